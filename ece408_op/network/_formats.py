"""Decide which values of a network are split activations, and insert nodes that convert to and from float32.

A split activation (``kernels.cuda.split_precision``) is the format that the tensor-core kernels read: each float32 as
two 16-bit floats, in NHWC. Between layers that compute split activations, no conversion is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Optional

import numpy as np

from ece408_op.graph.symbol_graph import VARIABLE, Entry, Graph, Node
from ece408_op.kernels.cuda.split_precision import split_form
from ece408_op.problem import ITEM_BYTES

from ._definition import Operator, Shape
from ._fusion import Combination
from ._layers import FullyConnected
from ._network import Network, named_inputs, of_graph, read_values


class SplitUse(Enum):
    """How a node can compute split activations."""

    BETWEEN = "from split activations, profitable only next to other nodes that use them"
    PROFITABLE = "from split activations, profitable even if the input must be converted"
    FROM_FLOAT32 = "from float32 values, which the node converts itself"


#: Returns how a node can compute split activations, given the shapes of its inputs and of its output, or None.
Accepts = Callable[[Node, Sequence[Shape], Shape], Optional[SplitUse]]
#: Bytes per image of a split activation's scales.
SCALE_BYTES = 8
#: The inputs that may be split. All other inputs, except a Combination's factor, must be parameters.
_ACTIVATIONS = ("data", "residual")


class Conversion(Operator):
    """Conversion of float32 values in NCHW to split activations (split), or back (join)."""

    names = ("split", "join")


@dataclass(frozen=True)
class SplitArray:
    """A split activation on the GPU: its values, its images' scales (B, 2) of int32, and its shape (B, C, H, W)."""

    values: Any
    scales: Any
    shape: Shape


def image_shape(shape: Shape) -> Shape:
    """Return the shape (B, C, H, W) of a value of at least two dimensions."""
    return (*shape, 1, 1)[:4] if len(shape) < 4 else shape


def split_bytes(shape: Shape) -> int:
    """Return the bytes of a split activation without its scales."""
    components, *sizes = split_form.activation_shape(*image_shape(shape))
    return ITEM_BYTES * int(np.prod(sizes, dtype=np.int64)) * components // 2


def with_formats(
    network: Network, shapes: Mapping[int, Shape], accepts: Accepts
) -> tuple[Network, dict[int, Shape], frozenset[int]]:
    """Return the network with conversion nodes, the shapes of its values, and the values that are split activations."""
    reads = _split_nodes(network, shapes, accepts)
    old, nodes = network.graph.nodes, list[Node]()
    numbers: dict[tuple[int, bool], int] = {}  # of new nodes, by the old number and whether the value is split

    def add(node: Node, value: int, split: bool) -> int:
        nodes.append(node)
        return numbers.setdefault((value, split), len(nodes) - 1)

    def number_of(value: int, split: bool) -> int:
        if (value, split) in numbers:
            return numbers[value, split]
        if not split and value not in reads:  # a view: added when its first reader needs it
            return copied(value)
        op, source = "split" if split else "join", Entry(number_of(value, not split))
        return add(Node(op, f"{old[value].name}_{op}", inputs=[source], operator=Conversion(op)), value, split)

    def copied(value: int) -> int:
        split = reads.get(value, {})
        inputs = [Entry(number_of(split.get(e.node, e.node), e.node in split), e.output) for e in old[value].inputs]
        return add(replace(old[value], inputs=inputs), value, value in reads)

    for value, node in enumerate(old):
        if node.op == VARIABLE or not node.operator.view:
            copied(value)
    graph = Graph(nodes, [Entry(number_of(head.node, False)) for head in network.graph.heads], network.graph.attrs)
    new_shapes = {number: shapes[value] for (value, _), number in numbers.items() if value in shapes}
    return (
        of_graph(graph, network.text),
        new_shapes,
        frozenset(number for (_, split), number in numbers.items() if split),
    )


def _split_nodes(network: Network, shapes: Mapping[int, Shape], accepts: Accepts) -> dict[int, dict[int, int]]:
    """Return the nodes that compute split activations, each with a mapping from its activation inputs to values.

    The node reads those values instead: an input that is a view is replaced by the value before the view, if both have
    the same shape or the reader is a FullyConnected that flattens. The mapping is empty for SplitUse.FROM_FLOAT32,
    unless an input is a split activation anyway.
    """
    found: dict[int, dict[int, int]] = {}
    for value, node in network.operators:
        inputs = [source for name, source in named_inputs(node) if name in _ACTIVATIONS]
        others = {source for name, source in named_inputs(node) if name not in _ACTIVATIONS}
        known = others <= {*network.parameters} or isinstance(node.operator, Combination)
        if node.operator.view or not inputs or not known or {*inputs} & {*network.parameters, *others}:
            continue
        sources = {each: _before_views(network, shapes, node, each) for each in inputs}
        form = accepts(node, [shapes[sources.get(each, each)] for each in read_values(node)], shapes[value])
        if form is SplitUse.FROM_FLOAT32 and found.keys().isdisjoint(sources.values()):
            found[value] = {}
        elif form is SplitUse.PROFITABLE or (form is not None and not found.keys().isdisjoint(sources.values())):
            found[value] = sources
    # A node gains nothing if all nodes before and after it compute in float32.
    alone: Collection[int] = found
    while alone:
        read = {source for sources in found.values() for source in sources.values()}
        alone = [value for value, sources in found.items() if value not in read and not {*sources.values()} & {*found}]
        for value in alone:
            del found[value]
    return found


def _before_views(network: Network, shapes: Mapping[int, Shape], reader: Node, value: int) -> int:
    node = network.graph.nodes[value]
    while node.op != VARIABLE and node.operator.view:
        source = node.inputs[0].node
        flattened = isinstance(reader.operator, FullyConnected) and reader.operator.flatten
        if shapes[source] != shapes[value] and not (flattened and shapes[source][0] == shapes[value][0]):
            break
        value, node = source, network.graph.nodes[source]
    return value
