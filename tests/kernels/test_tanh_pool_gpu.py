"""Convolution fused with tanh and 2 x 2 max-pooling on the GPU, compared with float64; also through the operator."""

from __future__ import annotations

import numpy as np
import pooled_case
import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD
from gpu_case import inputs, reference, refused, require_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_graph_fuse import arrays as mxnet_arrays
from test_graph_fuse import separate

import ece408_op
from ece408_op.core import dispatch
from ece408_op.kernels.cpu._tanh_pool import TANH_ULPS
from ece408_op.plugin import _device_context, bridge, host_context
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.gpu

POOLING = [kernel for kernel in CUDA_KERNELS if kernel.fuses_pooling]
KERNEL = pytest.mark.parametrize("kernel", POOLING, ids=lambda kernel: kernel.name)
FULL = pytest.mark.parametrize("full", [False, True])

LAYERS = [
    *[problem.with_batch(67) for problem in COURSE],
    *ODD,
    ConvProblem(1, 64, 30, 41, 33, 11),
    ConvProblem(2, 3, 11, 200, 128, 3),
    ConvProblem(100_000, 1, 8, 7, 3, 3),
    ConvProblem(3, 2, 5, 14, 3, 4),
]


def assert_right(problem, x, w, out):
    """A few images at a time: the reference takes 16 bytes and more for each element."""
    cupy = cuda.cupy()
    step = max(1, 2**26 // max(1, x[:1].size + problem.filters * problem.output_height * problem.output_width))
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        pooled_case.assert_right(out[part], problem, *reference(cupy, x[part], w), cupy)


def check(kernel, problem, seed=0):
    """Run the kernel inside poisoned memory, which must stay unchanged, and compare its output with float64."""
    cupy = require_gpu()
    x, w, _ = inputs(cupy, problem, seed)
    w /= np.float32(np.sqrt(problem.products))
    size = int(np.prod(problem.y_shape))
    around = cupy.full(size + 64, 7.0, "f")
    out = around[32:-32].reshape(problem.y_shape)
    out[...] = cupy.nan
    kernel.run(problem, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert bool((around[:32] == 7).all())
    assert bool((around[-32:] == 7).all())
    assert_right(problem, x, w, out)


def pooled(problem, full):
    """The layer with maxima behind it; None where there is nothing to take them of."""
    return problem.pooled(full) if full or min(problem.y_shape[2:]) > 1 else None


@KERNEL
@FULL
@pytest.mark.parametrize("plain", LAYERS, ids=str)
def test_it_is_right(kernel, plain, full):
    require_gpu()
    problem = pooled(plain, full)
    if problem is not None and not refused(kernel, problem):
        check(kernel, problem)


layers = st.builds(
    lambda b, c, h, w, m, k: ConvProblem(b, c, h + k - 1, w + k - 1, m, k),
    st.sampled_from([1, 2, 7]),
    st.integers(1, 64),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 256),
    st.integers(1, 11),
)


@FULL
def test_auto_is_right_on_random_layers(full):
    require_gpu()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plain=layers, few=st.booleans(), seed=st.integers(0, 1000))
    def hold(plain, few, seed):
        if few:
            plain = ConvProblem(7, 1 + seed % 3, plain.height, plain.width, plain.filters, plain.kernel)
        problem = pooled(plain, full)
        if problem is not None:
            check(dispatch.select(problem, "gpu", chip=cuda.chip()), problem, seed)

    hold()


@KERNEL
@pytest.mark.parametrize("moved", ["x", "w", "y"])
def test_it_takes_views_aligned_to_four_bytes_only(kernel, moved):
    cupy = require_gpu()
    problem = ConvProblem(9, 4, 20, 24, 16, 5).pooled(False)
    arrays = dict(zip("xwy", inputs(cupy, problem)))
    array = arrays[moved]
    view = cupy.full(array.size + 1, cupy.nan, "f")[1:].reshape(array.shape)
    view[...] = array
    assert view.data.ptr % 16 == 4
    arrays[moved] = view
    kernel.run(problem, *arrays.values())
    assert_right(problem, *arrays.values())


@KERNEL
def test_a_maximum_leaves_nan_out(kernel):
    cupy = require_gpu()
    problem = ConvProblem(3, 2, 18, 16, 5, 3).pooled(False)
    x, w, out = inputs(cupy, problem)
    x[0, 0, 5, 5], x[1, 1, 9, 7], x[2, 0, 4:12, 3:11] = cupy.nan, cupy.inf, cupy.nan
    kernel.run(problem, x, w, out)
    convolved, _ = reference(cupy, x, w)
    exact = pooled_case.maxima(convolved, False, cupy)
    assert bool((cupy.isnan(out) == cupy.isnan(exact)).all())
    assert bool(cupy.isnan(out).any())
    assert bool((abs(out)[cupy.isinf(exact)] == 1).all())


@KERNEL
def test_tanh_keeps_to_its_error(kernel):
    """Every 997th float32 from 0 to 32 and the negative ones, each as the maximum of four."""
    cupy = require_gpu()
    bits = np.arange(np.float32(2.0**-126).view(np.uint32), np.float32(32).view(np.uint32), 997, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    values = values[: len(values) // 1000 * 1000].reshape(-1, 1, 10, 100)
    problem = ConvProblem(len(values), 1, 20, 200, 1, 1).pooled(False)
    x = cupy.asarray(values.repeat(2, axis=2).repeat(2, axis=3))
    out = cupy.full(problem.y_shape, cupy.nan, "f")
    kernel.run(problem, x, cupy.ones(problem.w_shape, "f"), out)
    exact = np.tanh(values.astype(np.float64))
    below = np.nextafter(np.abs(exact).astype(np.float32), np.float32(0))
    error = np.abs(out.get() - exact) / np.spacing(below).astype(np.float64)
    assert error.max() < TANH_ULPS, f"{error.max()} units in the last place at {values.ravel()[error.argmax()]}"


@KERNEL
def test_an_empty_batch_is_nothing_to_do(kernel):
    cupy = require_gpu()
    problem = ConvProblem(0, 3, 10, 9, 4, 3).pooled(False)
    kernel.run(problem, *inputs(cupy, problem))


@KERNEL
@pytest.mark.parametrize(
    "plain",
    [ConvProblem(34_000, 1, 34, 34, 256, 3), ConvProblem(1, 4, 24_000, 24_000, 2, 2)],
    ids=["output", "input"],
)
def test_more_than_two_to_the_31_elements(kernel, plain):
    cupy = require_gpu()
    problem = plain.pooled(False)
    cupy.get_default_memory_pool().free_all_blocks()
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * problem.bytes:
        pytest.skip(f"needs {3 * problem.bytes / 1e9:.0f} GB of free GPU memory")
    x, w, out = inputs(cupy, problem)
    kernel.run(problem, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert max(x.size, out.size) > 2**31
    if problem.batch == 1:
        for rows in (slice(0, 40), slice(problem.pooled_height - 40, problem.pooled_height)):
            part = x[:, :, 2 * rows.start : 2 * rows.stop + 1]
            small = ConvProblem(1, 4, part.shape[2], plain.width, 2, 2).pooled(False)
            assert_right(small, part, w, out[:, :, rows])
    else:
        for part in (slice(0, 2), slice(32767, 32769), slice(33_998, 34_000)):
            assert_right(problem.with_batch(2), x[part], w, out[part])
    assert not any(bool(cupy.isnan(part).any()) for part in cupy.array_split(out.ravel(), 16))


# ---------------------------------------------------------------------------------------------- in both contexts


@pytest.fixture
def host():
    """Skip where the host context cannot be used."""
    reason = bridge.gpu_problem("host")
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("context", ["host", "device"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("batch", [1, 700, 6001])
def test_both_contexts_fill_and_add(context, add, batch):
    cupy = require_gpu()
    problem = ConvProblem(batch, 1, 29, 30, 50, 5).pooled(False)
    kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
    x, w, _ = inputs(cupy, problem)
    y = cupy.full(problem.y_shape, 3 if add else cupy.nan, "f")
    cuda.wait("the test's arrays", cupy.cuda.get_current_stream())  # both contexts have streams of their own
    if context == "host":
        x_host, w_host, y_host = x.get(), w.get(), y.get()
        timing = host_context.convolve(kernel, problem, x_host, w_host, y_host, add)
        y = cupy.asarray(y_host)
        assert timing.copy_seconds > 0
    else:
        timing = _device_context.convolve(kernel, problem, (x.data.ptr, w.data.ptr, y.data.ptr), 0, add)
    assert timing.seconds > 0
    if add:
        plain = cupy.empty_like(y)
        kernel.run(problem, x, w, plain)
        assert bool((y == plain + 3).all())
    else:
        assert_right(problem, x, w, y)


@pytest.mark.parametrize("kernel", ["auto", "naive", "register_tiled"])
@pytest.mark.parametrize(("fuse", "convention"), [("tanh_pool", "valid"), ("tanh_pool_full", "full")])
def test_it_is_mxnets_three_operators(host, kernel, fuse, convention):
    x, w = mxnet_arrays()
    want = separate(x, w, convention)
    attributes = {"kernel": (4, 4), "num_filter": 5, "fuse": fuse, "device": "gpu", "impl": kernel}
    ece408_op.clear_op_times()
    out = mx.nd.full(want.shape, np.nan)
    ece408_op.New(x, w, out=out, name="mine", **attributes)
    np.testing.assert_allclose(out.asnumpy(), want, atol=2e-6)
    (call,) = ece408_op.op_times()
    assert (call.layer, call.device, call.problem.y_shape) == ("mine", "gpu", want.shape)
    layer = ece408_op.New(mx.sym.Variable("data"), name="c", **attributes)
    bound = layer.bind(mx.cpu(), {"data": x, "c_weight": w})
    np.testing.assert_allclose(bound.forward()[0].asnumpy(), want, atol=2e-6)


def test_a_kernel_that_cannot_says_so(host):
    x, w = mxnet_arrays()
    with pytest.raises(mx.MXNetError, match="shared: fuse: it has no tanh and 2 x 2 maxima in the same pass"):
        ece408_op.New(x, w, kernel=(4, 4), num_filter=5, fuse="tanh_pool", device="gpu", impl="shared").asnumpy()
