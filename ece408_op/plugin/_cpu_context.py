"""The CPU for arrays in host memory."""

from __future__ import annotations

import time

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

    The arrays are C-contiguous float32, B is at least 1, and y may share memory with x or w. The kernel supports the
    problem; for a PooledProblem, its ``tanh_pool`` fills y (B, M, PH, PW).
    """
    threads = dispatch.thread_count(problem)
    # A kernel may not read what it writes.
    separate = add or np.may_share_memory(x, y) or np.may_share_memory(w, y)
    target = np.empty_like(y) if separate else y
    pooled = problem if isinstance(problem, PooledProblem) else None
    if pooled:
        assert kernel.tanh_pool is not None, "a kernel that supports the problem"
        kernel.tanh_pool.prepare(pooled.convolution, pooled.full)
    else:
        kernel.prepare(problem, target)
    # The course's harness zeroed the output before it started the clock, so an Op Time excludes page faults.
    memory.map_pages(target, threads)
    start = time.perf_counter()
    if pooled and kernel.tanh_pool:
        kernel.tanh_pool.run(pooled.convolution, x, w, target, threads, pooled.full)
    else:
        kernel.run(problem, x, w, target, threads)
    seconds = time.perf_counter() - start
    if add:
        y += target
    elif separate:
        y[...] = target
    return Timing(seconds)
