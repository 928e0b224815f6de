"""The operator on arrays of mx.gpu()."""

import numpy as np
import pytest
from gpu_case import require_gpus
from operator_case import GpuOperatorCases, assert_right, values

from ece408_op.plugin import bridge
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu


class TestDeviceContext(GpuOperatorCases):
    words = "mx.gpu()"

    @pytest.fixture(autouse=True)
    def mxnet_gpu(self, gpu):
        """Skip where MXNet has no GPU build."""
        if not self.mx.runtime.Features().is_enabled("CUDA"):
            pytest.skip("a GPU build of MXNet is not installed: pip install 'ece408-op[cu117]'")

    def context(self, number=0):
        return self.mx.gpu(number)

    def test_whole_networks_are_promised_only_where_mxnets_kernels_run(self):
        promised = any(
            cuda.chip(0).capability[0] == major and cuda.chip(0).capability[1] >= minor
            for major, minor in bridge.MXNET_CAPABILITIES
        )
        assert (bridge.gpu_problem("device") is None) == promised

    def test_the_array_is_seen_and_not_copied(self):
        array = self.array(np.arange(12, dtype=np.float32).reshape(3, 4))
        self.cupy.cuda.runtime.memset(bridge.address_of(array[1:]), 0, 2 * 4 * 4)
        self.cupy.cuda.runtime.deviceSynchronize()
        assert (array.asnumpy() == [[0, 1, 2, 3], [0] * 4, [0] * 4]).all()

    def test_chained_calls_see_each_others_results(self):
        """No call may be seen as done before its stream is: the next one would read too early."""
        x, w = values((500, 4, 40, 40), 4, 3)
        data, weight = self.array(x), self.array(w / 10)
        first = [self.call(data, weight) for _ in range(3)]
        for _ in range(5):
            chain = data
            for _ in range(6):
                chain = self.call(chain, weight)
            expected = data.asnumpy()
            chained = chain.asnumpy()
        for _ in range(6):
            expected = self.mx.nd.Convolution(
                self.mx.nd.array(expected), self.mx.nd.array(w / 10), kernel=(3, 3), num_filter=4, no_bias=True
            ).asnumpy()
        assert np.abs(chained - expected).max() <= 1e-4 * np.abs(expected).max()
        for y in first:
            assert_right(y.asnumpy()[:20], x[:20], (w / 10).astype(np.float32))

    def test_the_second_gpus_arrays_are_computed_there(self, monkeypatch):
        require_gpus(2)
        seen, enqueue, runtime = [], cuda.enqueue, self.cupy.cuda.runtime

        def spy(program, batch, addresses, device, stream):
            homes = {runtime.pointerGetAttributes(address).device for address in addresses.values()}
            seen.append({*homes, device, runtime.getDevice()})
            enqueue(program, batch, addresses, device, stream)

        monkeypatch.setattr(cuda, "enqueue", spy)
        for number, batch in [(1, 30), (0, 30), (1, 30), (1, 3000), (0, 3000)]:  # at once, and by MXNet's engine
            x, w = values((batch, 3, 20, 19), 7, 5, seed=number)
            data, weight = self.array(x, number), self.array(w, number)
            before = runtime.getDevice()
            y = self.call(data, weight)
            assert runtime.getDevice() == before
            assert y.context == self.mx.gpu(number)
            assert_right(y.asnumpy()[:20], x[:20], w)
            assert seen[-1] == {number}
