"""A pass of a training step on one GPU or several: a thread per GPU, and CUDA graphs that repeat the launches.

The passes are data parallel: one thread per GPU, a rank, computes that GPU's share of the batch.

NCCL's kernels on a GPU wait for NCCL's kernels on all other GPUs. So the last rank that reaches a barrier queues them
on all streams, or on none: if a rank fails between two barriers, the other ranks stop at the next one, and their GPUs
complete the queued work. If kernels still wait, because a GPU failed or only some kernels were launched, NCCL's
communicator is aborted.

Python takes longer to queue the launches of a pass of ResNet-50 than the GPU takes to compute them. So the second step
of a network captures its launches in CUDA graphs, which later steps repeat. A graph reads and writes the same memory at
each launch, and the network keeps this memory until the batch has another size twice in a row, or memory runs out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import cuda, nccl

from . import engine
from ._definition import Shape
from ._inference import on_each

#: The timeout of a barrier in seconds: longer than compiling all kernels of a network takes.
BARRIER_SECONDS = 600


class RetryError(Exception):
    """A pass lacks memory or cannot be captured. Without CUDA graphs, whose memory is then free, it may succeed."""


class CaptureError(RetryError):
    """A pass cannot be captured."""


def share_of(array: np.ndarray, shares: Sequence[slice], number: int) -> np.ndarray:
    """Return a view of one GPU's images of a C-contiguous array whose elements are in the images' order."""
    if len(shares) == 1:
        return array
    images = shares[-1].stop
    return array.reshape(array.shape if len(array) == images else (images, -1))[shares[number]]


class RankGroup:
    """The ranks of one pass. shares: each GPU's images. communicator: NCCL's, if the ranks exchange arrays."""

    def __init__(self, gpus: Sequence[Gpu], shares: Sequence[slice], communicator: nccl.Communicator | None) -> None:
        self.gpus, self.shares, self.communicator = gpus, shares, communicator
        self._barrier = threading.Barrier(len(shares), self._act, BARRIER_SECONDS)
        self._items: list[Any] = [None] * len(shares)
        self._action: Callable[[list[Any]], Any] = len

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Run work(rank) for all ranks at the same time, and return the results; the caller holds the GPUs' locks.

        Raises the error of one of the ranks; a DeviceError names its GPU.
        """
        results = dict[int, Any]()

        def on_rank(number: int) -> None:
            try:
                results[number] = work(Rank(self, number))
            except threading.BrokenBarrierError:
                pass  # the error of another rank has stopped this one
            except BaseException as error:
                self._barrier.abort()
                if isinstance(error, RetryError):
                    error.args = (f"GPU {self.gpus[number].device.id}: {error}",)
                else:
                    self._abort()
                raise

        try:
            on_each(on_rank, [gpu.device.id for gpu in self.gpus])
        finally:
            # The barrier and the group are a reference cycle, which would keep items until the next garbage collection.
            self._items, self._action = [], len
        if len(results) < len(self.gpus):
            raise DeviceError(f"expected all GPUs' threads within {BARRIER_SECONDS} seconds, got only some of them")
        return [results[number] for number in range(len(self.gpus))]

    def meet(self, rank: int, item: Any, action: Callable[[list[Any]], Any]) -> None:
        """Wait for all ranks; the last one calls ``action`` with the list of all ranks' items.

        Raises BrokenBarrierError if another rank failed or the barrier timed out.
        """
        self._items[rank], self._action = item, action
        self._barrier.wait()

    def _act(self) -> None:
        try:
            self._action(self._items)
        except BaseException:
            self._abort()  # the action may have queued kernels on only some of the streams
            raise

    def _abort(self) -> None:
        """End the kernels that wait for other GPUs."""
        if self.communicator:
            self.communicator.abort()


class Rank:
    """One thread of a group of ``size`` ranks; all ranks call ``all_gather`` and ``launch`` in the same order."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self.group, self.number, self.size, self.gpu = group, number, len(group.shares), group.gpus[number]

    def share_of(self, array: np.ndarray) -> np.ndarray:
        """Return this rank's share of an array: see the function of that name."""
        return share_of(array, self.group.shares, self.number)

    def of_batch(self, count: int) -> int:
        """Return the whole batch's number of elements, given the number ``count`` of this rank's share."""
        share, images = self.group.shares[self.number], self.group.shares[-1].stop
        return count // (share.stop - share.start) * int(images)

    def all_gather(self, array: Any) -> None:
        """Queue NCCL's all-gather on float64 arrays (ranks, ...); each rank has filled the row of its number."""

        def gather(arrays: list[Any]) -> None:
            assert self.group.communicator, "the communicator of a network that exchanges arrays"
            self.group.communicator.all_gather(arrays, [gpu.stream for gpu in self.group.gpus])

        self.group.meet(self.number, array, gather)

    def launch(self, graph: Any) -> None:
        """Launch this rank's CUDA graph together with those of all other ranks."""

        def launch(graphs: list[Any]) -> None:
            for gpu, one in zip(self.group.gpus, graphs):
                with gpu.device:
                    one.launch(gpu.stream)

        self.group.meet(self.number, graph, launch)


class Pool:
    """A pool of GPU memory that is freed when its last array is gone, and not before.

    CuPy does not free a pool's memory with the pool. When memory runs out, CuPy frees blocks that no array uses at the
    moment, but captured launches may use them: so this class holds references to all blocks too.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        memory, blocks = cuda.cupy().cuda, list[Any]()

        def allocate(size: int) -> Any:
            block = memory.Memory(size)
            blocks.append(block)
            return memory.MemoryPointer(block, 0)

        self._pool, self._gpus, self._blocks = memory.MemoryPool(allocate), gpus, blocks

    def using(self) -> AbstractContextManager[None]:
        """Return a context in which CuPy allocates in this pool."""
        return cuda.cupy().cuda.using_allocator(self._malloc)

    def _malloc(self, size: int) -> Any:
        memory, pointer = cuda.cupy().cuda, self._pool.malloc(size)
        # A tuple releases its last element first: the pointer must go before the pool.
        owner = self, pointer
        return memory.MemoryPointer(memory.UnownedMemory(pointer.ptr, size, owner, pointer.device_id), 0)

    # At the interpreter's exit, ``sys`` may be gone.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.free()

    def free(self) -> None:
        """Free the memory that no array uses; captured passes must not be launched afterwards."""
        self._blocks.clear()
        for gpu in self._gpus:
            with gpu.device:
                self._pool.free_all_blocks()


class GraphPass:
    """One pass of one rank as a CUDA graph: its launches, and its inputs on the GPU, which have these shapes.

    Each step has other ranks: ``rank`` is that of the last step.
    """

    def __init__(self, pool: Pool, rank: Rank, shapes: Sequence[Shape]) -> None:
        self._pool, self.rank, self._shapes, self._inputs = pool, rank, shapes, list[Any]()
        #: Pinned memory for the inputs, if the pass is queued behind another one that may still run.
        self.pinned: Sequence[np.ndarray] = ()
        self._graph: Any = None
        self._result: Any = None
        #: The communicator that the graph uses, if any.
        self._communicator: nccl.Communicator | None = None

    @property
    def inputs(self) -> Sequence[Any]:
        """The input arrays, allocated on the current GPU at the first call."""
        if not self._inputs:
            with self._pool.using():
                self._inputs = [cuda.cupy().empty(shape, np.float32) for shape in self._shapes]
        return self._inputs

    @property
    def is_captured(self) -> bool:
        """Whether the pass is captured and can be launched: its communicator, if any, is not aborted."""
        return self._graph is not None and not (self._communicator and self._communicator.aborted)

    def run(self, compute: Callable[[Sequence[Any]], Any]) -> Any:
        """Launch the graph of compute(inputs), captured at the first call; return the result of ``compute``."""
        if not self.is_captured:
            self._graph = None

            def call() -> None:
                self._result = compute(self.inputs)

            try:
                with self._pool.using():
                    self._graph = cuda.captured(call, self.rank.gpu.stream)
            except Exception as error:
                raise CaptureError(f"expected a pass that a CUDA graph can repeat, got {error}") from error
            self._communicator = self.rank.group.communicator
        return self.launch()

    def launch(self) -> Any:
        """Queue the captured launches on the rank's stream; return the result of ``compute`` at the capture."""
        self.rank.launch(self._graph)
        return self._result


class Graphs:
    """The passes of a network on data of one set of shapes, in a separate memory pool."""

    def __init__(self, shapes: Hashable, gpus: Sequence[Gpu]) -> None:
        self.shapes, self._gpus = shapes, gpus
        for gpu in gpus:
            with gpu.device:
                # Free the first step's memory for the passes.
                cuda.cupy().get_default_memory_pool().free_all_blocks()
        self._pool, self._passes = Pool(gpus), dict[Hashable, GraphPass]()
        #: Whether a pass could not be captured. Then no other pass is captured, since it would read that pass's memory.
        self.refused = False
        #: The kind of the last step's backward pass, None if that pass read gradients to outputs.
        self.backward: Hashable = None
        #: Returns the forward pass whose values are in the memory, or None.
        self.user: Callable[[], Any] = lambda: None

    def of(self, rank: Rank, kind: Hashable, shapes: Sequence[Shape]) -> GraphPass:
        """Return a rank's pass of a kind, for inputs of these shapes, made at the first call."""
        found = self._passes.setdefault((rank.number, kind, *shapes), GraphPass(self._pool, rank, shapes))
        found.rank = rank
        return found

    def drop(self, refuse: bool) -> None:
        """Drop the passes, and free their memory except arrays that a forward pass still holds.

        refuse: make ``GraphCache.take`` return None for these shapes from now on.
        """
        self.refused |= refuse
        self._passes.clear()
        self._pool.free()
        self._pool = Pool(self._gpus)


class GraphCache:
    """Decides which steps of a network use CUDA graphs; the caller holds the locks of the network's GPUs."""

    def __init__(self) -> None:
        self._last: Hashable = None
        self._graphs: Graphs | None = None
        engine.caches.add(self)

    def user(self) -> Any:
        """Return the forward pass whose values are in the memory, or None."""
        graphs = self._graphs
        return graphs.user() if graphs else None

    def take(self, shapes: Hashable, gpus: Sequence[Gpu]) -> Graphs | None:
        """Return the graphs for data of these shapes, which two steps in a row with them make; None before that.

        Also None while a forward pass uses the graphs' memory, and after a failed capture.
        """
        again, self._last = self._last == shapes, shapes
        graphs = self._graphs
        if graphs and graphs.user() is not None:
            return None
        if again and not (graphs and graphs.shapes == shapes):
            # Free the memory of the old graphs for the new ones.
            self._graphs = graphs = None
            self._graphs = graphs = Graphs(shapes, gpus)
        return graphs if graphs and graphs.shapes == shapes and not graphs.refused else None

    def clear(self) -> None:
        """Free the memory, as soon as no forward pass uses it; any thread may call this."""
        graphs = self._graphs
        if not (graphs and graphs.refused):
            self._graphs = self._last = None
