"""A problem's buffers in a GPU's memory: the parent's, opened by the worker through CUDA IPC.

On both sides of each buffer lies a red zone that bears a mark; whoever writes there is found out. The inputs have
copies that the worker never sees, and so has every output: the copies are what is judged.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ece408_op.core import reference, roofline, timer
from ece408_op.core.check import Comparison
from ece408_op.core.kernel import float32_bound
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from . import _judge
from ._errors import HarnessError
from ._health import chip_state

#: Bytes of the red zone on each side, a multiple of every alignment.
RED_ZONE = 16 << 20
_MARK = 0xA5A5A5A5
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
#: Elements of y that one step of the comparison takes.
_STEP = 1 << 26
#: Bytes written before a timed run: more than any second-level cache.
_FLUSH = 256 << 20
_BLOCKS, _THREADS = (2048,), (256,)
#: A killed process's memory comes back within moments: so much of it, within so many seconds, is waited for.
_RELEASED, _RELEASE_SECONDS = 0.95, 5.0
#: A share of the memory that an allocation may not have fitted into.
_LITTLE = 0.25
#: Multiply-adds of each of the thermometer's threads, and what they end at: some tenths of a millisecond.
_ROUNDS, _END = 16384, 2.0


@cache
def _kernels(device: int) -> Any:
    text = Path(__file__).with_name("native").joinpath("gpu_side.cu").read_text(encoding="utf-8")
    return cuda.cupy().RawModule(code=text, options=("--std=c++17",))


def _launch(name: str, *arguments: Any) -> None:
    _kernels(cuda.cupy().cuda.runtime.getDevice()).get_function(name)(_BLOCKS, _THREADS, arguments)


class _Buffer:
    """Memory of its own allocation, which alone can be shared: a red zone, the array, a red zone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        cp = cuda.cupy()
        count = int(np.prod(shape, dtype=np.int64))
        # The second zone begins right behind the last element.
        total = 2 * RED_ZONE + 4 * count
        self.pointer = cp.cuda.runtime.malloc(total)
        owner = cp.cuda.UnownedMemory(self.pointer, total, self)
        words = cp.ndarray((total // 4,), np.uint32, cp.cuda.MemoryPointer(owner, 0))
        words.fill(_MARK)
        first = RED_ZONE // 4
        self.zones = (words[:first], words[first + count :])
        self.array = words[first : first + count].view(np.float32).reshape(shape)
        self.handle = cp.cuda.runtime.ipcGetMemHandle(self.pointer).hex()

    def touched(self) -> bool:
        return any(_count("unlike", zone, np.uint64(zone.size), np.uint32(_MARK)) for zone in self.zones)

    def close(self) -> None:
        cuda.cupy().cuda.runtime.free(self.pointer)


class GpuSide:
    """The GPU's side of a case, with the same doors as HostSide."""

    guard = RED_ZONE
    descriptors: tuple[int, ...] = ()
    #: A GPU that has nothing else to do repeats itself within some hundredths.
    most_drift = 1.15

    def __init__(self, problem: ConvProblem, device: int = 0) -> None:
        with cuda.reported(f"GPU {device}"):
            self._allocate(problem, device)

    def _allocate(self, problem: ConvProblem, device: int) -> None:
        cp = cuda.cupy()
        cp.cuda.Device(device).use()
        self.problem, self.device_name = problem, f"gpu {device}"
        self._bus = str(cp.cuda.Device(device).pci_bus_id)
        self._x, self._w, self._y = (_Buffer(s) for s in (problem.x_shape, problem.w_shape, problem.y_shape))
        self._own_x, self._own_w = cp.empty(problem.x_shape, np.float32), cp.empty(problem.w_shape, np.float32)
        self._copy = cp.empty(problem.y_shape, np.float32)
        self._flush = cp.empty(_FLUSH // 4, np.float32)
        self._fixed = cp.empty(_BLOCKS[0] * _THREADS[0], np.float32)

    def __enter__(self) -> GpuSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._x, self._w, self._y):
            one.close()
        cuda.cupy().get_default_memory_pool().free_all_blocks()

    @property
    def handles(self) -> tuple[str, ...]:
        """How the runner is told where x, w and y are."""
        return (self._x.handle, self._w.handle, self._y.handle)

    def load(self, kind: str, rng: np.random.Generator) -> None:
        """Fresh inputs of that kind."""
        seed = np.uint64(rng.integers(0, 2**63))
        whole = 1 if self.problem.products <= 1000 else 2
        number = np.int32(0 if kind == _judge.REAL else whole)
        _launch("draw", self._own_x, np.uint64(self._own_x.size), seed, number)
        _, w = _judge.draw(self.problem.with_batch(1), kind, rng)
        self._own_w.set(w)

    def load_nearly_the_same(self, rng: np.random.Generator) -> None:
        """The inputs of the run before, but for an element here and there in every image."""
        image = np.uint64(self._own_x[0].size)
        seed = np.uint64(rng.integers(0, 2**63))
        _launch("sprinkle", self._own_x, np.uint64(self._own_x.size), image, seed)

    def load_given(self, x: Any, w: np.ndarray) -> None:
        """These inputs, NumPy's or CuPy's."""
        self._own_x[...] = cuda.cupy().asarray(x, np.float32)
        self._own_w.set(w)

    def clear(self, fill: float) -> None:
        """Set every element of y to ``fill``."""
        self._y.array.fill(fill)
        _wait()

    def present(self, flush: bool) -> None:
        """Put the inputs before the worker, and push all but the filters out of the second-level cache."""
        self._x.array[...] = self._own_x
        if flush:
            self._flush.fill(1.0)
        self._w.array[...] = self._own_w
        _wait()

    def thermometer(self) -> float:
        """Seconds of a fixed computation, which has to end at a known value; raises HarnessError where it does not."""
        return _fixed_seconds(self._fixed)

    def exhausted(self) -> bool:
        """Is so little of the GPU's memory left that it may have run out?"""
        free, total = cuda.cupy().cuda.runtime.memGetInfo()
        return bool(free < total * _LITTLE)

    def clocks(self) -> dict[str, int] | None:
        """Temperature and clocks, where NVML tells."""
        return chip_state(self._bus)

    def turn(self) -> float:
        """Seconds of a small piece of the parent's work, and of what the device does for the worker before it."""
        start = time.perf_counter()
        self._y.array.ravel()[:1].copy()
        _wait()
        return time.perf_counter() - start

    def snapshot(self) -> None:
        """Copy the output."""
        self._copy[...] = self._y.array
        _wait()

    def changed_late(self) -> bool:
        """Is the output another than when it was copied?"""
        return bool(_differ(self._copy, self._y.array))

    def inputs_changed(self) -> bool:
        """Do x and w differ from what was put there?"""
        return bool(_differ(self._own_x, self._x.array) or _differ(self._own_w, self._w.array))

    def touched(self) -> bool:
        """Was anything written into the red zones?"""
        return any(one.touched() for one in (self._x, self._w, self._y))

    def fingerprint(self) -> str:
        """A digest of the output's bits."""
        return f"{_count('digest', self._copy.view(np.uint32), np.uint64(self._copy.size)):x}"

    def judged(self, kind: str) -> _judge.Judged:
        """The copied output's class."""
        cp, problem = cuda.cupy(), self.problem
        image = self._copy[0].size
        step = max(1, _STEP // image)
        bound = np.float64(float32_bound(problem))
        least = np.float64(problem.products * _SMALLEST + _judge.least_error(problem, self._own_x, self._own_w, kind))
        share, scaled = cp.empty(step * image, np.float32), cp.empty(step * image, np.float32)
        worst, place, largest, wrong = -1.0, 0, 0.0, 0
        for first in range(0, problem.batch, step):
            y, x = self._copy[first : first + step], self._own_x[first : first + step]
            _launch("judge", y, x, self._own_w, np.uint64(y.size), *self._sizes(), bound, least, share, scaled)
            part = share[: y.size]
            at = int(part.argmax())
            if float(part[at]) > worst:
                worst, place = float(part[at]), first * image + at
            largest = max(largest, float(scaled[: y.size].max()))
            wrong += int((part > 1).sum())
        index = tuple(int(i) for i in np.unravel_index(place, problem.y_shape))
        got, expected = float(self._copy[index]), self._exact(index)
        found = Comparison(worst, largest, index, got, expected, wrong, self._copy.size, 0)
        return _judge.classify(found, problem, kind)

    def traces(self) -> _judge.Traces:
        """What became of the pattern in the copied output."""
        counts = cuda.cupy().zeros(5, np.uint64)
        numbers = (*self._sizes(), np.float32(_judge.PATTERN), np.float64(_judge.NEAR), counts)
        _launch("traces", self._copy, self._own_x, self._own_w, np.uint64(self._copy.size), *numbers)
        return _judge.Traces(*map(int, counts.get()))

    def output(self) -> Any:
        """The copied output, on the GPU."""
        return self._copy

    def exact(self, x: Any, w: np.ndarray) -> Any:
        """The convolution, summed in float64, rounded once to float32."""
        cp = cuda.cupy()
        y = cp.empty(self.problem.y_shape, np.float32)
        _launch("convolve", y, cp.asarray(x, np.float32), cp.asarray(w), np.uint64(y.size), *self._sizes())
        return y

    def _exact(self, index: tuple[int, ...]) -> float:
        image, m, i, j = index
        size = self.problem.kernel
        window = self._own_x[image : image + 1, :, i : i + size, j : j + size].get()
        return float(reference.convolve(window, self._own_w[m : m + 1].get())[0, 0, 0, 0])

    def _sizes(self) -> tuple[np.int32, ...]:
        p = self.problem
        return tuple(np.int32(size) for size in (p.channels, p.height, p.width, p.filters, p.kernel))


@cache
def _ceilings(device: int) -> roofline.Ceilings:
    return roofline.measure(device)


def roofline_seconds(problem: ConvProblem, device: int) -> float:
    """The least time that the GPU of that number could take: see ``ece408_op.core.roofline``."""
    return _ceilings(device).roofline_seconds(problem)


#: The most bytes that were ever free on each GPU.
_most_free: dict[int, int] = {}


def check(device: int) -> int:
    """Is the GPU of that number as usable as before? The bytes that are free on it; raises HarnessError if not.

    Waits a little for the memory of a process that has just been ended.
    """
    cp = cuda.cupy()
    with cuda.reported(f"GPU {device}"):
        cp.cuda.Device(device).use()
        _fixed_seconds(cp.empty(_BLOCKS[0] * _THREADS[0], np.float32))
        cp.get_default_memory_pool().free_all_blocks()
        free, _ = cp.cuda.runtime.memGetInfo()
        end = time.monotonic() + _RELEASE_SECONDS
        while free < _RELEASED * _most_free.get(device, 0) and time.monotonic() < end:
            time.sleep(0.05)
            free, _ = cp.cuda.runtime.memGetInfo()
    _most_free[device] = max(free, _most_free.get(device, 0))
    return int(free)


def _fixed_seconds(to: Any) -> float:
    seconds, _ = timer.GpuClock("thermometer")(lambda: _launch("thermometer", to, np.int32(_ROUNDS)))
    low, high = float(to.min()), float(to.max())
    if not low == high == _END:
        raise HarnessError(
            f"expected the GPU to compute {_END}, got {low} to {high}: it is not well, and is not trusted"
        )
    return seconds


def _wait() -> None:
    """All work of the parent on the device is done."""
    cuda.cupy().cuda.runtime.deviceSynchronize()


def _differ(a: Any, b: Any) -> int:
    return _count("differ", a.view(np.uint32), b.view(np.uint32), np.uint64(a.size))


def _count(kernel: str, *arguments: Any) -> int:
    """What a kernel adds up in its last argument."""
    counter = cuda.cupy().zeros(1, np.uint64)
    _launch(kernel, *arguments, counter)
    return int(counter[0])
