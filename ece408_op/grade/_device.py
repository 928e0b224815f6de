"""The device that submissions run on: its memory, its caches, and whether it is as usable as before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np

from ece408_op.core import roofline
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.submission.errors import HarnessError

#: Written before a timed run, so that no cache holds the buffers: more than any last-level cache.
_FLUSH_BYTES = {False: 64 << 20, True: 256 << 20}
#: Steps of the reference workload, some milliseconds of work that raise an idle GPU's clocks, and its result.
_WAKING, _END = 200, 2.0
#: The memory of a killed process comes back within moments: wait for this share of it, at most this many seconds.
_RELEASED, _RELEASE_SECONDS = 0.95, 5.0
#: Where a smaller share of a GPU's memory is free, an allocation may not have fitted.
_LITTLE = 0.25

#: CUDA C++: the exact sums.
KERNEL = r"""
typedef unsigned long long u64;
extern "C" __global__ void sums(const float* x, const float* w, u64 n, int C, int H, int W, int M, int K, double* exact,
                                double* size, double* root) {
  int OH = H - K + 1, OW = W - K + 1;
  for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < n; at += (u64)gridDim.x * blockDim.x) {
    int j = at % OW, i = at / OW % OH, m = at / ((u64)OW * OH) % M;
    u64 b = at / ((u64)OW * OH * M);
    double sum = 0, magnitude = 0, squares = 0;
    for (int c = 0; c < C; ++c)
      for (int p = 0; p < K; ++p)
        for (int q = 0; q < K; ++q) {
          double product = (double)x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
          sum += product;
          magnitude += fabs(product);
          squares += product * product;
        }
    exact[at] = sum;
    size[at] = magnitude;
    root[at] = sqrt(squares);
  }
}
"""


class Device:
    """The CPU (``number`` is None), or the GPU of that number. Threads may share one."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.gpu = number, number is not None
        self.name = "cpu" if number is None else f"gpu {number}"
        #: The most bytes that were ever free.
        self._most_free = 0

    def use(self) -> Any:
        """NumPy, or CuPy with this GPU as the thread's current one."""
        if self.number is None:
            return np
        cp = cuda.cupy()
        cp.cuda.Device(self.number).use()
        return cp

    def evict(self) -> None:
        """Write enough that no cache holds a submission's arrays."""
        block = _flush_block(self.number)
        block += 1

    def wake(self) -> None:
        """Have an idle GPU raise its clocks; raises HarnessError where it computes the reference workload wrong."""
        if not self.gpu:
            return
        to = cuda.cupy().arange(_FLUSH_BYTES[True] // 16, dtype=np.float32)
        for _ in range(_WAKING):  # from any start it ends at 2
            to *= 0.5
            to += 1
        low, high = float(to.min()), float(to.max())
        if not low == high == _END:
            raise HarnessError(f"expected the GPU to compute {_END}, got {low} to {high}: it is not trusted any more")

    def exhausted(self) -> bool:
        """May a GPU's memory have run out? A worker's host memory is limited by itself."""
        if not self.gpu:
            return False
        free, total = cuda.cupy().cuda.runtime.memGetInfo()
        return bool(free < total * _LITTLE)

    def roofline_seconds(self, problem: ConvProblem, arithmetic: str) -> float | None:
        """The problem's roofline on a GPU with that arithmetic, see ``ece408_op.core.roofline``; None on the CPU."""
        return None if self.number is None else _ceilings(self.number).roofline_seconds(problem, arithmetic)

    def check(self) -> None:
        """Raise HarnessError where a GPU is not as usable as before."""
        if not self.gpu:
            return
        with cuda.reported(self.name):
            cp = self.use()
            self.wake()
            cp.get_default_memory_pool().free_all_blocks()
            free, _ = cp.cuda.runtime.memGetInfo()
            end = time.monotonic() + _RELEASE_SECONDS
            while free < _RELEASED * self._most_free and time.monotonic() < end:
                time.sleep(0.05)
                free, _ = cp.cuda.runtime.memGetInfo()
        self._most_free = max(free, self._most_free)


@cache
def _flush_block(number: int | None) -> Any:
    """One for all arrays of a device: its content does not matter."""
    return Device(number).use().zeros(_FLUSH_BYTES[number is not None] // 8, np.int64)


_ceilings = cache(roofline.measure)


class Turns:
    """Lets ``jobs`` threads compile and check at a time, but one call be timed alone."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._alone = jobs, threading.Lock()
        #: Held by a thread that works; by one that times, all.
        self.working = threading.Semaphore(jobs)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within ``working``: no other thread works."""
        with ExitStack() as stack:
            self.working.release()
            stack.callback(self.working.acquire)
            stack.enter_context(self._alone)
            for _ in range(self._jobs):
                self.working.acquire()
                stack.callback(self.working.release)
            yield
