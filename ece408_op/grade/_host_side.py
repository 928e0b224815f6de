"""A problem's buffers in the host's memory: filled, copied and judged by the parent while the worker stands still."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from types import TracebackType

import numpy as np

from ece408_op.core import reference
from ece408_op.problem import ConvProblem

from . import _judge
from ._buffers import GUARD, Buffers

#: Written before a timed run, so that no cache holds the buffers: more than most processors' last level.
_FLUSH_BYTES = 64 << 20
#: Bytes of float64 windows that one step of an exact convolution takes.
_EXACT_BYTES = 64 << 20
#: What the thermometer digests: some milliseconds on one core.
_FIXED = bytes(4 << 20)


@cache
def _flush_block() -> np.ndarray:
    """One for all: what it holds does not matter."""
    return np.zeros(_FLUSH_BYTES // 8, np.int64)


class HostSide:
    """The CPU's side of a case. Of every output there is a copy, which is what is judged."""

    guard = GUARD
    device_name = "cpu"
    #: Cores change their clocks by themselves, and other programs run: half as long again is no disturbance.
    most_drift = 1.5

    def __init__(self, problem: ConvProblem, device: int = 0) -> None:
        self.problem = problem
        self._buffers = Buffers(problem)
        self._x: np.ndarray = np.empty(0, np.float32)
        self._w: np.ndarray = self._x
        self._y: np.ndarray = self._x

    def __enter__(self) -> HostSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffers.__exit__(kind, error, trace)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the worker inherits."""
        return self._buffers.descriptors

    @property
    def handles(self) -> tuple[str, ...]:
        """How the runner is told where x, w and y are."""
        return tuple(map(str, self.descriptors))

    def load(self, kind: str, rng: np.random.Generator) -> None:
        """Fresh inputs of that kind."""
        self._x, self._w = _judge.draw(self.problem, kind, rng)

    def load_nearly_the_same(self, rng: np.random.Generator) -> None:
        """The inputs of the run before, but for an element here and there in every image."""
        flat = self._x.reshape(self.problem.batch, -1)
        count = max(1, flat.shape[1] // 512)
        places = rng.integers(0, flat.shape[1], (self.problem.batch, count))
        np.put_along_axis(flat, places, rng.random(places.shape, np.float32) * 2 - 1, axis=1)

    def load_given(self, x: np.ndarray, w: np.ndarray) -> None:
        """These inputs."""
        self._x, self._w = np.array(x, np.float32), np.array(w, np.float32)

    def clear(self, fill: float) -> None:
        """Set every element of y to ``fill``."""
        self._buffers.y.array.fill(fill)

    def present(self, flush: bool) -> None:
        """Put the inputs before the worker, and push all out of the processor's caches."""
        self._buffers.x.array[...] = self._x
        self._buffers.w.array[...] = self._w
        if flush:
            block = _flush_block()
            block += 1

    def thermometer(self) -> float:
        """Seconds of a fixed computation."""
        start = time.perf_counter()
        hashlib.blake2b(_FIXED).digest()
        return time.perf_counter() - start

    def exhausted(self) -> bool:
        """A worker's memory is limited by itself."""
        return False

    def clocks(self) -> None:
        """There is no portable way to ask."""

    def turn(self) -> float:
        """0 seconds: nothing goes on behind a worker's threads, which are stopped."""
        return 0.0

    def snapshot(self) -> None:
        """Copy the output."""
        self._y = self._buffers.y.array.copy()

    def changed_late(self) -> bool:
        """Is the output another than when it was copied?"""
        return not np.array_equal(self._y.view(np.uint32), self._buffers.y.array.view(np.uint32))

    def inputs_changed(self) -> bool:
        """Do x and w differ from what was put there? The worker's mapping cannot be written, so they never should."""
        same = np.array_equal(self._x, self._buffers.x.array) and np.array_equal(self._w, self._buffers.w.array)
        return not same

    def touched(self) -> bool:
        """Was anything written beside y, short of the guard pages?"""
        return self._buffers.y.touched()

    def fingerprint(self) -> str:
        """A digest of the output's bytes."""
        return hashlib.blake2b(self._y.data, digest_size=16).hexdigest()

    def judged(self, kind: str) -> _judge.Judged:
        """The copied output's class."""
        return _judge.judge(self._y, self._x, self._w, kind)

    def traces(self) -> _judge.Traces:
        """What became of the pattern in the copied output."""
        return _judge.traces(self._y, self._x, self._w)

    def output(self) -> np.ndarray:
        """The copied output."""
        return self._y

    def exact(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The convolution in float64."""
        step = max(1, _EXACT_BYTES // (8 * self.problem.products * self.problem.output_height**2))
        return np.concatenate([reference.convolve(x[i : i + step], w) for i in range(0, len(x), step)])
