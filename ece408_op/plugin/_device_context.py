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

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import GRID_X, Launch, Plan, ceil_div

from .op_times import Timing

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
    gpu, layer = cuda.cupy().cuda, _layer(kernel, problem, device)
    # A kernel may not read what it writes.
    aside = add or _overlap(x, layer.x_bytes, y, layer.y_bytes) or _overlap(w, layer.w_bytes, y, layer.y_bytes)
    with cuda.on(device), cuda.reported(kernel.name), _Lane(device) as (stream, start, end):
        memory = _alloc(layer.y_bytes, stream) if aside else None
        target = memory.ptr if memory else y
        program = layer.program(x, w, target)
        places = {"x": x, "w": w, "y": target}
        if not layer.warm:
            layer.warm_up(program, places, stream)
        start.record(stream)
        cuda.enqueue(program, problem.batch, places, device, stream)
        end.record(stream)
        if add:
            _add(target, y, layer.y_bytes // ITEM_BYTES, device, stream)
        elif aside:
            gpu.runtime.memcpyAsync(y, target, layer.y_bytes, _DEVICE_TO_DEVICE, stream.ptr)
        stream.synchronize()
        return Timing(gpu.get_elapsed_time(start, end) / 1000)


def fill_nan(address: int, size: int, device: int) -> None:
    """Fill so many bytes of a GPU's memory, which are float32 numbers, with NaN, and wait for it."""
    gpu = cuda.cupy().cuda
    with cuda.on(device), cuda.reported("backward"), _Lane(device) as (stream, *_):
        # All bits set is a NaN.
        gpu.runtime.memsetAsync(address, 0xFF, size, stream.ptr)
        stream.synchronize()


_warm: set[tuple[str, ConvProblem, int]] = set()
_lanes: defaultdict[int, deque[Any]] = defaultdict(deque)


class _Layer:
    """What is known of a kernel's calls for one problem on one GPU."""

    def __init__(self, kernel: CudaKernel, problem: ConvProblem, device: int) -> None:
        self._kernel, self._problem, self._device = kernel, problem, device
        shapes = problem.x_shape, problem.w_shape, problem.y_shape
        self.x_bytes, self.w_bytes, self.y_bytes = (ITEM_BYTES * math.prod(shape) for shape in shapes)
        self._programs: dict[int, cuda.Program] = {}
        self.warm = False

    def program(self, *addresses: int) -> cuda.Program:
        """What is done for arrays at these addresses."""
        aligned = cuda.alignment(*addresses)
        if aligned not in self._programs:
            self._programs[aligned] = self._kernel.program(self._problem, self._device, *addresses)
        return self._programs[aligned]

    def warm_up(self, program: cuda.Program, places: dict[str, int], stream: Any) -> None:
        """Run the kernel once before it is timed, whatever the batch: that compiles and loads it."""
        key = (program.name, self._problem.with_batch(1), self._device)
        if key not in _warm:
            cuda.enqueue(program, self._problem.batch, places, self._device, stream)
            stream.synchronize()
            _warm.add(key)
        self.warm = True


_layer = lru_cache(maxsize=256)(_Layer)


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
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,))
    cuda.enqueue(cuda.Program("add", _ADD, (), plan), 1, {"x": x, "y": y}, device, stream)


__all__ = ("convolve", "fill_nan")
