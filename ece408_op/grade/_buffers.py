"""A device, and on it a layer's x, w and y, filled and judged while the worker that maps them is stopped.

The worker never sees the copies of the inputs and of the output, and the copies are what is judged.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any

import numpy as np

from ece408_op.core import dispatch, reference, roofline, timer
from ece408_op.core.explain import ROUNDED, Explanation, explain
from ece408_op.errors import Ece408Error
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.thread_pool import thread_count
from ece408_op.submission import HarnessError
from ece408_op.submission.arrays import Arrays
from ece408_op.submission.sandbox import Processes

from . import _judge
from ._judge import Part
from ._verdict import REAL, WIDE, Outcome

#: Written before a timed run, so that no cache holds the buffers: more than any last-level cache.
_FLUSH_BYTES = {False: 64 << 20, True: 256 << 20}
#: Steps of the reference workload, some milliseconds of work that raise an idle GPU's clocks, and its result.
_WAKING, _END = 200, 2.0
#: The memory of a killed process comes back within moments: wait for this share of it, at most this many seconds.
_RELEASED, _RELEASE_SECONDS = 0.95, 5.0
_LITTLE = 0.25  # where a smaller share of a GPU's memory is free, an allocation may not have fitted
#: Bytes of float64 per step of the comparison on the CPU: about what its caches hold; elements on a GPU.
_STEP_BYTES, _STEP_ELEMENTS = 2 << 20, 1 << 24
_OWN_RUNS = 3  # timed calls of the package's own kernel
_EXPLAINED = 4  # images of a wrong output that are explained, at most
_DRAWN = 1 << 22  # elements that one step of drawing random numbers takes
#: One image of this many is sparse, up to a number: few, since a submission can recognise them and skip their zeros.
_SPARSE, _MOST_SPARSE = 50, 100
_WIDE = 2.0**20  # the factor that takes whole numbers out of float16's range
#: Binades of a sparse image's numbers. No filter's element is smaller than this: its product with such a number is a
#: normal number of float16.
_BINADES, _SMALLEST_TAP = 7, 2.0**-6


class Device:
    """The CPU (``number`` is None), or the GPU of that number. Threads may share one."""

    def __init__(self, number: int | None = None) -> None:
        self.number, self.gpu = number, number is not None
        self._most_free = 0  # the most bytes that were ever free

    @cached_property
    def _block(self) -> Any:
        """Made once: later a submission may have taken all memory."""
        return (cuda.cupy() if self.gpu else np).zeros(_FLUSH_BYTES[self.gpu], np.uint8)

    def evict(self) -> None:
        """Write enough that no cache holds a submission's arrays."""
        self._block += 1

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

    def memory_bytes(self) -> int:
        """The bytes of memory that the device has."""
        if self.gpu:
            return int(cuda.cupy().cuda.runtime.memGetInfo()[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def exhausted(self) -> bool:
        """May a GPU's memory have run out? A worker's host memory is limited by itself."""
        free, total = cuda.cupy().cuda.runtime.memGetInfo() if self.gpu else (1, 1)
        return bool(free < total * _LITTLE)

    def roofline_seconds(self, problem: ConvProblem, arithmetic: str) -> float | None:
        """The problem's roofline on a GPU with that arithmetic, see ``ece408_op.core.roofline``; None on the CPU."""
        return roofline.measure(self.number or 0).roofline_seconds(problem, arithmetic) if self.gpu else None

    def check(self) -> None:
        """Raise HarnessError where a GPU is not as usable as before."""
        if not self.gpu:
            return
        with cuda.reported(f"gpu {self.number}"):
            cp = cuda.cupy()
            cp.cuda.Device(self.number).use()
            self.wake()
            cp.get_default_memory_pool().free_all_blocks()
            end = time.monotonic() + _RELEASE_SECONDS
            while (free := cp.cuda.runtime.memGetInfo()[0]) < _RELEASED * self._most_free and time.monotonic() < end:
                time.sleep(0.05)
        self._most_free = max(free, self._most_free)


class Buffers(Arrays):
    """The arrays of one problem on a device, and their copies."""

    def __init__(self, problem: ConvProblem, device: Device | None = None, running: Processes | None = None) -> None:
        self.device, self._running = device or Device(), running or Processes()
        super().__init__(problem, self.device.number)
        with cuda.reported(f"gpu {self.number}") if self.gpu else nullcontext(), ExitStack() as stack:
            stack.push(self)
            self._x, self._w, self.copied = (self.xp.empty(one.array.shape, np.float32) for one in self.arrays)
            stack.pop_all()

    def draw(self, kind: str, rng: np.random.Generator) -> None:
        """Draw new inputs of that kind; some images are sparse, among the others."""
        p, seed, x = self.problem, np.uint64(rng.integers(0, 2**63)), self._x.ravel()
        for first in range(0, x.size, _DRAWN):
            self._running.require_open()
            to = x[first : first + _DRAWN]
            bits = _mix(_mix(self.xp.arange(first, first + to.size, dtype=np.uint64)) + seed)
            sign = (bits & np.uint64(1)).astype(np.float32) * 2 - 1
            # Up to 1000 products of at most 2 stay below 2048, up to which float16 represents every integer.
            larger = (bits >> np.uint64(1) & np.uint64(p.products <= 1000)).astype(np.float32) + 1
            uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
            to[...] = uniform if kind == REAL else sign * larger
        least = int(rng.integers(2)) if p.batch == 1 else 1
        for image in rng.permutation(p.batch)[: max(least, min(p.batch // _SPARSE, _MOST_SPARSE))]:
            self._x[int(image)] = self.xp.asarray(self._sparse_image(rng, kind == REAL))
        if kind == WIDE:
            self._x *= np.float32(_WIDE)
        signs = rng.integers(0, 2, p.w_shape).astype(np.float32) * 2 - 1
        if kind == REAL:
            signs = signs * np.maximum(np.abs(rng.standard_normal(p.w_shape, np.float32)), np.float32(_SMALLEST_TAP))
        self._w[...] = self.xp.asarray(signs)

    def _sparse_image(self, rng: np.random.Generator, real: bool) -> np.ndarray:
        """An image of zeros and of odd whole numbers of 11 bits, one in each window."""
        p = self.problem
        image = np.zeros(p.x_shape[1:], np.float32)
        # Any window has one row and one column of a grid with the filter's spacing.
        rows, columns = (np.arange(rng.integers(p.kernel), size, p.kernel) for size in (p.height, p.width))
        shape = len(rows), len(columns)
        values = (2 * rng.integers(512, 1024, shape) + 1) * (2 * rng.integers(0, 2, shape) - 1)
        if real:  # between 1/128 and 1
            values = np.ldexp(values, -11 - rng.integers(0, _BINADES, shape))
        image[rng.integers(0, p.channels, shape), rows[:, None], columns] = values
        return image

    def draw_near_duplicate(self, rng: np.random.Generator) -> None:
        """Change about one element in 512 of the inputs, at least one per image, to odd multiples of 2^-11 below 1."""
        x = self._x.reshape(self.problem.batch, -1)
        shape = len(x), max(1, x.shape[1] // 512)
        images, elements = self.xp.arange(len(x))[:, None], self.xp.asarray(rng.integers(0, x.shape[1], shape))
        x[images, elements] = self.xp.asarray((2 * rng.integers(512, 1024, shape) + 1) * 2.0**-11, np.float32)

    def set_inputs(self, x: Any, w: np.ndarray) -> None:
        self._x[...] = self.xp.asarray(x, np.float32)
        self._w[...] = self.xp.asarray(w, np.float32)

    def present(self, flush: bool) -> None:
        """Give the worker the inputs, and flush the caches of all but the filters."""
        self.x.array[...] = self._x
        if flush:
            self.device.evict()
        self.w.array[...] = self._w
        self.wait()

    def turn_seconds(self) -> float:
        """Seconds until a GPU has done a small piece of the harness's work, and the worker's before it."""
        start = time.perf_counter()
        if self.gpu:
            self.y.array.ravel()[:1].copy()
            self.wait()
        return time.perf_counter() - start

    def own_seconds(self) -> float | None:
        """The median seconds of this package's kernel, or None if it has none here. Spoils the copied output."""
        p, arrays = self.problem, (self._x, self._w, self.copied)
        try:
            kernel = dispatch.select(p, "gpu", chip=cuda.chip()) if self.gpu else dispatch.select(p)
            threads = thread_count(p.flops)
            return timer.kernel_seconds(kernel, p, *arrays, threads, self.device.evict, _OWN_RUNS)
        except Ece408Error:
            return None

    def take_output(self) -> None:
        """Copy the output, for ``copied``."""
        self.copied[...] = self.y.array
        self.wait()

    def violations(self) -> list[str]:
        """The violations that happened, by their names in ``_verdict.VIOLATIONS``."""
        found = {
            "changed late": _differ(self.copied, self.y.array),
            "red zone": self.wrote_outside(),
            "inputs": _differ(self._x, self.x.array) or _differ(self._w, self.w.array),
        }
        return [name for name, happened in found.items() if happened]

    def digest(self) -> int:
        """A digest of the copied output's bits: their sum, each times an odd number of its own, modulo 2^64."""
        y, found = self.copied.ravel().view(np.uint32), 0
        for first in range(0, y.size, _DRAWN):
            part = y[first : first + _DRAWN]
            odd = self.xp.arange(2 * first + 1, 2 * (first + part.size), 2, dtype=np.uint64)
            found += int((odd * part).sum(dtype=np.uint64))
        return found % 2**64

    def outcome(self, kind: str, before: float = 0.0) -> Outcome:
        """The class of the copied output, whose elements were ``before`` when the call began."""
        return _judge.judge(self.xp, self._parts(kind == REAL), self.problem, kind, before)

    def explanation(self, before: float, worst: int, source: str) -> Explanation:
        """Explain errors of the copied output, which held ``before``: of the first images or those near ``worst``."""
        found = []
        for first in sorted({0, max(0, min(worst - 1, self.problem.batch - _EXPLAINED))}):
            some = slice(first, first + _EXPLAINED)
            x, w, y = (one.get() if self.gpu else one for one in (self._x[some], self._w, self.copied[some]))
            found.append(explain(x, w, y, before, source, (first, self.problem.batch)))
        return max(found, key=lambda one: (one.wrong > 0, one.mistake not in ("", ROUNDED)))

    def exact(self, x: Any, w: np.ndarray) -> Any:
        """The convolution of other inputs, summed in float64, rounded once to float32."""
        x, w = self.xp.asarray(x, np.float32), self.xp.asarray(w)
        return self.xp.concatenate([reference.sums(x[some], w)[0].astype(np.float32) for some in self._steps()])

    def _parts(self, roots: bool) -> Iterator[Part]:
        for some in self._steps():
            x = self._x[some]
            largest = self.xp.abs(x).max(axis=(1, 2, 3))[:, None] * self.xp.abs(self._w).max(axis=(1, 2, 3))
            largest = largest.astype(np.float64)[:, :, None, None] * math.sqrt(self.problem.products)
            yield (self.copied[some], *reference.sums(x, self._w, roots), largest)

    def _steps(self) -> Iterator[slice]:
        """Images that are compared at a time."""
        p = self.problem
        outputs = p.output_height * p.output_width
        step = _STEP_ELEMENTS // (p.filters * outputs) if self.gpu else _STEP_BYTES // (8 * p.products * outputs)
        for at in range(0, p.batch, max(1, step)):
            self._running.require_open()
            yield slice(at, at + max(1, step))


def _differ(a: Any, b: Any) -> bool:
    return bool((a.view(np.uint32) != b.view(np.uint32)).any())


def _mix(at: Any) -> Any:
    """SplitMix64 (Steele, Lea, Flood 2014): an independent number for each, uint64."""
    at = at + np.uint64(0x9E3779B97F4A7C15)
    at = (at ^ (at >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    at = (at ^ (at >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return at ^ (at >> np.uint64(31))
