"""A network for one batch size: each node's computation, the values' memory offsets, and the calls in order.

One block of memory stores all values between the layers. A value lives from the node that computes it to the last node
that reads it; values that do not live at the same time may overlap. The largest are placed first, each as low as the
values placed before allow (greedy by size: Y. Pisarchyk and J. Lee, Efficient Memory Management for Deep Neural Net
Inference, 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ece408_op.graph.symbol_graph import Node
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import ceil_div, round_up

from ._definition import Arrays, Shape
from ._formats import SCALE_BYTES, Accepts, SplitArray, split_bytes, with_formats
from ._network import Network, read_values

#: Values begin at multiples of this many bytes, for the widest loads and the libraries.
ALIGNMENT = 256

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

    def __init__(self, arrays: Arrays, node: Node) -> None:
        self._arrays, self._node = arrays, node
        # Other operators allocate memory for what they compute in between.
        self.repeatable = node.operator.moves and not node.epilogue

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        def call() -> None:
            self._node.operator.compute(self._arrays, inputs, out)
            if self._node.epilogue:
                self._node.epilogue.compute(self._arrays, [out], out)

        return call


class Timed(Computation):
    """A layer whose runs can be timed; ``op_times`` reports convolutions' times. ``name`` is the implementation's."""

    name = ""

    def __init__(self, node: Node) -> None:
        self.node = node
        #: Times the next runs; None: they are not timed.
        self.measure: Measure | None = None
        #: The timed runs that ``Batch.take`` has not taken yet.
        self.intervals: list[Interval] = []

    def timed(self, convolve: Call) -> Call:
        """Return a call that makes ``convolve``, the layer's call, and times it if ``measure`` is set."""

        def call() -> None:
            if self.measure is None:
                convolve()
            else:
                self.intervals.append(self.measure(convolve))

        return call


def arrays_of(inputs: Sequence[Any], out: Any) -> dict[str, Any]:
    """Return the arrays by their names in programs: x, x1, ..., y.

    For split activations, the scales are x_scales, scales1, ..., y_scales.
    """
    names = [("x", "x_scales"), *((f"x{number}", f"scales{number}") for number in range(1, len(inputs)))]
    found: dict[str, Any] = {}
    for (values, scales), array in zip((*names, ("y", "y_scales")), (*inputs, out)):
        found |= {values: array.values, scales: array.scales} if isinstance(array, SplitArray) else {values: array}
    return found


class ProgramComputation(Computation):
    """A node that one program computes, from the arrays of ``named(inputs, out)`` and those that ``prepare`` makes."""

    def __init__(self, program: cuda.Program, named: Callable[..., dict[str, Any]] = arrays_of) -> None:
        self._program, self._named, self.scratch = program, named, program.plan.scratch_bytes
        self._parameters: dict[str, Any] = {}

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        arrays = {**self._named(inputs, out), **self._parameters}
        return cuda.prepared_launch(self._program, self._program.plan.images_per_launch, arrays, scratch)


def in_order(*calls: Call) -> Call:
    """Return one call that makes several calls in order."""

    def call() -> None:
        for one in calls:
            one()

    return call if len(calls) != 1 else calls[0]


@dataclass(frozen=True)
class MemoryPlan:
    """The memory offsets of all values.

    shapes: those of all values. offsets: byte offsets in the block, of the values in it. variables: the number of the
    variable whose array a value shares, for data, parameters and views of them. scratch: byte offsets of nodes' scratch
    memory. bytes: the block's size.
    """

    shapes: Mapping[int, Shape]
    offsets: Mapping[int, int]
    variables: Mapping[int, int]
    scratch: Mapping[int, int]
    bytes: int


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
        #: The numbers that data and parameters have in the argument ``network``, by those in ``self.network``.
        self._original = dict(zip((*self.network.data, *self.network.parameters), variables))
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
        self.repeatable = False

    @property
    def bytes(self) -> int:
        """The bytes of the block that stores values and the scales of the split ones."""
        return self._scales_at + sum(SCALE_BYTES * self.plan.shapes[value][0] for value in self._split)

    def prepare(self, parameters: Mapping[int, Any]) -> None:
        """Give every computation its parameters, by number in the given network; call this again when they change."""
        for number, computation in self.computations.items():
            computation.prepare([parameters.get(self._original.get(value, -1)) for value in self._reads[number]])
        self.repeatable = {one.repeatable for one in self.computations.values()} == {True}

    def bind(self, variables: Mapping[int, Any], view: Callable[[int, Shape], Any]) -> tuple[Call, list[Any]]:
        """Return the call that computes the network, and its outputs, which the next run overwrites.

        variables: data and parameters by their numbers in the network given to ``__init__``. view: view(offset, shape)
        returns a float32 array at a byte offset of the memory block, which has ``bytes`` bytes.
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
                if value in self.plan.variables:
                    variable = self._original[self.plan.variables[value]]
                    values[value] = variables[variable].reshape(shape)
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


def plan(
    network: Network,
    shapes: Mapping[int, Shape],
    scratch: Mapping[int, int] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> MemoryPlan:
    """Place all values and each node's scratch memory. sizes: the bytes of values that are not float32 arrays."""
    bytes_of = {value: ITEM_BYTES * prod(shape) for value, shape in shapes.items()} | dict(sizes or {})
    last = {value: number for number, node in network.operators for value in [number, *read_values(node)]}
    last.update(dict.fromkeys(network.outputs, len(network.graph.nodes)))
    variables = {*network.data, *network.parameters}
    # For each value, the first value in the same memory, which lives until the last read of any of them.
    owners = {value: value for value in variables}
    lives: dict[int, list[int]] = {}
    for number, node in network.operators:
        read = read_values(node)
        owner = owners[read[0]] if read else number
        if not node.operator.view:
            # The output may overwrite the first input after the last read of its memory.
            shared = [value for value, other in owners.items() if other == owner] if node.operator.inplace else []
            free = owner not in variables and all(last.get(value, -1) <= number for value in shared)
            others = [owners[value] for value in read[1:]]
            if not (shared and free and bytes_of[read[0]] == bytes_of[number] and owner not in others):
                owner = number
        owners[number] = owner
        if owner == number:
            lives[number] = [number, last[number]]
        elif owner in lives:
            lives[owner][1] = max(lives[owner][1], last[number])
    # Scratch memory is a value that lives only during its node; its key is negative.
    wanted = [(bytes_of[value], first, end, value) for value, (first, end) in lives.items()]
    wanted += [(count, number, number, -1 - number) for number, count in (scratch or {}).items() if count]
    offsets, total = _place(wanted)
    return MemoryPlan(
        dict(shapes),
        {value: offsets[owner] for value, owner in owners.items() if owner not in variables},
        {value: owner for value, owner in owners.items() if owner in variables},
        {-1 - key: offset for key, offset in offsets.items() if key < 0},
        total,
    )


def _place(wanted: Sequence[tuple[int, int, int, int]]) -> tuple[dict[int, int], int]:
    """Return offsets by key for (bytes, first node, last node, key), and the bytes of the block."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    for count, first, last, key in sorted(wanted, key=lambda row: (-row[0], row[1])):
        room = round_up(max(count, 1), ALIGNMENT)
        offset = 0
        for start, end, begun, ended in sorted(placed):
            if begun <= last and first <= ended and start < offset + room and offset < end:
                offset = end
        placed.append((offset, offset + room, first, last))
        offsets[key] = offset
    return offsets, max((end for _, end, _, _ in placed), default=0)
