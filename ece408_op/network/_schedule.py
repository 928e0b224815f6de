"""A network for one batch size: each node's computation, the values' memory offsets, and the calls in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ece408_op.graph.symbol_graph import Node
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import ceil_div, round_up

from ._definition import Arrays, Shape
from ._elementwise import ACTIVATIONS
from ._formats import SCALE_BYTES, Accepts, SplitArray, split_bytes, with_formats
from ._memory_plan import ALIGNMENT, plan
from ._network import Network, read_values

#: Queues work on the current stream, or computes synchronously.
Call = Callable[[], None]
#: The CUDA events before and after a call; and a function that queues a call between two events.
Interval = tuple[Any, Any]
Measure = Callable[[Call], Interval]


class Computation:
    """The computation of one node for one batch size, with ``scratch`` bytes of temporary memory."""

    scratch = 0
    #: Whether every call queues the same launches, memsets and copies and does nothing else, as a CUDA graph requires.
    repeatable = True

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compute the data that depend only on parameters; inputs that are not parameters are None."""

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return a call that fills the output from these arrays, with the parameters of the last ``prepare``.

        The call may run any number of times. scratch: a flat float32 array, None if no scratch is needed.
        """
        raise NotImplementedError


class ArrayComputation(Computation):
    """A node computed by its operator's ``compute`` with an array library, and then its epilogue."""

    repeatable = False

    def __init__(self, arrays: Arrays, node: Node) -> None:
        self._arrays, self._node = arrays, node

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        def call() -> None:
            self._node.operator.compute(self._arrays, inputs, out)
            if self._node.epilogue:
                ACTIVATIONS[self._node.epilogue](self._arrays.xp, out, out)

        return call


class Timed(Computation):
    """A convolution whose run times ``op_times`` reports; ``name`` is the implementation's."""

    name = ""

    def __init__(self, node: Node) -> None:
        self._node = node
        #: Times the next runs; None: they are not timed.
        self.measure: Measure | None = None
        #: The timed runs that ``Batch.take`` has not taken yet.
        self.intervals: list[Interval] = []

    def timed(self, convolve: Call) -> Call:
        """Return a call that also times the convolution."""

        def call() -> None:
            if self.measure is None:
                convolve()
            else:
                self.intervals.append(self.measure(convolve))

        return call


class ProgramComputation(Computation):
    """A node without parameters that one program computes."""

    def __init__(self, program: cuda.Program) -> None:
        self._program = program

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        batch = self._program.plan.images_per_launch
        return cuda.prepared_launch(self._program, batch, arrays_of(inputs, out))


def arrays_of(inputs: Sequence[Any], out: Any) -> dict[str, Any]:
    """Return the arrays by their names in programs: x, x1, ..., y.

    For split activations, the scales are x_scales, scales1, ..., y_scales.
    """
    names = [("x", "x_scales"), *((f"x{number}", f"scales{number}") for number in range(1, len(inputs)))]
    found: dict[str, Any] = {}
    for (values, scales), array in zip((*names, ("y", "y_scales")), (*inputs, out)):
        found |= {values: array.values, scales: array.scales} if isinstance(array, SplitArray) else {values: array}
    return found


def in_order(*calls: Call | None) -> Call:
    """Return one call that makes several calls in order; a None is skipped."""
    some = [call for call in calls if call is not None]

    def call() -> None:
        for one in some:
            one()

    return call if len(some) != 1 else some[0]


class Schedule:
    """A network for one batch size.

    choose: returns the computation of a node, given its input shapes, its output shape, whether it reads split
    activations and whether it computes them (``Chooser.choose``). accepts: see ``_formats.Accepts``.
    """

    def __init__(
        self,
        network: Network,
        shapes: Mapping[int, Shape],
        choose: Callable[[Node, Sequence[Shape], Shape, bool, bool], Computation],
        accepts: Accepts,
    ) -> None:
        self.network, shapes, self._split = with_formats(network, shapes, accepts)
        variables = (*network.data, *network.parameters)
        #: The numbers that data and parameters have in the argument ``network``.
        self._given = dict(zip((*self.network.data, *self.network.parameters), variables))
        self._reads = {number: read_values(node) for number, node in self.network.operators}
        self.computations: dict[int, Computation] = {}
        for number, node in self.network.operators:
            if not node.operator.view:
                reads = self._reads[number]
                is_split = not self._split.isdisjoint(reads), number in self._split
                computation = choose(node, [shapes[value] for value in reads], shapes[number], *is_split)
                self.computations[number] = computation
        scratch = {number: one.scratch for number, one in self.computations.items()}
        sizes = {value: split_bytes(shapes[value]) for value in self._split}
        self.plan = plan(self.network, shapes, scratch, sizes)
        self._scales_at = round_up(self.plan.bytes, ALIGNMENT)
        #: Whether a CUDA graph can repeat the work: all computations are repeatable, and there is at least one.
        self.repeatable = {one.repeatable for one in self.computations.values()} == {True}

    @property
    def bytes(self) -> int:
        """The bytes of the block that stores values and the scales of the split ones."""
        return self._scales_at + sum(SCALE_BYTES * self.plan.shapes[value][0] for value in self._split)

    def prepare(self, parameters: Mapping[int, Any]) -> None:
        """Give every computation its parameters, by value's number; call this again when they have changed."""
        for number, computation in self.computations.items():
            computation.prepare([parameters.get(self._given.get(value, -1)) for value in self._reads[number]])

    def bind(self, given: Mapping[int, Any], view: Callable[[int, Shape], Any]) -> tuple[Call, list[Any]]:
        """Return the call that computes the network, and its outputs, which the next run overwrites.

        given: data and parameters by value's number. view: view(offset, shape) returns a float32 array at a byte offset
        of the memory block, which has ``bytes`` bytes.
        """
        values: dict[int, Any] = {}
        scales_at = self._scales_at
        for value in sorted(self._split):
            shape = self.plan.shapes[value]
            scales = view(scales_at, (SCALE_BYTES // ITEM_BYTES * shape[0],))
            elements = split_bytes(shape) // ITEM_BYTES
            values[value] = SplitArray(view(self.plan.offsets[value], (elements,)), scales, shape)
            scales_at += scales.nbytes

        def array(value: int) -> Any:
            if value not in values:
                shape = self.plan.shapes[value]
                if value in self.plan.given:
                    values[value] = given[self._given[self.plan.given[value]]].reshape(shape)
                else:
                    values[value] = view(self.plan.offsets[value], shape)
            return values[value]

        calls = []
        if self._split:
            all_scales = view(self._scales_at, ((scales_at - self._scales_at) // ITEM_BYTES,))
            calls.append(lambda: cuda.fill_with_zeros(all_scales, None))
        for number, one in self.computations.items():
            offset = self.plan.scratch.get(number)
            scratch = None if offset is None else view(offset, (ceil_div(one.scratch, ITEM_BYTES),))
            calls.append(one.bind([array(value) for value in self._reads[number]], array(number), scratch))
        return in_order(*calls), [array(value) for value in self.network.outputs]
