"""What is kept from call to call is bounded: compiled code, and the keys of layers that have run."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ece408_op.runtime import host_cpu, llvm
from ece408_op.runtime.bounded_dict import BoundedDict


def test_the_last_keys_are_kept():
    recent = BoundedDict(3)
    for key in "abcabd":
        recent[key] = key * 2
    assert dict(recent) == {"b": "bb", "c": "cc", "d": "dd"}


def test_threads_may_set_keys_at_once():
    recent = BoundedDict(10)

    def work(first):
        for key in range(first, 40_000, 8):
            recent[key] = key

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(recent) == 10
    assert all(key == value for key, value in recent.items())


class Made:
    """What a compilation stands for."""


def test_compiled_code_that_nobody_uses_is_freed_once_enough_other_code_is_compiled():
    make = llvm.compiled_once(lambda number: Made())
    used, unused = make(0), weakref.ref(make(1))
    for number in range(2, llvm.CAPACITY + 2):
        make(number)
    gc.collect()
    assert unused() is None
    assert weakref.ref(used)() is not None
    assert make(llvm.CAPACITY + 1) is make(llvm.CAPACITY + 1)


def test_threads_compile_once():
    made = []
    # While one thread compiles, the others ask for the same code.
    make = llvm.compiled_once(lambda number: time.sleep(0.05) or made.append(number) or Made())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make, [7] * 8))
    assert made == [7]
    assert len(set(map(id, found))) == 1


def test_a_function_works_as_long_as_somebody_has_it():
    @llvm.compiled_once
    def fill(number):
        with llvm.Function(llvm.Module("fill", host_cpu.cpu()), "fill", "out", exported=True) as f:
            f.arguments[0].store(f.scalar(number))
        return f.compiled()

    first, out = fill(0), np.full(1, np.nan, np.float32)
    for number in range(1, llvm.CAPACITY + 2):
        fill(number)(out.ctypes.data)
        assert out[0] == number
    gc.collect()
    first(out.ctypes.data)
    assert out[0] == 0
