"""Training passes as CUDA graphs: the second step of a network captures its launches, which later steps repeat.

Python takes longer to queue the launches of a pass of ResNet-50 than the GPU takes to compute them. A graph reads and
writes the same memory at each launch, and the network keeps this memory until the batch has another size twice in a
row, or memory runs out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import cuda, nccl

from . import engine
from ._data_parallel import Rank, RetryError
from ._definition import Shape


class CaptureError(RetryError):
    """A pass cannot be captured."""


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
