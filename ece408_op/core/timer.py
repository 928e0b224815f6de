"""The one timer: calls timed on a GPU between two events, or on the CPU, and their outputs checked against float64.

    reference = Reference(x, w, images=3)
    timing = measure(call, GpuClock("naive"), before=Eviction(out), check=reference.check, repeats=20)

Everything a timed call could profit from is undone before it: ``Eviction`` overwrites L2, and fills the output with NaN
so that an element that is not written is found. One call before the timed ones warms up; it compiles.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem, WeightGradient
from ece408_op.runtime import cuda

from . import reference
from .kernel import Kernel

#: Runs a call and waits for its end; returns the seconds and what the call returned.
Clock = Callable[[Callable[[], Any]], "tuple[float, Any]"]

#: Bytes that are written before a timed call: many times L2, and long enough that a call of a few launches is queued
#: before they are written. An idle GPU would wait for the host between launches, and that would be timed too.
_EVICTION_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """An output's largest error, as a share of the sum that ``Reference.check`` names, and a sentence about it."""

    error: float = 0.0
    worst: str = ""


@dataclass(frozen=True)
class Timing:
    """Seconds of each timed call, and the worst check of their outputs."""

    seconds: tuple[float, ...]
    check: Check = Check()

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)


class Reference:
    """The float64 results of some images of a layer, evenly spread: the others' outputs are checked for being finite.

    x (B, C, H, W) and w (M, C / G, K, L), or for a gradient the two arrays that it is computed from, are finite float32
    arrays of NumPy, or of CuPy on the current GPU. A weight gradient is the result of all images: it is compared for as
    many filters and channels, and whole where there are groups.
    """

    def __init__(self, x: Any, w: Any, images: int, problem: ConvProblem | None = None) -> None:
        def some(count: int) -> np.ndarray:
            return np.unique(np.linspace(0, count - 1, images).astype(int))

        problem = problem or ConvProblem.from_shapes(x.shape, w.shape)
        if not isinstance(problem, WeightGradient):
            self._axes = [some(len(x))]
            self._x, self._w, self._problem = x[self._axes[0]], w, problem.with_batch(len(self._axes[0]))
        elif problem.groups > 1:
            self._axes, self._x, self._w, self._problem = [np.arange(problem.filters)], x, w, problem
        else:
            filters, channels = self._axes = [some(problem.filters), some(problem.channels)]
            self._x, self._w = x[:, channels], w[:, filters]
            self._problem = replace(problem, filters=len(filters), channels=len(channels))
        self._x, self._w = _numpy(self._x), _numpy(self._w)
        self._exact = reference.convolve(self._x, self._w, self._problem)
        self._magnitudes: dict[tuple[Callable[[Any], Any], ...], np.ndarray] = {}

    def check(self, out: Any, kernel: Kernel | None = None) -> Check:
        """Check an output of the problem, of NumPy or CuPy; the error is infinite if it is not finite.

        The error is a share of the sum that the kernel's error bound is a factor of, or of the sum of |x||w|.
        """
        magnitudes = (kernel.magnitude_images, kernel.magnitude_weights) if kernel else (abs, abs)
        if magnitudes not in self._magnitudes:
            of_images, of_weights = magnitudes
            sums = reference.magnitude(of_images(self._x), of_weights(self._w), self._problem)
            self._magnitudes[magnitudes] = np.maximum(sums, np.finfo(float).tiny)
        got = _numpy(out[np.ix_(*self._axes)]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            errors = np.abs(got - self._exact) / self._magnitudes[magnitudes]
        errors = np.where(np.isfinite(errors), errors, np.inf)
        at = np.unravel_index(int(errors.argmax()), errors.shape)
        index = [int(axis[place]) for axis, place in zip(self._axes, at)]
        index += map(int, at[len(index) :])
        worst = f"worst element {index}: got {got[at]:.9g}, expected {self._exact[at]:.9g}"
        if np.isfinite(errors[at]) and not _all_finite(out):
            return Check(math.inf, "expected finite values in every image, got NaN or infinity")
        return Check(float(errors[at]), worst)


def _numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _all_finite(out: Any) -> bool:
    if isinstance(out, np.ndarray):
        return all(np.isfinite(image).all() for image in out)
    return bool(cuda.cupy().isfinite(out).all())


def cpu_clock(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time a call that returns when its work is done."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class GpuClock:
    """Times a call's work on the current stream, between two events; a CUDA error is raised under the given name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds between the events, and what the call returned."""
        events = cuda.cupy().cuda
        stream = events.get_current_stream()
        start, end = events.Event(), events.Event()
        start.record(stream)
        result = call()
        end.record(stream)
        cuda.wait(self._name, stream)
        return 1e-3 * float(events.get_elapsed_time(start, end)), result


class Eviction:
    """What runs on a GPU's stream before a timed call: L2 is overwritten, and ``out`` is filled with NaN."""

    def __init__(self, out: Any = None) -> None:
        self._unrelated = cuda.cupy().empty(_EVICTION_BYTES, np.uint8)
        self._out = out

    def __call__(self) -> None:
        """Queue both."""
        self._unrelated.fill(0)
        if self._out is not None:
            self._out.fill(np.nan)


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
        return measure(partial(kernel.run, problem, x, w, out), GpuClock(kernel.name), before, repeats=repeats).median
    kernel.prepare(problem, out)
    return measure(partial(kernel.run, problem, x, w, out, threads), cpu_clock, before, repeats=repeats).median


def measure(
    call: Callable[[], Any],
    clock: Clock,
    before: Callable[[], Any] | None = None,
    check: Callable[[Any], Check] | None = None,
    repeats: int = 10,
    budget: float = math.inf,
    fewest: int = 1,
) -> Timing:
    """Time ``repeats`` calls after one that is not timed, and check what each of them returned.

    After ``budget`` seconds of timed calls no further one is timed, except for the first ``fewest``.
    """
    seconds: list[float] = []
    worst = Check()
    for number in range(repeats + 1):
        result = None  # a fresh output may take the memory of the one before
        if before is not None:
            before()
        taken, result = clock(call)
        if not number:
            continue
        seconds.append(taken)
        if check is not None:
            worst = max(worst, check(result), key=lambda one: one.error)
        if sum(seconds) > budget and len(seconds) >= fewest:
            break
    return Timing(tuple(seconds), worst)
