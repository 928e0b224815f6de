"""A network for chunks of one size on one GPU: memory, launches as CUDA graphs, and the times of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import cuda
from ece408_op.runtime.compile_ahead import compile_ahead

from ._definition import Shape
from ._gpu import Chooser
from ._layers import Convolution
from ._network import Network
from ._schedule import Call, Interval, Measure, Schedule, Timed

#: Chunks on the device at a time: copies of one overlap with the computation of the other.
STAGES = 2


@dataclass
class _Bound:
    """The network's work on one set of data buffers, and the CUDA graph that repeats it from the second run on."""

    call: Call
    outputs: list[Any]
    runs: int = 0
    graph: Any = None


def _seconds(intervals: Iterable[Interval]) -> float:
    """Return the sum of all intervals' times in seconds; the GPU has reached all their events."""
    elapsed = cuda.cupy().cuda.get_elapsed_time
    return sum(elapsed(start, end) for start, end in intervals) / 1000


class Batch:
    """The network for chunks of ``images`` images: one block of memory, and sets of data and output buffers.

    One set suffices if a chunk is the whole batch.
    """

    def __init__(self, network: Network, chooser: Chooser, gpu: Gpu, images: int, data: Sequence[Shape]) -> None:
        cp, whole = cuda.cupy(), images == data[0][0]
        self.images, self._gpu = images, gpu
        shapes = network.infer(data, None if whole else images)
        self.schedule = Schedule(network, shapes, chooser.choose, chooser.accepts)
        self.block = cp.cuda.alloc(max(1, self.schedule.bytes))
        stages = range(1 if whole else STAGES)
        self.data = [[cp.zeros(shapes[value], np.float32) for value in network.data] for _ in stages]
        self.outputs = [[cp.empty(shapes[value], np.float32) for value in network.outputs] for _ in stages]
        self._network, self._parameters = network, dict[int, Any]()
        self._bound: dict[tuple[int, ...], _Bound] = {}
        timed = (one for one in self.schedule.computations.values() if isinstance(one, Timed))
        self._convolutions = [one for one in timed if isinstance(one.node.operator, Convolution)]
        #: Each convolution's node, the shape of one image of its data, and its implementation.
        self.records = [
            (one.node, self.schedule.plan.shapes[one.node.inputs[0].node][1:], one.name) for one in self._convolutions
        ]
        #: The seconds of a run, 0 if unknown, and each convolution's share of that time.
        self.seconds = 0.0
        self._shares: np.ndarray = np.zeros(len(self.records))
        self._graph_runs: list[Interval] = []

    def prepare(self, parameters: dict[int, Any]) -> None:
        """Take new parameters, by value's number."""
        self.schedule.prepare(parameters)
        self._parameters = parameters
        self._bound.clear()

    def warm_up(self, parameters: dict[int, Any]) -> None:
        """Compile and run everything once before timed runs, and measure the convolutions' shares of the time."""

        def launch() -> None:
            self.prepare(parameters)
            self.run(self.data[0])

        compile_ahead(launch, self._gpu.device.id)
        launch()
        if self.schedule.repeatable:
            self._call(self._bound_to(self.data[0]), self._measured)
            self.run(self.data[0], timed=True)
            self._gpu.stream.synchronize()
            self.seconds = _seconds(self._graph_runs)
            self._shares = np.array([_seconds(one.intervals) / self.seconds for one in self._convolutions])
            self.take()

    def run(self, data: Sequence[Any], timed: bool = False) -> list[Any]:
        """Queue the network's work on the current stream; return its outputs, which the next run overwrites."""
        bound = self._bound_to(data)
        bound.runs += 1
        if bound.runs > 1 and self.schedule.repeatable:
            if bound.graph is None:
                bound.graph = cuda.captured(bound.call, self._gpu.stream)
            interval = self._between_events(lambda: bound.graph.launch(cuda.cupy().cuda.get_current_stream()))
            self._graph_runs += [interval] if timed else []
        else:
            self._call(bound, self._measured if timed else None)
        return bound.outputs

    def take(self) -> Callable[[], np.ndarray]:
        """Take the runs since the last call; return a function that returns the convolutions' seconds in them.

        Call that function when the GPU has completed the runs. It holds none of the GPU's memory.

        Events inside a CUDA graph would take longer than small layers. So a graph is timed as a whole, and each
        convolution gets the share of that time that ``warm_up`` measured.
        """
        shares, runs, self._graph_runs = self._shares, self._graph_runs, []
        intervals = [one.intervals for one in self._convolutions]
        for one in self._convolutions:
            one.intervals = []
        return lambda: shares * _seconds(runs) + np.array([_seconds(some) for some in intervals])

    def _call(self, bound: _Bound, measure: Measure | None) -> None:
        """Queue the work; ``measure`` times each convolution, None does not."""
        try:
            for one in self._convolutions:
                one.measure = measure
            bound.call()
        finally:
            # ``measure`` refers to this batch: the reference cycle would keep its memory until a garbage collection.
            for one in self._convolutions:
                one.measure = None

    def _bound_to(self, data: Sequence[Any]) -> _Bound:
        key = tuple(array.data.ptr for array in data)
        if key not in self._bound:
            if len(self._bound) > STAGES:
                self._bound.clear()
            given = {**self._parameters, **dict(zip(self._network.data, data))}
            self._bound[key] = _Bound(*self.schedule.bind(given, self._view))
        return self._bound[key]

    def _measured(self, convolve: Call) -> Interval:
        """Block the stream until a convolution and both events are queued, so that launch time is not measured."""
        with self._gpu.blocked():
            return self._between_events(convolve)

    @staticmethod
    def _between_events(call: Callable[[], None]) -> Interval:
        start, end = (cuda.cupy().cuda.Event() for _ in range(2))
        start.record()
        call()
        end.record()
        return start, end

    def _view(self, offset: int, shape: Shape) -> Any:
        """Return the float32 array of that shape at a byte offset of the block."""
        return cuda.cupy().ndarray(shape, np.float32, self.block + offset)
