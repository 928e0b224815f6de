"""What becomes of a graph's nodes on the way in and out: ``New`` to ``Custom`` and back, weights held against them.

An original file says op ``New``; MXNet 1.9.1 knows that operator as op ``Custom`` with op_type ``New``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ece408_op.errors import GraphError, ProblemError
from ece408_op.plugin.attributes import LAYER, Attributes

from .symbol_json import VARIABLE, Graph, Node, integers, is_mxnets_own, places

NEW = "New"
CUSTOM = "Custom"

Shapes = Mapping[str, tuple[int, ...]]

#: What MXNet copies from an operator to the variables that it makes for its inputs, beyond the original's.
_INHERITED = ("op_type", "impl", "device", "precision", "fuse", LAYER)


def is_new(node: Node) -> bool:
    """Whether the node is the operator, in the original's spelling or as MXNet 1.9.1 has it."""
    return node["op"] == NEW or (node["op"] == CUSTOM and node["attrs"].get("op_type") == NEW)


def attributes_of(node: Node, where: str) -> Attributes:
    """The judged attributes of a ``New`` node; raises GraphError."""
    own = {key: value for key, value in node["attrs"].items() if key != "op_type" and not is_mxnets_own(key)}
    kernel = integers(own.get("kernel", ""))
    if kernel:
        own["kernel"] = str(tuple(kernel))
    try:
        return Attributes.parse({**own, LAYER: node["name"]})
    except ProblemError as error:
        raise GraphError(f"{where}: {error}") from None


def as_custom(attributes: Attributes, kept: Mapping[str, str]) -> dict[str, str]:
    """The attributes of a ``Custom`` node, with MXNet's own among ``kept``."""
    own = {key: value for key, value in kept.items() if is_mxnets_own(key) and key != LAYER}
    return {**own, **attributes.as_text(), "op_type": NEW}


def to_custom(graph: Graph, where: str, options: Mapping[str, str], cured: str) -> None:
    """Turn every ``New`` node into one that MXNet 1.9.1 runs, in place.

    options: impl, device and precision where they differ from the default; they overrule the file's.
    cured: the attribute that an operator inside a control-flow subgraph needs (see default_layout).
    Raises GraphError naming the node.
    """
    for node, _, label, around in places(graph, where):
        if not is_new(node):
            continue
        if around and cured not in node["attrs"]:
            raise GraphError(
                f"{label}: expected {NEW} outside of control flow, got it inside of {around[-1]!r}; "
                "build the loop in this process with mx.sym.contrib or Gluon instead of loading it"
            )
        if len(node["inputs"]) != 2:
            raise GraphError(f"{label}: inputs: expected 2, data and weight, got {len(node['inputs'])}")
        attributes_of(node, label)
        node["attrs"] = {**node["attrs"], **options}
        node["op"], node["attrs"] = CUSTOM, as_custom(attributes_of(node, label), node["attrs"])


def to_original(graph: Graph, where: str) -> None:
    """Turn every ``Custom`` node of type ``New`` into the original's, in place.

    Of its attributes kernel, num_filter and MXNet's own stay, which the original's reader takes. Raises GraphError
    for one that does more than convolve.
    """
    for node, parent, label, _ in places(graph, where):
        if not is_new(node):
            continue
        attributes = attributes_of(node, label).as_text()
        if "fuse" in attributes:
            raise GraphError(f"{label}: expected {NEW} as original files have it, got fuse {attributes['fuse']!r}")
        own = {key: value for key, value in node["attrs"].items() if is_mxnets_own(key) and key != LAYER}
        node["op"] = NEW
        node["attrs"] = {**own, "kernel": attributes["kernel"], "num_filter": attributes["num_filter"]}
        for index, *_ in node["inputs"]:
            source = parent["nodes"][index]
            if source["op"] == VARIABLE and source["attrs"].get("op_type") == NEW:
                source["attrs"] = {k: v for k, v in source["attrs"].items() if k not in _INHERITED}


def check_arrays(params: Any, name: str) -> None:
    """Raise GraphError for what is no mapping of names to arrays; ``name`` is what the caller calls it."""
    if not isinstance(params, Mapping):
        raise GraphError(f"{name}: expected a dictionary of arrays by name, got {type(params).__name__}")
    for key, array in params.items():
        if not isinstance(key, str) or not hasattr(array, "shape"):
            raise GraphError(f"{name}: expected arrays by name, got {type(array).__name__} for {key!r}")


def check_weights(graph: Graph, shapes: Shapes, where: str, required: bool) -> None:
    """Hold the shapes of parameters, by name, against every node that they are weights of.

    Raises GraphError naming the node where one has the wrong shape or, if required, a ``New`` has none.
    """
    for node, parent, label, around in places(graph, where):
        if around:
            continue
        for (index, *_), shape in zip(node["inputs"][1:], _expected_shapes(node, label)):
            source = parent["nodes"][index]
            name = source["name"]
            if source["op"] != VARIABLE:
                continue
            if name in shapes and not _fits(shapes[name], shape):
                raise GraphError(f"{label}: expected {name!r} of shape {_text(shape)}, got {_text(shapes[name])}")
            if name not in shapes and required and is_new(node):
                raise GraphError(f"{label}: expected parameter {name!r} of shape {_text(shape)}, got none")


def _expected_shapes(node: Node, label: str) -> list[tuple[Any, ...]]:
    """The shapes of a node's parameters in order, None for a length that depends on the data."""
    attrs: dict[str, str] = node["attrs"]
    if is_new(node):
        attributes = attributes_of(node, label)
        return [(attributes.num_filter, None, attributes.kernel, attributes.kernel)]
    if node["op"] == "Convolution" and attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW"):
        kernel, filters = integers(attrs.get("kernel", "")), integers(attrs.get("num_filter", ""))
        return [(filters[0], None, *kernel), (filters[0],)] if kernel and filters else []
    if node["op"] == "FullyConnected":
        hidden = integers(attrs.get("num_hidden", ""))
        return [(hidden[0], None), (hidden[0],)] if hidden else []
    return []


def _fits(got: tuple[int, ...], expected: tuple[Any, ...]) -> bool:
    return len(got) == len(expected) and all(want in (None, length) for length, want in zip(got, expected))


def _text(shape: tuple[Any, ...]) -> str:
    return "(" + ", ".join("?" if length is None else str(length) for length in shape) + ")"
