"""What a network's two files say of it: its layers, its convolutions' shapes, the images that it takes."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ece408_op.errors import GraphError
from ece408_op.graph import node_conversion, params_io, symbol_json
from ece408_op.plugin import attributes, mxnet_import

from .files import Network, data_node, find, read_graph

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

#: The most rows of an image that are tried.
LARGEST = 1024

_DIMENSIONS = 4


@dataclass(frozen=True)
class ConvLayer:
    """A convolution, for a batch of one: input x (1, C, H, W), weight w (M, C, K, K), output y (1, M, OH, OW)."""

    name: str
    x: Shape
    w: Shape
    y: Shape


@dataclass(frozen=True)
class NetworkInfo:
    """`image` is (channels, rows, columns); `layers` has (operator, name) of each node that computes, in order."""

    network: Network
    image: tuple[int, int, int]
    layers: tuple[tuple[str, str], ...]
    convolutions: tuple[ConvLayer, ...]


def info(network: str | Network, folder: str | os.PathLike[str] | None = None) -> NetworkInfo:
    """A network's layers and shapes.

    The image is what the data node's `__shape__` says, (batch, channels, rows, columns); without it, the
    smallest square that fits symbol and weights, with the channels of the first convolution.

    Raises GraphError, which names file and node, where a file is missing or broken, or where symbol and
    weights don't fit each other.
    """
    if isinstance(network, str):
        network = find(network, folder)
    written = read_graph(network.symbol)
    graph = with_convolutions(written, str(network.symbol))
    fit = _Fit(network, graph)
    image = _stated_image(data_node(graph, network.symbol))
    if image is None:
        image = fit.smallest_square(_channels(graph, fit.weights))
    else:
        misfit = fit.misfit(image)
        if misfit is not None:
            raise GraphError(f"{network.params}: with the __shape__ of 'data' in {network.symbol}, {misfit.reason}")
    layers = tuple((node["op"], node["name"]) for node in written["nodes"] if node["op"] != symbol_json.VARIABLE)
    return NetworkInfo(network, image, layers, _convolutions(graph, fit.symbol, image))


def with_convolutions(graph: symbol_json.Graph, where: str = "symbol") -> symbol_json.Graph:
    """A copy of the graph that MXNet runs by itself: each `New` a Convolution without bias, names unchanged.

    Raises GraphError, which begins with `where` and names the node, for a `New` whose attributes are wrong.
    """
    plain = copy.deepcopy(graph)
    for node, _, label, _ in symbol_json.places(plain, where):
        if node_conversion.is_new(node):
            judged = node_conversion.attributes_of(node, label).as_text()
            kept = {key: value for key, value in node["attrs"].items() if _is_kept(key)}
            node["op"] = "Convolution"
            node["attrs"] = {**kept, "kernel": judged["kernel"], "num_filter": judged["num_filter"], "no_bias": "True"}
    return plain


def load_symbol(graph: symbol_json.Graph, path: Path) -> Any:
    """The graph as MXNet's Symbol. Raises GraphError, with MXNet's reason, where it refuses the graph."""
    mx = mxnet_import.load()
    try:
        return mx.sym.load_json(symbol_json.for_mxnet(graph))
    except mx.MXNetError as error:
        raise GraphError(f"{path}: expected a symbol that MXNet loads, got: {_reason(error)}") from None


class _Misfit(NamedTuple):
    """Why weights don't fit; the larger of two is nearer to fitting."""

    fitting: int
    nearness: int
    reason: str


class _Fit:
    """A symbol held against the shapes of its weights."""

    def __init__(self, network: Network, graph: symbol_json.Graph) -> None:
        self.network, self.symbol = network, load_symbol(graph, network.symbol)
        arrays = params_io.read(network.params.read_bytes(), str(network.params))
        self.weights: Shapes = {key.partition(":")[2]: array.shape for key, array in arrays.items()}
        inputs = self.symbol.list_arguments() + self.symbol.list_auxiliary_states()
        # By MXNet's convention the truth, which only training needs, is called something_label.
        self.trained = [name for name in inputs if name != "data" and not name.endswith("label")]
        missing = ", ".join(name for name in self.trained if name not in self.weights)
        if missing:
            raise GraphError(f"{network.params}: expected weights for every layer of {network.symbol}, lacks {missing}")
        node_conversion.check_weights(graph, self.weights, f"{network.params} against {network.symbol}", required=False)

    def smallest_square(self, channels: int) -> tuple[int, int, int]:
        nearest = _Misfit(-1, 0, "")
        for side in range(1, LARGEST + 1):
            misfit = self.misfit((channels, side, side))
            if misfit is None:
                return (channels, side, side)
            nearest = max(nearest, misfit, key=lambda one: (one.fitting, one.nearness))
        raise GraphError(
            f"{self.network.params}: expected weights that fit {self.network.symbol} for a square image of up to "
            f"{LARGEST} rows, got none; nearest: {nearest.reason}; for other images give 'data' a __shape__"
        )

    def misfit(self, image: tuple[int, int, int]) -> _Misfit | None:
        """What keeps the weights from fitting for images of that shape; None where nothing does."""
        mx = mxnet_import.load()
        try:
            # Not infer_shape, which prints its arguments to stdout where it fails.
            arguments, _, states = self.symbol.infer_shape_partial(data=(1, *image))
        except mx.MXNetError as error:
            return _Misfit(-1, 0, _reason(error))
        inferred = dict(zip(self.symbol.list_arguments(), arguments))
        inferred.update(zip(self.symbol.list_auxiliary_states(), states))
        for fitting, name in enumerate(self.trained):
            expected, got = tuple(inferred[name]), self.weights[name]
            if expected != got:
                apart = abs(math.prod(expected) - math.prod(got))
                return _Misfit(fitting, -apart, f"expected {name} of shape {expected} for images {image}, got {got}")
        return None


def _is_kept(attribute: str) -> bool:
    return symbol_json.is_mxnets_own(attribute) and attribute != attributes.LAYER


def _stated_image(node: symbol_json.Node) -> tuple[int, int, int] | None:
    """(channels, rows, columns) of a data node's `__shape__`; None where it has none or leaves one open."""
    shape = symbol_json.integers(node["attrs"].get("__shape__", "")) or []
    if len(shape) != _DIMENSIONS or min(shape[1:]) < 1:
        return None
    return (shape[1], shape[2], shape[3])


def _channels(graph: symbol_json.Graph, weights: Shapes) -> int:
    """The channels that the first convolution takes; 1 in a network without any."""
    nodes = graph["nodes"]
    for node in nodes:
        if node["op"] == "Convolution" and len(node["inputs"]) > 1:
            weight = weights.get(nodes[node["inputs"][1][0]]["name"], ())
            if len(weight) == _DIMENSIONS:
                return weight[1] * int(node["attrs"].get("num_group", "1"))
    return 1


def _convolutions(graph: symbol_json.Graph, symbol: Any, image: tuple[int, int, int]) -> tuple[ConvLayer, ...]:
    internals = symbol.get_internals()
    shapes = dict(zip(internals.list_outputs(), internals.infer_shape_partial(data=(1, *image))[1]))

    def output(index: int) -> Shape:
        node = graph["nodes"][index]
        return tuple(shapes[node["name"] if node["op"] == symbol_json.VARIABLE else f"{node['name']}_output"])

    return tuple(
        ConvLayer(node["name"], output(node["inputs"][0][0]), output(node["inputs"][1][0]), output(index))
        for index, node in enumerate(graph["nodes"])
        if node["op"] == "Convolution"
    )


def _reason(error: Exception) -> str:
    """The reason in an MXNetError, which ends with it, without the stack above."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
