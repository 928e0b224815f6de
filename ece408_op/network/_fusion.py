"""Fusion: rewrites of a network's graph that compute the same function in fewer passes over memory.

Each rewrite merges or exchanges a node and a node that feeds it, if nothing else reads the value in between.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np

from ece408_op.core.dispatch import AUTO
from ece408_op.graph.fusion import only_source
from ece408_op.graph.symbol_graph import Entry, Graph, Node

from ._definition import ONE, SHAPE, UNBOUNDED, Arrays, Bounds, Operator
from ._elementwise import Activation, Clip, Elementwise, Function, is_prelu
from ._layers import BatchNorm, Convolution, Pooling
from ._passes import MOST_OPERANDS
from ._shaping import Identity, Pad


@dataclass(frozen=True)
class Pointwise(Elementwise):
    """Several elementwise operators in one pass, which fusion makes.

    steps: each operator and the numbers of its operands; the inputs come first, then the results of the earlier steps.
    The last result is the output.
    """

    names = ()
    steps: tuple[tuple[Elementwise, tuple[int, ...]], ...] = ()

    def input_names(self, count: int) -> tuple[str, ...]:
        return ("data",) * count

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        values = list(inputs)
        for operator, places in self.steps:
            given = [values[place] for place in places]
            values.append(arrays.xp.empty(np.broadcast_shapes(*(one.shape for one in given)), np.float32))
            operator.compute(arrays, given, values[-1])
        out[...] = values[-1]

    def text(self, *operands: str) -> str:
        texts = [operator.text(*(f"v{place}" for place in places)) for operator, places in self.steps]
        values = "".join(f"const float v{len(operands) + n} = {text}; " for n, text in enumerate(texts[:-1]))
        arguments = ", ".join(f"float v{number}" for number in range(len(operands)))
        return f"[]({arguments}) {{ {values}return {texts[-1]}; }}({', '.join(operands)})"

    def bounds(self, *operands: Bounds) -> Bounds:
        found = list(operands)
        for operator, places in self.steps:
            found.append(operator.bounds(*(found[place] for place in places)))
        return found[-1]


@dataclass(frozen=True)
class Combination(Elementwise):
    """data factor + residual, which fusion makes; the factor or the residual may be missing.

    factor: at most one in magnitude; data and factor broadcast. residual: of the output's shape.
    """

    names = ()
    takes_epilogue = True
    has_factor: bool = False
    residual: bool = False

    def used_inputs(self) -> tuple[str, ...]:
        return ("data", *["factor"] * self.has_factor, *["residual"] * self.residual)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        product = arrays.xp.multiply(*inputs[:2]) if self.has_factor else inputs[0]
        out[...] = product + inputs[-1] if self.residual else product

    def text(self, *operands: str) -> str:
        return f"{' * '.join(operands[: 1 + self.has_factor])}{f' + {operands[-1]}' if self.residual else ''}"


def _is_mergeable(operator: Operator | None) -> bool:
    """Return whether a Pointwise may contain an operator. A PReLU's slopes do not broadcast as other operands do."""
    return isinstance(operator, Elementwise) and not isinstance(operator, Combination) and not is_prelu(operator)


def is_unary(node: Node) -> bool:
    """Return whether a node computes each element from one element of its only input."""
    return _is_mergeable(node.operator) and len(node.inputs) == 1


def fused(graph: Graph) -> Graph:
    """Return the graph with BatchNorms, additions and elementwise operators fused into the nodes before them.

    All nodes have operators. First, an activation that feeds a max-pooling moves behind the pooling: a monotonic
    function of a maximum is the maximum of the function's values, and behind a 2 x 2 pooling it is computed for a
    quarter as many elements. Elementwise operators that compute a function of one value, such as x sigmoid(x), become
    one. Then each node is merged into a node that feeds it, if that node's operator can compute both. Last, elementwise
    operators of several values become one as well.
    """
    graph = _pointwise(Graph(_activations_behind_maxima(graph), graph.heads, graph.attrs), 1)
    nodes, uses, dropped = list(graph.nodes), graph.uses(), set()
    for index, node in enumerate(nodes):
        # An addition is merged into the later one of its two terms, because the earlier one is computed by then.
        feeding = sorted({entry.node for entry in node.inputs}, reverse=True) if node.operator else []
        for before in feeding:
            joined = _joined(nodes, before, node) if uses[before] == 1 and nodes[before].operator else None
            if joined:
                nodes[index] = joined
                dropped.add(before)
                break
        else:
            nodes[index] = _combination(nodes, node) or node
    return _pointwise(Graph(nodes, graph.heads, graph.attrs).without(dropped), MOST_OPERANDS)


def _pointwise(graph: Graph, most: int) -> Graph:
    """Return the graph with elementwise operators merged where the result reads at most ``most`` values."""
    nodes, uses, dropped = list(graph.nodes), graph.uses(), set[int]()
    # The last nodes come first: the readers of a node have merged what they can before it does.
    for index in reversed(range(len(nodes))):
        if index in dropped or not _is_mergeable(nodes[index].operator):
            continue
        order = _group(nodes, index, uses, most)
        if len(order) > 1:
            read = dict.fromkeys(entry for one in order for entry in nodes[one].inputs if entry.node not in order)
            numbers = {value: number for number, value in enumerate([*(entry.node for entry in read), *order])}
            steps = ((nodes[one].operator, tuple(numbers[e.node] for e in nodes[one].inputs)) for one in order)
            nodes[index] = replace(nodes[index], operator=Pointwise("pointwise", tuple(steps)), inputs=[*read])
            dropped.update(order[:-1])
    return Graph(nodes, graph.heads, graph.attrs).without(dropped)


def _group(nodes: list[Node], last: int, uses: Counter[int], most: int) -> list[int]:
    """Return the most nodes, in order, that one operator can compute up to the node ``last``.

    They are mergeable, only they read their values except the last one, and they read at most ``most`` other values.
    """
    members, found, queue = list[int](), 1, [-last]
    reads, inputs, kept = defaultdict[int, float](float), {last}, set[int]()
    while queue and len(kept) <= most:  # kept: inputs that are not mergeable
        # A node's readers have larger numbers, so that they are members before it.
        members.append(-heappop(queue))
        inputs.remove(members[-1])
        # What broadcasts may read a smaller array, which is not to be computed for each element of the larger one.
        smaller = most > 1 and nodes[members[-1]].operator.op.startswith("broadcast_")
        for value, *_ in nodes[members[-1]].inputs:
            mergeable = _is_mergeable(nodes[value].operator)
            (inputs if mergeable else kept).add(value)
            reads[value] += inf if smaller else 1
            if mergeable and reads[value] == uses[value]:
                heappush(queue, -value)
        if len(inputs) + len(kept) <= most:
            found = len(members)
    return members[:found][::-1]


def _combination(nodes: list[Node], node: Node) -> Node | None:
    """Return a sum, or a product with values of at most one, as a Combination; None for another node."""
    op = node.operator.op if isinstance(node.operator, Function) else ""
    if op == "elemwise_add":
        return replace(node, operator=Combination("combination", residual=True))
    if op in ("elemwise_mul", "broadcast_mul"):
        for data, factor in (node.inputs, node.inputs[::-1]):
            if _at_most_one(nodes, factor.node):
                return replace(node, operator=Combination("combination", has_factor=True), inputs=[data, factor])
    return None


def _at_most_one(nodes: list[Node], value: int) -> bool:
    node = nodes[value]
    while node.operator and node.operator.view:
        node = nodes[node.inputs[0].node]
    last, operands = (node.epilogue, 1) if node.epilogue else (node.operator, len(node.inputs))
    return isinstance(last, Elementwise) and last.bounds(*[UNBOUNDED] * operands).largest <= ONE


def fused_for_training(graph: Graph) -> Graph:
    """Return the graph with each relu fused into the BatchNorm or sum before it, if nothing else reads that value.

    Under the same condition, a BatchNorm takes over the bias of a convolution before it, and a max-pooling the
    activation before it: an increasing function of a maximum is the maximum of the function's values.
    """
    source, nodes = only_source(graph), list(graph.nodes)
    for index, node in enumerate(nodes):
        before = source(index)
        if before is None:
            continue
        one, own = nodes[before].operator, node.operator
        batch_norm = isinstance(own, BatchNorm) and not own.use_global_stats and own.axis == 1
        if batch_norm and isinstance(one, Convolution) and not one.no_bias:
            *rest, bias = nodes[before].inputs
            nodes[before] = replace(nodes[before], operator=replace(one, no_bias=True), inputs=rest)
            nodes[index] = replace(node, operator=replace(own, bias=True), inputs=[*node.inputs, bias])
        if isinstance(own, Pooling) and own.is_maximum and isinstance(one, Activation):
            nodes[before] = replace(nodes[before], operator=Identity("_copy"))
            nodes[index] = replace(node, epilogue=one)
        if not isinstance(own, Activation) or own.activation != "relu":
            continue
        if (isinstance(one, BatchNorm) and not one.use_global_stats) or one.op == "elemwise_add":
            nodes[before] = replace(nodes[before], epilogue=own)
            nodes[index] = replace(node, operator=Identity("_copy"))
    return Graph(nodes, graph.heads, graph.attrs)


def _activations_behind_maxima(graph: Graph) -> list[Node]:
    source, nodes = only_source(graph), list(graph.nodes)
    for index, pool in enumerate(nodes):
        before = source(index)
        maximum = isinstance(pool.operator, Pooling) and pool.operator.is_maximum
        if before is not None and maximum and isinstance(nodes[before].operator, (Activation, Clip)):
            # The nodes exchange places: the value in between becomes the pooling's, which is smaller.
            nodes[index] = replace(nodes[before], inputs=[Entry(before)], origin=pool.origin)
            nodes[before] = replace(pool, inputs=graph.nodes[before].inputs)
    return nodes


def _joined(nodes: list[Node], before: int, node: Node) -> Node | None:
    """Return one node that computes both ``before`` and ``node``, which reads it, or None if there is none."""
    feeding, others = nodes[before], [entry for entry in node.inputs if entry.node != before]
    if feeding.epilogue is not None or len(others) != len(node.inputs) - 1:
        return None
    if is_unary(node) and feeding.operator.takes_epilogue:
        return replace(feeding, epilogue=node.operator)
    convolution, own = feeding.operator, node.operator
    if isinstance(convolution, Pad):
        *_, top, bottom, left, right = convolution.pad_width
        zeros = (convolution.mode, convolution.constant_value, top, left) == ("constant", 0, bottom, right)
        # Not into a New that names its implementation, which may not support padding.
        if not zeros or own.op not in ("Convolution", "New") or own.impl != AUTO or node.inputs[0].node != before:
            return None
        padded = replace(own, pad=(own.pad[0] + top, own.pad[1] + left))
        return replace(node, operator=padded, inputs=[*feeding.inputs, *others])
    if not isinstance(convolution, (Convolution, Combination)) or convolution.residual:
        return None
    if own.op == "elemwise_add":
        operator = replace(convolution, residual=True)
    elif isinstance(convolution, Combination):
        return None
    else:
        constant = all(SHAPE in nodes[each.node].attrs for each in [*feeding.inputs[1:], *others])
        foldable = isinstance(own, BatchNorm) and own.axis == 1 and node.inputs[0].node == before
        if not (foldable and constant) or convolution.norm:
            return None
        operator = replace(convolution, norm=own)
    return replace(feeding, operator=operator, inputs=[*feeding.inputs, *others], epilogue=node.epilogue)
