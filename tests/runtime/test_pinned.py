"""Pinned memory: when memory is pinned and unpinned, by a CUDA that only counts, and on a GPU."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_case import require_gpu

from ece408_op.runtime import cuda
from ece408_op.runtime.memory import address
from ece408_op.runtime.pinned import LEAST_BYTES, Pinned, using, wanted


class CudaError(Exception):
    pass


class Runtime:
    """CUDA's functions for pinned memory; ``pinned`` has the sizes by address, and ``refuses`` what cannot be."""

    CUDARuntimeError = CudaError

    def __init__(self):
        self.pinned, self.refuses = {}, set()

    def hostRegister(self, address, size, flags):  # noqa: N802
        if address in self.refuses or address in self.pinned:
            raise CudaError("refused")
        self.pinned[address] = size

    def hostUnregister(self, address):  # noqa: N802
        if address not in self.pinned:
            raise CudaError("not pinned")
        del self.pinned[address]


@pytest.fixture()
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=found)))
    return found


def floats(count=LEAST_BYTES // 4):
    return np.zeros(count, np.float32)


def flags(*arrays):
    with using(arrays) as found:
        return found


def test_memory_is_pinned_while_its_object_lives(runtime):
    one, other = floats(), floats()
    pinned = Pinned(one, address(one), one.nbytes)
    assert runtime.pinned == {address(one): one.nbytes}
    assert flags(one, other, one[:9], one[1:]) == [True, False, False, False]
    del pinned
    gc.collect()
    assert (runtime.pinned, flags(one)) == ({}, [False])


def test_memory_is_unpinned_after_its_last_use_and_before_its_owner_is_freed(runtime):
    class Owner:
        def __del__(self):
            freed.append(dict(runtime.pinned))

    freed, array = [], floats()
    pinned = Pinned(Owner(), address(array), array.nbytes)
    with using([array]) as first:
        with using([array, array]) as second:
            del pinned
            gc.collect()
            assert flags(array) == [True]
        assert runtime.pinned
        assert not freed
    assert (first, second, freed, runtime.pinned) == ([True], [True, True], [{}], {})


def test_memory_that_cuda_refuses_is_left_as_it_is(runtime):
    one, other = floats(), floats()
    runtime.refuses.add(address(one))
    refused = Pinned(one, address(one), one.nbytes)
    first, second = (Pinned(other, address(other), other.nbytes) for _ in range(2))
    assert flags(one, other) == [False, True]
    del refused, second
    gc.collect()
    assert runtime.pinned == {address(other): other.nbytes}, "only what has pinned memory unpins it"
    del first
    gc.collect()
    assert runtime.pinned == {}


def test_memory_that_comes_again_is_wanted_until_it_is_pinned(runtime):
    wanted.clear()
    one, little = floats(), floats(LEAST_BYTES // 4 - 1)
    with using([one, little], wants=True) as found:
        assert found == [False, False]
    assert wanted == {address(one): one.nbytes}
    wanted.clear()
    pinned = Pinned(one, address(one), one.nbytes)
    with using([one], wants=True) as found:
        assert found == [True]
    assert (wanted, pinned is None) == ({}, False)


@pytest.mark.gpu
def test_a_gpu_copies_from_pinned_memory_that_shares_a_page():
    require_gpu()
    xp, rng = cuda.cupy(), np.random.default_rng(0)
    memory = rng.random(4 * LEAST_BYTES, np.float32)
    arrays = [memory[10 : 10 + LEAST_BYTES], memory[12 + LEAST_BYTES : 12 + 2 * LEAST_BYTES]]
    ones = [Pinned(memory, address(array), array.nbytes) for array in arrays]
    assert flags(*arrays) == [True, True]
    ones.pop(0)
    gc.collect()
    assert flags(*arrays) == [False, True]
    found = xp.empty(LEAST_BYTES, np.float32)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.runtime.memcpyAsync(found.data.ptr, address(arrays[1]), arrays[1].nbytes, 1, stream.ptr)
    stream.synchronize()
    assert (found.get() == arrays[1]).all()
