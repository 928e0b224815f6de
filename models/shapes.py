"""Read a network's two files: its layers, the shapes of its convolutions, the shape of its images."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ece408_op.errors import GraphError
from ece408_op.graph import node_conversion
from ece408_op.graph.symbol_graph import VARIABLE, Graph
from ece408_op.plugin import mxnet_import
from ece408_op.plugin.attributes import LAYER, integers, is_mxnets_own
from ece408_op.plugin.mxnet_errors import sentence_of

from .files import Network, data_node, find, read_graph, read_weights

Shape = tuple[int, ...]

#: The largest image, in rows, that `info` tries.
LARGEST = 1024

#: The rows and columns of Fashion-MNIST's images, which need no resizing.
_OWN_SIDE = 28

_DIMENSIONS = 4


@dataclass(frozen=True)
class ConvLayer:
    """A convolution's shapes for one image: input x (1, C, H, W), weight w (M, C, K, K), output y (1, M, OH, OW)."""

    name: str
    x: Shape
    w: Shape
    y: Shape


@dataclass(frozen=True)
class NetworkInfo:
    """`image` is (channels, rows, columns)."""

    network: Network
    image: tuple[int, int, int]
    convolutions: tuple[ConvLayer, ...]


def info(network: str | Network) -> NetworkInfo:
    """Return the shapes of a network.

    The image has the shape in the data node's `__shape__`, (batch, channels, rows, columns). Without that attribute it
    has the channels of the first convolution and is Fashion-MNIST's 28 x 28 if that size fits symbol and weights, or
    else the smallest square that fits.

    Raises GraphError, which names file and node, if a file is missing or broken, or if symbol and weights don't fit.
    """
    if isinstance(network, str):
        network = find(network)
    shapes = _Shapes(network, with_convolutions(read_graph(network.symbol), str(network.symbol)))
    image = shapes.stated_image() or shapes.square()
    return NetworkInfo(network, image, shapes.convolutions(image))


def with_convolutions(graph: Graph, where: str = "symbol") -> Graph:
    """Return a copy of the graph that MXNet alone can run: each `New` is a Convolution, names unchanged.

    Raises GraphError, which starts with `where` and names the node, if the attributes of a `New` node are wrong.
    """
    plain = copy.deepcopy(graph)
    for node, _, label, _ in plain.locations(where):
        if node_conversion.is_new(node):
            own = {"no_bias": "True", **node_conversion.attributes_of(node, label).convolution()}
            mxnets = {key: value for key, value in node.attrs.items() if is_mxnets_own(key) and key != LAYER}
            node.op = "Convolution"
            node.attrs = {**mxnets, **own}
    return plain


def load_symbol(graph: Graph, path: Path) -> Any:
    """Return the graph as an MXNet Symbol. Raises GraphError, with MXNet's reason, if MXNet refuses the graph."""
    mx = mxnet_import.load()
    try:
        return mx.sym.load_json(graph.for_mxnet())
    except mx.MXNetError as error:
        raise GraphError(f"{path}: expected a symbol that MXNet loads, got: {sentence_of(error)}") from None


#: The number of weights before the first misfit, the misfit's difference in elements as a negative number, a message.
_Misfit = tuple[int, int, str]


class _Shapes:
    """Compares a symbol with the shapes of its weights."""

    def __init__(self, network: Network, graph: Graph) -> None:
        self.network, self.graph, self.symbol = network, graph, load_symbol(graph, network.symbol)
        self.weights: dict[str, Shape] = {name: array.shape for name, array in read_weights(network).items()}
        inputs = self.symbol.list_arguments() + self.symbol.list_auxiliary_states()
        # By MXNet's convention the labels, which only training needs, are named something_label.
        self.trained = [name for name in inputs if name != "data" and not name.endswith("label")]
        missing = ", ".join(name for name in self.trained if name not in self.weights)
        if missing:
            raise GraphError(f"{network.params}: expected weights for every layer of {network.symbol}, lacks {missing}")
        node_conversion.check_weights(graph, self.weights, f"{network.params} against {network.symbol}", required=False)

    def stated_image(self) -> tuple[int, int, int] | None:
        """Return the data node's `__shape__` without the batch; None if it is missing or has unknown sizes."""
        stated = data_node(self.graph, self.network.symbol).attrs.get("__shape__", "")
        shape = integers(stated) or []
        if len(shape) != _DIMENSIONS or min(shape[1:]) < 1:
            return None
        image = (shape[1], shape[2], shape[3])
        misfit = self.misfit(image)
        if misfit is not None:
            where = f"{self.network.params}: with the __shape__ of 'data' in {self.network.symbol}"
            raise GraphError(f"{where}, {misfit[-1]}")
        return image

    def square(self) -> tuple[int, int, int]:
        """Return the image that `info` reports if the data node states none."""
        channels, nearest = self._channels(), (-1, 0, "")
        for side in (_OWN_SIDE, *range(1, LARGEST + 1)):  # 28 first: with global pooling, one pixel would fit too
            misfit = self.misfit((channels, side, side))
            if misfit is None:
                return (channels, side, side)
            nearest = max(nearest, misfit, key=lambda one: one[:-1])
        raise GraphError(
            f"{self.network.params}: expected weights that fit {self.network.symbol} for a square image of up to "
            f"{LARGEST} rows, got none; nearest: {nearest[-1]}; for other images give 'data' a __shape__"
        )

    def misfit(self, image: tuple[int, int, int]) -> _Misfit | None:
        """Return why the weights do not fit images of that shape; None if they do."""
        mx = mxnet_import.load()
        try:
            # Not infer_shape, which prints its arguments to stdout on failure.
            arguments, _, states = self.symbol.infer_shape_partial(data=(1, *image))
        except mx.MXNetError as error:
            return -1, 0, sentence_of(error)
        inferred = dict(zip(self.symbol.list_arguments(), arguments))
        inferred.update(zip(self.symbol.list_auxiliary_states(), states))
        for fitting, name in enumerate(self.trained):
            expected, got = tuple(inferred[name]), self.weights[name]
            if expected != got:
                difference = abs(math.prod(expected) - math.prod(got))
                reason = f"expected {name} of shape {expected} for images {image}, got {got}"
                return fitting, -difference, reason
        return None

    def convolutions(self, image: tuple[int, int, int]) -> tuple[ConvLayer, ...]:
        internals = self.symbol.get_internals()
        shapes = dict(zip(internals.list_outputs(), internals.infer_shape_partial(data=(1, *image))[1]))
        nodes = self.graph.nodes

        def output(index: int) -> Shape:
            op, name = nodes[index].op, nodes[index].name
            return tuple(shapes[name if op == VARIABLE else f"{name}_output"])

        return tuple(
            ConvLayer(node.name, output(node.inputs[0].node), output(node.inputs[1].node), output(index))
            for index, node in enumerate(nodes)
            if node.op == "Convolution"
        )

    def _channels(self) -> int:
        """Return the input channels of the first convolution; 1 for a network without any."""
        for node in self.graph.nodes:
            if node.op == "Convolution" and len(node.inputs) > 1:
                weight = self.weights.get(self.graph.nodes[node.inputs[1].node].name, ())
                if len(weight) == _DIMENSIONS:
                    return weight[1] * int(node.attrs.get("num_group", "1"))
        return 1
