"""Training passes as CUDA graphs: from its second step on, a network's launches are captured once and then repeated.

Python takes longer to queue the launches of a pass of ResNet-50 than the GPU takes to compute them. A graph reads and
fills the same memory at each launch, which is therefore the network's own until the batch has another size twice in a
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
    """A pool of the GPUs' memory that is freed when its last array is gone, and not before.

    CuPy never frees what a pool leaves. Where there is no room, it frees what no array of the pool uses at the moment,
    which launches that are captured do: so the pool's blocks have another owner too.
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
        # A tuple lets its last element go first.
        owner = self, pointer
        return memory.MemoryPointer(memory.UnownedMemory(pointer.ptr, size, owner, pointer.device_id), 0)

    # At the interpreter's exit, ``sys`` may be gone.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.free()

    def free(self) -> None:
        """Free what no array uses; no pass that is captured may be launched again."""
        self._blocks.clear()
        for gpu in self._gpus:
            with gpu.device:
                self._pool.free_all_blocks()


class GraphPass:
    """One pass of one rank as a CUDA graph: its inputs on the GPU, of these shapes, and its launches."""

    def __init__(self, pool: Pool, shapes: Sequence[Shape]) -> None:
        self._pool, self._shapes, self._inputs = pool, shapes, list[Any]()
        #: Pinned memory for its inputs, if they are queued before the pass that they follow ends.
        self.pinned: Sequence[np.ndarray] = ()
        self._graph: Any = None
        self._result: Any = None
        #: The communicator that the graph uses, if any.
        self._communicator: nccl.Communicator | None = None

    @property
    def inputs(self) -> Sequence[Any]:
        """The arrays on the GPU, the current one."""
        if not self._inputs:
            with self._pool.using():
                self._inputs = [cuda.cupy().empty(shape, np.float32) for shape in self._shapes]
        return self._inputs

    @property
    def is_captured(self) -> bool:
        """Whether ``launch`` can be called."""
        return self._graph is not None and not (self._communicator and self._communicator.aborted)

    def run(self, compute: Callable[[Sequence[Any]], Any], rank: Rank) -> Any:
        """Launch what ``compute`` launches for the inputs, captured at the first call; return what it returned then."""
        if not self.is_captured:
            self._graph = None

            def call() -> None:
                self._result = compute(self.inputs)

            try:
                with self._pool.using():
                    self._graph = cuda.captured(call, rank.gpu.stream)
            except Exception as error:
                raise CaptureError(f"expected a pass that a CUDA graph can repeat, got {error}") from error
            self._communicator = rank.group.communicator
        return self.launch(rank)

    def launch(self, rank: Rank) -> Any:
        """Queue the captured launches on the rank's stream; return what ``compute`` returned."""
        rank.launch(self._graph)
        return self._result


class Graphs:
    """The passes of a network on data of one set of shapes, in a memory pool of their own."""

    def __init__(self, shapes: Hashable, gpus: Sequence[Gpu]) -> None:
        self.shapes, self._gpus = shapes, gpus
        for gpu in gpus:
            with gpu.device:
                # The first step's memory is free for the passes.
                cuda.cupy().get_default_memory_pool().free_all_blocks()
        self._pool, self._passes = Pool(gpus), dict[Hashable, GraphPass]()
        #: Whether a pass could not be captured. No other one is then: it would read what that one has filled.
        self.refused = False
        #: The kind of the last step's backward pass, if it depends on labels alone.
        self.backward: Hashable = None
        #: Returns the forward pass whose values are in the memory, or None.
        self.user: Callable[[], Any] = lambda: None

    def of(self, rank: Rank, kind: Hashable, shapes: Sequence[Shape]) -> GraphPass:
        """Return a rank's pass of a kind, for inputs of these shapes."""
        return self._passes.setdefault((rank.number, kind, *shapes), GraphPass(self._pool, shapes))

    def take_backward(self) -> Hashable:
        """Return ``backward``, once."""
        kind, self.backward = self.backward, None
        return kind

    def refuse(self) -> None:
        """Never repeat these passes."""
        self.refused = True
        self.drop()

    def drop(self) -> None:
        """Forget the passes, and free their memory but for the values of a forward pass."""
        self._passes.clear()
        self._pool.free()
        self._pool = Pool(self._gpus)


class GraphCache:
    """Decides which steps of a network graphs repeat; the caller has the locks of the network's GPUs."""

    def __init__(self) -> None:
        self._last: Hashable = None
        self._graphs: Graphs | None = None
        engine.caches.add(self)

    def user(self) -> Any:
        """Return the forward pass whose values are in the memory, or None."""
        graphs = self._graphs
        return graphs.user() if graphs else None

    def take(self, shapes: Hashable, gpus: Sequence[Gpu]) -> Graphs | None:
        """Return the graphs for data of these shapes; None for the first step, and while the memory is in use."""
        again, self._last = self._last == shapes, shapes
        graphs = self._graphs
        if graphs and graphs.user() is not None:
            return None
        if again and not (graphs and graphs.shapes == shapes):
            # The old ones' memory is free for the new ones.
            self._graphs = graphs = None
            self._graphs = graphs = Graphs(shapes, gpus)
        return graphs if graphs and graphs.shapes == shapes and not graphs.refused else None

    def clear(self) -> None:
        """Free the memory, but not before its forward pass is gone; any thread may call it."""
        graphs = self._graphs
        if not (graphs and graphs.refused):
            self._graphs = self._last = None
