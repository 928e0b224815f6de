"""Is one output right, and in which precision? Held against float64, scaled by the sum of |x||w|.

Two kinds of data. "real" is x uniform in [-1, 1] and w normal: it tells float32 from half precision. "whole" is
small integers whose every partial sum float16 holds exactly, so that a file in half precision must get it as
right as one in float32: a product left out shows there, however coarse the rounding. A third, "picture", is given:
the test set, whose background is zero. There sums |x||w| vanish beside others that do not, and a convolution by Fourier
or Winograd transforms, whose errors are small beside the largest of them alone, must not fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.core import reference
from ece408_op.core.check import Comparison, compare
from ece408_op.core.kernel import float32_bound
from ece408_op.kernels.cpu import loops
from ece408_op.problem import ConvProblem

#: The kinds of data.
WHOLE, REAL, PICTURE = "whole", "real", "picture"
#: Verdicts on one output.
FLOAT32, HALF, WRONG = "float32", "half", "wrong"

EPS16 = 2.0**-11
"""Half a unit in the last place of 1.0 in float16."""

#: What outputs hold before the run that looks for elements never written: no whole number.
PATTERN = 4096.5
NEAR = 0.25
"""How far from an integer an element may be and count as that integer."""


def half_bound(problem: ConvProblem) -> float:
    """The largest |y - exact| of a sum of n products in float16, as a share of sum |x||w|.

    Both factors are rounded, and each of n sums; the errors of the sums grow with the root of n (Higham and
    Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), here with a factor of 2.
    """
    return 2 * EPS16 * (2 + math.sqrt(problem.products))


@dataclass(frozen=True)
class Judged:
    """One output: its class, and the comparison behind it."""

    verdict: str
    comparison: Comparison


def judge(y: np.ndarray, x: np.ndarray, w: np.ndarray, kind: str) -> Judged:
    """The class of y, (B, M, OH, OW), the output for x, (B, C, H, W), and w, (M, C, K, K)."""
    # Of the kernel only its error bound is asked for: that of any float32 sum.
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    return classify(compare(y, x, w, loops.KERNEL, least=least_error(problem, x, w, kind)), problem, kind)


def least_error(problem: ConvProblem, x: Any, w: Any, kind: str) -> float:
    """The error that passes wherever it is, beside the bound: of pictures float32's for the largest |x||w| there is."""
    if kind != PICTURE:
        return 0.0
    largest = problem.products * math.prod(max(float(one.max()), -float(one.min())) for one in (x, w))
    return float32_bound(problem) * largest if math.isfinite(largest) else 0.0


def classify(found: Comparison, problem: ConvProblem, kind: str) -> Judged:
    """The class that a comparison with float32's bound means."""
    if found.passed:
        return Judged(FLOAT32, found)
    if kind != WHOLE and math.isfinite(found.worst) and found.scaled <= half_bound(problem):
        return Judged(HALF, found)
    return Judged(WRONG, found)


def describe(judged: Judged, problem: ConvProblem) -> str:
    """What differs where, in words."""
    found = judged.comparison
    text = (
        f"{found.wrong} of {found.compared} elements differ ({100 * found.wrong / max(1, found.compared):.3g} %), "
        f"worst y{list(found.index)}: got {found.got:.7g}, expected {found.expected:.7g}"
    )
    return f"{text} ({problem})"


def draw(problem: ConvProblem, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Fresh x and w, float32."""
    if kind == REAL:
        x = rng.random(problem.x_shape, np.float32) * 2 - 1
        w = rng.standard_normal(problem.w_shape, np.float32)
        return x, w
    # Up to 1000 products of at most 2 stay below 2048, up to which float16 holds every integer.
    values = np.array([-2, -1, 1, 2] if problem.products <= 1000 else [-1, 1], np.float32)
    x = values[rng.integers(0, len(values), problem.x_shape, np.uint8)]
    w = np.array([-1, 1], np.float32)[rng.integers(0, 2, problem.w_shape, np.uint8)]
    return x, w


@dataclass(frozen=True)
class Traces:
    """What became of the elements of an output that held PATTERN: counts.

    ``skipped`` were left as they were though their sum is not zero, ``still`` are those whose sum is zero: writing
    nothing and adding zero look alike there.
    """

    written: int
    accumulated: int
    skipped: int
    still: int
    other: int


def traces(y: np.ndarray, x: np.ndarray, w: np.ndarray) -> Traces:
    """Look for elements never written; x and w are whole, so that each sum is an integer."""
    counts = np.zeros(5, np.int64)
    step = max(1, (32 << 20) // max(1, 8 * w[0].size * y[0, 0].size))
    for first in range(0, len(y), step):
        part = y[first : first + step]
        expected = reference.convolve(x[first : first + step], w)
        left, zero = part == np.float32(PATTERN), np.abs(expected) < NEAR
        written = np.abs(part - expected) < NEAR
        accumulated = ~left & (np.abs(part - expected - PATTERN) < NEAR)
        kinds = (written, accumulated, left & ~zero, left & zero, ~(left | written | accumulated))
        counts += [int(kind.sum()) for kind in kinds]
    return Traces(*map(int, counts))
