"""Copy in, compute and copy out once on a GPU: a pass of a training step, or an update.

All data of a step is one chunk of the copy pipeline. Small arrays are packed into one buffer, because Python takes
about 50 microseconds per copy, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.bounded_dict import BoundedDict
from ece408_op.runtime.compile_ahead import compile_ahead
from ece408_op.runtime.copy_pipeline import INPUT, OUTPUT, Chunk, Pipeline, StagingBuffer, Transfer
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, ceil_div, round_up
from ece408_op.runtime.memory import address

from ._cuda_graphs import GraphPass
from ._data_parallel import RetryError
from ._definition import Shape
from .engine import copying_threads, free_memory

Result = TypeVar("Result")

#: The most bytes of a small array.
SMALL_BYTES = 256 << 10

#: The most threads that copy, and the fewest and most bytes per transfer, tuned on the 2018 fall network (ece408-bench
#: networks --training). There are more threads than in ``engine``, because a step copies everything in one chunk, and
#: its threads contend less for the GIL.
_THREADS, _LEAST_TRANSFER, _MOST_TRANSFER = 12, 2 << 20, 4 << 20


class Packing:
    """The packed form of float32 arrays of these shapes: the large arrays and, last, a flat array with all others.

    shapes: those of the packed arrays.
    """

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        #: The shape of each array, and the index of its first element in the flat array, -1 for a large array.
        self._offsets: list[tuple[Shape, int]] = []
        #: Views of the last flat host arrays, by address, cached because making hundreds takes as long as filling them.
        self._views: BoundedDict[int, list[np.ndarray]] = BoundedDict(8)
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= SMALL_BYTES
            self._offsets.append((tuple(shape), size if small else -1))
            size += round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
        # The flat array is never empty, so that callers can always copy it.
        self.shapes = [*(shape for shape, offset in self._offsets if offset < 0), (max(1, size),)]

    def large(self, arrays: Sequence[Any]) -> list[Any]:
        """Return those of the arrays that count as large."""
        return [array for array, (_, offset) in zip(arrays, self._offsets) if offset < 0]

    def copy_small(self, arrays: Sequence[np.ndarray], flat: np.ndarray, out: bool = False) -> None:
        """Copy the small ones of the NumPy arrays to the flat array, or with ``out`` from the flat array."""
        views = self._views.get(address(flat))
        if views is None:
            views = self._views[address(flat)] = self._small_views(flat)
        small = (array for array, (_, offset) in zip(arrays, self._offsets) if offset >= 0)
        for array, view in zip(small, views):
            if out:
                array[...] = view
            else:
                view[...] = array

    def packed(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the large ones of the CuPy arrays, and a flat array with copies of the others."""
        flat = cuda.cupy().zeros(self.shapes[-1], np.float32)
        small = (array for array, (_, offset) in zip(arrays, self._offsets) if offset >= 0)
        for array, view in zip(small, self._small_views(flat)):
            view[...] = array
        return [*self.large(arrays), flat]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays in their original order, the small ones as views of the flat array."""
        *large, flat = packed
        rest, views = iter(large), iter(self._small_views(flat))
        return [next(rest if offset < 0 else views) for _, offset in self._offsets]

    def _small_views(self, flat: Any) -> list[Any]:
        return [flat[start : start + prod(shape)].reshape(shape) for shape, start in self._offsets if start >= 0]


packing_of_shapes = lru_cache(maxsize=64)(Packing)


def packing_of(arrays: Sequence[Any]) -> Packing:
    """Return the packing for arrays of these arrays' shapes."""
    return packing_of_shapes(tuple(array.shape for array in arrays))


def step(
    gpu: Gpu,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    compute: Callable[[Sequence[Any]], tuple[Sequence[Any], Any]],
    *,
    graph: GraphPass | None = None,
    cached: Callable[[np.ndarray], Any] = lambda _: None,
    pinned_inputs: Sequence[bool] = (),
    pinned_outputs: Sequence[bool] = (),
    meanwhile: Sequence[Callable[[], None]] = (),
    then: Callable[[Any], Any] = lambda result: result,
    first: bool = False,
) -> Any:
    """Copy the inputs to the GPU, compute arrays and a result there, and copy the arrays to the outputs.

    The caller holds the GPU's lock. Raises RetryError if there is no memory.

    compute: returns the arrays as packed by ``packing_of(outputs)``, and the result; it changes nothing before it has
    allocated all memory. graph: a CUDA graph that captures or repeats the computation. cached: returns for a large
    input a CuPy array on any GPU that is copied instead, or None. pinned_inputs, pinned_outputs: whether each array is
    in pinned memory; none is if empty. meanwhile: functions to call while the GPU computes. then: takes the
    result, queues work behind the computation, and returns the final result. first: compile in parallel, before
    ``compute`` runs, the kernels that it launches; ignored with ``graph``.
    """
    packing, out_packing = map(packing_of, (inputs, outputs))
    large, targets = packing.large(inputs), out_packing.large(outputs)
    in_pinned = packing.large(pinned_inputs or [False] * len(inputs))
    out_pinned = out_packing.large(pinned_outputs or [False] * len(outputs))
    with gpu.device, cuda.reported("training"):
        try:
            small = _pinned_buffer(gpu, INPUT, packing.shapes[-1])
            small_out = _pinned_buffer(gpu, OUTPUT, out_packing.shapes[-1])
            with gpu.stream:
                arrays = graph.inputs if graph else [cuda.cupy().empty(one, np.float32) for one in packing.shapes]
            device = _Device(gpu, arrays, lambda given: compute(packing.unpacked(given)), graph, then, first)
            left = device.queue_inputs(large, list(map(cached, large)), in_pinned)
            packing.copy_small(inputs, small)
            # ``run`` also waits for the computation: the next step may reuse memory that is then free, and its copies
            # run on other streams.
            device.run([*left, small], [*targets, small_out], [*out_pinned, True], meanwhile)
        except (cuda.cupy().cuda.memory.OutOfMemoryError, cuda.NoRoomError) as error:
            gpu.wait()
            raise RetryError(
                f"the GPU's memory: expected room for a training step, got {error.__cause__ or error}; use a smaller "
                "batch"
            ) from error
        except BaseException:
            gpu.wait()
            raise
        out_packing.copy_small(outputs, small_out, out=True)
        return device.result


def with_retry(gpus: Sequence[Gpu], attempt: Callable[[bool], Result]) -> Result:
    """Return attempt(True); after a RetryError, free memory and return attempt(False), without CUDA graphs.

    The caller holds the GPUs' locks. Raises DeviceError if the second attempt lacks memory too.
    """
    with suppress(RetryError):
        return attempt(True)
    # Not in an except clause: the error's traceback would keep the arrays of the first attempt.
    for gpu in gpus:
        free_memory(gpu)
    try:
        return attempt(False)
    except RetryError as error:
        raise DeviceError(str(error)) from error


#: Pinned host memory, by GPU and by use (INPUT or OUTPUT).
_buffers: WeakKeyDictionary[Gpu, dict[str, np.ndarray]] = WeakKeyDictionary()


def _pinned_buffer(gpu: Gpu, use: str, shape: Shape) -> np.ndarray:
    """Return a flat pinned array, which the next call for that use reuses; the caller holds the GPU's lock."""
    known = _buffers.setdefault(gpu, {})
    if use not in known or known[use].size < shape[0]:
        known[use] = pinned_array(gpu, shape)
    return known[use][: shape[0]]


def pinned_array(gpu: Gpu, shape: Shape) -> np.ndarray:
    """Return a new float32 array in pinned memory."""
    return np.frombuffer(gpu.pinned(ITEM_BYTES * prod(shape)), np.float32, prod(shape)).reshape(shape)


@dataclass(eq=False)
class _Device:
    """The copy pipeline's interface to the GPU, for one step, which is a single chunk.

    inputs: arrays on the GPU. work: computes the packed outputs and the result from them. The others as in ``step``.
    """

    gpu: Gpu
    inputs: Sequence[Any]
    work: Callable[[Sequence[Any]], tuple[Sequence[Any], Any]]
    graph: GraphPass | None
    then: Callable[[Any], Any]
    first: bool

    def __post_init__(self) -> None:
        self.staging = self.gpu.staging
        self._outputs: Sequence[Any] = []
        #: The events of copies from pinned arrays.
        self._copied: list[Any] = []
        #: For each output, its host array if that is pinned, else None.
        self._pinned: list[np.ndarray | None] = []
        self._end: Any = None
        self.result: Any = None

    def queue_inputs(
        self, inputs: Sequence[np.ndarray], cached: Sequence[Any], pinned: Sequence[bool]
    ) -> list[np.ndarray]:
        """Queue the copies of inputs that are on a GPU or pinned; return the inputs, with empty arrays in their place.

        Called before other threads copy, because these slow down CUDA calls. The link is then busy while the caller
        packs the other inputs.
        """
        left = list(inputs)
        with self.gpu.device, self.gpu.stream:
            for number, (array, target, copy, is_pinned) in enumerate(zip(inputs, self.inputs, cached, pinned)):
                if copy is not None:
                    target.data.copy_from_device_async(copy.data, copy.nbytes, self.gpu.stream)
                elif is_pinned:
                    self._copied.append(self.gpu.copy_pinned(array, target.data.ptr))
                if copy is not None or is_pinned:
                    left[number] = array[:0]
        return left

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        pinned: Sequence[bool],
        meanwhile: Sequence[Callable[[], None]],
    ) -> None:
        """Copy the remaining inputs (the last is pinned), compute, and copy the outputs.

        pinned: whether each output is in pinned memory. Copies to pinned memory are queued right behind the computation
        on one stream, without a staging buffer or thread.
        """
        *staged, small = inputs
        if small.size:
            self._copied.append(self.gpu.copy_pinned(small, self.inputs[-1].data.ptr))
        self._pinned = [array if flag else None for array, flag in zip(outputs, pinned)]
        outputs = [array[:0] if flag else array for array, flag in zip(outputs, pinned)]
        copied = sum(array.nbytes for array in (*staged, *outputs))
        threads = copying_threads(self.gpu, copied, _THREADS, _LEAST_TRANSFER)
        # Each thread copies an equal part, in as few transfers as the limits allow.
        part = ceil_div(copied, threads)
        most = max(_LEAST_TRANSFER, ceil_div(part, ceil_div(max(1, part), _MOST_TRANSFER))) // ITEM_BYTES
        staged, outputs = ([array.reshape(1, array.size) for array in arrays] for arrays in (staged, outputs))
        Pipeline(self, [Chunk(0, 1)], staged, outputs, most, checks=meanwhile).run(threads)
        cuda.wait("training", self.gpu.pinned_stream)
        # Wait for the computation only, not for the work that ``then`` has queued behind it.
        cuda.wait("training", self._end)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        arrays = self.inputs if transfer.role == INPUT else self._outputs
        self.gpu.copy(buffer, arrays[transfer.array].data.ptr, transfer, after)

    def compute(self, chunk: Chunk) -> Any:
        with self.gpu.device, self.gpu.stream:
            self.gpu.wait_for(self._copied)
            if self.graph:
                self._outputs, self.result = self.graph.run(self.work)
            else:
                if self.first:
                    compile_ahead(lambda: self.work(self.inputs), self.gpu.device.id)
                self._outputs, self.result = self.work(self.inputs)
            end = self._end = self.gpu.stream.record()
            for source, target in zip(self._outputs, self._pinned):
                if target is not None:
                    self.gpu.copy_pinned(target, source.data.ptr, end, out=True)
            self.result = self.then(self.result)
            return end
