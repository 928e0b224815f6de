"""Fusion of ``New``, tanh and max-pooling: a rewrite of a graph that computes them in one pass over memory.

Nodes are merged if each is the first input of the next one, and nothing else reads the values in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ece408_op.plugin.attributes import FULL, LAYER, integers

from .node_conversion import is_new, parsed
from .symbol_graph import Graph, Node

#: Attributes of a Pooling that do not change the result of 2 x 2 maxima.
_IRRELEVANT = ("cudnn_off", "p_value", "count_include_pad")
#: The values that a fused node supports for a Pooling's other attributes, except its sizes.
_FUSED = {
    "pool_type": ("max",),
    "pooling_convention": ("valid", "full"),
    "global_pool": ("False", "false", "0"),
    "layout": ("None", "NCHW"),
}


def fuse_tanh_pool(graph: Graph) -> Graph:
    """Return the graph with every chain of ``New``, tanh and Pooling as one ``New`` with the name of the Pooling.

    The Pooling must take the maximum of 2 x 2 with stride 2, without padding. ``Node.operator`` is not used.
    """
    source, replaced, dropped = only_source(graph), {}, set()
    for index, pool in enumerate(graph.nodes):
        convention = _max_pool_convention(pool)
        middle = source(index) if convention else None
        first = None if middle is None else source(middle)
        if middle is None or first is None:
            continue
        activation, convolution = graph.nodes[middle], graph.nodes[first]
        dependent = pool.control_deps or activation.control_deps
        if _is_tanh(activation) and is_new(convolution) and parsed(convolution.attrs).is_plain and not dependent:
            fuse = {"fuse": "tanh_pool" if convention == "valid" else FULL}
            attrs = {LAYER: convolution.name, **convolution.attrs, **fuse}
            replaced[index] = replace(convolution, name=pool.name, attrs=attrs)
            dropped |= {first, middle}
    nodes = [replaced.get(index, node) for index, node in enumerate(graph.nodes)]
    return Graph(nodes, graph.heads, graph.attrs).without(dropped)


def only_source(graph: Graph) -> Callable[[int], int | None]:
    """Return a function that returns the operator node that feeds a node's first input, if it has no other reader.

    The function takes and returns numbers of nodes; it returns None for a variable or several readers.
    """
    uses = graph.uses()

    def source(index: int) -> int | None:
        inputs = graph.nodes[index].inputs
        found = inputs[0].node if inputs else None
        return found if found is not None and uses[found] == 1 and graph.nodes[found].inputs else None

    return source


def _is_tanh(node: Node) -> bool:
    return node.op == "tanh" or (node.op == "Activation" and node.attrs.get("act_type") == "tanh")


def _max_pool_convention(node: Node) -> str | None:
    """Return the convention of a Pooling that takes the maximum of 2 x 2 with stride 2; None for any other node."""
    attrs = {key: text for key, text in node.attrs.items() if key not in _IRRELEVANT and not key.startswith("__")}
    kernel, stride, pad = (integers(attrs.pop(name, "()")) for name in ("kernel", "stride", "pad"))
    is_fused = all(text in _FUSED.get(key, ()) for key, text in attrs.items())
    if node.op != "Pooling" or kernel != [2, 2] or stride != [2, 2] or any(pad or ()) or not is_fused:
        return None
    return attrs.get("pooling_convention", "valid")
