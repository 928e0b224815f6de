"""Tests of the operator on the CPU and in both contexts of the GPU: the test classes of each inherit these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pooled_case
import pytest
from general_problems import problems
from gpu_case import require_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process import printed

import ece408_op
from ece408_op.core import dispatch, reference
from ece408_op.core.check import compare
from ece408_op.core.kernel import EPS32
from ece408_op.plugin import mxnet_import
from ece408_op.problem import ConvProblem, DataGradient


def mxnet():
    """MXNet; skips the test where it cannot be imported."""
    try:
        return mxnet_import.load()
    except ImportError as error:
        pytest.skip(str(error))


def attributes(problem, **more):
    """The keywords of MXNet's Convolution for a problem."""
    words = {"kernel": problem.w_shape[2:], "num_filter": problem.filters, "num_group": problem.groups}
    return {**words, "stride": problem.stride, "pad": problem.pad, "dilate": problem.dilate, **more}


def operands(problem, seed=0):
    """Random data, weight and bias."""
    random = np.random.RandomState(seed)
    shapes = problem.x_shape, problem.w_shape, (problem.filters,)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def values(shape, filters, kernel, seed=0):
    """Input of that shape, and filters, as NumPy arrays."""
    stream = np.random.RandomState(seed)
    x = stream.uniform(-1, 1, shape).astype(np.float32)
    return x, stream.normal(size=(filters, shape[1], kernel, kernel)).astype(np.float32)


def assert_right(y, x, w, problem=None, bias=None):
    """Within the error of a float32 sum of n products, whatever its order, and of one more rounding for the bias."""
    bias = np.zeros(len(w)) if bias is None else bias
    exact = reference.convolve(x, w, problem) + bias[:, None, None]
    scale = reference.magnitude(x, w, problem) + np.abs(bias)[:, None, None]
    assert y.shape == exact.shape
    worst = np.abs(y - exact) - 2 * (w[0].size + 2 * bias.any()) * EPS32 * scale
    assert worst.max() <= 0, f"off by {worst.max()} more than rounding at {np.unravel_index(worst.argmax(), y.shape)}"


class OperatorCases:
    """The tests; a subclass says where the arrays live, and in a child process's words too."""

    #: A device attribute for calls, or nothing if the arrays' device computes.
    device: dict[str, str] = {}
    #: The device that computes, and one of its implementations.
    computes, impl = "gpu", "naive"
    #: The implementation for random problems; the CPU's best ones would be compiled for each of them.
    quick = "auto"
    #: Many images: several chunks of the host context.
    many = 4001
    #: The context as a child process writes it.
    words = ""

    @pytest.fixture(autouse=True)
    def setup(self):
        """Skip where MXNet is missing."""
        self.mx = mxnet()

    def context(self, number=0):
        """MXNet's context of the arrays."""
        raise NotImplementedError

    def array(self, source, number=0):
        """A NumPy array as an NDArray there."""
        return self.mx.nd.array(source, ctx=self.context(number))

    def variable(self, source, request="write", gradient=0):
        """A NumPy array as an NDArray there with a gradient, filled by a copy: MXNet's kernels don't know all GPUs."""
        array = self.array(source)
        filled = self.array(np.full(array.shape, gradient, np.float32))
        self.mx.autograd.mark_variables([array], [filled], [request])
        return array

    def call(self, x, w, **options):
        """Call the operator through nd.Custom."""
        return self.mx.nd.Custom(
            x, w, op_type="New", kernel=w.shape[2:], num_filter=w.shape[0], **self.device, **options
        )

    def operator(self, x, w, number=0):
        """The operator as MXNet makes it, for calling its methods directly."""
        from ece408_op.plugin.operator import NewProp

        prop = NewProp(kernel=str(w.shape[2:]), num_filter=str(w.shape[0]), **self.device)
        return prop.create_operator(self.context(number), [x.shape, w.shape], [np.float32] * 2)

    def own(self, x, w):
        """MXNet's Convolution on the CPU."""
        x, w = (self.mx.nd.array(a) if isinstance(a, np.ndarray) else a for a in (x, w))
        return self.mx.nd.Convolution(x, w, kernel=w.shape[2:], num_filter=w.shape[0], no_bias=True)

    def test_it_agrees_with_mxnets_own_on_many_images(self):
        """In a given output and in a fresh one."""
        x, w = values((self.many, 1, 28, 28), 50, 5)
        out = self.array(np.full((self.many, 50, 24, 24), np.nan, np.float32))
        self.call(self.array(x), self.array(w), out=out)
        own, most = self.own(x, w).asnumpy(), np.abs(w).sum(axis=(1, 2, 3)).max()
        for y in (out, self.call(self.array(x), self.array(w))):
            assert np.abs(y.asnumpy() - own).max() <= 2 * 25 * EPS32 * most

    @pytest.mark.parametrize("fuse", ["tanh_pool", "tanh_pool_full"])
    @pytest.mark.parametrize("named", [False, True])
    def test_tanh_and_maxima_in_the_same_pass(self, fuse, named):
        x, w = values((300, 3, 20, 17), 12, 4)
        w /= 7
        problem = ConvProblem.from_shapes(x.shape, w.shape).pooled(fuse == "tanh_pool_full")
        out = self.array(np.full(problem.y_shape, np.nan, np.float32))
        for words in ({"out": out}, {}):
            y = self.call(self.array(x), self.array(w), fuse=fuse, impl=self.impl if named else "auto", **words)
            pooled_case.assert_right(y.asnumpy(), problem, reference.convolve(x, w), reference.magnitude(x, w))

    @pytest.mark.parametrize("own", [False, True], ids=["another output", "its own input"])
    @pytest.mark.parametrize("request_", ["null", "write", "inplace", "add"])
    def test_each_request_of_a_forward(self, request_, own):
        x, w = values((40, 3, 6, 5), 3, 1) if own else values((40, 3, 9, 7), 4, 3)
        before = x if own else np.full((40, 4, 7, 5), 3, np.float32)
        data, plain, forward = self.array(x), self.array(before), self.operator(x, w).forward
        y = data if own else self.array(before)
        forward(False, [request_], [data, self.array(w)], [y], [])
        forward(False, ["write"], [self.array(x), self.array(w)], [plain], [])
        if request_ in ("write", "inplace"):
            assert_right(y.asnumpy(), x, w)
        else:
            assert (y.asnumpy() == before + (request_ == "add") * plain.asnumpy()).all()

    def test_all_arrays_may_be_slices(self):
        x, w = values((6, 1, 9, 7), 8, 3)
        whole = self.array(np.full((5, 5, 7, 5), np.nan, np.float32))
        self.call(self.array(x)[1:4], self.array(w)[3:8], out=whole[1:4])
        assert_right(whole.asnumpy()[1:4], x[1:4], w[3:8])
        assert np.isnan(whole.asnumpy()[[0, 4]]).all()

    def test_an_empty_batch_gives_an_empty_output(self):
        with self.mx.util.np_shape(True):
            x, w = self.mx.nd.empty((0, 2, 9, 8), ctx=self.context()), self.array(np.ones((3, 2, 3, 3)))
            y = self.call(x, w)
            assert y.shape == (0, 3, 7, 6)
            y.wait_to_read()

    def test_the_gradient_of_a_fused_operator_raises_and_leaves_nan(self):
        x, w = (self.variable(a) for a in values((2, 1, 6, 6), 2, 3))
        with self.mx.autograd.record():
            y = self.call(x, w, fuse="tanh_pool")
        with pytest.raises(self.mx.MXNetError, match="fuse='tanh_pool' has no gradient"):
            y.backward(self.array(np.ones(y.shape, np.float32)))
            x.grad.wait_to_read()
        assert np.isnan(x.grad.asnumpy()).all()

    def convolved(self, problem, arrays, **options):
        """Call the operator on NDArrays with the problem's attributes."""
        return ece408_op.Convolution(*arrays, **attributes(problem, no_bias=len(arrays) == 2), **self.device, **options)

    def check_gradients(self, problem, requests=("write", "write", "write"), seed=0, **options):
        """Compare all gradients with float64, within the bounds of the kernels that computed them."""
        x, w, _ = inputs = operands(problem, seed)
        head = np.random.RandomState(seed + 1).standard_normal(problem.y_shape).astype(np.float32)
        arrays = [self.variable(each, request, float(request == "add")) for each, request in zip(inputs, requests)]
        ece408_op.clear_op_times()
        with self.mx.autograd.record():
            y = self.convolved(problem, arrays, **options)
        y.backward(self.array(head))
        got = {}
        for name, array, request in zip(("data", "weight", "bias"), arrays, requests):
            if request != "null":
                got[name] = array.grad.asnumpy() - (request == "add")
        called = {type(call.problem): call for call in ece408_op.op_times()}
        of = {"data": (problem.data_gradient, head, w), "weight": (problem.weight_gradient, x, head)}
        assert set(called) == {ConvProblem, *(type(one) for name, (one, *_) in of.items() if name in got)}
        for name, (gradient, a, b) in of.items():
            if name in got:
                call = called[type(gradient)]
                assert (call.device, call.problem) == (self.computes, gradient)
                # Adding 1 and taking it away round twice.
                added = 4 * EPS32 * (1 + np.abs(got[name]).max()) if "add" in requests else 0.0
                result = compare(got[name], a, b, dispatch.find(call.implementation), least=added, problem=gradient)
                assert result.passed, f"{name}: {result}"
        if "bias" in got:
            exact, scale = (part.astype(np.float64).sum(axis=(0, 2, 3)) for part in (head, np.abs(head)))
            pixels = problem.output_height * problem.output_width
            assert (np.abs(got["bias"] - exact) <= (pixels + 4) * EPS32 * (scale + 2)).all()

    def test_any_convolution_is_right(self):
        @given(problems(largest_extra=12, most_channels=5), st.booleans(), st.integers(0, 99))
        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        def check(problem, biased, seed):
            self.check_output(problem, biased, seed, impl=self.quick)

        check()

    def check_output(self, problem, biased=True, seed=0, **options):
        """Compare a fresh and a given output with float64, within the bound of the kernel that computed them."""
        x, w, bias = operands(problem, seed)
        bias *= biased
        arrays = [self.array(each) for each in (x, w, bias)[: 2 + biased]]
        given_out = self.array(np.full(problem.y_shape, np.nan, np.float32))
        self.convolved(problem, arrays, out=given_out, **options)
        fresh = self.convolved(problem, arrays, **options).asnumpy()
        kernel = dispatch.find(ece408_op.op_times()[-1].implementation)
        exact = reference.convolve(x, w, problem) + bias[:, None, None]
        magnitudes = kernel.magnitude_images(x), kernel.magnitude_weights(w)
        scale = reference.convolve(*magnitudes, problem) + abs(bias)[:, None, None]
        for y in (fresh, given_out.asnumpy()):
            assert (abs(y - exact) <= (kernel.error_bound(problem) + 2 * EPS32) * scale).all()

    def test_any_gradient_is_right(self):
        @given(problems(), st.integers(0, 99))
        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        def check(problem, seed):
            self.check_gradients(problem, seed=seed, impl=self.quick)

        check()

    @pytest.mark.parametrize("requests", ["add add add", "null write add", "add null null", "null null write"])
    def test_each_request_of_a_gradient(self, requests):
        self.check_gradients(ConvProblem(5, 4, 9, 8, 6, 3, 2, (2, 1), (1, 2), (1, 2), 2), requests.split())

    @pytest.mark.parametrize("named", [False, True])
    def test_gradients_of_many_images(self, named):
        self.check_gradients(ConvProblem(251, 1, 28, 28, 50, 5), impl=self.impl if named else "auto")

    def test_an_empty_batch_has_gradients_of_zero(self):
        with self.mx.util.np_shape(True):
            x = self.mx.nd.empty((0, 2, 9, 8), ctx=self.context())
            w, b = self.variable(np.ones((3, 2, 3, 3))), self.variable(np.ones(3), "add", 7)
            self.mx.autograd.mark_variables([x], [self.mx.nd.empty(x.shape, ctx=self.context())])
            with self.mx.autograd.record():
                y = self.convolved(ConvProblem(0, 2, 9, 8, 3, 3), (x, w, b))
            y.backward(self.mx.nd.empty(y.shape, ctx=self.context()))
            assert (w.grad.asnumpy() == 0).all()
            assert (b.grad.asnumpy() == 7).all()

    def test_the_record_says_where_and_how_long(self):
        x, w = values((300, 1, 28, 28), 50, 5)
        ece408_op.clear_op_times()
        self.call(self.array(x), self.array(w), impl=self.impl, __layer__="layer1").wait_to_read()
        (call,) = ece408_op.op_times()
        assert (call.layer, call.implementation, call.device) == ("layer1", self.impl, self.computes)
        assert call.seconds > 0
        assert (call.copy_seconds > 0) == bool(self.device)

    def test_eight_threads_at_once(self):
        """Layers of different shapes at the same time; each thread checks its own."""

        def work(seed):
            x, w = values((20, 1 + seed % 3, 20 + seed, 24), 5 + seed, 3, seed)
            data, weight = self.array(x), self.array(w)
            for y in [self.call(data, weight) for _ in range(20)]:
                assert_right(y.asnumpy(), x, w)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    def test_exit_with_dependent_calls_pending(self):
        program = f"""
import ece408_op, mxnet as mx, numpy as np
at = dict(ctx={self.words})
w = mx.nd.array(np.ones((4, 4, 3, 3), np.float32), **at)
y = mx.nd.array(np.ones((3000, 4, 28, 28), np.float32), **at)
mx.autograd.mark_variables([w], [mx.nd.array(np.zeros((4, 4, 3, 3), np.float32), **at)])
def calls(y):
    for _ in range(4):
        y = mx.nd.Custom(y, w, op_type='New', kernel=(3, 3), num_filter=4, **{self.device})
    return y
with mx.autograd.record():
    trained = calls(y)
trained.backward(mx.nd.array(np.ones((3000, 4, 20, 20), np.float32), **at))
y = calls(y)
print('leaving')
"""
        assert printed("-c", program) == "leaving\n"


class GpuOperatorCases(OperatorCases):
    """The tests of both contexts of the GPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, setup):
        """Skip where there is no GPU."""
        self.cupy = require_gpu()

    @pytest.mark.parametrize("impl", ["auto", "cudnn"])
    def test_cudnn_computes_outputs_and_gradients(self, impl):
        pytest.importorskip("cudnn")
        problem = ConvProblem(37, 64, 14, 12, 72, 3, stride=(2, 2), pad=(1, 1))
        self.check_output(problem, impl=impl)
        for requests in (("write", "write", "write"), ("add", "add", "add")):
            self.check_gradients(problem, requests, impl=impl)
            used = {type(call.problem): call.implementation for call in ece408_op.op_times()}
            assert used[DataGradient] == "cudnn"
            assert impl == "auto" or set(used.values()) == {"cudnn"}

    def test_many_calls_leave_no_memory_behind(self):
        x, w = values((20, 2, 20, 20), 8, 3)
        data, weight = self.array(x), self.array(w)
        out = self.call(data, weight)

        def free_memory(calls):
            for _ in range(calls):
                self.call(data, weight, out=out)
            self.mx.nd.waitall()
            return self.cupy.cuda.runtime.memGetInfo()[0]

        # Other processes may take memory of the GPU meanwhile, now and then; what is left behind is so every time.
        assert any(free_memory(50) <= free_memory(2000) for _ in range(5))
