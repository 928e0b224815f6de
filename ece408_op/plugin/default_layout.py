"""Keeps oneDNN's blocked layout away from the operator.

MXNet's oneDNN operators leave their results, and reorder their weights, into a blocked layout. When such an array goes
into a Custom operator, MXNet reorders it into a temporary that it frees before the asynchronous operator reads it:
wrong numbers and no error. Executors (and so Module) keep that temporary alive. Two other ways do not:

- an imperative call: ``reorder`` is queued for each input before the call, see imperative.py;
- a graph run by CachedOp (hybridised Gluon, SymbolBlock): this module inserts a slice of the whole array in front of
  each input, because a slice's output always has the default layout. (So has a reshape's, but oneDNN's reshape fails
  on an empty batch.) The operator is not supported inside the graph of a control-flow operator.

The gradient of the output is an input of the backward pass, with the same problem. A slice of the output makes that
gradient arrive in the default layout; outside of graphs, so does a reshaped view, which needs no copy. A CachedOp has a
second graph with these slices for recorded calls.

The node of a whole network (``NETWORK``) is treated in the same way, except for inputs that are inputs of the graph,
such as images and parameters: a slice would copy them, so they are reordered in place before the call.

Only calls and graphs that contain such operators are changed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx

from ece408_op.errors import DeviceError, ProblemError

from . import bridge

OP_TYPE = "New"
NETWORK = "ece408_network"
_OP_TYPES = (OP_TYPE, NETWORK)

#: The attribute that MXNet sets on every node inside a control-flow subgraph.
_SUBGRAPH = "__subgraph_name__"

#: slice_axis with these attributes returns the whole array, whatever its rank.
_ALL = {"axis": "0", "begin": "0", "end": "None"}

#: void mxnet::NDArray::Reorder2DefaultAsync() const, which MXNDArrayGetData calls and waits for.
REORDER = "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv"


def install() -> None:
    """Make MXNet's graphs insert the slices; once per process."""
    replace("mxnet.ndarray", "CachedOp", _cached_op_with_slices(mx.nd.CachedOp))


def reorder(array: Any) -> None:
    """Queue an in-place reorder of a CPU NDArray to the default layout, after all pending operations on it.

    The reorder is queued as a write, without waiting: the operator that is called next reads the default layout. A
    built-in Convolution that begins to read its weight requests the blocked layout for the weight. A Convolution called
    earlier begins before the reorder, and MXNet drops its request, because the array has been written since. Raises
    ProblemError for a sparse array, and DeviceError if this build of MXNet has no reorder function.
    """
    shape = array.shape
    if array.stype != "default":  # tested here too, so that the message is formatted only for an error
        bridge.check_dense(array.stype, f"an array of shape {shape}")
    if 0 not in shape:
        reorder_function(mx.base._LIB)(array.handle)


@functools.cache
def reorder_function(library: Any) -> Callable[[Any], None]:
    """Return the C++ function of MXNet's library that queues a reorder; the C API has only one that also waits.

    A build without oneDNN has no blocked arrays, so it gets a function that does nothing. Raises DeviceError if a build
    with oneDNN lacks the function.
    """
    function = getattr(library, REORDER, None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p], None
        return function  # type: ignore[no-any-return]
    features = mx.runtime.Features()
    uses_onednn = any(name in features and features.is_enabled(name) for name in ("MKLDNN", "ONEDNN"))
    if uses_onednn and os.environ.get("MXNET_MKLDNN_ENABLED") != "0":
        raise DeviceError(
            f"MXNet {mx.__version__}: expected NDArray::Reorder2DefaultAsync in its library, found none; without it "
            "the operator would read arrays in oneDNN's blocked layout and return wrong numbers; install MXNet 1.9.1 "
            "from PyPI, or set MXNET_MKLDNN_ENABLED=0"
        )
    return lambda handle: None


def check_subgraph(attributes: Mapping[str, str], name: str = OP_TYPE) -> None:
    """Raise ProblemError for the operator ``name`` inside a control-flow subgraph."""
    if attributes.get(_SUBGRAPH):
        raise ProblemError(
            f"expected a graph without control flow around {name}, got one inside {attributes[_SUBGRAPH]!r}; use "
            "MXNet's own operators there, or a loop of Python"
        )


def replace(package: str, name: str, new: Any) -> None:
    """Replace the object ``name`` of the MXNet package or module ``package`` in all its modules that have it."""
    old = getattr(sys.modules[package], name)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(package) and vars(module).get(name) is old:
            setattr(module, name, new)


def _cached_op_with_slices(cached_op: Any) -> Any:
    class CachedOp(cached_op):  # type: ignore[misc]
        """MXNet's CachedOp, in whose graph this package's operators get inputs in the default layout."""

        __slots__ = ("_recorded", "_reordered")

        def __init__(self, sym: Any, flags: Any = ()) -> None:
            self._recorded: Any = None
            # By default, tojson drops the casts that automatic mixed precision inserted.
            graph, of_numpy = json.loads(sym.tojson(remove_amp_cast=False)), isinstance(sym, mx.sym.np._Symbol)
            self._reordered = _network_inputs(graph, sym)
            if any(map(_op_type, graph["nodes"])):
                sym = _with_slices(graph, of_numpy, outputs_too=False)
            super().__init__(sym, flags)
            if any(map(_has_gradient, graph["nodes"])):
                recorded = _with_slices(graph, of_numpy, outputs_too=True)
                self._recorded = functools.cache(lambda: cached_op(recorded, flags))

        def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
            super()._register_op_hook(callback, monitor_all)
            if self._recorded:
                self._recorded()._register_op_hook(callback, monitor_all)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            for position in self._reordered:
                if args[position].context.device_type != "gpu":
                    reorder(args[position])
            if self._recorded and mx.autograd.is_recording():
                return self._recorded()(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    return CachedOp


def _op_type(node: dict[str, Any]) -> str | None:
    """Return OP_TYPE or NETWORK for a node of this package's operators, and None for others."""
    op_type = node.get("attrs", {}).get("op_type") if node["op"] == "Custom" else None
    return op_type if op_type in _OP_TYPES else None


def _has_gradient(node: dict[str, Any]) -> bool:
    return _op_type(node) == OP_TYPE or (_op_type(node) == NETWORK and node["attrs"].get("for_training") == "True")


def _network_inputs(graph: dict[str, Any], sym: Any) -> tuple[int, ...]:
    """Return the positions of the graph's inputs that are inputs of a whole network's node."""
    nodes = graph["nodes"]
    sources = {nodes[source]["name"] for node in nodes if _op_type(node) == NETWORK for source, *_ in node["inputs"]}
    return tuple(position for position, name in enumerate(sym.list_inputs()) if name in sources)


def view(output: Any) -> Any:
    """Return a view of a recorded call's output whose gradient arrives in the default layout.

    An array on a GPU is returned as it is: it always has the default layout, and MXNet would copy a view's gradient.
    """
    return output.reshape(output.shape) if output.size and not bridge.on_gpu(output) else output


def _with_slices(graph: Mapping[str, Any], of_numpy: bool, outputs_too: bool) -> Any:
    """Return a Symbol of the graph with slices; with ``outputs_too`` also after each operator that has a gradient."""
    sliced = mx.sym.load_json(json.dumps(_insert_slices(graph, outputs_too)))
    return sliced.as_np_ndarray() if of_numpy else sliced


def _insert_slices(graph: Mapping[str, Any], outputs_too: bool) -> dict[str, Any]:
    """Insert a slice in front of each input of each New, and of a network's inputs that other nodes compute.

    The graph stays in topological order.
    """
    nodes: list[dict[str, Any]] = []
    moved: list[int] = []  # the new index of each node
    sliced: dict[tuple[int, int], list[int]] = {}  # the slices of outputs
    entries = [*graph["heads"], *(entry for node in graph["nodes"] for entry in node["inputs"])]
    outputs = sorted({(source, output) for source, output, *_ in entries})

    def new(source: int, output: int, *rest: int) -> list[int]:
        return sliced.get((source, output)) or [moved[source], output, *rest]

    for index, node in enumerate(graph["nodes"]):
        inputs = [new(*entry) for entry in node["inputs"]]
        if _op_type(node):
            for position, entry in enumerate(inputs):
                if _op_type(node) == NETWORK and nodes[entry[0]]["op"] == "null":
                    continue
                name = f"{node['name']}_plain{position}"
                nodes.append({"op": "slice_axis", "name": name, "attrs": _ALL, "inputs": [entry]})
                inputs[position] = [len(nodes) - 1, 0, 0]
        nodes.append({**node, "inputs": inputs})
        moved.append(len(nodes) - 1)
        if "control_deps" in node:
            nodes[-1]["control_deps"] = [moved[source] for source in node["control_deps"]]
        if outputs_too and _has_gradient(node):
            # The slice of a single output gets the node's name, because MXNet names the output after the slice.
            nodes[-1]["name"] += "_plain"
            mine = [output for source, output in outputs if source == index]
            for output in mine:
                name = node["name"] if mine == [0] else f"{node['name']}_output{output}"
                entry = [moved[index], output, 0]
                nodes.append({"op": "slice_axis", "name": name, "attrs": _ALL, "inputs": [entry]})
                sliced[index, output] = [len(nodes) - 1, 0, 0]
    return {
        "nodes": nodes,
        "arg_nodes": [moved[index] for index in graph["arg_nodes"]],
        "heads": [new(*head) for head in graph["heads"]],
        "attrs": graph.get("attrs", {}),
        "node_row_ptr": list(range(len(nodes) + 1)),
    }
