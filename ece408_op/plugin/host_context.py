"""The host context: compute on arrays in host memory by a GPU; copies in and out overlap with computation.

Calls on one GPU run one after another, so that one set of buffers is enough: parallel calls would share the link to the
GPU anyway. Staging buffers, device buffers of the pipeline's stages, and streams are kept per GPU from call to call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from queue import SimpleQueue
from typing import Any

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.bounded_dict import BoundedDict
from ece408_op.runtime.copy_pipeline import (
    CONSTANT,
    INPUT,
    OUTPUT,
    STAGES,
    Chunk,
    Pipeline,
    StagingBuffer,
    Transfer,
    chunks_of,
    images_per_chunk,
)
from ece408_op.runtime.launch import Plan, ceil_div
from ece408_op.runtime.memory import address, advise_huge_pages
from ece408_op.runtime.thread_pool import parallel_for

from . import _passes
from .op_times import Timing

# ``ece408-bench transfers`` times these constants.
#: The most threads that copy, and the bytes of a staging buffer.
THREADS = 16
STAGING_BYTES = 8 << 20

#: The bytes of one chunk's input and output on the device, unless one image has more.
CHUNK_BYTES = 128 << 20

#: With fewer bytes than this, only the caller's thread copies.
_WORTH_THREADS = 1 << 20

_TO_DEVICE, _TO_HOST = 1, 2

#: Device buffers that all stages share: the filters or their gradient, the bias, and sums in float64.
_WEIGHT, _BIAS, _SUMS = "w", "bias", "sums"

# A kernel that waits until the host sets a flag. It also ends after this time, so that a CUDA call that waits for it
# cannot deadlock with the thread that has to set the flag.
_SPIN_NANOSECONDS = 20_000_000
_SPIN = """
extern "C" __global__ void spin(const volatile long long *flag, long long number, long long most) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (*flag < number && now - start < most);
}
"""


def convolve(
    kernel: CudaKernel,
    problem: ConvProblem,
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    bias: np.ndarray | None = None,
) -> Timing:
    """Fill out from a and b, the problem's operands, by a GPU kernel.

    The arrays are NumPy's, C-contiguous float32, and out shares no memory with the others. bias (M,) is added to y.
    All chunks of images read the same weight. If the weight is the output, the chunks' results are summed on the device
    in float64. Returns when out is filled. Raises DeviceError if there is no GPU or it fails, and UnsupportedError if
    the kernel does not support the problem.
    """
    advise_huge_pages(out)
    context, image = gpu(), problem.with_batch(1)
    image_bytes = ITEM_BYTES * (prod(image.x_shape) + prod(image.y_shape))
    chunks = chunks_of(problem.batch, images_per_chunk(problem.batch, image_bytes, CHUNK_BYTES))
    part = problem.with_batch(chunks[0].images)
    work = _Work(context, kernel, problem, len(chunks), bias is not None)
    arrays = dict(zip(problem.operands, (a, b, out)))
    if bias is not None:
        arrays[_BIAS] = bias
    named = work.constants, work.inputs, work.outputs
    constants, inputs, outputs = ([arrays[name] for name in names] for names in named)
    with context.lock, context.device, cuda.reported(kernel.name):
        try:
            work.prepare(part, min(STAGES, len(chunks)))
            threads = context.threads if problem.bytes >= _WORTH_THREADS else 1
            start = time.perf_counter()
            elements = STAGING_BYTES // ITEM_BYTES
            Pipeline(work, chunks, inputs, outputs, elements, constants=constants).run(threads)
            if not outputs:
                work.finish()
                context.copy_out(context.buffers[_WEIGHT, 0].ptr, out)
            total = time.perf_counter() - start
        finally:
            context.wait()
            if image_bytes > CHUNK_BYTES:
                context.buffers.clear()
        seconds = work.seconds()
    return Timing(seconds, max(0.0, total - seconds))


class Gpu:
    """One GPU's compute stream, staging buffers and device buffers; a call holds ``lock`` while it uses them."""

    def __init__(self, number: int) -> None:
        self.cuda = cuda.cupy().cuda
        self.device = self.cuda.Device(number)
        self.lock = threading.Lock()
        self.threads = min(THREADS, max(2, len(os.sched_getaffinity(0))))
        self.staging: SimpleQueue[StagingBuffer] = SimpleQueue()
        #: Device memory by array and pipeline stage: ("w", 0), ("x", 0), ("y", 0), ("x", 1), ...
        self.buffers: dict[tuple[str, int], Any] = {}
        #: Kernels and chunks' problems that have run, and whether with a bias.
        self.warm: BoundedDict[tuple[str, ConvProblem, bool], bool] = BoundedDict(1024)
        with self.device, cuda.reported("the host context"):
            #: The compute stream, and the stream of copies from and to pinned arrays, which take turns on the link.
            self.stream, self.pinned_stream = (self.cuda.Stream(non_blocking=True) for _ in range(2))
            #: For ``blocked``: pinned memory with the number of the last context that has ended, and the kernel.
            self._flag = np.frombuffer(self.pinned(2 * ITEM_BYTES), np.int64, 1)
            self._flag[0] = self._blocks = 0
            self._spin: Any = None
            for _ in range(self.threads):
                floats = np.frombuffer(self.pinned(STAGING_BYTES), np.float32, STAGING_BYTES // ITEM_BYTES)
                self.staging.put(StagingBuffer(floats, self.cuda.Stream(non_blocking=True)))

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Make the compute stream wait until this context ends; contexts must not overlap. The GPU is the current one.

        Otherwise the time between two events in the context would include Python's time: while other threads run, a
        kernel is launched 0.1 ms or more after the event in front of it.
        """
        if self._spin is None:
            plan = Plan(defines={}, images_per_launch=1, steps=lambda images: ())
            self._spin = cuda.compiled(cuda.Program("spin", _SPIN, (), plan), self.device.id).function("spin", 0)
        self._blocks += 1
        args = (np.int64(self._flag.ctypes.data), np.int64(self._blocks), np.int64(_SPIN_NANOSECONDS))
        with self.stream:
            self._spin((1, 1, 1), (1, 1, 1), args)
        try:
            yield
        finally:
            self._flag[0] = self._blocks

    def pinned(self, size: int) -> Any:
        """Return ``size`` bytes of pinned host memory."""
        return self.cuda.PinnedMemoryPointer(self.cuda.PinnedMemory(size), 0)

    def copy(self, buffer: StagingBuffer, array: int, transfer: Transfer, after: Any = None) -> None:
        """Copy to or from the device array at the address ``array``, and wait: see ``copy_pipeline.Device``."""
        there, out = array + ITEM_BYTES * transfer.start, transfer.role == OUTPUT
        if after is not None:
            buffer.stream.wait_event(after)
        self._queue_copy(buffer.address, there, transfer.host.nbytes, out, buffer.stream)
        buffer.stream.synchronize()

    def _queue_copy(self, here: int, there: int, size: int, out: bool, stream: Any) -> None:
        target, source, direction = (here, there, _TO_HOST) if out else (there, here, _TO_DEVICE)
        self.cuda.runtime.memcpyAsync(target, source, size, direction, stream.ptr)

    def copy_pinned(self, array: np.ndarray, there: int, after: Any = None, out: bool = False) -> Any:
        """Queue a copy of a pinned array to an address on the device, or with ``out`` from it, after an event.

        Returns the event of the copy's end.
        """
        stream = self.pinned_stream
        if after is not None:
            stream.wait_event(after)
        self._queue_copy(address(array), there, array.nbytes, out, stream)
        with self.device:
            return stream.record()

    def wait_for(self, events: Sequence[Any]) -> None:
        """Make all work that is queued on the compute stream after this call wait for the events."""
        for event in events:
            self.stream.wait_event(event)

    def copy_out(self, source: int, target: np.ndarray) -> None:
        """Copy a float32 array at a device address to a NumPy array, on several threads; the caller holds the lock."""
        flat, most = target.reshape(-1), STAGING_BYTES // ITEM_BYTES

        def work(number: int) -> None:
            part = flat[number * most : (number + 1) * most]
            buffer = self.staging.get()
            try:
                self.copy(buffer, source, Transfer(OUTPUT, 0, 0, number * most, part))
                np.copyto(part, buffer.floats[: part.size])
            finally:
                self.staging.put(buffer)

        parallel_for(work, ceil_div(flat.size, most), self.threads)

    def allocate(self, size: int, part: ConvProblem) -> Any:
        """Return ``size`` bytes of zeroed device memory; raises DeviceError if there is no room."""
        errors = (self.cuda.runtime.CUDARuntimeError, self.cuda.memory.OutOfMemoryError)
        try:
            memory = self.cuda.Memory(size)
        except errors:
            # CuPy's pool may hold freed memory.
            cuda.cupy().get_default_memory_pool().free_all_blocks()
            try:
                memory = self.cuda.Memory(size)
            except errors as error:
                free, total = self.cuda.runtime.memGetInfo()
                raise DeviceError(
                    f"the GPU's memory: expected room for {part} {STAGES} times over, got {free >> 20} of "
                    f"{total >> 20} MB free; end other programs on the GPU, or use smaller images or fewer filters"
                ) from error
        # The first run of a kernel reads this memory before any data is copied in.
        self.cuda.runtime.memsetAsync(memory.ptr, 0, size, self.stream.ptr)
        return self.cuda.MemoryPointer(memory, 0)

    def wait(self) -> None:
        """Wait for all work of the call, also after an error, because the next call uses the same buffers."""
        self.stream.synchronize()
        self.pinned_stream.synchronize()
        staging = [self.staging.get() for _ in range(self.threads)]
        try:
            for buffer in staging:
                buffer.stream.synchronize()
        finally:
            for buffer in staging:
                self.staging.put(buffer)


class _Work:
    """The copy pipeline's interface to the GPU for one call; several threads use it.

    inputs, outputs: the names of the arrays that are divided into chunks of images. constants: the names of the arrays
    that all chunks read.
    """

    def __init__(self, gpu: Gpu, kernel: CudaKernel, problem: ConvProblem, chunks: int, bias: bool) -> None:
        self._gpu, self._kernel, self._problem, self.staging = gpu, kernel, problem, gpu.staging
        self._intervals: list[tuple[Any, Any]] = []
        *read, filled = problem.operands
        self.bias = bias
        self.inputs = [name for name in read if name != _WEIGHT]
        self.outputs = [name for name in (filled,) if name != _WEIGHT]
        self.constants = [_WEIGHT] * (_WEIGHT in read) + [_BIAS] * bias
        self._names = {CONSTANT: self.constants, INPUT: self.inputs, OUTPUT: self.outputs}
        self._sums = chunks > 1 and not self.outputs

    def prepare(self, part: ConvProblem, stages: int) -> None:
        """Allocate device buffers, and run kernel and passes once, untimed, unless they have run for such a chunk."""
        gpu, key = self._gpu, (self._kernel.name, part, self.bias)
        for name, size in self._sizes(part, stages).items():
            if name not in gpu.buffers or gpu.buffers[name].mem.size < size:
                gpu.buffers.pop(name, None)
                gpu.buffers[name] = gpu.allocate(size, part)
        if key not in gpu.warm:
            with gpu.blocked():
                pass
            self._kernel.run(part, *self.arrays(part, 0), gpu.stream)
            for first in (0, 1):  # both cases of ``after_kernel``: the first chunk fills the sums, later ones add
                self.after_kernel(part, first)
            self.finish()
            gpu.warm[key] = True
        # Copies must not begin before new memory is zeroed and the first run has ended.
        cuda.wait(self._kernel.name, gpu.stream)

    def _sizes(self, part: ConvProblem, stages: int) -> dict[tuple[str, int], int]:
        """Return the bytes of the device buffers by array and stage."""
        shapes = {"x": part.x_shape, "y": part.y_shape}
        wanted = {(name, stage): ITEM_BYTES * prod(shapes[name]) for stage in range(stages) for name in shapes}
        wanted[_WEIGHT, 0] = ITEM_BYTES * prod(part.w_shape)
        if self.bias:
            wanted[_BIAS, 0] = ITEM_BYTES * part.filters
        if self._sums:
            wanted[_SUMS, 0] = 2 * wanted[_WEIGHT, 0]
        return wanted

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        name = self._names[transfer.role][transfer.array]
        self._gpu.copy(buffer, self._address(name, transfer.stage), transfer, after)

    def compute(self, chunk: Chunk) -> Any:
        problem, stream = self._problem.with_batch(chunk.images), self._gpu.stream
        arrays = self.arrays(problem, chunk.stage)
        with self._gpu.device, self._gpu.blocked():
            if self._sums and chunk.overlap:
                # The previous chunk's sum includes these images already, so zero them.
                for array in arrays[:2]:
                    size = array.nbytes // len(array) * chunk.overlap
                    self._gpu.cuda.runtime.memsetAsync(array.data.ptr, 0, size, stream.ptr)
            start, end = self._gpu.cuda.Event(), self._gpu.cuda.Event()
            start.record(stream)
            self._kernel.run(problem, *arrays, stream)
            end.record(stream)
            self.after_kernel(problem, chunk.first, chunk.stage)
            done = stream.record() if self.bias else end
        self._intervals.append((start, end))
        return done

    def after_kernel(self, problem: ConvProblem, first: int, stage: int = 0) -> None:
        """Queue the passes after the kernel: add the bias to y, or add the weight's gradient to the sums."""
        if self.bias:
            addresses = self._address(_BIAS), self._address("y", stage)
            _passes.add_bias(*addresses, problem, self._gpu.device.id, self._gpu.stream)
        if self._sums:
            self._for_weight("accumulate", _WEIGHT, _SUMS, np.int32(first == 0))

    def finish(self) -> None:
        """Round the sums to the float32 weight gradient, and wait for all work."""
        if self._sums:
            self._for_weight("round_sums", _SUMS, _WEIGHT)
        self._gpu.stream.synchronize()

    def _for_weight(self, entry: str, source: str, target: str, *numbers: Any) -> None:
        """Queue a pass from one array of the weight's size to another."""
        addresses = {"x": self._address(source), "y": self._address(target)}
        count = prod(self._problem.w_shape)
        _passes.enqueue(entry, addresses, count, self._gpu.device.id, self._gpu.stream, *numbers)

    def arrays(self, part: ConvProblem, stage: int) -> tuple[Any, Any, Any]:
        """Return the operands of a chunk on the device."""
        array = cuda.cupy().ndarray
        keys = [(name, 0 if name == _WEIGHT else stage) for name in part.operands]
        a, b, out = (array(shape, np.float32, self._gpu.buffers[key]) for key, shape in zip(keys, part.shapes))
        return a, b, out

    def _address(self, name: str, stage: int = 0) -> int:
        return int(self._gpu.buffers[name, stage if name in ("x", "y") else 0].ptr)

    def seconds(self) -> float:
        """Return the kernels' total time in seconds; all work must have ended."""
        return sum(self._gpu.cuda.get_elapsed_time(start, end) for start, end in self._intervals) / 1000


_gpus: dict[int, Gpu] = {}
_lock = threading.Lock()


def gpu(number: int = 0) -> Gpu:
    """Return the buffers and streams of the GPU of that number; raises DeviceError if there is no such GPU."""
    cuda.chip(number)
    with _lock:
        if number not in _gpus:
            _gpus[number] = Gpu(number)
        return _gpus[number]


# atexit calls functions in reverse order: this one, registered at the import, runs after the wait for pending calls.
atexit.register(_gpus.clear)
