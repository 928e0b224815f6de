"""Replacement of Convolution nodes by the operator.

The nodes keep their order and number. A replaced node gets a new op, name and attributes, and the variable of its
weight, if nothing else uses it, the matching name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace as with_fields
from itertools import count
from typing import NamedTuple

from ece408_op.plugin.attributes import LAYER, Attributes

from .node_conversion import CUSTOM, as_custom
from .symbol_graph import VARIABLE, Graph, Node, integers, is_mxnets_own

CONVOLUTION = "Convolution"

#: Attributes that change how MXNet computes a Convolution, not the result.
_HINTS = {"workspace", "cudnn_tune", "cudnn_off"}
_KNOWN = {"kernel", "num_filter", "stride", "pad", "dilate", "num_group", "no_bias", "layout", *_HINTS}
_TRUE = ("True", "true", "1")
_TWO_DIMENSIONS = 2


class Replacements(NamedTuple):
    """replaced: old node names to new ones; left: a node's name to all reasons; weights: old names to new ones."""

    replaced: dict[str, str]
    left: dict[str, str]
    weights: dict[str, str]


def replace(graph: Graph, attributes: Attributes, types: Mapping[str, str], taken: set[str]) -> Replacements:
    """Turn each Convolution that the operator supports into ``New``, in place.

    attributes: impl, device and precision of the new nodes. types: the type of a node's output where it is known.
    taken: names that no new node, output or weight may have.
    """
    result = Replacements({}, {}, {})
    names = Counter(node.name for node in graph.nodes)
    chosen: list[Node] = []
    for node, _, _, parents in graph.locations(""):
        if node.op != CONVOLUTION:
            continue
        reasons = _reasons(node, types.get(node.name))
        if parents:
            reasons.append(f"it is inside of {parents[-1]!r}: control flow, or operators that MXNet fused")
        elif names[node.name] > 1:
            reasons.append(f"{names[node.name]} nodes are called {node.name!r}")
        if reasons:
            key = "/".join((*parents, node.name)) if parents and node.name in names else node.name
            result.left[key] = "; ".join(reasons)
        else:
            chosen.append(node)
    taken = taken | {location.node.name for location in graph.locations("")}
    new_names = (name for name in map("new{}".format, count()) if not taken & _names_of(name))
    weights = _weights_of(graph, chosen, names)
    for node, name in zip(chosen, new_names):
        result.replaced[node.name] = name
        weight = graph.nodes[node.inputs[1].node]
        if weight.name in weights:
            # The first layer that uses a weight names it for all of them.
            weights.remove(weight.name)
            result.weights[weight.name] = f"{name}_weight"
            _rename_weight(weight, f"{name}_weight", node)
        kernel, filters = integers(node.attrs["kernel"]), integers(node.attrs["num_filter"])
        assert kernel and filters, "_reasons has checked them"
        new = with_fields(attributes, kernel=kernel[0], num_filter=filters[0], layer=name)
        node.op, node.name, node.attrs = CUSTOM, name, as_custom(new, node.attrs)
    return result


def _reasons(node: Node, dtype: str | None) -> list[str]:
    """Return every reason why the operator cannot replace this Convolution."""
    attrs = node.attrs
    kernel = integers(attrs.get("kernel", ""))
    reasons = []
    if kernel is None or len(kernel) != _TWO_DIMENSIONS:
        reasons.append(f"kernel {attrs.get('kernel')}: New takes 2-D convolutions only")
    elif kernel[0] != kernel[1]:
        reasons.append(f"kernel {attrs['kernel']}: New takes square kernels only")
    for key, plain in (("stride", 1), ("pad", 0), ("dilate", 1), ("num_group", 1)):
        given = attrs.get(key, "()")
        numbers = integers(given)
        if numbers is None or any(number != plain for number in numbers):
            reasons.append(f"{key} {given}: New takes {plain} only")
    if attrs.get("no_bias", "False") not in _TRUE or len(node.inputs) != 2:
        reasons.append("it has a bias, New has none")
    if attrs.get("layout", "None") not in ("None", "NCHW", "NCW", "NCDHW"):
        reasons.append(f"layout {attrs['layout']}: New takes NCHW only")
    if dtype not in (None, "float32"):
        reasons.append(f"type {dtype}: New takes float32 only")
    unknown = sorted(key for key in attrs if key not in _KNOWN and not is_mxnets_own(key))
    if unknown:
        reasons.append(f"attribute {', '.join(unknown)}: New does not know it")
    return reasons


def _names_of(name: str) -> set[str]:
    return {name, f"{name}_output", f"{name}_weight", f"{name}_data"}


def _weights_of(graph: Graph, chosen: list[Node], names: Mapping[str, int]) -> set[str]:
    """Return the names of the variables that are weights of chosen nodes and nothing else."""
    uses = graph.uses()
    uses.subtract(node.inputs[1].node for node in chosen)
    weights = {node.inputs[1].node: graph.nodes[node.inputs[1].node] for node in chosen}
    return {w.name for index, w in weights.items() if not uses[index] and w.op == VARIABLE and names[w.name] == 1}


def _rename_weight(weight: Node, name: str, node: Node) -> None:
    """Give the variable its new name, without the attributes that MXNet copied from the Convolution and New lacks."""
    copied = {key for key in _KNOWN - {"kernel", "num_filter"} if weight.attrs.get(key) == node.attrs.get(key)}
    weight.name = name
    weight.attrs = {key: value for key, value in weight.attrs.items() if key not in copied | {LAYER}}
