"""A network on one GPU: its parameters in GPU memory, and for each batch size a schedule and memory.

Parameters are float32 arrays that MXNet may change between calls without notice. So every call compares them, bit by
bit, with a copy of what the GPU has, while the GPU computes the last images; if they differ, the call sends them and
computes again. Calls on one GPU take turns.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin import host_context, op_times
from ece408_op.plugin.bridge import view_at
from ece408_op.plugin.host_context import STAGING_BYTES, Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import c_calls, cuda
from ece408_op.runtime.compile_ahead import compile_ahead
from ece408_op.runtime.copy_pipeline import INPUT, Chunk, Pipeline, StagingBuffer, Transfer, chunks_of, unpinned
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.memory import address
from ece408_op.runtime.recent import Recent

from ._batch import STAGES, Batch
from ._definition import Shape
from ._gpu import Chooser
from ._memory_plan import plan, splits
from ._network import parse

#: Bytes of data and outputs of a chunk, and chunks at most: enough to overlap, few enough to launch.
CHUNK_BYTES, MOST_CHUNKS = 12 << 20, 4
#: The fewest images of a chunk: fewer leave parts of the GPU idle, which takes longer than the copies that overlap. And
#: those where several GPUs share the images.
LEAST_IMAGES, LEAST_SHARED_IMAGES = 128, 64
#: The share of the GPU's free memory that one batch size may use.
MEMORY_SHARE = 0.8
#: The most threads that copy, the most for each of several GPUs, and the bytes that pay for one more: at each
#: CUDA call they contend for the GIL with each other and with the threads that launch. On two H200, 16 threads for one
#: GPU or for both took 13 to 71 % longer than 8 for inference.
_THREADS, _SHARED_THREADS, _THREAD_BYTES = 8, 4, 8 << 20
LEAST_TRANSFER, _COMPARED_BYTES = 2 << 20, 4 << 20
_KEPT_BATCHES, _KEPT_ENGINES, _KEPT_SHAPES = 3, 4, 64


class Engine:
    """One network on one GPU; see the head of this file."""

    def __init__(self, text: str, impl: str, precision: str, number: int) -> None:
        self.network = parse(text).fused()
        self.gpu: Gpu = host_context.gpu(number)
        with self.gpu.device, self.gpu.stream:
            self.chooser = Chooser(impl, precision, number, cuda.chip(number))
        #: What was made for each of the last shapes of data, the newest last.
        self.batches: OrderedDict[tuple[Any, ...], Batch] = OrderedDict()
        self._shapes = [self.network.shape(value) for value in self.network.parameters]
        self._comparisons = _comparisons([ITEM_BYTES * prod(shape) for shape in self._shapes])
        self._independent: Recent[tuple[Shape, ...], bool] = Recent(_KEPT_SHAPES)
        #: Copies of the parameters that the GPU has.
        self.sent: Sequence[np.ndarray] = []
        self._sent_at: np.ndarray = np.empty(0, np.int64)
        self._parameters: dict[int, Any] = {}

    def run(
        self,
        data: Sequence[np.ndarray],
        parameters: Sequence[int],
        outputs: Sequence[np.ndarray],
        pinned: Sequence[bool] = (),
        checked: Sequence[np.ndarray] | None = None,
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> Sequence[np.ndarray]:
        """Fill the outputs from data and parameters, each in the network's order: C-contiguous float32.

        Parameters are addresses: to make views of hundreds of arrays would take a millisecond. Outputs share no memory
        with the others. pinned: whether each array of data is. checked: what an engine of the same network returned for
        these parameters: they are not compared. meanwhile: functions to call while the GPU computes. Returns the copies
        of the parameters that it computed with, when the outputs are filled. Raises DeviceError if the GPU fails or has
        no memory for one image.
        """
        with self.gpu.lock, self.gpu.device, cuda.reported("network"):
            if checked is not None and self.sent is not checked:
                self._send(checked)
            known = bool(self._parameters) or not parameters
            if not known:
                self._send(self._copied(parameters))
            try:
                batch = self._batch([array.shape for array in data])
                compared = parameters if known and checked is None else ()
                if self._computed(batch, data, outputs, pinned, compared, meanwhile):
                    batch.op_times(len(data[0]))
                    self._send(self._copied(parameters))
                    self._computed(batch, data, outputs, pinned, (), ())
            except BaseException:
                self.gpu.wait()
                raise
            op_times.record(batch.op_times(len(data[0])))
            return self.sent

    def compute(self, data: Sequence[Any]) -> list[Any]:
        """Return the outputs for CuPy arrays, all images at once on the current stream, with the parameters of ``run``.

        The outputs are the network's own memory until the next call.
        """
        with self.gpu.lock, self.gpu.device:
            return self._batch([array.shape for array in data], whole_batch=True).run(self._given(data), data)

    def divides(self, shapes: Sequence[Shape]) -> bool:
        """Return whether a batch of data of these shapes can be divided: see ``_memory_plan.splits``."""
        key = tuple(shapes)
        found = self._independent.get(key)
        if found is None:
            found = splits(self.network, dict(zip(self.network.names(self.network.data), shapes)))
            self._independent[key] = found
        return found

    def _given(self, data: Sequence[Any]) -> dict[int, Any]:
        return {**self._parameters, **dict(zip(self.network.data, data))}

    def _copied(self, parameters: Sequence[int]) -> list[np.ndarray]:
        return [view_at(at, shape).copy() for at, shape in zip(parameters, self._shapes)]

    def _send(self, parameters: Sequence[np.ndarray]) -> None:
        """Send all parameters, arrays that nobody changes."""
        # Where the GPU fails meanwhile, it has none of them.
        self.sent, self._parameters = [], {}
        with self.gpu.stream:
            found = dict(zip(self.network.parameters, map(cuda.cupy().asarray, parameters)))
            for batch in self.batches.values():
                batch.prepare(found)
        cuda.wait("network", self.gpu.stream)
        self._sent_at = np.array([address(array) for array in parameters], np.int64)
        self.sent, self._parameters = parameters, found

    def _batch(self, shapes: Sequence[Shape], whole_batch: bool = False) -> Batch:
        """Return what computes data of these shapes, made at the first call with them."""
        key = (*shapes, whole_batch, _several_share())
        if key in self.batches:
            self.batches.move_to_end(key)
            return self.batches[key]
        data = dict(zip(self.network.names(self.network.data), shapes))
        independent = not whole_batch and self.divides(shapes)
        while len(self.batches) >= _KEPT_BATCHES:
            self.batches.popitem(last=False)
        # Freed memory that CuPy keeps would count as used.
        pool = cuda.cupy().get_default_memory_pool()
        pool.free_all_blocks()
        images = self._images(data) if independent else shapes[0][0]
        while key not in self.batches:
            try:
                self.batches[key] = self._made(images, data)
            except cuda.cupy().cuda.memory.OutOfMemoryError as error:
                # Other networks on this GPU wait for its lock: their memory can be freed.
                for other in [self, *_engines.values()]:
                    if other.gpu is self.gpu:
                        other.batches.clear()
                pool.free_all_blocks()
                if images == 1 or not independent:
                    raise DeviceError(
                        f"the GPU's memory: expected room for {images} image{'s' if images > 1 else ''} of the "
                        f"network, got {error}; end other programs on the GPU, or use smaller images"
                    ) from error
                images = ceil_div(images, 2)
        return self.batches[key]

    def _images(self, data: dict[str, Shape]) -> int:
        """Return the images of a chunk: few enough that copies overlap with computation, and that the memory fits."""
        batch = next(iter(data.values()))[0]
        one = self.network.infer({name: (1, *shape[1:]) for name, shape in data.items()})
        image = ITEM_BYTES * sum(prod(one[value]) for value in (*self.network.data, *self.network.outputs))
        least = LEAST_SHARED_IMAGES if _several_share() else LEAST_IMAGES
        chunks = min(MOST_CHUNKS, batch * image // CHUNK_BYTES, batch // least)
        images = ceil_div(batch, max(1, chunks))
        room = MEMORY_SHARE * self.gpu.cuda.runtime.memGetInfo()[0]
        while images > 1:
            shapes = self.network.infer({name: (images, *shape[1:]) for name, shape in data.items()})
            if plan(self.network, shapes).bytes + STAGES * image * images <= room:
                break
            images = ceil_div(images, 2)
        return images

    def _made(self, images: int, data: dict[str, Shape]) -> Batch:
        """Return a batch size's schedule and memory, with its kernels compiled and run once: no first run is timed."""
        with self.gpu.stream:
            batch = Batch(self.network, self.chooser, self.gpu, images, data, images == next(iter(data.values()))[0])
            given = self._given(batch.data[0])
            compile_ahead(lambda: batch.launch(self._parameters, given), self.gpu.device.id)
            batch.prepare(self._parameters)
            batch.warm_up(given)
        cuda.wait("network", self.gpu.stream)
        return batch

    def _computed(
        self,
        batch: Batch,
        data: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        pinned: Sequence[bool],
        compared: Sequence[int],
        meanwhile: Sequence[Callable[[], None]],
    ) -> bool:
        """Compute all chunks; return whether some of the parameters compared differ from those that were sent."""
        differ = threading.Event()

        def compare(given: np.ndarray, part: np.ndarray) -> None:
            if not _same(given, self._sent_at, part):
                differ.set()

        given = np.array(compared, np.int64)
        checks = [partial(compare, given, part) for part in self._comparisons] if compared else []
        if batch.images < len(data[0]):
            chunks = chunks_of(len(data[0]), batch.images, STAGES)
        else:
            chunks = [Chunk(0, 1)]
            data, outputs = ([array.reshape(1, -1) for array in arrays] for arrays in (data, outputs))
        staged = unpinned(data, pinned)
        copied = (*staged, *outputs, *(self.sent if compared else ()))
        threads = copying_threads(self.gpu, sum(array.nbytes for array in copied))
        if any(pinned) and len(chunks) > 1:
            # One queues the next chunk, or compares parameters, while the other waits for outputs.
            threads = max(2, threads)
        # Each thread copies an equal part of each chunk, in as few transfers as staging buffers allow. For several GPUs
        # they are at least two, since their threads do not begin at the same time.
        share = ceil_div(chunks[0].images * sum(array[0].nbytes for array in staged), threads)
        transfers = max(1 + _several_share(), ceil_div(share, STAGING_BYTES))
        most = max(LEAST_TRANSFER, ceil_div(share, transfers)) // ITEM_BYTES
        pipeline = Pipeline(
            _Device(self, batch), chunks, data, outputs, most, checks=[*meanwhile, *checks], pinned={INPUT: pinned}
        )
        pipeline.run(threads)
        return differ.is_set()


class _Device:
    """The GPU as the copy pipeline asks for it."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self._engine, self._batch, self._gpu, self.staging = engine, batch, engine.gpu, engine.gpu.staging

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> Any:
        buffers = self._batch.data if transfer.role == INPUT else self._batch.outputs
        return self._gpu.copy(buffer, buffers[transfer.stage][transfer.array].data.ptr, transfer, after)

    def compute(self, this: Chunk, copied: Sequence[Any]) -> Any:
        gpu, batch = self._gpu, self._batch
        with gpu.device, gpu.stream:
            gpu.wait_for(copied)
            data = batch.data[this.stage]
            outputs = batch.run(self._engine._given(data), data, timed=True)
            for source, target in zip(outputs, batch.outputs[this.stage]):
                target.data.copy_from_device_async(source.data, source.nbytes, gpu.stream)
            return gpu.stream.record()


_sharing = threading.local()


@contextmanager
def sharing(gpus: int) -> Iterator[None]:
    """Have this thread's calls use fewer threads and smaller chunks, if several GPUs compute at the same time."""
    _sharing.gpus = gpus
    try:
        yield
    finally:
        _sharing.gpus = 1


def _several_share() -> bool:
    return getattr(_sharing, "gpus", 1) > 1


def copying_threads(gpu: Gpu, copied: int, most: int = _THREADS, each: int = _THREAD_BYTES) -> int:
    """Return how many threads copy that many bytes: one per ``each`` bytes, up to a limit."""
    return max(1, min(gpu.threads, min(most, _SHARED_THREADS) if _several_share() else most, copied // each))


@cache
def _memcmp() -> int:
    return c_calls.address_of(ctypes.CDLL(None).memcmp)


def _comparisons(sizes: Sequence[int]) -> list[np.ndarray]:
    """Return parts of about equally many bytes to compare: rows of an array's number, first byte and count of bytes."""
    found, left = list[list[tuple[int, int, int]]](), 0
    for number, size in enumerate(sizes):
        for first in range(0, size, _COMPARED_BYTES):
            if left <= 0:
                found.append([])
                left = _COMPARED_BYTES
            found[-1].append((number, first, min(_COMPARED_BYTES, size - first)))
            left -= found[-1][-1][2]
    return [np.array(rows, np.int64) for rows in found]


def _same(a: np.ndarray, b: np.ndarray, part: np.ndarray) -> bool:
    """Return whether arrays at these addresses are the same: bits, so that a NaN is equal to itself."""
    rows, (numbers, first, _) = part.copy(), part.T
    rows[:, 0], rows[:, 1] = a[numbers] + first, b[numbers] + first
    return not c_calls.any_nonzero(_memcmp(), rows)


_engines: OrderedDict[tuple[str, str, str, int], Engine] = OrderedDict()
_lock = threading.Lock()


def engine(text: str, impl: str, precision: str, number: int) -> Engine:
    """Return the engine of that graph and those options; a few stay, so that a graph bound again finds its own.

    Raises DeviceError if there is no GPU of that number, and GraphError as parse.
    """
    key = (text, impl, precision, number)
    with _lock:
        if key not in _engines:
            while len(_engines) >= _KEPT_ENGINES:
                _engines.popitem(last=False)
            _engines[key] = Engine(*key)
        _engines.move_to_end(key)
        return _engines[key]


def engines() -> list[Engine]:
    """Return the engines that stay, the newest last."""
    return list(_engines.values())


def clear() -> None:
    """Free the GPU memory of all networks; networks that are bound hold theirs until they are gone."""
    _engines.clear()


# Runs after the package's wait for pending calls, as host_context's does.
atexit.register(clear)
