"""Training passes as CUDA graphs: from its second step on, a network's launches are captured once and then repeated.

Python takes longer to queue the launches of a pass of ResNet-50 than the GPU takes to compute them. A graph reads and
fills the same memory at each launch, which is therefore the network's own until the batch has another size twice in a
row, or memory runs out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ece408_op.runtime import cuda, nccl

from ._definition import Shape
from ._meeting import Member
from ._training import Forward


def _being_computed() -> bool:
    return True


class Pass:
    """One of the passes, on arrays of these shapes: its inputs on the GPU, and its launches."""

    def __init__(self, passes: Passes, shapes: Sequence[Shape]) -> None:
        self._passes, self._shapes, self._inputs = passes, shapes, list[Any]()
        #: Memory on the host for its inputs, if they are queued before the pass that they follow ends.
        self.pinned: Sequence[np.ndarray] = ()
        self._graph: Any = None
        self._found: Any = None
        #: NCCL's group, part of whose work is in the graph, if any.
        self._group: nccl.Group | None = None

    @property
    def inputs(self) -> Sequence[Any]:
        """The arrays on the GPU, the current one."""
        if not self._inputs:
            with cuda.cupy().cuda.using_allocator(self._passes.pool.malloc):
                self._inputs = [cuda.cupy().empty(shape, np.float32) for shape in self._shapes]
        return self._inputs

    @property
    def stage(self) -> int:
        """0 if the pass cannot be repeated, 1 if its launches have yet to be captured, or else 2."""
        if self._passes.refused:
            return 0
        return 1 if self._graph is None or (self._group and self._group.aborted) else 2

    def run(self, compute: Callable[[Sequence[Any]], Any], stream: Any, stage: int, member: Member | None) -> Any:
        """Put what ``compute`` launches for the inputs on the stream, the current one; return what it returned.

        What cannot be captured is computed without a graph, now and later. stage: 1 or 2. member: of the GPUs whose
        passes are at that stage at the same time.
        """
        if stage == 1 and not self._capture(compute, stream, member):
            return compute(self.inputs)
        return self.again(stream, member)

    def again(self, stream: Any, member: Member | None) -> Any:
        """Put the launches, which have been captured, on the stream; return what they fill, as ``run``."""
        if member:
            member.launch(self._graph)
        else:
            self._graph.launch(stream)
        return self._found

    def _capture(self, compute: Callable[[Sequence[Any]], Any], stream: Any, member: Member | None) -> bool:
        """Capture the launches, and return whether that was possible, for all members."""
        self._graph = self._found = None

        def call() -> None:
            self._found = compute(self.inputs)

        try:
            with cuda.cupy().cuda.using_allocator(self._passes.pool.malloc):
                self._graph = cuda.captured(call, stream)
            if member:
                member.least()
                self._group = member.meeting.group
            return True
        except Exception:
            self._passes.refused, self._graph, self._found = True, None, None
            if member:
                member.stop()
        # The error's traceback has kept the arrays of the capture until here.
        self._passes.pool.free_all_blocks()
        if member:
            member.begin_again()
        return False


class Passes:
    """The passes of a network on data of one set of shapes, in a memory pool of their own."""

    def __init__(self, shapes: Hashable) -> None:
        self.shapes = shapes
        # The first step's memory is free for the passes.
        cuda.cupy().get_default_memory_pool().free_all_blocks()
        self.pool, self._passes = cuda.cupy().cuda.MemoryPool(), dict[Hashable, Pass]()
        #: Whether something could not be captured, or had no room. Then all is computed as without graphs, since a
        #: graph reads what the passes before it have filled.
        self.refused = False
        #: The kind of the last step's backward pass, if it depends on labels alone.
        self.backward: Hashable = None
        #: Returns what uses the memory, the forward pass whose values are there, or None.
        self.used: Callable[[], Any] = _being_computed

    def of(self, kind: Hashable, shapes: Sequence[Shape]) -> Pass:
        """Return the pass of a kind, for inputs of these shapes."""
        key = kind, tuple(shapes)
        if key not in self._passes:
            # A cycle would keep the memory until the next garbage collection.
            self._passes[key] = Pass(weakref.proxy(self), shapes)
        return self._passes[key]

    def holds(self, found: Forward, ahead: Any) -> Forward:
        """Return the forward pass, with its backward pass if that is queued; the result keeps the memory."""
        found = replace(found, passes=self, ahead=ahead)
        self.used = weakref.ref(found)
        return found


class Repeated:
    """Decides which steps of a network are repeated; several threads may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Hashable = None
        self._passes: Passes | None = None
        _known.add(self)

    def take(self, shapes: Hashable) -> Passes | None:
        """Return the passes for data of these shapes; None for the first step and while the memory is in use.

        The GPU is the current one.
        """
        with self._lock:
            again, self._last = self._last == shapes, shapes
            passes = self._passes
            if passes and passes.used() is not None:
                return None
            if passes and passes.shapes == shapes:
                passes.used = _being_computed
                return passes
            self._passes = Passes(shapes) if again else passes
            return self._passes if again else None

    def clear(self) -> None:
        """Give the memory back, but not before its forward pass is gone."""
        with self._lock:
            self._passes = self._last = None


_known = weakref.WeakSet[Repeated]()


def clear() -> None:
    """Give the memory of all networks' passes back."""
    for one in list(_known):
        one.clear()


__all__ = ("Pass", "Passes", "Repeated", "clear")
