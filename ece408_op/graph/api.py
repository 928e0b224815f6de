"""Networks as files and graphs: original ones opened and written, Convolution replaced by the operator.

    symbol, arg_params, aux_params = load_checkpoint("models/ece408-high", 1)
    symbol, arg_params, replaced, left = replace_convolution(symbol, arg_params)
    save_checkpoint("models/mine", 1, symbol, arg_params, aux_params)

Files are read and judged as plain data (symbol_json, params_io) before MXNet sees them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Union

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch
from ece408_op.data.atomic import replacing
from ece408_op.errors import GraphError, ProblemError
from ece408_op.plugin.attributes import Attributes
from ece408_op.plugin.default_layout import CURED

from . import _fusion, _replacement, node_conversion, params_io, symbol_json

Arrays = dict[str, Any]
Prefix = Union[str, "os.PathLike[str]"]

#: The error's ``where`` for a graph that came from no file.
_SYMBOL = "symbol"
_KINDS = ("arg", "aux")


class Replaced(NamedTuple):
    """What replace_convolution returns.

    symbol: the new graph; arg_params: the parameters by their new names, None where none were given;
    replaced: names of Convolutions to those of the operators in their place; left: names of the other
    Convolutions to the reasons.
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
    """The network in PREFIX-symbol.json and PREFIX-EPOCH.params: (symbol, arg_params, aux_params).

    As mx.model.load_checkpoint, and original files with ``New`` nodes in them too, in any spelling
    that MXNet ever wrote. impl, device, precision: for every ``New``, as in ``ece408_op.New``; where
    left at their defaults, what the file says holds. fuse: a ``New``, the tanh of it and the 2 x 2 maxima
    of that become one node, called as the last of them, where nothing else reads what is between. The
    arrays are on mx.cpu(), of the file's types.

    Raises GraphError, naming file and node, for a file that is missing, broken or damaged or whose
    weights do not fit the symbol, and ProblemError for an impl, device or precision that is unknown.
    """
    options = _options(impl, device, precision)
    symbol_file, params_file = _files(prefix, epoch)
    where = str(symbol_file)
    graph = symbol_json.parse(_text(symbol_file), where)
    node_conversion.to_custom(graph, where, options.as_text(), CURED)
    if fuse:
        graph = _fusion.fused(graph)
    symbol = _symbol(graph, where)
    arg_params, aux_params = _load_params(params_file)
    shapes = {name: array.shape for name, array in arg_params.items()}
    node_conversion.check_weights(graph, shapes, f"{params_file} against {where}", required=True)
    return symbol, _ndarrays(arg_params), _ndarrays(aux_params)


def save_checkpoint(
    prefix: Prefix, epoch: int, symbol: Any, arg_params: Mapping[str, Any], aux_params: Mapping[str, Any]
) -> None:
    """Write the network to PREFIX-symbol.json and PREFIX-EPOCH.params as the original had them.

    The reverse of load_checkpoint: op ``New`` with kernel and num_filter (its impl, device and
    precision are not kept), attributes under ``attr`` and arrays in the format's first version,
    which MXNet from 0.10 to 1.9.1 reads. Neither file takes its place before both are complete.

    Raises GraphError for a graph or an array that such files cannot hold.
    """
    symbol_file, params_file = _files(prefix, epoch)
    graph = _graph(symbol)
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
    text = symbol_json.dump(graph, "attr") + "\n"
    with replacing(symbol_file) as symbol_stream, replacing(params_file) as params_stream:
        symbol_stream.write(text.encode("utf-8"))
        params_stream.write(params_content)


def replace_convolution(
    symbol: Any,
    arg_params: Mapping[str, Any] | None = None,
    *,
    impl: str = "auto",
    device: str | None = None,
    precision: str = "float32",
    fuse: bool = False,
    warn: bool = True,
) -> Replaced:
    """The same network with ``New`` in the place of every Convolution that it supports.

    Supported: 2-D, a square kernel, stride 1, no padding, no dilation, one group, no bias, NCHW, float32;
    ``left`` says of each other one why not. The new nodes are called new0, new1, ... past every name
    that is there. A weight that only replaced nodes use is renamed with the first of them
    (new0_weight) and arg_params, a new dictionary, has its value by that name; a weight that something
    else uses too, or that is an output, keeps its name. Nothing else changes, the caller's objects
    neither. impl, device, precision: for the new nodes, as in ``ece408_op.New``. fuse: as in load_checkpoint, for every
    ``New``. warn: say on stderr, in one line, how many of the new nodes are expected to be slower than MXNet's own
    Convolution on their device.

    Raises GraphError where a weight's shape is not its layer's, arg_params are no arrays or the symbol has no JSON,
    and ProblemError for an impl, device or precision that is unknown.
    """
    options = _options(impl, device, precision).attributes
    graph = _graph(symbol)
    node_conversion.check_arrays(arg_params or {}, "arg_params")
    internals = symbol.get_internals()
    taken = {*internals.list_outputs(), *(arg_params or {})}
    shapes = {name: tuple(array.shape) for name, array in (arg_params or {}).items()}
    node_conversion.check_weights(graph, shapes, _SYMBOL, required=False)
    weights = _weight_shapes(graph, symbol, shapes)
    result = _replacement.replace(graph, options, _types(internals), taken)
    params = None if arg_params is None else {result.weights.get(k, k): v for k, v in arg_params.items()}
    new = _symbol(_fusion.fused(graph) if fuse else graph, _SYMBOL)
    if isinstance(symbol, mx.sym.np._Symbol):
        new = new.as_np_ndarray()
    if warn:
        _warn_of_slower([weights.get(name, ()) for name in result.replaced], options)
    return Replaced(new, params, result.replaced, result.left)


def _weight_shapes(graph: symbol_json.Graph, symbol: Any, known: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The shapes of the Convolutions' weights, by node, as far as parameters or the layers before them say."""
    inferred = {}
    if not known and "data" in symbol.list_arguments():
        try:
            shapes, _, _ = symbol.infer_shape_partial(data=(0, 0, 0, 0))
            inferred = dict(zip(symbol.list_arguments(), shapes))
        except mx.MXNetError:  # images of another rank: then nothing is known
            pass
    nodes = graph["nodes"]
    weights = {node["name"]: nodes[node["inputs"][1][0]]["name"] for node in nodes if node["op"] == "Convolution"}
    return {name: known.get(weight) or inferred.get(weight) or () for name, weight in weights.items()}


def _warn_of_slower(weights: list[tuple[int, ...]], options: Attributes) -> None:
    """Print one line on stderr where replaced layers of these weights are expected to be slower than MXNet's own."""
    device = options.device or dispatch.device_of(options.impl, "cpu")
    slower = sum(len(shape) == 4 and dispatch.slower_than_mxnet(shape, device) for shape in weights)
    if slower:
        print(
            f"replace_convolution: expect {slower} of {len(weights)} replaced layers to be slower than MXNet's own "
            f"Convolution on the {device.upper()}; warn=False silences this",
            file=sys.stderr,
        )


class _Options(NamedTuple):
    attributes: Attributes

    def as_text(self) -> dict[str, str]:
        text = self.attributes.as_text()
        return {key: text[key] for key in ("impl", "device", "precision") if key in text}


def _options(impl: str, device: str | None, precision: str) -> _Options:
    some = {"kernel": (1, 1), "num_filter": 1}
    return _Options(Attributes.parse({**some, "impl": impl, "device": device, "precision": precision}))


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
        raise GraphError(f"{file}: expected a symbol in UTF-8, got byte {error.start} of something else") from None


def _graph(symbol: Any) -> symbol_json.Graph:
    if not isinstance(symbol, mx.sym.Symbol):
        raise GraphError(f"{_SYMBOL}: expected an mxnet Symbol, got {type(symbol).__name__}")
    # By default tojson drops the casts that mixed precision put in.
    return symbol_json.parse(symbol.tojson(remove_amp_cast=False), _SYMBOL)


def _symbol(graph: symbol_json.Graph, where: str) -> Any:
    try:
        symbol = mx.sym.load_json(symbol_json.for_mxnet(graph))
        text = symbol.tojson(remove_amp_cast=False)
    except (mx.MXNetError, UnicodeEncodeError) as error:
        raise GraphError(
            f"{where}: expected a graph for MXNet {mx.__version__}, which says: {_reason(error)}"
        ) from None
    symbol_json.check_output_numbers(symbol_json.parse(text, where), where)
    return symbol


def _reason(error: Exception) -> str:
    """MXNet's sentence, without the trace of its own source around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("MXNetError:")] or lines[-1:] or [repr(error)]
    return said[-1].replace("MXNetError: ", "", 1)


def _load_params(file: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    by_kind: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _KINDS}
    for full_name, array in params_io.read(_bytes(file), str(file)).items():
        kind, _, name = full_name.partition(":")
        if kind not in by_kind or not name:
            raise GraphError(f"{file}: expected names that begin with arg: or aux:, got {full_name!r}")
        by_kind[kind][name] = array
    return by_kind["arg"], by_kind["aux"]


def _ndarrays(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {name: mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype) for name, array in arrays.items()}


def _types(internals: Any) -> dict[str, str]:
    """The types that MXNet can infer without being told any, by node."""
    try:
        _, types, _ = internals.infer_type_partial()
    except mx.MXNetError:
        return {}
    known = {}
    for name, dtype in zip(internals.list_outputs(), types or ()):
        if dtype is not None and name.endswith("_output"):
            known[name[: -len("_output")]] = np.dtype(dtype).name
    return known
