"""Networks whose data and parameters are pinned from the second call on: the results are those of other memory."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest
from network_case import S, inference_of, mx, ndarrays, on_numpy, require_gpus, values
from network_fake import Gpu
from process import wait_until

import ece408_op
from ece408_op.network import engine
from ece408_op.plugin import bridge
from ece408_op.runtime import pinned

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(autouse=True)
def uses(monkeypatch):
    """Have little memory pinned too; a list of whether the data of each call was."""
    found, original = [], pinned.using

    @contextmanager
    def noted(arrays, wants=False):
        with original(arrays, wants) as flags:
            found.extend(flags)
            yield flags

    monkeypatch.setattr(pinned, "LEAST_BYTES", 4)
    monkeypatch.setattr(pinned, "using", noted)
    return found


def bound(images, numbers):
    """Return an executor on GPUs of these numbers, and MXNet's own one, with whole numbers, whose sums are exact."""
    symbol = S.FullyConnected(S.Convolution(S.Variable("data"), kernel=(3, 3), num_filter=4), num_hidden=3)
    args = {name: np.rint(3 * array) for name, array in values(symbol, {"data": (images, 2, 8, 8)})[0].items()}
    return inference_of(symbol, args, device_ids=numbers), symbol.bind(mx.cpu(), ndarrays(args))


def compare_calls(ours, theirs, images):
    """Have both compute other data at each of four calls."""
    for seed in range(4):
        data = np.random.RandomState(seed).randint(-3, 4, (images, 2, 8, 8))
        found = []
        for executor in (ours, theirs):
            executor.arg_dict["data"][:] = data
            found.append(executor.forward(is_train=False)[0].asnumpy())
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("images", [1, 2, 7, 300])
@pytest.mark.parametrize("numbers", [[0], [0, 1], [1, 0], [1, 0, 2]])
def test_each_call_has_the_data_of_its_time(way, images, numbers, uses):
    require_gpus(way, len(numbers))
    compare_calls(*bound(images, numbers), images)
    assert uses == [False, True, True, True]


@on_numpy
@pytest.mark.parametrize("images", [2, 3, 9, 13])
@pytest.mark.parametrize("numbers", [[0], [0, 1]])
@pytest.mark.parametrize("least", [4, 1 << 30], ids=["pinned", "staged"])
@pytest.mark.parametrize("two_sizes", [False, True], ids=["equal chunks", "a small and a large chunk"])
def test_chunks_give_the_images_in_order(images, numbers, least, two_sizes, monkeypatch):
    for name, value in (("CHUNK_BYTES", 1), ("LEAST_IMAGES", 2), ("MOST_CHUNKS", 4)):
        monkeypatch.setattr(engine, name, value)
    # Computing takes no time here: copies take less, or more.
    monkeypatch.setattr(engine, "COPY_BYTES_PER_SECOND", -1 if two_sizes else 1)
    monkeypatch.setattr(pinned, "LEAST_BYTES", least)
    compare_calls(*bound(images, numbers), images)
    ((chunks, _),) = engine.engines()[-1].batches.values()
    if images // len(numbers) >= 4:
        first, *others = (chunk.images for chunk in chunks)
        assert others and (others[0] > first if two_sizes else set(others) == {first})


@on_numpy
def test_an_executor_that_is_gone_leaves_nothing_pinned(uses):
    others = dict(Gpu.registered)
    ours, _ = bound(7, [0])
    for _ in range(3):
        ours.forward(is_train=False)[0].wait_to_read()
    assert [size for at, size in Gpu.registered.items() if at not in others] == [4 * 7 * 2 * 8 * 8]
    del ours
    wait_until(lambda: gc.collect() >= 0 and Gpu.registered.keys() <= others.keys())


@on_numpy
def test_no_more_is_pinned_than_an_argument_has():
    """What a call copied before may have been freed, and an argument of another executor be in its place."""
    ours, _ = bound(2, [0])
    memory = ours.arg_dict["data"].asnumpy()
    (at,) = bridge.addresses([ours.arg_dict["data"]])
    pinned.wanted[at] = 10 * memory.nbytes
    ours.forward(is_train=False)[0].wait_to_read()
    assert Gpu.registered[at] == memory.nbytes


def test_calls_with_arrays_of_their_own_pin_nothing(uses):
    """MXNet frees the memory of each, and may have the next one in the same place."""
    symbol = ece408_op.gpu_network(S.Variable("data") * 2, {})[0]
    block = mx.gluon.SymbolBlock(symbol, [S.Variable("data")])
    block.hybridize(static_alloc=True)
    for seed in range(6):
        data = mx.nd.random.uniform(shape=(50, 3))
        assert (block(data).asnumpy() == 2 * data.asnumpy()).all(), seed
        del data
    assert uses == [False] * 6
