"""The CPU for arrays in the computer's memory."""

from __future__ import annotations

import time

import numpy as np

from . import dispatch
from .call_record import Timing
from .kernel import CpuKernel
from .problem import ConvProblem


def convolve(
    kernel: CpuKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray, add: bool = False
) -> Timing:
    """Fill y (B, M, OH, OW) from x (B, C, H, W) and w (M, C, K, K) by a CPU kernel, or add the result to y.

    The arrays are C-contiguous float32, B is at least 1, and y may share memory with x or w.
    """
    # A kernel may not read what it writes: an output that is its own input goes through a copy.
    aside = add or np.may_share_memory(x, y) or np.may_share_memory(w, y)
    target = np.empty_like(y) if aside else y
    kernel.prepare(problem, target)
    start = time.perf_counter()
    kernel.run(problem, x, w, target, dispatch.thread_count(problem))
    seconds = time.perf_counter() - start
    if add:
        y += target
    elif aside:
        y[...] = target
    return Timing(seconds)
