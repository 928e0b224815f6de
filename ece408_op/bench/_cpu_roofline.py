"""A CPU's rates, measured: multiply-adds that never leave the registers, and non-temporal stores."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import partial
from typing import Any

from llvmlite import ir

from ece408_op.core import timer
from ece408_op.core.roofline import Ceilings
from ece408_op.runtime import llvm, thread_pool
from ece408_op.runtime.memory import aligned

#: Independent sums: more than the multiply-adds in flight, fewer than the registers.
_SUMS = 12

_STEPS = 2_000_000
_FILL_BYTES = 1 << 29
_REPEATS = 5


@llvm.compiled_once
def _multiply_adds(target: llvm.Cpu) -> Any:
    """Compile a function (out): _STEPS times _SUMS multiply-adds of whole vectors; the sums are loaded and stored."""
    module = ir.Module("peak")
    vector = ir.VectorType(llvm.F32, target.lanes).as_pointer()
    b, (out,) = llvm.new_function(module, "peak", {"out": llvm.F32_PTR})
    pointers = [b.bitcast(llvm.element(b, out, n * target.lanes), vector) for n in range(_SUMS)]
    values = [b.load(pointer) for pointer in pointers]
    with llvm.for_range(b, _STEPS, values) as loop:
        loop.values = [llvm.fma(b, target, value, values[0], values[0]) for value in loop.values]
    for value, pointer in zip(loop.values, pointers):
        b.store(value, pointer)
    b.ret_void()
    return llvm.compile_function(module, "peak", [c_void_p], target)


@llvm.compiled_once
def _fill(target: llvm.Cpu) -> Any:
    """Compile a function (out, vectors) that stores vectors of ones past the caches."""
    module = ir.Module("fill")
    vector = ir.VectorType(llvm.F32, target.lanes)
    b, (out, vectors) = llvm.new_function(module, "fill", {"out": llvm.F32_PTR, "vectors": llvm.I64})
    ones = ir.Constant(vector, [1.0] * target.lanes)
    with llvm.for_range(b, vectors) as loop:
        pointer = llvm.element(b, out, b.mul(loop.index, llvm.const(target.lanes)))
        llvm.store_nontemporal(b, ones, b.bitcast(pointer, vector.as_pointer()), 4 * target.lanes)
    llvm.nontemporal_fence(b)
    b.ret_void()
    return llvm.compile_function(module, "fill", [c_void_p, c_int64], target)


def measure(threads: int) -> Ceilings:
    """Return the rates of that many threads together: the best of several runs."""
    target = llvm.cpu()
    sums = [aligned(_SUMS * target.lanes) for _ in range(threads)]
    for array in sums:
        array.fill(0.5)  # x 0.5 + 0.5 stays below 1: no infinity, no subnormal number
    vectors = _FILL_BYTES // 4 // target.lanes // threads
    parts = [aligned(vectors * target.lanes) for _ in range(threads)]
    for array in parts:
        array.fill(0.0)  # so that its pages are mapped before the clock starts
    compute, store = _multiply_adds(target), _fill(target)

    def best(work: Any) -> float:
        call = partial(thread_pool.share, work, threads, threads)
        return min(timer.measure(call, timer.cpu_clock, repeats=_REPEATS).seconds)

    filled, flops = sum(array.nbytes for array in parts), 2.0 * _STEPS * _SUMS * target.lanes * threads
    return Ceilings(
        filled / best(lambda thread: store(parts[thread].ctypes.data, vectors)),
        flops / best(lambda thread: compute(sums[thread].ctypes.data)),
    )
