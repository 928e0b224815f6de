"""A convolution, its tanh and the 2 x 2 maxima of that as one node, in graphs as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ece408_op.plugin.attributes import FULL, LAYER

from .node_conversion import is_new
from .symbol_json import Graph, Node, integers

_FALSE = ("False", "false", "0")

#: A Pooling's attributes that change how MXNet computes it, not what; the others are judged one by one.
_HINTS = {"cudnn_off", "p_value", "count_include_pad"}


def fused(graph: Graph) -> Graph:
    """The graph with every ``New``, tanh, Pooling in a row as one ``New``, which bears the Pooling's name.

    The Pooling takes the largest of 2 x 2, two apart, without padding; nothing else reads the two outputs between.
    """
    nodes = graph["nodes"]
    uses = Counter(entry[0] for node in nodes for entry in node["inputs"])
    uses.update(entry[0] for entry in graph["heads"])
    uses.update(source for node in nodes for source in node.get("control_deps", ()))
    replaced: dict[int, Node] = {}
    dropped: set[int] = set()
    for index, pool in enumerate(nodes):
        convention = _convention(pool)
        if convention is None:
            continue
        middle = pool["inputs"][0][0]
        activation = nodes[middle]
        if not _is_tanh(activation) or uses[middle] != 1 or "control_deps" in pool or "control_deps" in activation:
            continue
        first = activation["inputs"][0][0]
        convolution = nodes[first]
        if not is_new(convolution) or uses[first] != 1 or "fuse" in convolution["attrs"]:
            continue
        attributes = {LAYER: convolution["name"], **convolution["attrs"]}
        attributes["fuse"] = "tanh_pool" if convention == "valid" else FULL
        replaced[index] = {**convolution, "name": pool["name"], "attrs": attributes}
        dropped |= {first, middle}
    return _without(graph, replaced, dropped)


def _is_tanh(node: Node) -> bool:
    return node["op"] == "tanh" or (node["op"] == "Activation" and node["attrs"].get("act_type") == "tanh")


def _convention(node: Node) -> str | None:
    """The convention of a Pooling that takes the largest of 2 x 2, two apart; None for any other node."""
    attrs = node["attrs"]
    if node["op"] != "Pooling" or attrs.get("pool_type", "max") != "max":
        return None
    plain = {
        "kernel": integers(attrs.get("kernel", "")) == [2, 2],
        "stride": integers(attrs.get("stride", "")) == [2, 2],
        "pad": not any(integers(attrs.get("pad", "()")) or ()),
        "global_pool": attrs.get("global_pool", "False") in _FALSE,
        "layout": attrs.get("layout", "None") in ("None", "NCHW"),
    }
    convention = attrs.get("pooling_convention", "valid")
    known = {*plain, *_HINTS, "pool_type", "pooling_convention"}
    if not all(plain.values()) or any(key not in known and not key.startswith("__") for key in attrs):
        return None
    return convention if convention in ("valid", "full") else None


def _without(graph: Graph, replaced: Mapping[int, Node], dropped: set[int]) -> Graph:
    """The graph with some nodes replaced and others, which nothing reads any more, left out."""
    moved: dict[int, int] = {}
    nodes: list[Node] = []
    for index, node in enumerate(graph["nodes"]):
        if index not in dropped:
            moved[index] = len(nodes)
            nodes.append(replaced.get(index, node))

    def entries(old: list[list[int]]) -> list[list[int]]:
        return [[moved[source], *rest] for source, *rest in old]

    for position, node in enumerate(nodes):
        nodes[position] = {**node, "inputs": entries(node["inputs"])}
        if "control_deps" in node:
            nodes[position]["control_deps"] = [moved[source] for source in node["control_deps"]]
    kept = {key: value for key, value in graph.items() if key != "node_row_ptr"}  # MXNet counts outputs itself
    arg_nodes = [moved[index] for index in graph["arg_nodes"]]
    return {**kept, "nodes": nodes, "arg_nodes": arg_nodes, "heads": entries(graph["heads"])}
