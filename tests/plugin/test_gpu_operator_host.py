"""The operator on the GPU with its arrays in the computer's memory (device="gpu")."""

import numpy as np
import pytest
from operator_case import GpuOperatorCases, assert_right, values

from ece408_op.plugin import bridge, host_context
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.gpu


class TestHostContext(GpuOperatorCases):
    device = {"device": "gpu"}
    words = "mx.cpu()"

    def context(self, number=0):
        return self.mx.cpu()

    def test_nothing_stands_in_its_way(self):
        assert bridge.gpu_problem("host") is None

    def test_a_batch_that_does_not_fit_the_device_is_split(self):
        """Three quarters of the batch's bytes are free on the GPU, and it is computed all the same."""
        x, w = values((9000, 1, 28, 28), 50, 5)
        runtime = self.cupy.cuda.runtime
        self.call(self.array(x[:5]), self.array(w)).wait_to_read()
        taken = self.cupy.cuda.Memory(runtime.memGetInfo()[0] - (768 << 20))
        try:
            y = self.call(self.array(x), self.array(w)).asnumpy()
        finally:
            del taken
        for first in range(0, len(x), 1000):
            assert_right(y[first : first + 50], x[first : first + 50], w)
        assert not np.isnan(y).any()

    @pytest.mark.parametrize("impl", ["auto", "cudnn"])
    @pytest.mark.parametrize("batch", [7, 20, 37])
    def test_gradients_of_several_chunks(self, batch, impl, monkeypatch):
        """The last chunk overlaps the one before; no image counts twice in the weight's gradient."""
        if impl == "cudnn":
            pytest.importorskip("cudnn")
        problem = ConvProblem(batch, 4, 20, 18, 6, 3, pad=(1, 1))
        monkeypatch.setattr(host_context, "CHUNK_BYTES", 8 * 4 * (4 * 20 * 18 + 6 * 20 * 18))
        self.check_gradients(problem, impl=impl)
        self.check_gradients(problem, ("add", "add", "add"), impl=impl)

    def test_an_infinity_of_an_image_in_two_chunks_counts_once(self, monkeypatch):
        problem = ConvProblem(11, 1, 8, 8, 1, 3)
        monkeypatch.setattr(host_context, "CHUNK_BYTES", 8 * 4 * (64 + 36))
        x, w = np.zeros(problem.x_shape, np.float32), np.ones(problem.w_shape, np.float32)
        x[5] = np.inf
        weight = self.variable(w)
        with self.mx.autograd.record():
            y = self.convolved(problem, (self.array(x), weight))
        y.backward()
        assert (weight.grad.asnumpy() == np.inf).all()

    def test_an_image_that_does_not_fit_the_device_is_refused_in_words(self):
        x, w = (self.array(a) for a in values((2, 1, 3000, 3000), 8, 3))
        small = self.array(np.ones((1, 1, 3, 3), np.float32)), self.array(np.ones((1, 1, 3, 3), np.float32))
        self.cupy.get_default_memory_pool().free_all_blocks()  # what other tests left there would be room
        taken = self.cupy.cuda.Memory(self.cupy.cuda.runtime.memGetInfo()[0] - (100 << 20))
        try:
            with pytest.raises(self.mx.MXNetError, match="the GPU's memory: expected room for 1 x 1 x 3000 x 3000"):
                self.call(x, w).wait_to_read()
            assert self.call(*small).asnumpy() == 9
        finally:
            del taken
        assert self.call(x, w)[1, 7, 2997, 2997].asscalar() == pytest.approx(
            float((x[1, 0, -3:, -3:] * w[7, 0]).sum().asscalar()), abs=1e-4
        )

    def test_behind_and_before_mxnets_own_layers(self):
        """Arrays in oneDNN's blocked layout, in a Module and imperatively."""
        mx = self.mx
        x, before = values((100, 16, 22, 22), 16, 3)
        _, w = values((100, 16, 20, 20), 32, 3, seed=1)
        between = mx.nd.array(self.own(x, before).asnumpy())
        expected = self.own(between.asnumpy(), w).asnumpy()
        data = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=16, no_bias=True, name="before")
        layer = mx.sym.Custom(data, op_type="New", kernel=(3, 3), num_filter=32, name="after", device="gpu")
        module = mx.mod.Module(layer, label_names=None)
        module.bind([("data", x.shape)], for_training=False)
        parameters = {"before_weight": mx.nd.array(before), "after_weight": mx.nd.array(w)}
        module.init_params(arg_params=parameters, aux_params={})
        results = []
        for _ in range(10):
            module.forward(mx.io.DataBatch([mx.nd.array(x)]), is_train=False)
            results.append(module.get_outputs()[0])
            weight = mx.nd.array(w)
            self.own(between.asnumpy(), weight)  # leaves the weight in a layout of its own
            results.append(self.call(self.own(x, before), weight))
        for y in results:
            assert np.abs(y.asnumpy() - expected).max() <= 1e-4 * np.abs(expected).max()
