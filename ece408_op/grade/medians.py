"""Statistics of repeated times: the median, its confidence interval, and the extremes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: The share of cases in which the interval should hold the true median.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Times:
    """All in the unit of the samples; the true median lies between ``low`` and ``high`` with that ``confidence``."""

    median: float
    low: float
    high: float
    confidence: float
    fastest: float
    slowest: float
    count: int


def summary(samples: Sequence[float]) -> Times:
    """The figures of at least one sample.

    The interval is that between two samples equally far from both ends: of n independent samples the true median lies
    below the k-th smallest with the chance of fewer than k heads in n throws of a coin. It is the narrowest of at
    least CONFIDENCE; few samples reach less even from the first to the last. Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    ordered = sorted(samples)
    n, k = len(ordered), 1
    fewer = 1  # the ways in which n coins show fewer than k heads
    while k < (n + 1) // 2 and 1 - 2 * (fewer + math.comb(n, k)) / 2**n >= CONFIDENCE:
        fewer += math.comb(n, k)
        k += 1
    confidence = max(0.0, 1 - 2 * fewer / 2**n)
    return Times(statistics.median(ordered), ordered[k - 1], ordered[n - k], confidence, ordered[0], ordered[-1], n)
