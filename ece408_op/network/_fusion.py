"""Fusion: rewrites of a network's graph that compute the same function in fewer passes over memory.

Each rewrite merges or exchanges a node and a node that feeds it, if nothing else reads the value in between.
"""

from __future__ import annotations

from dataclasses import replace

from ece408_op.graph.fusion import only_source
from ece408_op.graph.symbol_graph import Entry, Graph, Node

from ._definition import SHAPE
from ._elementwise import Activation, Clip
from ._layers import BatchNorm, Convolution, Pooling
from ._shaping import Identity


def fused(graph: Graph) -> Graph:
    """Return the graph with BatchNorms, additions and activations fused into the nodes before them.

    All nodes have operators. First, an activation that feeds a max-pooling moves behind the pooling: a monotonic
    function of a maximum is the maximum of the function's values, and behind a 2 x 2 pooling it is computed for a
    quarter as many elements. Then each node is merged into a node that feeds it, if that node's operator can compute
    both.
    """
    nodes = _activations_behind_maxima(graph)
    uses, dropped = graph.uses(), set()
    for index, node in enumerate(nodes):
        # An addition is merged into the later one of its two terms, because the earlier one is computed by then.
        feeding = sorted({entry.node for entry in node.inputs}, reverse=True) if node.operator else []
        for before in feeding:
            joined = _joined(nodes, before, node) if uses[before] == 1 and nodes[before].operator else None
            if joined:
                nodes[index] = joined
                dropped.add(before)
                break
    return Graph(nodes, graph.heads, graph.attrs).without(dropped)


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
            nodes[index] = replace(node, epilogue=one.activation)
        if not isinstance(own, Activation) or own.activation != "relu":
            continue
        if (isinstance(one, BatchNorm) and not one.use_global_stats) or one.op == "elemwise_add":
            nodes[before] = replace(nodes[before], epilogue="relu")
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
    if node.operator.activation and feeding.operator.takes_epilogue:
        return replace(feeding, epilogue=node.operator.activation)
    convolution, own = feeding.operator, node.operator
    if not isinstance(convolution, Convolution) or convolution.residual:
        return None
    if own.op == "elemwise_add":
        operator = replace(convolution, residual=True)
    else:
        constant = all(SHAPE in nodes[each.node].attrs for each in [*feeding.inputs[1:], *others])
        foldable = isinstance(own, BatchNorm) and own.axis == 1 and node.inputs[0].node == before
        if not (foldable and constant) or convolution.norm:
            return None
        operator = replace(convolution, norm=own)
    return replace(feeding, operator=operator, inputs=[*feeding.inputs, *others], epilogue=node.epilogue)
