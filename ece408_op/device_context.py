"""The GPU for arrays that live there, in ``mx.gpu(i)``: no copies, and what MXNet's engine must not see too early.

MXNet takes a Custom operator for done as soon as ``forward`` returns, and knows nothing of CuPy's streams. The
inputs are ready when it is called: whatever wrote them has waited for its own stream. So the kernel runs on a
stream of ours, which orders it after nothing else, and that stream alone is waited for.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from . import cuda
from .call_record import Timing
from .kernel import CudaKernel
from .launch import GRID_X, Launch, Plan, ceil_div
from .problem import ITEM_BYTES, ConvProblem

_THREADS = 256
_DEVICE_TO_DEVICE = 3

_ADD = """
extern "C" __global__ void add(const float *x, float *y, long long count) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) y[i] += x[i];
}
"""


def convolve(
    kernel: CudaKernel, problem: ConvProblem, addresses: Sequence[int], device: int, add: bool = False
) -> Timing:
    """Fill y (B, M, OH, OW) from x (B, C, H, W) and w (M, C, K, K) by a GPU kernel, or add the result to y.

    ``addresses`` are those of x, w and y: C-contiguous float32 arrays, all on that GPU, where it is computed, B at
    least 1; y may share memory with x or w. Returns when y is filled. Raises DeviceError where the GPU
    fails, and UnsupportedError as the kernel does.
    """
    x, w, y = addresses
    gpu = cuda.cupy().cuda
    x_size, w_size, y_size = _sizes(problem)
    # A kernel may not read what it writes.
    aside = add or _overlap(x, x_size, y, y_size) or _overlap(w, w_size, y, y_size)
    with gpu.Device(device), cuda.reported(kernel.name), _Lane(device) as (stream, start, end):
        memory = _alloc(y_size, stream) if aside else None
        target = memory.ptr if memory else y
        program = kernel.program(problem, device, x, w, target)
        places = {"x": x, "w": w, "y": target}
        if (program.name, problem, device) not in _warm:
            _warm_up(program, problem, places, device, stream)
        start.record(stream)
        cuda.enqueue(program, problem.batch, places, device, stream)
        end.record(stream)
        if add:
            _add(target, y, y_size // ITEM_BYTES, device, stream)
        elif aside:
            gpu.runtime.memcpyAsync(y, target, y_size, _DEVICE_TO_DEVICE, stream.ptr)
        stream.synchronize()
        return Timing(gpu.get_elapsed_time(start, end) / 1000)


def fill_nan(address: int, size: int, device: int) -> None:
    """Fill so many bytes of a GPU's memory, which are float32 numbers, with NaN, and wait for it."""
    gpu = cuda.cupy().cuda
    with gpu.Device(device), cuda.reported("backward"), _Lane(device) as (stream, *_):
        # All bits set is a NaN.
        gpu.runtime.memsetAsync(address, 0xFF, size, stream.ptr)
        stream.synchronize()


_warm: set[tuple[str, ConvProblem, int]] = set()
_lanes: defaultdict[int, deque[Any]] = defaultdict(deque)


def _warm_up(program: cuda.Program, problem: ConvProblem, places: dict[str, int], device: int, stream: Any) -> None:
    """Run a layer's kernel once before it is timed, whatever the batch: that compiles and loads it."""
    key = (program.name, problem.with_batch(1), device)
    if key not in _warm:
        cuda.enqueue(program, problem.batch, places, device, stream)
        stream.synchronize()
        _warm.add(key)
    _warm.add((program.name, problem, device))


class _Lane:
    """A stream of the current device, which is that number, and two events, for the caller alone.

    They are kept here and not by thread: a thread of MXNet's is a new one to Python at each call.
    """

    def __init__(self, device: int) -> None:
        self._idle = _lanes[device]

    def __enter__(self) -> Any:
        try:
            self._lane = self._idle.pop()
        except IndexError:
            gpu = cuda.cupy().cuda
            self._lane = gpu.Stream(non_blocking=True), gpu.Event(), gpu.Event()
        return self._lane

    def __exit__(self, *error: object) -> None:
        self._idle.append(self._lane)


@lru_cache(maxsize=1024)
def _sizes(problem: ConvProblem) -> tuple[int, ...]:
    """Bytes of x, w and y."""
    return tuple(ITEM_BYTES * math.prod(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))


def _overlap(a: int, a_size: int, b: int, b_size: int) -> bool:
    """Whether so many bytes at both addresses are partly the same."""
    return a < b + b_size and b < a + a_size


def _alloc(size: int, stream: Any) -> Any:
    with stream:  # the pool keeps what is freed for work on the same stream
        return cuda.cupy().cuda.alloc(size)


def _add(x: int, y: int, count: int, device: int, stream: Any) -> None:
    """y += x, by a kernel of our own: CuPy's need more of CUDA on the machine than compiling these does."""
    blocks = min(GRID_X, ceil_div(count, _THREADS))
    launch = Launch("add", (blocks, 1, 1), (_THREADS, 1, 1), ("x", "y", np.int64(count)))
    plan = Plan(defines={}, images=1, steps=lambda images: (launch,))
    cuda.enqueue(cuda.Program("add", _ADD, (), plan), 1, {"x": x, "y": y}, device, stream)


__all__ = ("convolve", "fill_nan")
