"""The CPU for arrays in the computer's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ece408_op.core import dispatch
from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ConvProblem, PooledProblem
from ece408_op.runtime import memory

from .op_times import Timing


def convolve(
    kernel: CpuKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray, add: bool = False
) -> Timing:
    """Fill y (B, M, OH, OW) from x (B, C, H, W) and w (M, C, K, K) by a CPU kernel, or add the result to y.

    The arrays are C-contiguous float32, B is at least 1, and y may share memory with x or w. The kernel takes the
    problem; that of a PooledProblem is computed by its ``tanh_pool``, into y (B, M, PH, PW).
    """
    threads = dispatch.thread_count(problem)
    if isinstance(problem, PooledProblem):
        both, plain, full = kernel.tanh_pool, problem.convolution, problem.full
        assert both is not None, "a kernel that takes the problem"
        return _timed(
            lambda target: both.prepare(plain, full),
            lambda target: both.run(plain, x, w, target, threads, full),
            (x, w, y),
            add,
            threads,
        )
    return _timed(
        lambda target: kernel.prepare(problem, target),
        lambda target: kernel.run(problem, x, w, target, threads),
        (x, w, y),
        add,
        threads,
    )


def _timed(
    prepare: Callable[[np.ndarray], None],
    run: Callable[[np.ndarray], None],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    add: bool,
    threads: int,
) -> Timing:
    x, w, y = arrays
    # A kernel may not read what it writes: an output that is its own input goes through a copy.
    aside = add or np.may_share_memory(x, y) or np.may_share_memory(w, y)
    target = np.empty_like(y) if aside else y
    prepare(target)
    # The course's harness zeroed the output before it started the clock, so page faults were no part of an Op Time.
    memory.map_pages(target, threads)
    start = time.perf_counter()
    run(target)
    seconds = time.perf_counter() - start
    if add:
        y += target
    elif aside:
        y[...] = target
    return Timing(seconds)
