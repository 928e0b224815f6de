"""Convert the operator's nodes in a graph from the original files' op ``New`` to MXNet 1.9.1's ``Custom`` and back.

In an original file, a node of the operator has op ``New``; in MXNet 1.9.1, it has op ``Custom`` and op_type ``New``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ece408_op.errors import GraphError, ProblemError
from ece408_op.plugin.attributes import LAYER, Attributes, integers, is_mxnets_own

from .symbol_graph import VARIABLE, Graph, Node

NEW = "New"
CUSTOM = "Custom"

Shapes = Mapping[str, tuple[int, ...]]

#: The attributes that MXNet copies from a node to the variables that it creates for the node's inputs, except those
#: that original files have.
_INHERITED = ("op_type", "impl", "device", "precision", "fuse", LAYER)


def is_new(node: Node) -> bool:
    """Return whether the node is the operator, in the original's spelling or MXNet 1.9.1's."""
    return node.type == NEW


def parsed(attrs: Mapping[str, str], layer: str | None = None) -> Attributes:
    """Return the checked attributes of a ``New`` node; raises ProblemError."""
    own = {key: value for key, value in attrs.items() if key != "op_type" and not is_mxnets_own(key)}
    return Attributes.parse({**own, LAYER: layer} if layer else own)


def attributes_of(node: Node, where: str) -> Attributes:
    """Return the checked attributes of a ``New`` node; raises GraphError, which starts with ``where``."""
    try:
        return parsed(node.attrs, node.name)
    except ProblemError as error:
        raise GraphError(f"{where}: {error}") from None


def as_custom(attributes: Attributes, mxnets: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of a ``Custom`` node: the operator's, and MXNet's own ones from ``mxnets``."""
    own = {key: value for key, value in mxnets.items() if is_mxnets_own(key) and key != LAYER}
    return {**own, **attributes.as_text(), "op_type": NEW}


def to_custom(graph: Graph, where: str, options: Mapping[str, str]) -> None:
    """Turn every ``New`` node into a ``Custom`` node, which MXNet 1.9.1 can run, in place.

    options: impl, device and precision that replace those of the file. Raises GraphError, which names the node.
    """
    for node, _, label, parents in graph.locations(where):
        if not is_new(node):
            continue
        if parents:
            raise GraphError(f"{label}: expected {NEW} outside of control flow, got it inside of {parents[-1]!r}")
        inputs = attributes_of(node, label).inputs
        if len(node.inputs) != len(inputs):
            raise GraphError(f"{label}: inputs: expected {len(inputs)}, {' and '.join(inputs)}, got {len(node.inputs)}")
        node.attrs = {**node.attrs, **options}
        node.op, node.attrs = CUSTOM, as_custom(attributes_of(node, label), node.attrs)


def to_original(graph: Graph, where: str) -> None:
    """Turn every ``Custom`` node of type ``New`` into one of op ``New`` as in original files, in place.

    The node keeps MXNet's own attributes, kernel and num_filter, and those of Convolution's attributes that differ from
    the operator's default. For a layer of the course, these are kernel and num_filter, which the course's MXNet
    accepts. Raises GraphError for a fused node.
    """
    for node, parent, label, _ in graph.locations(where):
        if not is_new(node):
            continue
        attributes = attributes_of(node, label)
        if attributes.fuse:
            raise GraphError(f"{label}: expected {NEW} as original files have it, got fuse {attributes.fuse!r}")
        own = {key: value for key, value in node.attrs.items() if is_mxnets_own(key) and key != LAYER}
        node.op = NEW
        node.attrs = {**own, **attributes.convolution()}
        for entry in node.inputs:
            source = parent.nodes[entry.node]
            if source.op == VARIABLE and source.attrs.get("op_type") == NEW:
                source.attrs = {k: v for k, v in source.attrs.items() if k not in _INHERITED}


def check_arrays(params: Any, name: str) -> None:
    """Raise GraphError unless ``params`` is a mapping of names to arrays; ``name`` is the caller's name for it."""
    if not isinstance(params, Mapping):
        raise GraphError(f"{name}: expected a dictionary of arrays by name, got {type(params).__name__}")
    for key, array in params.items():
        if not isinstance(key, str) or not hasattr(array, "shape"):
            raise GraphError(f"{name}: expected arrays by name, got {type(array).__name__} for {key!r}")
        if key.startswith(("arg:", "aux:")):
            raise GraphError(f"{name}: expected names without 'arg:' and 'aux:', got {key!r}; use load_checkpoint")


def check_weights(graph: Graph, shapes: Shapes, where: str, required: bool) -> None:
    """Check the shapes of parameters, by name, against every node that reads them as weight or bias.

    Raises GraphError, which names the node, if a shape is wrong or, with ``required``, a parameter of a ``New`` is
    missing.
    """
    for node, parent, label, parents in graph.locations(where):
        if parents:
            continue
        for entry, shape in zip(node.inputs[1:], _parameter_shapes(node, label)):
            source = parent.nodes[entry.node]
            if source.op != VARIABLE:
                continue
            expected = f"{source.name!r} of shape ({', '.join('?' if n is None else str(n) for n in shape)})"
            got = shapes.get(source.name)
            if got is None and required and is_new(node):
                raise GraphError(f"{label}: expected parameter {expected}, got none")
            if got is not None and (len(got) != len(shape) or any(n not in (None, g) for n, g in zip(shape, got))):
                raise GraphError(f"{label}: expected {expected}, got ({', '.join(map(str, got))})")


def _parameter_shapes(node: Node, label: str) -> list[tuple[int | None, ...]]:
    """Return the shapes of a node's parameters in order; a size that depends on the data is None."""
    if is_new(node):
        attributes = attributes_of(node, label)
        return [(attributes.num_filter, None, *attributes.kernel), (attributes.num_filter,)]
    if node.op == "Convolution" and node.attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW"):
        kernel, filters = integers(node.attrs.get("kernel", "")), integers(node.attrs.get("num_filter", ""))
        return [(filters[0], None, *kernel), (filters[0],)] if kernel and filters else []
    if node.op == "FullyConnected":
        hidden = integers(node.attrs.get("num_hidden", ""))
        return [(hidden[0], None), (hidden[0],)] if hidden else []
    return []
