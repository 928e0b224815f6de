"""The CPU for arrays in the computer's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from . import dispatch
from .call_record import Timing
from .errors import UnsupportedError
from .kernel import CpuKernel
from .problem import ConvProblem


def convolve(
    kernel: CpuKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray, add: bool = False
) -> Timing:
    """Fill y (B, M, OH, OW) from x (B, C, H, W) and w (M, C, K, K) by a CPU kernel, or add the result to y.

    The arrays are C-contiguous float32, B is at least 1, and y may share memory with x or w.
    """
    return _timed(
        lambda target: kernel.prepare(problem, target),
        lambda target: kernel.run(problem, x, w, target, dispatch.thread_count(problem)),
        (x, w, y),
        add,
    )


def tanh_pool(
    kernel: CpuKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray, full: bool, add: bool = False
) -> Timing:
    """The same with the tanh of the 2 x 2 maxima, y (B, M, (OH + full) // 2, (OW + full) // 2).

    Raises UnsupportedError for a kernel that cannot.
    """
    both = kernel.tanh_pool
    if both is None:
        raise UnsupportedError(f"fuse: expected an implementation that can, auto or direct; got {kernel.name}")
    return _timed(
        lambda target: both.prepare(problem, full),
        lambda target: both.run(problem, x, w, target, dispatch.thread_count(problem), full),
        (x, w, y),
        add,
    )


def _timed(
    prepare: Callable[[np.ndarray], None],
    run: Callable[[np.ndarray], None],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    add: bool,
) -> Timing:
    x, w, y = arrays
    # A kernel may not read what it writes: an output that is its own input goes through a copy.
    aside = add or np.may_share_memory(x, y) or np.may_share_memory(w, y)
    target = np.empty_like(y) if aside else y
    prepare(target)
    start = time.perf_counter()
    run(target)
    seconds = time.perf_counter() - start
    if add:
        y += target
    elif aside:
        y[...] = target
    return Timing(seconds)
