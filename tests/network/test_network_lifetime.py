"""What has ended keeps no memory on the GPU, also before Python collects garbage: it does not see that memory."""

import weakref
from contextlib import nullcontext

import network_fake
import numpy as np
import pytest
from network_case import S, inference_of, mx, on_numpy, values
from process import wait_until

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.network import engine
from ece408_op.runtime import cuda

pytestmark = [pytest.mark.usefixtures("way", "no_collection"), on_numpy]


def bound(images=3, filters=4, axes=()):
    """Return an executor of a convolution, and of a transposition, which no CUDA graph repeats."""
    symbol = S.Convolution(S.Variable("data"), kernel=(3, 3), num_filter=filters, name="conv")
    symbol = S.transpose(symbol, axes=axes, name="last") if axes else symbol
    args, _ = values(symbol, {"data": (images, 2, 6, 6)})
    return inference_of(symbol, args)


def compute(executor):
    return executor.forward(is_train=False)[0].asnumpy()


@pytest.mark.parametrize("fails", [False, True])
def test_a_network_that_is_gone(fails, monkeypatch):
    executor = bound()
    found = weakref.ref(engine.engines()[-1])
    if fails:
        monkeypatch.setattr(network_fake.Gpu, "largest", 100)
        with pytest.raises(DeviceError, match="expected room for 1 image"):
            compute(executor)
    else:
        compute(executor)
    engine.clear()
    assert found() is not None
    del executor
    wait_until(lambda: found() is None)


@pytest.mark.parametrize("axes", [(), (0, 2, 3, 1)])
def test_batch_sizes_before_the_last_ones(axes):
    kept, found = [], []
    for images in range(1, 7):
        kept.append(bound(images, axes=axes))
        for _ in range(3):
            compute(kept[-1])
        *_, (_, (batch,)) = engine.engines()[-1].batches.values()
        found.append(weakref.ref(batch))
        del batch
    assert [one() is None for one in found] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("inside", [nullcontext(), cuda.reported("a kernel")], ids=["array", "scratch"])
def test_networks_that_are_bound_share_an_engine_however_many_there_are(inside, monkeypatch):
    executors = [bound(filters=filters) for filters in range(1, 7)]
    for executor in executors:
        compute(executor)
    found = engine.engines()[-6:]
    again = bound(filters=1)
    assert np.isfinite(compute(again)).all()
    assert engine.engines()[-6:] == [*found[1:], found[0]]
    # Where memory runs out, that of all others is free for the same number of images.
    batch = engine.Batch

    def made(*given):
        if any(one.batches or one._parameters for one in found):
            with inside:
                raise network_fake.OutOfMemoryError("no room")
        return batch(*given)

    monkeypatch.setattr(engine, "Batch", made)
    compute(bound(images=5, filters=7))
    *_, (_, (own,)) = engine.engines()[-1].batches.values()
    assert own.images == 5


def test_networks_whose_parameters_have_no_room_at_the_same_time(monkeypatch):
    asarray, sent = cuda.cupy().asarray, []

    def with_room_for_three(array):
        if sum(one() is not None for one in sent) == 6:  # filters and bias of each
            raise network_fake.OutOfMemoryError("no room")
        copy = asarray(array)
        sent.append(weakref.ref(copy))
        return copy

    executors = [bound(filters=filters) for filters in range(1, 7)]
    expected = [compute(executor) for executor in executors]
    for one in engine.engines():
        one.free(parameters=True)
    monkeypatch.setattr(cuda.cupy(), "asarray", with_room_for_three)
    for _ in range(2):
        for executor, right in zip(executors, expected):
            assert (compute(executor) == right).all()
    assert len(sent) == 2 * 6 * 2


def test_a_network_computes_arrays_of_a_gpu_after_another_one_took_its_memory():
    expected, own = compute(bound()), engine.engines()[-1]
    engine.free_memory(own.gpu)
    (found,) = own.compute([cuda.cupy().asarray(bound().arg_dict["data"].asnumpy())])
    assert (found == expected).all()


def test_blocks_of_gluon_find_their_engines_however_many_there_are():
    """MXNet makes an operator for each call of a block, which has ended before the next one."""
    x, blocks = mx.nd.ones((3, 4)), []
    for units in range(1, 7):
        layer = mx.gluon.nn.Dense(units, in_units=4)
        layer.initialize()
        blocks.append(ece408_op.gluon.on_gpu(layer, x))
    found = []
    for _ in range(2):
        for block in blocks:
            block(x).wait_to_read()
            found.append(weakref.ref(engine.engines()[-1]))
    assert [one() for one in found[:6]] == engine.engines()[-6:]
    assert found[:6] == found[6:]


def test_where_a_call_has_no_room_for_its_intermediate_arrays_it_computes_fewer_images(monkeypatch):
    executor = bound(40, axes=(0, 2, 3, 1))
    expected, run = compute(executor), engine.Batch.run
    ece408_op.clear_op_times()

    def tried(batch, *given, **options):
        found = run(batch, *given, **options)
        if batch.images > 10:
            raise network_fake.OutOfMemoryError("no room")
        return found

    monkeypatch.setattr(engine.Batch, "run", tried)
    assert (compute(executor) == expected).all()
    *_, (_, (made, *_)) = engine.engines()[-1].batches.values()
    assert made.images == 10
    (record,) = ece408_op.op_times()
    assert record.seconds == 4 * 0.001


def test_a_call_that_has_failed_takes_no_time(monkeypatch):
    executor, run = bound(), engine.Batch.run
    compute(executor)
    ece408_op.clear_op_times()

    def failing(*given, **options):
        run(*given, **options)
        raise network_fake.Error("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(engine.Batch, "run", failing)
        with pytest.raises(DeviceError, match="stopped"):
            compute(executor)
    compute(executor)
    (record,) = ece408_op.op_times()
    assert record.seconds == 0.001


def test_a_gpu_that_has_failed_since_does_not_tell_its_times(monkeypatch):
    executor = bound()
    compute(executor)
    ece408_op.clear_op_times()

    def failing(*events):
        raise network_fake.Error("lost")

    monkeypatch.setattr(cuda.cupy().cuda, "get_elapsed_time", failing)
    compute(executor)
    assert ece408_op.op_times() == []
