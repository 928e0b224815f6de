"""Keeps oneDNN's blocked layout away from the operator, by every way that leads to it.

MXNet's oneDNN operators leave their results, and reorder their weights, into a blocked layout. When
such an array goes into a Custom operator, MXNet reorders it into a temporary that it frees before
the asynchronous operator reads it: wrong numbers and no error. Executors (and so Module) keep that
temporary alive; two other ways do not, and each has its cure:

- an imperative call: its inputs are put into plain order in place, by an operator queued before it; where other
  threads live, which may give the weight to a built-in Convolution between the two, a copy of the weight goes in;
- a graph run by CachedOp (hybridised Gluon, SymbolBlock) or by a control-flow operator: a slice of all
  of it stands in front of each input, since its output is always in plain order. (So is a reshape's, but
  oneDNN's reshape fails on an empty batch.)
  A hybridised graph with the operator inside a loop also gives up its static allocation.

The node that stands for a whole network (``NETWORK``) is cured alike, but for its inputs that are the graph's own,
images and parameters: those are put into plain order in place before the call, since a slice would copy them.

Only calls and graphs with such operators in them are touched.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import mxnet as mx

from ece408_op.errors import ProblemError
from ece408_op.runtime import thread_pool

from . import bridge

OP_TYPE = "New"
NETWORK = "ece408_network"
_OP_TYPES = (OP_TYPE, NETWORK)

#: Set on an operator inside a control-flow subgraph whose inputs have the slice in front.
CURED = "__plain_inputs__"

#: Set by MXNet on every node that is made inside a control-flow subgraph.
_SUBGRAPH = "__subgraph_name__"

#: slice_axis with these takes all of an array, whatever its rank.
_ALL = {"axis": "0", "begin": "0", "end": "None"}


def install() -> None:
    """Put the cures in place; once a process."""
    replace("mxnet.ndarray", "Custom", _settling(mx.nd.Custom))
    replace("mxnet.symbol", "Custom", _slicing(mx.sym.Custom))
    replace("mxnet.ndarray", "CachedOp", _plain_cached_op(mx.nd.CachedOp))


def check_subgraph(attributes: Mapping[str, str]) -> None:
    """Raise ProblemError for an operator inside a control-flow subgraph without the cure (one from a file, say)."""
    if attributes.get(_SUBGRAPH) and CURED not in attributes:
        raise ProblemError(
            f"expected a graph without control flow around New, got one inside {attributes[_SUBGRAPH]!r}; build the "
            "loop in this process with mx.sym.contrib or Gluon after importing ece408_op, instead of loading it"
        )


def replace(package: str, name: str, new: Any) -> None:
    """Set a name of MXNet's anew in every module of the package that holds it."""
    old = getattr(sys.modules[package], name)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(package) and vars(module).get(name) is old:
            setattr(module, name, new)


def _settling(custom: Any) -> Any:
    @functools.wraps(custom)
    def wrapped(*data: Any, **kwargs: Any) -> Any:
        op_type = kwargs.get("op_type")
        if op_type in _OP_TYPES:
            out = kwargs.get("out")
            if out is not None:
                for array in out if isinstance(out, (list, tuple)) else (out,):
                    _plain(array)
            data = tuple(_plain(value, shared=place > 0 and op_type == OP_TYPE) for place, value in enumerate(data))
        return custom(*data, **kwargs)

    return wrapped


def _plain(array: Any, shared: bool = False) -> Any:
    """The array in plain order when the call begins that comes next; ``shared``: a weight, which others may block."""
    if not isinstance(array, mx.nd.NDArray) or bridge.on_gpu(array):
        return array
    if shared and not thread_pool.alone() and array.stype == "default" and array.ndim == 4 and array.size:
        # A copy, which only this call knows, and so nobody blocks; slices are always in plain order.
        return mx.nd.slice_axis(array, axis=0, begin=0, end=None)
    bridge.settle(array)
    return array


def _slicing(custom: Any) -> Any:
    @functools.wraps(custom)
    def wrapped(*data: Any, **kwargs: Any) -> Any:
        if kwargs.get("op_type") == OP_TYPE and _inside_subgraph():
            data = tuple(map(_sliced, data))
            kwargs = {name: _sliced(value) for name, value in kwargs.items()}
            kwargs[CURED] = "1"
        return custom(*data, **kwargs)

    return wrapped


def _inside_subgraph() -> bool:
    with mx.AttrScope() as scope:
        return _SUBGRAPH in scope.get(None)


def _sliced(value: Any) -> Any:
    return mx.sym.slice_axis(value, **_ALL) if isinstance(value, mx.sym.Symbol) else value


def _plain_cached_op(cached_op: Any) -> Any:
    class CachedOp(cached_op):  # type: ignore[misc]
        """MXNet's CachedOp; graphs with New in them get plain inputs."""

        __slots__ = ("_settled",)

        def __init__(self, sym: Any, flags: Any = ()) -> None:
            text = sym.tojson()
            known = any(f'"{op_type}"' in text for op_type in _OP_TYPES)
            graph = json.loads(text) if known else {"nodes": []}
            self._settled = _network_inputs(graph, sym) if known else ()
            if any(map(_is_ours, graph["nodes"])):
                _insert_slices(graph)
                plain = mx.sym.load_json(json.dumps(graph))
                sym = plain.as_np_ndarray() if isinstance(sym, mx.sym.np._Symbol) else plain
            if any(_has_new_inside(node) for node in graph["nodes"]):
                # Statically allocated, a loop's memory is used again before the operator has read it.
                flags = [(key, value) for key, value in flags if key not in ("static_alloc", "static_shape")]
            super().__init__(sym, flags)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            for position in self._settled:
                if args[position].context.device_type != "gpu":
                    bridge.settle(args[position])
            return super().__call__(*args, **kwargs)

    return CachedOp


def _is_new(node: dict[str, Any]) -> bool:
    return node["op"] == "Custom" and node.get("attrs", {}).get("op_type") == OP_TYPE


def _is_network(node: dict[str, Any]) -> bool:
    return node["op"] == "Custom" and node.get("attrs", {}).get("op_type") == NETWORK


def _is_ours(node: dict[str, Any]) -> bool:
    return _is_new(node) or _is_network(node)


def _network_inputs(graph: dict[str, Any], sym: Any) -> tuple[int, ...]:
    """Which of the graph's inputs, by position, go straight into a whole network."""
    nodes = graph["nodes"]
    sources = {nodes[source]["name"] for node in nodes if _is_network(node) for source, *_ in node["inputs"]}
    return tuple(position for position, name in enumerate(sym.list_inputs()) if name in sources)


def _has_new_inside(node: dict[str, Any]) -> bool:
    inside = [inner for subgraph in node.get("subgraphs", ()) for inner in subgraph["nodes"]]
    return any(_is_new(inner) or _has_new_inside(inner) for inner in inside)


def _insert_slices(graph: dict[str, Any]) -> None:
    """A slice of all in front of each input of each New, and of what a network is given by other nodes.

    The graph stays in topological order.
    """
    nodes: list[dict[str, Any]] = []
    moved: list[int] = []  # where the node of each old index stands now
    for node in graph["nodes"]:
        inputs = [[moved[source], *rest] for source, *rest in node["inputs"]]
        if _is_ours(node):
            for position, entry in enumerate(inputs):
                if _is_network(node) and nodes[entry[0]]["op"] == "null":
                    continue
                name = f"{node['name']}_plain{position}"
                nodes.append({"op": "slice_axis", "name": name, "attrs": _ALL, "inputs": [entry]})
                inputs[position] = [len(nodes) - 1, 0, 0]
        moved.append(len(nodes))
        nodes.append({**node, "inputs": inputs})
        if "control_deps" in node:
            nodes[-1]["control_deps"] = [moved[source] for source in node["control_deps"]]
    graph["nodes"] = nodes
    graph["arg_nodes"] = [moved[index] for index in graph["arg_nodes"]]
    graph["heads"] = [[moved[source], *rest] for source, *rest in graph["heads"]]
    graph["node_row_ptr"] = list(range(len(nodes) + 1))
