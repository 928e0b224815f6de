"""The CPU context: run a CPU kernel on arrays in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.thread_pool import parallel_for, thread_count

from .op_times import Timing


def convolve(
    kernel: CpuKernel,
    problem: ConvProblem,
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    bias: np.ndarray | None = None,
) -> Timing:
    """Fill out from a and b, the problem's operands, by a CPU kernel, which must support the problem.

    The arrays are C-contiguous float32, B is at least 1, and out shares no memory with the others. bias (M,) is added
    to y.
    """
    threads = thread_count(problem.flops)
    kernel.prepare(problem, out)
    # The course's harness zeroed the output before it started the clock, so an Op Time excludes page faults.
    memory.map_pages(out, threads)
    start = time.perf_counter()
    computing = kernel.run(problem, a, b, out, threads)
    if bias is not None:
        per_filter = bias[:, None, None]
        _share_images(lambda images: np.add(images, per_filter, out=images), threads, out)
    return Timing(time.perf_counter() - start if computing is None else computing)


def bias_gradient(problem: ConvProblem, y: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Fill out (M,) with the sums of y (B, M, OH, OW) over images and pixels, or add them to out.

    The pixels of an image are summed pairwise in float32, and these sums in float64.
    """
    images = np.empty(y.shape[:2], np.float32)
    threads = thread_count(problem.flops)
    _share_images(lambda y, sums: y.reshape(*sums.shape, -1).sum(axis=2, out=sums), threads, y, images)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = images.sum(axis=0, dtype=np.float64)
        out[...] = sums + out if add else sums


def _share_images(work: Callable[..., object], threads: int, *arrays: np.ndarray) -> None:
    """Call ``work`` on at most ``threads`` threads, each with one of about equal parts of the arrays' images."""
    images = len(arrays[0])
    threads = min(threads, images)

    def run(part: int) -> None:
        some = slice(images * part // threads, images * (part + 1) // threads)
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are no error
            work(*(array[some] for array in arrays))

    parallel_for(run, threads, threads)
