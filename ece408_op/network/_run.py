"""A planned network at work, on arrays of any library: NumPy's here, CuPy's in _gpu.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Protocol

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.launch import ceil_div

from ._elementwise import ACTIVATIONS
from ._op_definition import Arrays, Shape, size
from ._plan import Given, Plan, plan, read_values
from .graph import Network, Node


class NumpyArrays:
    """NumPy: the reference that every operator is tested in, without a GPU."""

    xp: Any = np

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """The product of two stacks of matrices."""
        np.matmul(a, b, out=out)

    def erf(self, x: Any, out: Any) -> None:
        """The error function, by the standard library's."""
        out[...] = np.frompyfunc(math.erf, 1, 1)(x).astype(np.float32)


class Step(Protocol):
    """What computes one node for one batch size."""

    #: Bytes of memory beside inputs and output.
    scratch: int

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Work out what depends on parameters alone; the inputs that are no parameters are None."""

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """What fills the output from these arrays, again and again, and what was prepared last.

        scratch: the memory beside as a flat float32 array, None where there is none.
        """


class Plain:
    """A node computed by its record's own function, with a library's functions, and its activation after it."""

    scratch = 0

    def __init__(self, arrays: Arrays, node: Node) -> None:
        self._arrays, self._node = arrays, node

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Nothing depends on parameters alone."""

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """The record's function, on these arrays."""

        def fill() -> None:
            self._node.kind.compute(self._arrays, self._node.settings, inputs, out)
            if self._node.activation:
                ACTIVATIONS[self._node.activation](self._arrays, out, out)

        return fill


class Program:
    """The network for one batch size: its plan and its steps; ``step`` makes a node's, from the shapes around it."""

    def __init__(
        self,
        network: Network,
        shapes: Mapping[int, Shape],
        step: Callable[[Node, Sequence[Shape], Shape], Step],
    ) -> None:
        self.network = network
        self._reads = [read_values(node) for node in network.nodes]
        self.steps = [
            step(node, [shapes[value] for value in reads], shapes[node.output])
            for node, reads in zip(network.nodes, self._reads)
        ]
        self.plan: Plan = plan(network, shapes, [step.scratch for step in self.steps])

    def prepare(self, parameters: Mapping[int, Any]) -> None:
        """Tell every step of the parameters, by value number; again when they have changed."""
        for step, reads in zip(self.steps, self._reads):
            step.prepare([parameters.get(value) for value in reads])

    def bind(
        self, given: Mapping[int, Any], view: Callable[[int, Shape], Any]
    ) -> tuple[list[Callable[[], None]], list[Any]]:
        """What computes the network, to be called in order, and its outputs.

        given: data and parameters by value number. view: the float32 array of a shape at an offset, in bytes, of the
        block of ``plan.bytes`` bytes, which the network works in. The outputs lie in it too, until the next run.
        """
        values: dict[int, Any] = {}

        def value_of(number: int) -> Any:
            if number not in values:
                place, shape = self.plan.places[number], self.plan.shapes[number]
                values[number] = (
                    given[place.value].reshape(shape) if isinstance(place, Given) else view(place.offset, shape)
                )
            return values[number]

        calls = []
        for position, (node, step, reads) in enumerate(zip(self.network.nodes, self.steps, self._reads)):
            if node.kind.view and node.activation is None:
                continue
            block = self.plan.scratch.get(position)
            scratch = None if block is None else view(block.offset, (ceil_div(step.scratch, ITEM_BYTES),))
            calls.append(step.bind([value_of(value) for value in reads], value_of(node.output), scratch))
        return calls, [value_of(value) for _, value in self.network.outputs]


def compute(network: Network, shapes: Mapping[int, Shape], given: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """The outputs of a network by NumPy, from data and parameters by value number: the reference without a GPU.

    The memory between the layers begins as NaN.
    """
    arrays = NumpyArrays()
    program = Program(network, shapes, lambda node, inputs, output: Plain(arrays, node))
    program.prepare({v.value: given[v.value] for v in network.parameters})
    block = np.full(program.plan.bytes // ITEM_BYTES, np.nan, np.float32)

    def view(offset: int, shape: Shape) -> np.ndarray:
        start = offset // ITEM_BYTES
        return block[start : start + size(shape)].reshape(shape)

    calls, outputs = program.bind(given, view)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for call in calls:
            call()
    return [output.copy() for output in outputs]
