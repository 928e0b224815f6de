"""Which Convolutions of a graph the operator can stand in for, and the putting in its place.

The nodes keep their order and number; a replaced one gets a new operator, name and attributes, and
its weight's variable, where nothing else uses it, the name that goes with the new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace as with_fields
from typing import NamedTuple

from ece408_op.plugin.attributes import LAYER, Attributes

from .node_conversion import CUSTOM, as_custom
from .symbol_json import VARIABLE, Graph, Node, integers, is_mxnets_own, places

CONVOLUTION = "Convolution"

#: Attributes that change how MXNet computes a Convolution, not what.
_HINTS = {"workspace", "cudnn_tune", "cudnn_off"}
_KNOWN = {"kernel", "num_filter", "stride", "pad", "dilate", "num_group", "no_bias", "layout", *_HINTS}
_TRUE = ("True", "true", "1")
_FLAT = 2


class Replacements(NamedTuple):
    """replaced: old node names to new ones; left: a node's name to every reason; weights: old names to new ones."""

    replaced: dict[str, str]
    left: dict[str, str]
    weights: dict[str, str]


def replace(graph: Graph, attributes: Attributes, types: Mapping[str, str], taken: set[str]) -> Replacements:
    """Turn each Convolution that the operator supports into ``New``, in place.

    attributes: impl, device and precision of the new nodes. types: the type of a node's output where it
    is known. taken: names that no new node, output or weight may have.
    """
    result = Replacements({}, {}, {})
    nodes = graph["nodes"]
    names = Counter(node["name"] for node in nodes)
    chosen = []
    for node, _, _, around in places(graph, ""):
        if node["op"] != CONVOLUTION:
            continue
        reasons = _reasons(node, types.get(node["name"]))
        if around:
            reasons.append(f"it is inside of {around[-1]!r}: control flow, or operators that MXNet fused")
        elif names[node["name"]] > 1:
            reasons.append(f"{names[node['name']]} nodes are called {node['name']!r}")
        if reasons:
            key = node["name"] if not around or node["name"] not in names else "/".join((*around, node["name"]))
            result.left[key] = "; ".join(reasons)
        else:
            chosen.append(node)
    fresh = _fresh_names(taken | {place.node["name"] for place in places(graph, "")})
    own_weights = _weights_of(graph, chosen, names)
    for node in chosen:
        name = next(fresh)
        result.replaced[node["name"]] = name
        index = node["inputs"][1][0]
        if index in own_weights:
            # The first layer that uses a weight names it for all of them.
            own_weights.remove(index)
            result.weights[nodes[index]["name"]] = f"{name}_weight"
            _rename_weight(nodes[index], f"{name}_weight", node)
        kernel, filters = integers(node["attrs"]["kernel"]), integers(node["attrs"]["num_filter"])
        assert kernel and filters, "judged in _reasons"
        text = with_fields(attributes, kernel=kernel[0], num_filter=filters[0], layer=name)
        node.update(op=CUSTOM, name=name, attrs=as_custom(text, node["attrs"]))
    return result


def _reasons(node: Node, dtype: str | None) -> list[str]:
    """Every reason why the operator cannot stand in for this Convolution."""
    attrs = node["attrs"]
    kernel = integers(attrs.get("kernel", ""))
    reasons = []
    if kernel is None or len(kernel) != _FLAT:
        reasons.append(f"kernel {attrs.get('kernel')}: New takes 2-D convolutions only")
    elif kernel[0] != kernel[1]:
        reasons.append(f"kernel {attrs['kernel']}: New takes square kernels only")
    for key, plain in (("stride", 1), ("pad", 0), ("dilate", 1), ("num_group", 1)):
        given = attrs.get(key, "()")
        numbers = integers(given)
        if numbers is None or any(number != plain for number in numbers):
            reasons.append(f"{key} {given}: New takes {plain} only")
    if attrs.get("no_bias", "False") not in _TRUE or len(node["inputs"]) != 2:
        reasons.append("it has a bias, New has none")
    if attrs.get("layout", "None") not in ("None", "NCHW", "NCW", "NCDHW"):
        reasons.append(f"layout {attrs['layout']}: New takes NCHW only")
    if dtype not in (None, "float32"):
        reasons.append(f"type {dtype}: New takes float32 only")
    unknown = sorted(key for key in attrs if key not in _KNOWN and not is_mxnets_own(key))
    if unknown:
        reasons.append(f"attribute {', '.join(unknown)}: New does not know it")
    return reasons


def _fresh_names(taken: set[str]) -> Iterator[str]:
    number = 0
    while True:
        name = f"new{number}"
        if not taken & {name, f"{name}_output", f"{name}_weight", f"{name}_data"}:
            yield name
        number += 1


def _weights_of(graph: Graph, chosen: list[Node], names: Mapping[str, int]) -> set[int]:
    """The variables that are weights of chosen nodes and nothing else, by index."""
    nodes = graph["nodes"]
    slots: set[tuple[int, int]] = {(id(node), 1) for node in chosen}
    weights = {node["inputs"][1][0] for node in chosen}
    used_otherwise = {entry[0] for entry in graph["heads"]}
    for node in nodes:
        used_otherwise.update(node.get("control_deps", ()))
        used_otherwise.update(e[0] for slot, e in enumerate(node["inputs"]) if (id(node), slot) not in slots)
    return {
        index
        for index in weights - used_otherwise
        if nodes[index]["op"] == VARIABLE and names[nodes[index]["name"]] == 1
    }


def _rename_weight(weight: Node, name: str, node: Node) -> None:
    """Give the variable its new name; of what MXNet copied to it from the Convolution, keep what New has too."""
    copied = {key for key in _KNOWN - {"kernel", "num_filter"} if weight["attrs"].get(key) == node["attrs"].get(key)}
    weight["name"] = name
    weight["attrs"] = {key: value for key, value in weight["attrs"].items() if key not in copied | {LAYER}}
