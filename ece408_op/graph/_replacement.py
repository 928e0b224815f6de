"""Replacement of Convolution nodes by the operator.

The nodes keep their order and number. A replaced node gets a new op, name and attributes. The variables of its weight
and bias get matching names if nothing else uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace as with_fields
from itertools import count
from typing import Any, NamedTuple

from ece408_op.errors import ProblemError
from ece408_op.plugin.attributes import CONVOLUTION_ATTRIBUTES, LAYER, Attributes, integers, is_mxnets_own

from .node_conversion import CUSTOM, as_custom
from .symbol_graph import VARIABLE, Graph, Node

CONVOLUTION = "Convolution"


class Replacements(NamedTuple):
    """The names of replaced, left and renamed nodes.

    replaced: old node names to new ones. left: the name of a node that stays, to the reasons. parameters: old parameter
    names to new ones.
    """

    replaced: dict[str, str]
    left: dict[str, str]
    parameters: dict[str, str]


def replace(
    graph: Graph,
    options: Mapping[str, Any],
    types: Mapping[str, str],
    taken: set[str],
    excluded: Mapping[str, str],
    renames: bool = True,
) -> Replacements:
    """Turn each Convolution that the operator supports into ``New``, in place.

    options: impl, device and precision of the new nodes. types: the known types of nodes' outputs, by node name. taken:
    names that no new node, output or parameter may have. excluded: nodes to leave, with the reason. renames: whether
    parameters are renamed.
    """
    result = Replacements({}, {}, {})
    names = Counter(node.name for node in graph.nodes)
    chosen: list[tuple[Node, Attributes]] = []
    for node, around, _, parents in graph.locations(""):
        if node.op != CONVOLUTION:
            continue
        related = node.name, *(around.nodes[entry.node].name for entry in node.inputs)
        other = next((types[name] for name in related if types.get(name, "float32") != "float32"), None)
        attributes, reasons = _read(node, options, other)
        data = around.nodes[node.inputs[0].node] if node.inputs else node
        if not data.inputs and 0 in (integers(data.attrs.get("shape", "")) or ()):
            # The first state of a recurrent cell. MXNet tells a Convolution the shape of its output, but not New.
            reasons.append("the shape of its data depends on that of its output")
        if node.name in excluded:
            reasons.append(excluded[node.name])
        if parents:
            reasons.append(f"it is inside of {parents[-1]!r}: control flow, or operators that MXNet fused")
        elif names[node.name] > 1:
            reasons.append(f"{names[node.name]} nodes are called {node.name!r}")
        if reasons or attributes is None:
            key = "/".join((*parents, node.name)) if parents and node.name in names else node.name
            result.left[key] = "; ".join(reasons)
        else:
            chosen.append((node, attributes))
    taken = taken | {node.name for node, *_ in graph.locations("")}
    new_names = (name for name in map("new{}".format, count()) if not taken & _names_of(name))
    parameters = _parameters_of(graph, [node for node, _ in chosen], names) if renames else set()
    for (node, attributes), name in zip(chosen, new_names):
        result.replaced[node.name] = name
        for role, entry in zip(attributes.inputs[1:], node.inputs[1:]):
            variable = graph.nodes[entry.node]
            if variable.name in parameters:
                # A shared parameter is named after the first layer that uses it.
                parameters.remove(variable.name)
                result.parameters[variable.name] = f"{name}_{role}"
                _rename(variable, f"{name}_{role}", node)
        new = with_fields(attributes, layer=name)
        node.op, node.name, node.attrs = CUSTOM, name, as_custom(new, node.attrs)
    return result


def _read(node: Node, options: Mapping[str, Any], other: str | None) -> tuple[Attributes | None, list[str]]:
    """Return a Convolution's attributes with the options, None if invalid, and the reasons against a replacement.

    other: a type of an input or the output that is not float32, or None.
    """
    own = {key: value for key, value in node.attrs.items() if not is_mxnets_own(key)}
    reasons = [f"type {other}: New takes float32 only"] if other else []
    try:
        attributes = Attributes.parse({"no_bias": "False", **own, **options})
    except ProblemError as error:
        return None, [str(error), *reasons]
    if len(node.inputs) != len(attributes.inputs):
        reasons.append(f"it has {len(node.inputs)} inputs, expected {', '.join(attributes.inputs)}")
    return attributes, reasons


def _names_of(name: str) -> set[str]:
    return {name, *(f"{name}_{ending}" for ending in ("output", "weight", "bias", "data"))}


def _parameters_of(graph: Graph, chosen: list[Node], names: Mapping[str, int]) -> set[str]:
    """Return the names of the variables that are only used as weights or biases of chosen nodes, each in one role."""
    uses, roles = graph.uses(), Counter[tuple[int, int]]()
    for node in chosen:
        roles.update((entry.node, place) for place, entry in enumerate(node.inputs) if place)
    found = {index: graph.nodes[index] for (index, _), count in roles.items() if uses[index] == count}
    return {one.name for one in found.values() if one.op == VARIABLE and names[one.name] == 1}


def _rename(parameter: Node, name: str, node: Node) -> None:
    """Rename the variable, and remove those attributes that MXNet copied from the Convolution and ``New`` lacks."""
    dropped = set(CONVOLUTION_ATTRIBUTES) - {"kernel", "num_filter"}
    copied = {key for key in dropped if parameter.attrs.get(key) == node.attrs.get(key)}
    parameter.name = name
    parameter.attrs = {key: value for key, value in parameter.attrs.items() if key not in copied | {LAYER}}
