"""Inference of a network on one GPU: its parameters in GPU memory, and for each batch size a schedule and memory.

Calls on one GPU take turns: each holds the GPU's ``lock``.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin import host_context, op_times
from ece408_op.plugin.bridge import view_at
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import c_calls, cuda
from ece408_op.runtime.bounded_dict import BoundedDict
from ece408_op.runtime.copy_pipeline import Chunk, chunks_of
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.memory import address

from ._batch import STAGES, Batch
from ._definition import Shape
from ._gpu import Chooser
from ._network import parse, splits
from ._schedule import plan

#: The bytes of data and outputs per chunk, and the most chunks: enough to overlap copies with computation, and few
#: enough to launch quickly.
CHUNK_BYTES, MOST_CHUNKS = 12 << 20, 4
#: The fewest images of a batch that is divided. Chunks of a smaller batch would leave parts of the GPU idle, which
#: costs more time than the overlap saves.
LEAST_IMAGES = 96
#: The bytes per second of copies from pageable memory: half the rate of pinned memory on PCIe 5.
COPY_BYTES_PER_SECOND = 25e9
#: The share of the GPU's free memory that one batch size may use.
MEMORY_SHARE = 0.8
#: The most threads that copy, the most per GPU if there are several, and the bytes that pay for one more thread. At
#: each CUDA call, these threads contend for the GIL with each other and with the threads that launch. On two H200,
#: inference with 16 threads for one GPU or for both took 13 to 71 % longer than with 8.
_THREADS, _SHARED_THREADS, _THREAD_BYTES = 8, 4, 8 << 20
#: The bytes of parameters per comparison.
_COMPARED_BYTES = 4 << 20
#: The address of C's memcmp.
_MEMCMP = c_calls.address_of(ctypes.CDLL(None).memcmp)
#: The most data shapes per engine, and engines without a network, that stay in memory.
_KEPT_BATCHES, _KEPT_ENGINES = 3, 4


class ChunkedBatch(NamedTuple):
    """The chunks of a batch, and the Batch that computes each; a batch in a single chunk counts as one image."""

    chunks: Sequence[Chunk]
    batches: Sequence[Batch]

    def op_times(self, images: int) -> op_times.Later:
        """Take the times of the convolutions since the last call, for ``images`` images, as records to make later."""
        taken, records = [batch.take() for batch in set(self.batches)], self.batches[-1].records

        def made() -> list[op_times.OpTime]:
            try:
                with cuda.reported("network"):
                    seconds = np.sum([one() for one in taken], axis=0)
            except DeviceError:  # a GPU that has failed since does not report its times
                return []
            return [
                op_times.OpTime(node.name, node.operator.problem((images, *image)), name, "gpu", float(one))
                for (node, image, name), one in zip(records, seconds)
            ]

        return op_times.Later(made)


class Engine:
    """One network on one GPU."""

    def __init__(self, text: str, impl: str, precision: str, number: int) -> None:
        self.network = parse(text).fused()
        self.gpu: Gpu = host_context.gpu(number)
        with self.gpu.device, self.gpu.stream:
            self.chooser = Chooser(impl, precision, cuda.chip(number))
        #: The batch made for each of the last data shapes, the newest last.
        self.batches: OrderedDict[tuple[Any, ...], ChunkedBatch] = OrderedDict()
        self._shapes = [self.network.shape(value) for value in self.network.parameters]
        self._comparisons = _comparisons([ITEM_BYTES * prod(shape) for shape in self._shapes])
        #: Host copies of the parameters that were sent last; the GPU's arrays are empty if they were freed.
        self.sent: Sequence[np.ndarray] = []
        #: How many lists of parameters have been sent.
        self.sends = 0
        self._sent_at: np.ndarray = np.empty(0, np.int64)
        self._parameters: dict[int, Any] = {}

    def has(self, parameters: Sequence[np.ndarray]) -> bool:
        """Return whether the GPU has the parameters of this list, compared by identity, or the network has none."""
        return (self.sent is parameters and bool(self._parameters)) or not self.network.parameters

    def comparisons(self, parameters: Sequence[int]) -> tuple[list[Callable[[], None]], threading.Event]:
        """Return functions that compare parameters at these addresses with those sent, and an event for a difference.

        The functions are for several threads; there are none without addresses, and none for a parameter whose address
        is 0. They compare bits, so that a NaN equals itself.
        """
        differ = threading.Event()
        given, sent = np.array(parameters, np.int64), self._sent_at

        def compare(part: np.ndarray) -> None:
            rows, (numbers, first, _) = part.copy(), part.T
            rows[:, 0], rows[:, 1] = given[numbers] + first, sent[numbers] + first
            if c_calls.any_nonzero(_MEMCMP, rows):
                differ.set()

        rows = self._comparisons[given[self._comparisons[:, 0]] != 0] if len(given) else self._comparisons[:0]
        starts = rows[:, 2].cumsum() - rows[:, 2]
        parts = np.split(rows, np.flatnonzero(np.diff(starts // _COMPARED_BYTES)) + 1)
        return [partial(compare, part) for part in parts if len(part)], differ

    def compute(self, data: Sequence[Any]) -> list[Any]:
        """Return the outputs for CuPy arrays, all images at once on the current stream, with the parameters sent last.

        The next call overwrites the outputs, which are in the network's memory.
        """
        with self.gpu.lock, self.gpu.device:
            if not self.has(self.sent):
                self.send(self.sent)
            (batch,) = self.chunks([array.shape for array in data], whole_batch=True).batches
            return batch.run(data)

    def copied(self, parameters: Sequence[int]) -> list[np.ndarray]:
        """Return copies of parameters at these addresses."""
        return [view_at(at, shape).copy() for at, shape in zip(parameters, self._shapes)]

    def send(self, parameters: Sequence[np.ndarray]) -> None:
        """Copy all parameters to the GPU; the engine keeps the arrays, which must not change.

        The caller holds the GPU's lock, and the GPU is the current one. Raises DeviceError if there is no memory.
        """
        with suppress(cuda.cupy().cuda.memory.OutOfMemoryError, cuda.NoRoomError):
            return self._send(parameters)
        # Not in an except clause: the error's traceback would keep the memory of the first attempt.
        free_memory(self.gpu, self)
        try:
            self._send(parameters)
        except (cuda.cupy().cuda.memory.OutOfMemoryError, cuda.NoRoomError) as error:
            raise DeviceError(
                f"the GPU's memory: expected room for the network's parameters, got {error.__cause__ or error}; end "
                "other programs on the GPU"
            ) from error

    def _send(self, parameters: Sequence[np.ndarray]) -> None:
        # If the GPU fails meanwhile, it counts as having no parameters.
        self.sent, self._parameters = [], {}
        with self.gpu.stream:
            found = dict(zip(self.network.parameters, map(cuda.cupy().asarray, parameters)))
            for chunks in self.batches.values():
                for batch in set(chunks.batches):
                    batch.prepare(found)
        cuda.wait("network", self.gpu.stream)
        self._sent_at = np.array([address(array) for array in parameters], np.int64)
        self.sent, self._parameters = parameters, found
        self.sends += 1

    def has_chunks(self, shapes: Sequence[Shape]) -> bool:
        """Return whether ``chunks`` has a result in its cache for data of these shapes."""
        return (*shapes, False) in self.batches

    def chunks(self, shapes: Sequence[Shape], whole_batch: bool = False) -> ChunkedBatch:
        """Return the chunks that compute data of these shapes, made at the first call; the caller as in ``send``.

        Raises DeviceError if there is no memory for one image.
        """
        key = (*shapes, whole_batch)
        if key in self.batches:
            self.batches.move_to_end(key)
            return self.batches[key]
        divides = not whole_batch and splits(self.network, tuple(shapes))
        while len(self.batches) >= _KEPT_BATCHES:
            self.batches.popitem(last=False)
        # Otherwise freed memory in CuPy's pool would count as used.
        cuda.cupy().get_default_memory_pool().free_all_blocks()
        images, freed = shapes[0][0], False
        if divides:
            images = self._room(shapes, self._chunk_images(shapes))
        while True:
            try:
                found = self.batches[key] = self._made(images, shapes)
                return found
            except (cuda.cupy().cuda.memory.OutOfMemoryError, cuda.NoRoomError) as error:
                if freed and (images == 1 or not divides):
                    raise DeviceError(
                        f"the GPU's memory: expected room for {images} image{'s' if images > 1 else ''} of the "
                        f"network, got {error.__cause__ or error}; end other programs on the GPU, or use smaller images"
                    ) from error
            # Not in the except clause: the error's traceback would keep the memory of the first attempt.
            images = ceil_div(images, 2) if freed else images
            free_memory(self.gpu, self)
            freed = True

    def free(self, parameters: bool) -> None:
        """Free the memory of all batches, and if asked the parameters, which the next call sends again.

        The caller as in ``send``.
        """
        self.batches.clear()
        if parameters:
            self._parameters = {}

    def _chunk_images(self, data: Sequence[Shape]) -> int:
        """Return the images per chunk: enough to keep the GPU busy, few enough that copies overlap with computing."""
        batch = data[0][0]
        chunks = min(MOST_CHUNKS, batch * self._image_bytes(data) // CHUNK_BYTES) if batch >= LEAST_IMAGES else 1
        return ceil_div(batch, max(1, chunks))

    def _image_bytes(self, data: Sequence[Shape]) -> int:
        one = self.network.infer(data, 1)
        return ITEM_BYTES * sum(prod(one[value]) for value in (*self.network.data, *self.network.outputs))

    def _room(self, data: Sequence[Shape], images: int) -> int:
        """Return ``images``, halved until that many fit the GPU's memory."""
        room = MEMORY_SHARE * self.gpu.cuda.runtime.memGetInfo()[0]
        while images > 1:
            planned = plan(self.network, self.network.infer(data, images)).bytes
            if planned + STAGES * self._image_bytes(data) * images <= room:
                break
            images = ceil_div(images, 2)
        return images

    def _made(self, images: int, data: Sequence[Shape]) -> ChunkedBatch:
        """Return chunks of ``images`` images, or a small and a large one if computing takes longer than copies.

        In the latter case, the GPU waits only for the copy of the first chunk, and a larger second chunk computes
        faster.
        """
        batch = data[0][0]
        small = self._batch(images, data)
        if images == batch:
            return ChunkedBatch([Chunk(0, 1)], [small])
        copied = images * self._image_bytes(data) / COPY_BYTES_PER_SECOND
        rest = batch - images
        if small.seconds > copied and rest > images and self._room(data, rest) == rest:
            return ChunkedBatch([Chunk(0, images), Chunk(images, rest, 1)], [small, self._batch(rest, data)])
        chunks = chunks_of(batch, images, STAGES)
        return ChunkedBatch(chunks, [small] * len(chunks))

    def _batch(self, images: int, data: Sequence[Shape]) -> Batch:
        """Return a batch size's schedule and memory, with kernels compiled and run once: no first run is timed."""
        with self.gpu.stream:
            batch = Batch(self.network, self.chooser, self.gpu, images, data)
            batch.warm_up(self._parameters)
        cuda.wait("network", self.gpu.stream)
        return batch


_sharing = threading.local()


@contextmanager
def sharing(gpus: int) -> Iterator[None]:
    """Make this thread's calls use fewer copying threads if several GPUs compute at the same time."""
    _sharing.gpus = gpus
    try:
        yield
    finally:
        _sharing.gpus = 1


def copying_threads(gpu: Gpu, copied: int, most: int = _THREADS, each: int = _THREAD_BYTES) -> int:
    """Return the number of threads that copy ``copied`` bytes: one per ``each`` bytes, up to a limit."""
    most = min(most, _SHARED_THREADS) if getattr(_sharing, "gpus", 1) > 1 else most
    return max(1, min(gpu.threads, most, copied // each))


def _comparisons(sizes: Sequence[int]) -> np.ndarray:
    """Divide arrays of these byte sizes into pieces of at most _COMPARED_BYTES.

    Returns int64 rows (array's number, first byte, count of bytes).
    """
    most = _COMPARED_BYTES
    pieces = [(n, first, min(most, size - first)) for n, size in enumerate(sizes) for first in range(0, size, most)]
    return np.array(pieces, np.int64).reshape(-1, 3)


_Key = tuple[str, str, str, int]

#: All engines that bound networks use, and the last engines, which stay alive without a network.
_engines: WeakValueDictionary[_Key, Engine] = WeakValueDictionary()
_kept: BoundedDict[_Key, Engine] = BoundedDict(_KEPT_ENGINES)
_lock = threading.Lock()


def engine(text: str, impl: str, precision: str, number: int) -> Engine:
    """Return the engine for a graph and these options; the last few stay alive, for a graph that is bound again.

    Raises DeviceError if there is no GPU of that number, and GraphError as ``parse``.
    """
    key = (text, impl, precision, number)
    with _lock:
        found = _engines.pop(key, None) or Engine(*key)
        _kept.pop(key, None)
        _engines[key] = _kept[key] = found
        return found


def engines() -> list[Engine]:
    """Return all live engines, the most recently requested last."""
    with _lock:
        return list(_engines.values())


#: Other objects that keep GPU memory for later calls; any thread may call their ``clear``.
caches: WeakSet[Any] = WeakSet()


def free_memory(gpu: Gpu, user: Engine | None = None) -> None:
    """Free a GPU's memory that networks keep for later calls, except the parameters of ``user``.

    The caller holds the GPU's lock, so that no network uses the memory.
    """
    for one in list(caches):
        one.clear()
    for other in engines():
        if other.gpu is gpu:
            other.free(parameters=other is not user)
    with gpu.device:
        cuda.cupy().get_default_memory_pool().free_all_blocks()


def clear() -> None:
    """Free the GPU memory of networks whose symbol and executors are gone; the others keep theirs."""
    _kept.clear()


# Runs after the package's wait for pending calls, as host_context's does.
atexit.register(clear)
