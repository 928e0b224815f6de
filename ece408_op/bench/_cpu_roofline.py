"""What the CPU can do at most, measured on the spot: multiply-adds that never leave registers, and filling memory."""

from __future__ import annotations

import time
from ctypes import c_int64, c_void_p
from functools import partial
from typing import Any

from llvmlite import ir

from ece408_op.core.roofline import Ceilings
from ece408_op.runtime import llvm, thread_pool
from ece408_op.runtime.memory import aligned

#: Sums that do not wait for one another: more than the multiply-adds in flight, fewer than the registers.
_CHAINS = 12

_ROUNDS = 2_000_000
_FILL_BYTES = 1 << 29
_REPEATS = 5


@llvm.compiled_once
def _chains(target: llvm.Cpu) -> Any:
    """A function (out) of _ROUNDS times _CHAINS multiply-adds of whole vectors, whose sums it stores."""
    module = ir.Module("peak")
    vector = ir.VectorType(llvm.F32, target.lanes)
    b, (out,) = llvm.new_function(module, "peak", {"out": llvm.F32_PTR})
    values = [b.load(b.bitcast(llvm.element(b, out, n * target.lanes), vector.as_pointer())) for n in range(_CHAINS)]
    factor = values[0]
    with llvm.for_range(b, _ROUNDS, values) as loop:
        loop.values = [llvm.fma(b, target, value, factor, factor) for value in loop.values]
    for n, value in enumerate(loop.values):
        b.store(value, b.bitcast(llvm.element(b, out, n * target.lanes), vector.as_pointer()))
    b.ret_void()
    return llvm.compile_function(module, "peak", [c_void_p], target)


@llvm.compiled_once
def _filling(target: llvm.Cpu) -> Any:
    """A function (out, vectors) that stores so many vectors past the caches."""
    module = ir.Module("fill")
    vector = ir.VectorType(llvm.F32, target.lanes)
    b, (out, vectors) = llvm.new_function(module, "fill", {"out": llvm.F32_PTR, "vectors": llvm.I64})
    ones = ir.Constant(vector, [1.0] * target.lanes)
    with llvm.for_range(b, vectors) as loop:
        place = llvm.element(b, out, b.mul(loop.index, llvm.const(target.lanes)))
        llvm.store_past_caches(b, ones, b.bitcast(place, vector.as_pointer()), 4 * target.lanes)
    llvm.streamed_stores_done(b)
    b.ret_void()
    return llvm.compile_function(module, "fill", [c_void_p, c_int64], target)


def measure(threads: int) -> Ceilings:
    """The ceilings of so many threads together: the best of several runs."""
    target = llvm.cpu()
    peak = _chains(target)
    sums = [aligned(_CHAINS * target.lanes) for _ in range(threads)]
    for array in sums:
        array.fill(0.5)  # x 0.5 + 0.5 stays below 1: no infinity, no subnormal number
    flops = 2.0 * _ROUNDS * _CHAINS * target.lanes * threads
    vectors = _FILL_BYTES // 4 // target.lanes // threads
    parts = [aligned(vectors * target.lanes) for _ in range(threads)]
    for array in parts:
        array.fill(0.0)  # its pages are there before the clock starts
    store = _filling(target)
    multiply = partial(thread_pool.share, lambda thread: peak(sums[thread].ctypes.data), threads, threads)
    fill = partial(thread_pool.share, lambda thread: store(parts[thread].ctypes.data, vectors), threads, threads)
    return Ceilings(sum(array.nbytes for array in parts) / _best_seconds(fill), flops / _best_seconds(multiply))


def _best_seconds(work: Any) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
