"""Open and write network files in the original format, and replace Convolution by the operator in a graph.

    symbol, arg_params, aux_params = load_checkpoint("models/ece408-high", 1)
    symbol, arg_params, replaced, left = replace_convolution(symbol, arg_params)
    save_checkpoint("models/mine", 1, symbol, arg_params, aux_params)

Files are read and checked as plain data (symbol_graph, params_io) before MXNet sees them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Union

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch
from ece408_op.data.atomic import replacing
from ece408_op.errors import GraphError, ProblemError
from ece408_op.plugin.attributes import Attributes
from ece408_op.plugin.mxnet_errors import sentence_of

from . import _replacement, fusion, node_conversion, params_io
from .symbol_graph import Graph

Arrays = dict[str, Any]
Prefix = Union[str, "os.PathLike[str]"]

#: The ``where`` of errors in a graph that does not come from a file.
_SYMBOL = "symbol"
_KINDS = ("arg", "aux")

#: The values of ``where``, and the reason given for layers that "faster" does not replace.
WHERE = ("all", "faster")
SLOWER = "MXNet's own Convolution is expected to be faster"


class Replaced(NamedTuple):
    """The result of replace_convolution.

    Attributes:
        symbol: the new network.
        arg_params: the parameters by their new names; None if none were given.
        replaced: for each replaced Convolution, by name, the name of its new node.
        left: for each other Convolution, by name, the reasons why ``New`` cannot replace it.
    """

    symbol: Any
    arg_params: Arrays | None
    replaced: dict[str, str]
    left: dict[str, str]


def load_checkpoint(
    prefix: Prefix,
    epoch: int,
    *,
    impl: str = "auto",
    device: str | None = None,
    precision: str = "float32",
    fuse: bool = False,
) -> tuple[Any, Arrays, Arrays]:
    """Load the network in PREFIX-symbol.json and PREFIX-EPOCH.params.

    Like mx.model.load_checkpoint, but it also supports files with ``New`` nodes, in every MXNet version's spelling.

    Args:
        prefix: the path of the files up to "-symbol.json".
        epoch: the number in the name of the parameter file, which has at least four digits there.
        impl: the implementation of every ``New``, as in ``ece408_op.New``. Values of impl, device and precision other
            than the defaults override the file's.
        device: as in ``ece408_op.New``.
        precision: as in ``ece408_op.New``.
        fuse: merge each ``New``, the tanh after it and the 2 x 2 max-pooling after the tanh into one node, named like
            the pooling, if nothing else reads the values in between.

    Returns:
        (symbol, arg_params, aux_params); the arrays are on mx.cpu() and have the types of the file.

    Raises:
        GraphError: a file is missing or damaged, or the weights do not fit the symbol; the message names file and node.
        ProblemError: impl, device or precision is unknown.
    """
    options = checked_options(impl, device, precision)
    symbol_file, params_file = _files(prefix, epoch)
    where = str(symbol_file)
    graph = Graph.parse(_text(symbol_file), where)
    given = {name: value for name, value in options.items() if value != getattr(Attributes, name)}
    node_conversion.to_custom(graph, where, given)
    if fuse:
        graph = fusion.fuse_tanh_pool(graph)
    symbol = _symbol(graph, where)
    by_kind: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _KINDS}
    for full_name, array in params_io.read(_bytes(params_file), str(params_file)).items():
        kind, _, name = full_name.partition(":")
        if kind not in by_kind or not name:
            raise GraphError(f"{params_file}: expected names that begin with arg: or aux:, got {full_name!r}")
        by_kind[kind][name] = array
    shapes = {name: array.shape for name, array in by_kind["arg"].items()}
    node_conversion.check_weights(graph, shapes, f"{params_file} against {where}", required=True)
    arg_params, aux_params = (
        {name: mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype) for name, array in by_kind[kind].items()}
        for kind in _KINDS
    )
    return symbol, arg_params, aux_params


def save_checkpoint(
    prefix: Prefix, epoch: int, symbol: Any, arg_params: Mapping[str, Any], aux_params: Mapping[str, Any]
) -> None:
    """Write a network to PREFIX-symbol.json and PREFIX-EPOCH.params in the format of the course's files.

    The symbol file has nodes of the operator ``New`` with kernel and num_filter, without impl, device and precision,
    and attributes under ``attr``. Arrays have the first version of the format, which MXNet 0.10 to 1.9.1 reads. Both
    files are complete before either is replaced.

    Args:
        prefix: the path of the files up to "-symbol.json".
        epoch: the number for the name of the parameter file.
        symbol: the network, an MXNet Symbol.
        arg_params: its parameters by name, NDArrays.
        aux_params: its auxiliary states by name, NDArrays.

    Raises:
        GraphError: the files cannot store the graph or an array.
    """
    symbol_file, params_file = _files(prefix, epoch)
    graph = graph_of(symbol)
    node_conversion.to_original(graph, _SYMBOL)
    arrays = {}
    for kind, params in zip(_KINDS, (arg_params or {}, aux_params or {})):
        node_conversion.check_arrays(params, f"{kind}_params")
        for name, array in params.items():
            if not isinstance(array, mx.nd.NDArray):
                raise GraphError(f"{params_file}: {name}: expected an NDArray, got {type(array).__name__}")
            if array.stype != "default":
                raise GraphError(f"{params_file}: {name}: expected a dense array, got a {array.stype} one")
            arrays[f"{kind}:{name}"] = array.asnumpy()
    params_content = params_io.write(arrays, str(params_file))
    text = graph.dump("attr") + "\n"
    with replacing(symbol_file) as symbol_stream:
        symbol_stream.write(text.encode("utf-8"))
        symbol_stream.flush()  # so that later errors concern only the other file
        with replacing(params_file) as params_stream:
            params_stream.write(params_content)


def replace_convolution(
    symbol: Any,
    arg_params: Mapping[str, Any] | None = None,
    *,
    impl: str = "auto",
    device: str | None = None,
    precision: str = "float32",
    fuse: bool = False,
    where: str = "all",
    renames: bool = True,
    warn: bool = True,
) -> Replaced:
    """Return a network with ``New`` in place of every Convolution that ``New`` supports, for inference or training.

    ``New`` supports all 2-D Convolutions in NCHW and float32 outside of control flow. The new nodes are named new0,
    new1, ...; names that exist already are skipped. A weight or bias that only replaced nodes use is named after the
    first of these nodes (new0_weight); others keep their names. Nothing else changes, and the caller's objects are not
    modified.

    Args:
        symbol: the network, an MXNet Symbol.
        arg_params: its parameters by name, to be renamed like the weights.
        impl: the implementation of the new nodes, as in ``ece408_op.New``.
        device: as in ``ece408_op.New``.
        precision: as in ``ece408_op.New``.
        fuse: merge each ``New`` with tanh and pooling, as in load_checkpoint.
        where: "all", or "faster" to leave the layers that MXNet is expected to compute faster on this device.
        renames: whether parameters are renamed after the new nodes.
        warn: print one line on stderr if some of the new nodes are expected to be slower than MXNet's Convolution.

    Raises:
        GraphError: a weight's shape does not fit its layer, arg_params is not a dictionary of arrays by name, or the
            symbol cannot be written as JSON.
        ProblemError: impl, device, precision or where is unknown.
    """
    options = checked_options(impl, device, precision, where)
    graph = graph_of(symbol)
    node_conversion.check_arrays(arg_params or {}, "arg_params")
    internals = symbol.get_internals()
    taken = {*internals.list_outputs(), *(arg_params or {})}
    shapes = {name: tuple(array.shape) for name, array in (arg_params or {}).items()}
    node_conversion.check_weights(graph, shapes, _SYMBOL, required=False)
    weights = _weight_shapes(graph, symbol, shapes)
    attributes = {node.name: node.attrs for node in graph.nodes}
    slower = [name for name, shape in weights.items() if is_slower(shape, attributes[name], options)]
    excluded = dict.fromkeys(slower, SLOWER) if where == "faster" else {}
    result = _replacement.replace(graph, options, _types(internals), taken, excluded, renames)
    params = None if arg_params is None else {result.parameters.get(k, k): v for k, v in arg_params.items()}
    new = _symbol(fusion.fuse_tanh_pool(graph) if fuse else graph, _SYMBOL)
    if isinstance(symbol, mx.sym.np._Symbol):
        new = new.as_np_ndarray()
    count = len(result.replaced.keys() & set(slower))
    if warn and count:
        print(
            f"replace_convolution: expect {count} of {len(result.replaced)} replaced layers to be slower than MXNet's "
            "own Convolution; where='faster' leaves them, warn=False silences this",
            file=sys.stderr,
        )
    return Replaced(new, params, result.replaced, result.left)


def graph_of(symbol: Any) -> Graph:
    """Return the graph of an MXNet symbol; raises GraphError for anything else."""
    if not isinstance(symbol, mx.sym.Symbol):
        raise GraphError(f"{_SYMBOL}: expected an mxnet Symbol, got {type(symbol).__name__}")
    # By default, tojson drops the casts that automatic mixed precision inserted.
    return Graph.parse(symbol.tojson(remove_amp_cast=False), _SYMBOL)


def _weight_shapes(graph: Graph, symbol: Any, known: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the shapes of the Convolutions' weights by node name, () if unknown, from parameters or by inference."""
    inferred: dict[str, tuple[int, ...]] = {}
    convolutions = [node for node in graph.nodes if node.op == _replacement.CONVOLUTION]
    if convolutions and not known:
        # Without the layers behind them: MXNet cannot infer a FullyConnected of an image of unknown size.
        names, internals = {f"{node.name}_output" for node in convolutions}, symbol.get_internals()
        places = (place for place, name in enumerate(internals.list_outputs()) if name in names)
        symbol = mx.sym.Group([internals[place] for place in places])
        arguments = symbol.list_arguments()
        images = {"data", *(graph.nodes[node.inputs[0].node].name for node in convolutions)}.intersection(arguments)
        unknown = -1 if mx.util.is_np_shape() else 0
        for some in (images, *({image} for image in images)):
            with suppress(mx.MXNetError):  # one of them has another number of dimensions
                shapes, _, _ = symbol.infer_shape_partial(**dict.fromkeys(some, (unknown,) * 4))
                found = {name: shape for name, shape in zip(arguments, shapes) if shape}
                inferred = {**found, **{name: shape for name, shape in inferred.items() if min(shape) > 0}}
            if some == images and inferred:
                break
    weights = {node.name: graph.nodes[node.inputs[1].node].name for node in convolutions}
    return {name: known.get(weight) or inferred.get(weight) or () for name, weight in weights.items()}


def is_slower(weight: tuple[int, ...], attributes: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether ``New`` is expected to be slower than MXNet's own Convolution with a weight of this shape.

    False if the shape is not known: () or with sizes of 0 or -1. attributes: the Convolution's, as text or values.
    """
    device = options["device"] or dispatch.device_of(options["impl"], "cpu")
    groups = int(attributes.get("num_group", 1))
    steps = re.findall(r"\d+", f"{attributes.get('stride', '')} {attributes.get('dilate', '')}")
    dense = all(int(step) == 1 for step in steps)
    return len(weight) == 4 and min(weight) > 0 and dispatch.slower_than_mxnet(weight, device, groups, dense)


def checked_options(impl: str, device: str | None, precision: str, where: str = "all") -> dict[str, Any]:
    """Return impl, device and precision by name; raises ProblemError for a wrong option."""
    if where not in WHERE:
        raise ProblemError(f"where: expected one of {', '.join(WHERE)}; got {where!r}")
    given = {"impl": impl, "device": device, "precision": precision}
    parsed = Attributes.parse({"kernel": (1, 1), "num_filter": 1, **given})
    return {name: getattr(parsed, name) for name in given}


def _files(prefix: Prefix, epoch: int) -> tuple[Path, Path]:
    text = os.fspath(prefix)
    if not hasattr(epoch, "__index__") or isinstance(epoch, bool) or epoch < 0:
        raise ProblemError(f"epoch: expected a whole number from 0 on, got {epoch!r}")
    return Path(f"{text}-symbol.json"), Path(f"{text}-{epoch:04d}.params")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise GraphError(f"{file}: expected a file, found none; check prefix and epoch") from None
    except OSError as error:
        raise GraphError(f"{file}: expected a file to read, got: {error.strerror}") from None


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise GraphError(f"{file}: expected a symbol in UTF-8, got an invalid byte at {error.start}") from None


def _symbol(graph: Graph, where: str) -> Any:
    try:
        symbol = mx.sym.load_json(graph.for_mxnet())
        text = symbol.tojson(remove_amp_cast=False)
    except (mx.MXNetError, UnicodeEncodeError) as error:
        raise GraphError(
            f"{where}: expected a graph for MXNet {mx.__version__}, which says: {sentence_of(error)}"
        ) from None
    Graph.parse(text, where).check_outputs(where)
    return symbol


def _types(internals: Any) -> dict[str, str]:
    """Return the names of the types that MXNet infers, by node name; variables of unknown type count as float32."""
    types: Any = ()
    with suppress(mx.MXNetError):
        arguments, types, _ = internals.infer_type_partial()
        # A cast of automatic mixed precision has no type while that of its input is unknown.
        unknown = [name for name, dtype in zip(internals.list_arguments(), arguments) if dtype is None]
        _, types, _ = internals.infer_type_partial(**dict.fromkeys(unknown, np.float32))
    known = ((name, np.dtype(dtype)) for name, dtype in zip(internals.list_outputs(), types) if dtype is not None)
    return {name.removesuffix("_output"): (dtype.names or [dtype.name])[0] for name, dtype in known}
