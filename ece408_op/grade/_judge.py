"""Is one output right, and in which precision? It is compared with float64, element by element, on NumPy or CuPy.

Three kinds of data. "real" is x uniform in [-1, 1] and w normal: it tells float32 from half precision. "whole" is small
integers of which float16 represents every partial sum, so half precision must be exact there too: a missing product
shows, however coarse the rounding. "picture" is the test set, whose background is zero: there the sum of |x||w|
vanishes next to large ones, and a convolution by Fourier or Winograd transforms, whose errors are small compared with
the largest sum only, must not fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ece408_op.core.kernel import float32_bound
from ece408_op.problem import ConvProblem

from ._verdict import FLOAT32, HALF, WRONG, Outcome

#: The kinds of data.
WHOLE, REAL, PICTURE = "whole", "real", "picture"

EPS16 = 2.0**-11
"""Half a unit in the last place of 1.0 in float16."""

#: What a poisoned output holds before the call: no whole number.
POISON = 4096.5
#: How far from an integer an element may be and count as that integer.
_NEAR = 0.25
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


class Part(NamedTuple):
    """Some images of an output: ``y``, the exact sums, the sums of |x||w|, all (B, M, OH, OW), y float32."""

    y: Any
    exact: Any
    size: Any


def half_bound(problem: ConvProblem) -> float:
    """The largest |y - exact| of a sum of n products in float16, as a share of the sum of |x||w|.

    Both factors are rounded, and each of n sums; the errors of the sums grow with the root of n (Higham and
    Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), here with a factor of 2.
    """
    return 2 * EPS16 * (2 + math.sqrt(problem.products))


def least_error(problem: ConvProblem, x: Any, w: Any, kind: str) -> float:
    """The error that passes at any element: for pictures float32's for the largest |x||w|."""
    least = problem.products * _SMALLEST
    if kind != PICTURE:
        return least
    largest = problem.products * math.prod(max(float(one.max()), -float(one.min())) for one in (x, w))
    return least + (float32_bound(problem) * largest if math.isfinite(largest) else 0.0)


def judge(xp: Any, parts: Iterable[Part], problem: ConvProblem, kind: str, least: float) -> Outcome:
    """The class of an output that comes in parts of whole images; ``xp`` is numpy or cupy."""
    bound = float32_bound(problem)
    share, scaled, at, images = -1.0, 0.0, (0, 0.0, 0.0), 0
    where = xp.zeros(problem.y_shape[2:], np.int64)
    for part in parts:
        error = xp.abs(part.y - part.exact)
        finite = xp.isfinite(part.y)
        shares = xp.where(finite, error / (bound * part.size + least), xp.inf)
        # Where nothing is added up, no precision excuses an error.
        alone = xp.where(error > least, xp.inf, 0.0)
        ratios = xp.where(part.size > 0, error / xp.maximum(part.size, _SMALLEST**2), alone)
        scaled = max(scaled, float(xp.where(finite, ratios, 0.0).max()))
        where += (shares > 1).sum(axis=(0, 1))
        worst = int(shares.argmax())
        if float(shares.ravel()[worst]) > share:
            share = float(shares.ravel()[worst])
            at = (images * part.y[0].size + worst, float(part.y.ravel()[worst]), float(part.exact.ravel()[worst]))
        images += len(part.y)
    wrong = int(where.sum())
    precision = FLOAT32 if wrong == 0 else WRONG
    if wrong and kind != WHOLE and math.isfinite(share) and scaled <= half_bound(problem):
        precision = HALF
    return _outcome(problem, precision, share, scaled, at, where)


def judge_poisoned(xp: Any, parts: Iterable[Part], problem: ConvProblem) -> Outcome:
    """The class of an output that held POISON; x and w are whole, so each sum is an integer.

    Each element must be the sum, or POISON plus the sum if the file adds to the output. Where the sum is zero, writing
    nothing and adding zero look alike.
    """
    unwritten = written = accumulated = images = 0
    share, at = 0.0, (0, 0.0, 0.0)
    where = xp.zeros(problem.y_shape[2:], np.int64)
    for part in parts:
        left = part.y == np.float32(POISON)
        error = xp.abs(part.y - part.exact)
        is_written = error < _NEAR
        is_accumulated = ~left & (xp.abs(part.y - part.exact - POISON) < _NEAR)
        skipped = left & (xp.abs(part.exact) >= _NEAR)
        bad = skipped | ~(left | is_written | is_accumulated)
        if bool(bad.any()) and not share:
            worst = int(bad.argmax())
            got, expected = float(part.y.ravel()[worst]), float(part.exact.ravel()[worst])
            at, share = (images * part.y[0].size + worst, got, expected), math.inf
        unwritten += int(skipped.sum())
        written += int(is_written.sum())
        accumulated += int(is_accumulated.sum())
        where += bad.sum(axis=(0, 1))
        images += len(part.y)
    counts = {"unwritten": unwritten, "accumulates": accumulated > written}
    return _outcome(problem, WRONG if share else FLOAT32, share, share, at, where, **counts)


def _outcome(
    problem: ConvProblem,
    precision: str,
    share: float,
    scaled: float,
    at: tuple[int, float, float],
    where: Any,
    **more: Any,
) -> Outcome:
    """``at`` is the worst element's number, its value and the exact one; ``where`` counts wrong elements by place."""
    index = tuple(int(i) for i in np.unravel_index(at[0], problem.y_shape))
    counts, each = where.tolist(), problem.batch * problem.filters
    wrong, compared = sum(map(sum, counts)), math.prod(problem.y_shape)
    if wrong and precision == WRONG:
        more["wrong_map"] = tuple("".join(str(-(-9 * n // each)) if n else "." for n in row) for row in counts)
    return Outcome(precision, share, scaled, index, at[1], at[2], wrong, compared, **more)
