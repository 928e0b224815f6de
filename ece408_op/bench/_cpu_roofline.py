"""Measure a CPU's rates: of multiply-adds in registers, and of non-temporal stores."""

from __future__ import annotations

from functools import partial
from typing import Any

from ece408_op.core import timer
from ece408_op.core.roofline import Ceilings
from ece408_op.runtime import host_cpu, llvm, thread_pool
from ece408_op.runtime.memory import aligned

#: The number of independent sums: more than the multiply-adds in flight, fewer than the registers.
_SUMS = 12

_STEPS = 2_000_000
_FILL_BYTES = 1 << 29
_REPEATS = 5


@llvm.compiled_once
def _multiply_adds(target: host_cpu.Cpu) -> Any:
    """Compile (out), which does _STEPS times _SUMS multiply-adds of whole vectors on sums that it loads from out."""
    with llvm.Function(llvm.Module("peak", target), "peak", "out", exported=True) as f:
        (out,) = f.arguments
        values = [out[n * target.lanes].load(target.lanes) for n in range(_SUMS)]
        with f.loop(_STEPS, values) as loop:
            loop.values = [value.fma(values[0], values[0]) for value in loop.values]
        for n, value in enumerate(loop.values):
            out[n * target.lanes].store(value)
    return f.compiled()


@llvm.compiled_once
def _fill(target: host_cpu.Cpu) -> Any:
    """Compile (out, vectors), which fills out with ones by non-temporal stores."""
    with llvm.Function(llvm.Module("fill", target), "fill", "out", "vectors", exported=True) as f:
        out, vectors = f.arguments
        with f.range(vectors) as n:
            out[n * target.lanes].store_nontemporal(f.vector(1.0))
        f.nontemporal_fence()
    return f.compiled()


def measure(threads: int) -> Ceilings:
    """Return the rates of ``threads`` threads together: the best of several runs."""
    target = host_cpu.cpu()
    sums = [aligned(_SUMS * target.lanes) for _ in range(threads)]
    for array in sums:
        array.fill(0.5)  # x 0.5 + 0.5 stays below 1: no infinity, no subnormal number
    vectors = _FILL_BYTES // 4 // target.lanes // threads
    parts = [aligned(vectors * target.lanes) for _ in range(threads)]
    for array in parts:
        array.fill(0.0)  # so that its pages are mapped before the clock starts
    compute, store = _multiply_adds(target), _fill(target)

    def best(work: Any) -> float:
        call = partial(thread_pool.parallel_for, work, threads, threads)
        return min(timer.measure(call, timer.cpu_clock, repeats=_REPEATS).seconds)

    filled, flops = sum(array.nbytes for array in parts), 2.0 * _STEPS * _SUMS * target.lanes * threads
    return Ceilings(
        filled / best(lambda thread: store(parts[thread].ctypes.data, vectors)),
        flops / best(lambda thread: compute(sums[thread].ctypes.data)),
    )
