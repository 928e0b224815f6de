"""The times of a network's convolutions, which ``op_times`` reports: CUDA events around each, where somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ece408_op.graph.symbol_graph import Node
from ece408_op.runtime import cuda

from ._schedule import Call, Computation

#: The events before and after a call, and what queues a call between two events.
Interval = tuple[Any, Any]
Measure = Callable[[Call], Interval]


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the time between the events of all intervals, which have ended."""
    elapsed = cuda.cupy().cuda.get_elapsed_time
    return sum(elapsed(start, end) for start, end in intervals) / 1000


class Timer:
    """What all convolutions of a network ask: how to time a call, or None while nobody asks for times."""

    measure: Measure | None = None


class Timed(Computation):
    """A convolution whose runs can be timed; ``name`` is the implementation's."""

    name = ""

    def __init__(self, timer: Timer, node: Node) -> None:
        self._timer, self._node = timer, node
        #: The timed runs that nobody has asked for yet.
        self.intervals: list[Interval] = []

    def timed(self, convolve: Call) -> Call:
        """Return a call that also times the convolution."""

        def call() -> None:
            if self._timer.measure is None:
                convolve()
            else:
                self.intervals.append(self._timer.measure(convolve))

        return call
