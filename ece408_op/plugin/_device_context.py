"""The device context: compute on arrays in ``mx.gpu(i)``, on that GPU and without copies.

MXNet does not know CuPy's streams: it takes a Custom operator as complete when ``forward`` returns. The inputs are
ready when ``forward`` is called, because the operator that wrote them waited for its own stream. So the kernel runs on
a stream of this module, which waits for no other work, and ``convolve`` waits only for that stream.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda

from . import _passes
from .op_times import Timing

_DEVICE_TO_DEVICE = 3


def convolve(
    kernel: CudaKernel,
    problem: ConvProblem,
    addresses: Sequence[int],
    device: int,
    add: bool = False,
    bias: int | None = None,
) -> Timing:
    """Fill an array from two others, the problem's operands, by a GPU kernel, or add the result to it.

    addresses: those of the three operands, C-contiguous float32 arrays on the GPU ``device``; the third may share
    memory with the others. B is at least 1. bias: the address of the bias (M,), which is added to y. Returns when the
    array is filled. Raises DeviceError if the GPU fails, and UnsupportedError if the kernel does not support the
    problem.
    """
    a, b, out = addresses
    gpu = cuda.cupy().cuda
    a_bytes, b_bytes, out_bytes = (ITEM_BYTES * math.prod(shape) for shape in problem.shapes)
    # A kernel's output must not overlap its inputs.
    separate = add or _overlap(a, a_bytes, out, out_bytes) or _overlap(b, b_bytes, out, out_bytes)
    with cuda.on(device), cuda.reported(kernel.name), _Stream(device) as (stream, start, end):
        memory = _alloc(out_bytes, stream) if separate else None
        target = memory.ptr if memory else out
        program = kernel.program(problem, device, a, b, target)
        given = dict(zip(problem.operands, (a, b, target)))
        if not program.idle[device, problem.batch]:
            # The first run is not timed: it compiles and loads the kernel, and prepares its launches.
            cuda.enqueue(program, problem.batch, given, device, stream)
            stream.synchronize()
        start.record(stream)
        cuda.enqueue(program, problem.batch, given, device, stream)
        end.record(stream)
        if bias is not None:
            _passes.add_bias(bias, target, problem, device, stream)
        if add:
            _passes.enqueue("add", {"x": target, "y": out}, out_bytes // ITEM_BYTES, device, stream)
        elif separate:
            gpu.runtime.memcpyAsync(out, target, out_bytes, _DEVICE_TO_DEVICE, stream.ptr)
        stream.synchronize()
        return Timing(gpu.get_elapsed_time(start, end) / 1000)


def bias_gradient(problem: ConvProblem, y: int, out: int, device: int, add: bool) -> None:
    """Fill the array (M,) at the address ``out`` with the sums of y over images and pixels, or add them to it."""
    size = ITEM_BYTES * problem.filters
    with cuda.on(device), cuda.reported("the bias's gradient"), _Stream(device) as (stream, *_):
        memory = _alloc(size, stream) if add else None
        target = memory.ptr if memory else out
        _passes.bias_gradient(y, target, problem, device, stream)
        if add:
            _passes.enqueue("add", {"x": target, "y": out}, problem.filters, device, stream)
        stream.synchronize()


def fill(address: int, size: int, byte: int, device: int) -> None:
    """Fill ``size`` bytes of a GPU's memory with a byte, and wait until that is done."""
    gpu = cuda.cupy().cuda
    with cuda.on(device), cuda.reported("backward"), _Stream(device) as (stream, *_):
        gpu.runtime.memsetAsync(address, byte, size, stream.ptr)
        stream.synchronize()


#: Idle streams, each with two events, by GPU. They are not kept per thread, because Python sees MXNet's threads as new
#: ones at each call.
_idle: defaultdict[int, deque[Any]] = defaultdict(deque)


class _Stream:
    """A context with a stream of ``device``, the current one, and two events, which no other caller uses.

    A class, because a generator would be slower.
    """

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
    with stream:  # CuPy's pool reuses freed memory only for work on the same stream
        return cuda.cupy().cuda.alloc(size)
