"""gpu_network on several GPUs, on NumPy in place of CuPy and on GPUs: they share a batch's images."""

import network_fake
import numpy as np
import pytest
from network_case import S, data, inference_of, mx, on_numpy, ours, require_gpus, values

from ece408_op.errors import DeviceError
from ece408_op.network import _inference, engine
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda

pytestmark = pytest.mark.usefixtures("way")


@on_numpy
def test_gpus_that_share_a_batch_have_fewer_copying_threads(monkeypatch):
    found, original, gpu = [], engine.copying_threads, network_fake.Gpu(threads=16)
    monkeypatch.setattr(_inference, "copying_threads", lambda *_: found.append(original(gpu, 1 << 30)) or 1)
    args, _ = values(data, {"data": (4, 5)})
    for numbers in ([0], [0, 1]):
        assert (ours(data * 2, args, {}, device_ids=numbers)[0] == 2 * args["data"]).all()
    assert found == [8, 4, 4]
    assert [original(gpu, copied, 12, 1) for copied in (0, 3, 99)] == [1, 3, 12]


def bound_several():
    """Return an executor of a network on two GPUs, and what it has to compute; those of two have the same graph."""
    symbol = S.broadcast_mul(data, S.Variable("factor"), name="product")
    args = {"data": np.ones((4, 5), "f"), "factor": np.random.uniform(1, 2, (1, 5)).astype("f")}
    return inference_of(symbol, args, device_ids=[0, 1]), np.repeat(args["factor"], 4, axis=0)


@on_numpy
def test_several_gpus_have_the_parameters_of_their_call():
    bound = [bound_several() for _ in range(3)]
    for _ in range(5):
        outputs = [executor.forward(is_train=False)[0] for executor, _ in bound]
        for output, (_, expected) in zip(outputs, bound):
            assert np.array_equal(output.asnumpy(), expected)


@on_numpy
def test_parameters_that_did_not_arrive_are_sent_again(monkeypatch):
    """At the first call, and after parameters have changed."""
    executor, _ = bound_several()
    words = r"GPU \d: the GPU's memory: expected room for the network's parameters, got no room; end other programs"
    for factor in (3, 7):
        executor.arg_dict["factor"][:] = factor
        with monkeypatch.context() as patch:
            patch.setattr(cuda.cupy(), "asarray", network_fake.no_room)
            with pytest.raises(DeviceError, match=words):
                executor.forward(is_train=False)[0].wait_to_read()
        assert (executor.forward(is_train=False)[0].asnumpy() == factor).all()


def test_images_that_depend_on_each_other_stay_on_one_gpu(way):
    require_gpus(way, 2)
    args, _ = values(data, {"data": (4, 5)})
    with pytest.raises(mx.MXNetError, match="device_ids: expected a network that computes each image by itself"):
        ours(S.softmax(data, axis=0), args, {}, way=way, device_ids=[0, 1])


def test_a_gpu_that_fails_is_named(way, monkeypatch):
    require_gpus(way, 2)
    symbol = data * 2
    args, _ = values(symbol, {"data": (4, 5)})
    chunks = engine.Engine.chunks

    def fails_on_the_second(self, *given):
        if self.gpu is host_context.gpu(1):
            raise DeviceError("out of order")
        return chunks(self, *given)

    monkeypatch.setattr(engine.Engine, "chunks", fails_on_the_second)
    with pytest.raises(mx.MXNetError, match="GPU 1: out of order"):
        ours(symbol, args, {}, way=way, device_ids=[0, 1])
