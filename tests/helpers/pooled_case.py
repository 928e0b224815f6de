"""Shared by the tests of fused convolution, tanh and 2 x 2 max-pooling: the maxima and the error bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.core.kernel import EPS32, float32_bound
from ece408_op.problem import PooledProblem

#: The largest error of the kernels' tanh, in units in the last place: docs/numerics.md.
TANH_ULPS = 3


def maxima(y: Any, full: bool, xp: Any = np) -> Any:
    """Return the maximum of each 2 x 2 window, ignoring NaN unless all are NaN; xp is NumPy or CuPy."""
    edges = [(0, size % 2 if full else 0) for size in y.shape[2:]]
    y = xp.pad(y, [(0, 0), (0, 0), *edges], constant_values=xp.nan)
    y = y[:, :, : y.shape[2] // 2 * 2, : y.shape[3] // 2 * 2]
    top, bottom = (xp.fmax(y[:, :, i::2, ::2], y[:, :, i::2, 1::2]) for i in (0, 1))
    return xp.fmax(top, bottom)


def assert_right(out: Any, problem: PooledProblem, convolved: Any, magnitude: Any, xp: Any = np) -> None:
    """Check out against the convolution in float64; magnitude has the sums of |x||w|.

    The slope of tanh is at most 1, so the error bound is the convolution's plus that of tanh.
    """
    exact = xp.tanh(maxima(convolved, problem.full, xp))
    allowed = float32_bound(problem) * maxima(magnitude, problem.full, xp)
    allowed += TANH_ULPS * 2 * EPS32 * abs(exact)
    assert out.shape == exact.shape
    worst = abs(out - exact) - allowed
    worst = xp.where(xp.isnan(worst), xp.inf, worst)
    at = np.unravel_index(int(worst.argmax()), worst.shape)
    assert float(worst[at]) <= 0, (
        f"{problem}: {int((worst > 0).sum())} wrong, the worst {at}: expected {float(exact[at])}, got {float(out[at])}"
    )
