"""The one timer: calls timed on a GPU between two events, or on the CPU, and their outputs checked against float64.

    reference = check.Reference(x, w, images=3)
    timing = measure(call, gpu_clock("naive"), before=eviction(out), check=reference.compare, repeats=20)

Before each timed call, ``eviction`` overwrites L2 and poisons the output with NaN, so that an element that is not
written is found. One call before the timed ones warms up; it compiles.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from .check import Comparison

#: Runs a call and waits for its end; returns the seconds and what the call returned.
Clock = Callable[[Callable[[], Any]], "tuple[float, Any]"]

#: Bytes that are written before a timed call: many times L2, and long enough that a call of a few launches is queued
#: before they are written. An idle GPU would wait for the host between launches, and that would be timed too.
_EVICTION_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Seconds of each timed call, and the worst comparison of their outputs, None if they were not checked."""

    seconds: tuple[float, ...]
    worst: Comparison | None = None

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)


def cpu_clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time a call that returns when its work is done."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def gpu_clock(name: str) -> Clock:
    """Return a clock of the work on the current stream, between two events; it raises a CUDA error under this name."""

    def clock(call: Callable[[], Any]) -> tuple[float, Any]:
        events = cuda.cupy().cuda
        stream = events.get_current_stream()
        start, end = events.Event(), events.Event()
        start.record(stream)
        result = call()
        end.record(stream)
        cuda.wait(name, stream)
        return 1e-3 * float(events.get_elapsed_time(start, end)), result

    return clock


def eviction(out: Any) -> Callable[[], None]:
    """Return a function that overwrites L2 and fills ``out`` with NaN, on the GPU's current stream."""
    unrelated = cuda.cupy().empty(_EVICTION_BYTES, np.uint8)

    def evict() -> None:
        unrelated.fill(0)
        out.fill(np.nan)

    return evict


def kernel_seconds(
    kernel: Any,
    problem: ConvProblem,
    x: Any,
    w: Any,
    out: Any,
    threads: int = 1,
    before: Callable[[], Any] | None = None,
    repeats: int = 10,
) -> float:
    """Return the median seconds of a kernel's calls, which fill out: NumPy's arrays on the CPU, CuPy's on a GPU."""
    if kernel.device == "gpu":
        return measure(partial(kernel.run, problem, x, w, out), gpu_clock(kernel.name), before, repeats=repeats).median
    kernel.prepare(problem, out)
    return measure(partial(kernel.run, problem, x, w, out, threads), cpu_clock, before, repeats=repeats).median


def measure(
    call: Callable[[], Any],
    clock: Clock,
    before: Callable[[], Any] | None = None,
    check: Callable[[Any], Comparison] | None = None,
    repeats: int = 10,
    budget: float = math.inf,
    fewest: int = 1,
) -> Timing:
    """Time ``repeats`` calls after one that is not timed, and check what each of them returned.

    After ``budget`` seconds of timed calls no further one is timed, except for the first ``fewest``.
    """
    seconds: list[float] = []
    compared: list[Comparison] = []
    for number in range(repeats + 1):
        result = None  # a fresh output may take the memory of the one before
        if before is not None:
            before()
        taken, result = clock(call)
        if not number:
            continue
        seconds.append(taken)
        if check is not None:
            compared.append(check(result))
        if sum(seconds) > budget and len(seconds) >= fewest:
            break
    return Timing(tuple(seconds), max(compared, key=lambda one: one.scaled, default=None))
