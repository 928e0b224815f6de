"""The convolution in float64, the reference of every kernel. Dispatch never selects it.

Rounding in float64 is some 2**29 times finer than in float32, so its own error does not count.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def convolve(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y, shape (B, M, OH, OW), float64, of x (B, C, H, W) and w (M, C, K, K)."""
    # (B, C, OH, OW, K, K)
    windows = sliding_window_view(x.astype(np.float64), w.shape[2:], axis=(2, 3))  # type: ignore[call-overload]
    return np.einsum("bcijpq,mcpq->bmij", windows, w.astype(np.float64), optimize=True)


def magnitude(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The sum of |x||w| at each output element: the scale of the rounding errors there."""
    return convolve(np.abs(x), np.abs(w))
