"""The GPU for arrays that live there, in ``mx.gpu(i)``: no copies, and what MXNet's engine must not see too early.

MXNet takes a Custom operator for done as soon as ``forward`` returns, and knows nothing of CuPy's streams. The
inputs are ready when it is called: whatever wrote them has waited for its own stream. So the kernel runs on a
stream of ours, which orders it after nothing else, and that stream alone is waited for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import cuda
from .call_record import Timing
from .kernel import CudaKernel
from .launch import GRID_X, Launch, Plan, ceil_div
from .problem import ConvProblem

_THREADS = 256

_ADD = """
extern "C" __global__ void add(const float *x, float *y, long long count) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) y[i] += x[i];
}
"""


def convolve(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, y: Any, add: bool = False) -> Timing:
    """Fill y (B, M, OH, OW) from x (B, C, H, W) and w (M, C, K, K) by a GPU kernel, or add the result to y.

    The arrays are CuPy's, C-contiguous float32, all on one GPU, where it is computed; y may share memory with x
    or w. Returns when y is filled. Raises DeviceError where the GPU
    fails, and UnsupportedError as the kernel does.
    """
    cp = cuda.cupy()
    device = x.device
    with device, cuda.reported(kernel.name), _stream(device.id) as stream:
        # A kernel may not read what it writes.
        aside = add or _overlap(x, y) or _overlap(w, y)
        target = cp.empty(y.shape, np.float32) if aside else y
        _warm_up(kernel, problem, x, w, target, stream)
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        kernel.run(problem, x, w, target, stream)
        end.record(stream)
        if add:
            _add(target, y, stream)
        elif aside:
            y.data.copy_from_device_async(target.data, y.nbytes, stream)
        cuda.wait(kernel.name, stream)
        return Timing(cp.cuda.get_elapsed_time(start, end) / 1000)


def fill_nan(array: Any) -> None:
    """Fill a CuPy float32 array with NaN, and wait for it."""
    with array.device as device, _stream(device.id) as stream:
        # All bits set is a NaN.
        cuda.cupy().cuda.runtime.memsetAsync(array.data.ptr, 0xFF, array.nbytes, stream.ptr)
        cuda.wait("backward", stream)


_warm: set[tuple[str, ConvProblem, int]] = set()
_streams: dict[int, deque[Any]] = {}
_lock = threading.Lock()


def _warm_up(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, y: Any, stream: Any) -> None:
    """Run a layer's kernel once before it is timed: that compiles and loads it."""
    key = (kernel.name, problem.with_batch(1), x.device.id)
    if key not in _warm:
        kernel.run(problem, x, w, y, stream)
        cuda.wait(kernel.name, stream)
        _warm.add(key)


@contextmanager
def _stream(device: int) -> Iterator[Any]:
    """A stream of the current device, which is that number, for the caller alone.

    Streams are kept here and not by thread: a thread of MXNet's is a new one to Python at each call.
    """
    with _lock:
        idle = _streams.setdefault(device, deque())
    try:
        stream = idle.pop()
    except IndexError:
        stream = cuda.cupy().cuda.Stream(non_blocking=True)
    try:
        with stream:
            yield stream
    finally:
        idle.append(stream)


def _overlap(a: Any, b: Any) -> bool:
    """Whether two contiguous arrays share memory."""
    return bool(a.data.ptr < b.data.ptr + b.nbytes and b.data.ptr < a.data.ptr + a.nbytes)


def _add(x: Any, y: Any, stream: Any) -> None:
    """y += x, by a kernel of our own: CuPy's need more of CUDA on the machine than compiling these does."""
    blocks = min(GRID_X, ceil_div(y.size, _THREADS))
    launch = Launch("add", (blocks, 1, 1), (_THREADS, 1, 1), ("x", "y", np.int64(y.size)))
    plan = Plan(defines={}, images=1, steps=lambda images: (launch,))
    cuda.execute(cuda.Program("add", _ADD, (), plan), 1, {"x": x, "y": y}, stream)


__all__ = ("convolve", "fill_nan")
