"""The device context: arrays on a GPU, in ``mx.gpu(i)``, computed there without copies.

For MXNet a Custom operator has ended when ``forward`` returns; it does not know CuPy's streams. The inputs are ready
when ``forward`` is called, because the operator that wrote them has waited for its own stream. So the kernel runs on a
stream of this module, which waits for no other work, and ``convolve`` waits for that stream alone.
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
from ece408_op.runtime.recent import Recent

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

    ``addresses`` are those of x, w and y: C-contiguous float32 arrays, all on the GPU ``device``, B at least 1; y may
    share memory with x or w. Returns when y is filled. Raises DeviceError where the GPU fails, and UnsupportedError as
    the kernel does.
    """
    x, w, y = addresses
    gpu, layer = cuda.cupy().cuda, _layer(kernel, problem, device)
    # A kernel may not read what it writes.
    separate = add or _overlap(x, layer.x_bytes, y, layer.y_bytes) or _overlap(w, layer.w_bytes, y, layer.y_bytes)
    with cuda.on(device), cuda.reported(kernel.name), _Stream(device) as (stream, start, end):
        memory = _alloc(layer.y_bytes, stream) if separate else None
        target = memory.ptr if memory else y
        program = layer.program(x, w, target)
        given = {"x": x, "w": w, "y": target}
        if not layer.warm:
            layer.warm_up(program, given, stream)
        start.record(stream)
        cuda.enqueue(program, problem.batch, given, device, stream)
        end.record(stream)
        if add:
            _add(target, y, layer.y_bytes // ITEM_BYTES, device, stream)
        elif separate:
            gpu.runtime.memcpyAsync(y, target, layer.y_bytes, _DEVICE_TO_DEVICE, stream.ptr)
        stream.synchronize()
        return Timing(gpu.get_elapsed_time(start, end) / 1000)


def fill_nan(address: int, size: int, device: int) -> None:
    """Fill ``size`` bytes of float32 numbers in a GPU's memory with NaN, and wait for it."""
    gpu = cuda.cupy().cuda
    with cuda.on(device), cuda.reported("backward"), _Stream(device) as (stream, *_):
        # All bits set is a NaN.
        gpu.runtime.memsetAsync(address, 0xFF, size, stream.ptr)
        stream.synchronize()


#: Kernels and layers that have run, by GPU.
_warm: Recent[tuple[str, ConvProblem, int], bool] = Recent(1024)
#: Idle streams, each with two events, by GPU. A thread of MXNet's is a new one to Python at each call, so that streams
#: kept by thread would not be found again.
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)


class _Layer:
    """A kernel's programs for one problem on one GPU, and the sizes of its arrays."""

    def __init__(self, kernel: CudaKernel, problem: ConvProblem, device: int) -> None:
        self._kernel, self._problem, self._device = kernel, problem, device
        shapes = problem.x_shape, problem.w_shape, problem.y_shape
        self.x_bytes, self.w_bytes, self.y_bytes = (ITEM_BYTES * math.prod(shape) for shape in shapes)
        self._programs: dict[int, cuda.Program] = {}
        self.warm = False

    def program(self, *addresses: int) -> cuda.Program:
        """Return the program for arrays at these addresses, which their alignment selects."""
        aligned = cuda.alignment(*addresses)
        if aligned not in self._programs:
            self._programs[aligned] = self._kernel.program(self._problem, self._device, *addresses)
        return self._programs[aligned]

    def warm_up(self, program: cuda.Program, given: dict[str, int], stream: Any) -> None:
        """Run the kernel once, untimed, unless it has run with another batch: that compiles and loads it."""
        key = (program.name, self._problem.with_batch(1), self._device)
        if key not in _warm:
            cuda.enqueue(program, self._problem.batch, given, self._device, stream)
            stream.synchronize()
            _warm[key] = True
        self.warm = True


_layer = lru_cache(maxsize=256)(_Layer)


class _Stream:
    """A stream of ``device``, the current one, and two events, for the caller alone; faster than a generator."""

    def __init__(self, device: int) -> None:
        self._idle = _idle[device]

    def __enter__(self) -> Any:
        try:
            self._taken = self._idle.pop()
        except IndexError:
            gpu = cuda.cupy().cuda
            self._taken = gpu.Stream(non_blocking=True), gpu.Event(), gpu.Event()
        return self._taken

    def __exit__(self, *error: object) -> None:
        self._idle.append(self._taken)


def _overlap(a: int, a_size: int, b: int, b_size: int) -> bool:
    """Return whether the two ranges of bytes overlap."""
    return a < b + b_size and b < a + a_size


def _alloc(size: int, stream: Any) -> Any:
    with stream:  # the pool keeps what is freed for work on the same stream
        return cuda.cupy().cuda.alloc(size)


def _add(x: int, y: int, count: int, device: int, stream: Any) -> None:
    """Compute y += x. CuPy's own kernel would need more of CUDA on the machine than this one."""
    blocks = min(GRID_X, ceil_div(count, _THREADS))
    launch = Launch("add", (blocks, 1, 1), (_THREADS, 1, 1), ("x", "y", np.int64(count)))
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,))
    cuda.enqueue(cuda.Program("add", _ADD, (), plan), 1, {"x": x, "y": y}, device, stream)
