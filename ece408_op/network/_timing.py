"""The times of a network's convolutions, which ``op_times`` reports: CUDA events around each, where somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ece408_op.graph.symbol_graph import Node
from ece408_op.plugin import op_times
from ece408_op.runtime import cuda

from ._definition import Shape
from ._schedule import Call, Computation

#: Queues a call between two events, and returns these.
Measure = Callable[[Call], "tuple[Any, Any]"]


class Timer:
    """What all convolutions of a network ask: how to time a call, or None while nobody asks for times."""

    measure: Measure | None = None


class Timed(Computation):
    """A convolution whose runs can be timed; ``name`` is the implementation's."""

    name = ""

    def __init__(self, timer: Timer, node: Node) -> None:
        self._timer, self._node = timer, node
        #: The events around each timed run, until somebody takes them.
        self.intervals: list[tuple[Any, Any]] = []

    def timed(self, convolve: Call) -> Call:
        """Return a call that also times the convolution."""

        def call() -> None:
            if self._timer.measure is None:
                convolve()
            else:
                self.intervals.append(self._timer.measure(convolve))

        return call

    def taken(self) -> list[tuple[Any, Any]]:
        """Return the intervals, and forget them."""
        intervals, self.intervals = self.intervals, []
        return intervals

    def op_time(self, x: Shape) -> op_times.OpTime:
        """Return the time of the runs since the last call, which have ended, for data of shape x in all."""
        elapsed = cuda.cupy().cuda.get_elapsed_time
        seconds = sum(elapsed(start, end) for start, end in self.taken()) / 1000
        problem = self._node.operator.problem(x)
        return op_times.OpTime(self._node.name, problem, self.name, "gpu", seconds)
