"""Time what a contestant computes, and check every output that was timed. Nothing here knows MXNet.

All calls of one kind follow one another, so that an output is allocated from the memory that the call before
it gave back, as in a program that runs one network again and again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ece408_op.core.check import Comparison, compare
from ece408_op.core.kernel import Kernel

#: The ways of a call: its output is new memory, or one that was written before.
FRESH, REUSED = "fresh", "reused"

#: Images of each output that are compared with float64; all others must be finite.
CHECKED_IMAGES = 16

#: A contestant whose first call takes longer, in seconds, is timed once and not several times.
SLOW = 10.0


@dataclass(frozen=True)
class Calls:
    """A contestant that holds its input. A call returns when its output is computed.

    ``fresh()`` returns its output, ``reused(output)`` writes into one; ``values(output)`` is a NumPy view of it.
    A contestant without ``out=`` has no ``reused``.
    """

    fresh: Callable[[], Any]
    reused: Callable[[Any], None] | None
    values: Callable[[Any], np.ndarray]


@dataclass
class Timing:
    """Seconds of each timed call, and the worst comparison of their outputs."""

    seconds: list[float] = field(default_factory=list)
    check: Comparison | None = None

    @property
    def passed(self) -> bool:
        """Every output was right."""
        return self.check is not None and self.check.passed

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        """The median, and the quickest and the slowest call; no speed where an output was wrong."""
        if not self.passed:
            return str(self.check)
        low, high = min(self.seconds), max(self.seconds)
        return f"{self.median * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"

    def add(self, seconds: float, check: Comparison) -> None:
        """Count one more call."""
        self.seconds.append(seconds)
        if self.check is None or (self.check.passed and (not check.passed or check.worst > self.check.worst)):
            self.check = check


def measure(
    calls: Calls, x: np.ndarray, w: np.ndarray, bound: Kernel, repeats: int, budget: float = math.inf
) -> dict[str, Timing]:
    """The timings of fresh and, where there are such, reused outputs; one call before each kind is not counted.

    Outputs are held to the error bound of the kernel ``bound``. After ``budget`` seconds of timed calls of one kind,
    no further call of that kind is timed.
    """

    def checked(output: Any) -> Comparison:
        return compare(calls.values(output), x, w, bound, CHECKED_IMAGES)

    start = time.perf_counter()
    output = calls.fresh()
    first = time.perf_counter() - start
    count = 1 if first > SLOW else repeats
    results = {FRESH: Timing()}
    outcomes = []
    for _ in range(count):
        output = None  # its memory is free before the next call asks for some
        start = time.perf_counter()
        output = calls.fresh()
        outcomes.append((time.perf_counter() - start, checked(output)))
        if sum(seconds for seconds, _ in outcomes) > budget:
            break
    for outcome in outcomes:
        results[FRESH].add(*outcome)
    if calls.reused is None:
        return results
    results[REUSED] = Timing()
    for number in range(count + 1):
        calls.values(output)[...] = np.nan  # what is not written will be found
        start = time.perf_counter()
        calls.reused(output)
        seconds = time.perf_counter() - start
        if number:
            results[REUSED].add(seconds, checked(output))
        if sum(results[REUSED].seconds) > budget:
            break
    return results
