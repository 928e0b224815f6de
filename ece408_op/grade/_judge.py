"""Is one output right, and in which precision? It is compared with float64, element by element, on NumPy or CuPy.

Of n products p, S is the sum of |p|, T the root of the sum of their squares, and L the root of n times the largest |x|
of the image and the largest |w| of the filter. u is 2^-24 for float32, u16 = 2^-11 for float16. The classes:

    float32        every error <= n u S / (1 - n u): any order of sums (N. Higham, Accuracy and Stability of Numerical
                   Algorithms, section 3.1); on random data, rms(error / T) <= 4 u sqrt(n), where plain sums have 0.3
    by transforms  every error <= 600 u L, and rms <= 100 u L: 300 and 22 measured for Winograd's F(4x4, 5x5)
    half           every error <= u16 min(4 S, 1.5 |sum| + 6 T): two factors and a product rounded, or two
                   factors truncated, which errs by 1.4 u16 |sum| on average; on random data, rms(error / T) <= 2.2 u16:
                   0.7 measured, 1.5 with truncation, 4.5 with bfloat16
    half sums      in addition sqrt(n) u16 (3 |sum| + 4 T), and rms(error / T) <= (1 + sqrt(n) / 2) u16: float16's sums
                   err like a random walk (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
                   2019); among two million sums, a third of the first bound and 0.3 sqrt(n) measured

A sum of one product has S = T, and x of 11 bits there: both kinds of half have errors <= 3 u16 S (w truncated, the
product rounded), and a w of bfloat16 up to 8. No w is so small that float16 has fewer than 11 bits for it.

Four kinds of data. "real" is x uniform in [-1, 1] and w normal. "whole" is small integers of which float16 represents
every partial sum, so half precision must be exact there too. In both, some images are sparse: each window has one
product only, and x has 11 bits. Nothing hides a product there that is missing or rounded to fewer bits. "picture" is
the test set, whose pixels are not random. "wide" is whole numbers beyond float16's range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np

from ece408_op.core.kernel import EPS16, EPS32, SMALLEST32, float32_bound
from ece408_op.problem import ConvProblem

from ._verdict import FLOAT32, HALF, HALF_SUMS, PICTURE, REAL, TRANSFORM, WRONG, Outcome

#: Some images of an output: y (float32), the exact sums, S and T, all (B, M, OH, OW), and L, (B, M, 1, 1).
Part = tuple[Any, Any, Any, Any, Any]

POISON = 4096.5  # what a poisoned output holds before the call: no whole number
#: How far from its sum a poisoned element to which it was added may be, next to what a transform may err.
_NEAR = 2.0**-9
_ALONE = 1e-9  # S and T of one product differ by less than this share
_ENOUGH = 1000  # with fewer elements an average says little


@np.errstate(all="ignore")  # an output may hold anything
def judge(xp: Any, parts: Iterable[Part], problem: ConvProblem, kind: str, before: float = 0.0) -> Outcome:
    """The class of an output that held ``before``, and comes in parts of whole images; ``xp`` is numpy or cupy."""
    n = problem.products
    most = dict.fromkeys((FLOAT32, TRANSFORM, HALF, HALF_SUMS), 0.0)
    scaled, squares = 0.0, np.zeros(2)
    wrong = count = images = 0
    worst = []  # of each part: is it wrong, its error as a share of float32's bound, its index, got and expected
    for y, exact, sizes, roots, largest in parts:
        error = xp.where(xp.isfinite(y), xp.abs(y - exact), xp.inf)
        if before:  # a file may add to it; where a sum is zero, adding it and writing nothing look alike
            added = xp.abs(y - exact - before) < _NEAR + 600 * EPS32 * largest
            error = xp.where(added, 0, error)
        bounds = _bounds(xp, exact, sizes, roots, largest, problem, kind)
        for name, bound in bounds.items():
            most[name] = max(most[name], float((error / bound).max()))
        bad, share = error > reduce(xp.maximum, bounds.values()), error / bounds[FLOAT32]
        wrong += int(bad.sum())
        some_bad = bool(bad.any())
        # The worst of the wrong elements, if there are any.
        place = int((xp.where(bad, share, -1) if some_bad else share).argmax())
        image, *rest = at = tuple(int(i) for i in np.unravel_index(place, error.shape))
        worst.append((some_bad, float(share[at]), (images + image, *rest), float(y[at]), float(exact[at])))
        scaled = max(scaled, float((error / (sizes + n * SMALLEST32)).max()))
        some = roots > 0
        count += int(some.sum())
        squares[0] += float(xp.where(some, (error / xp.maximum(roots, SMALLEST32)) ** 2, 0).sum())
        squares[1] += float(((error / xp.maximum(largest, SMALLEST32)) ** 2).sum())
        images += len(y)
    by_root, by_largest = np.sqrt(squares / (max(1, count), math.prod(problem.y_shape)))
    limits = {FLOAT32: 4 * EPS32 * math.sqrt(n), HALF: 2.2 * EPS16, HALF_SUMS: (1 + math.sqrt(n) / 2) * EPS16}
    fits = {name: kind != REAL or count < _ENOUGH or by_root <= limit for name, limit in limits.items()}
    fits[TRANSFORM] = by_largest <= 100 * EPS32
    precision = next((name for name in bounds if most[name] <= 1 and fits[name]), WRONG)
    _, _, index, got, expected = max(worst, key=lambda one: one[:2])
    return Outcome(precision, most[FLOAT32], scaled, index, got, expected, wrong, math.prod(problem.y_shape))


def _bounds(xp: Any, exact: Any, sizes: Any, roots: Any, largest: Any, p: ConvProblem, kind: str) -> dict[str, Any]:
    """The error allowed at each element, by class, the finest first."""
    n, least = p.products, p.products * SMALLEST32
    bounds = {FLOAT32: float32_bound(p) * sizes + least, TRANSFORM: 600 * EPS32 * largest + least}
    if kind == PICTURE:  # equal pixels have equal errors, which only S bounds
        bounds[HALF] = bounds[HALF_SUMS] = 2 * EPS16 * (2 + math.sqrt(n)) * sizes + least
    elif kind == REAL:
        alone = (sizes <= roots * (1 + _ALONE)) & (n > 1)
        most = xp.where(alone, 3 * EPS16 * sizes, math.inf) + bounds[FLOAT32]
        exact = xp.abs(exact)
        half = EPS16 * xp.minimum(4 * sizes, 1.5 * exact + 6 * roots) + bounds[FLOAT32]
        bounds[HALF] = xp.minimum(most, half)
        bounds[HALF_SUMS] = xp.minimum(most, half + math.sqrt(n) * EPS16 * (3 * exact + 4 * roots))
    return bounds
