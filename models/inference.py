"""Run a whole network on a data set: predictions, and comparisons of the operator's layers with MXNet and float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mxnet as mx
import numpy as np
from tqdm import tqdm

from ece408_op.core import dispatch
from ece408_op.core.check import Comparison, compare
from ece408_op.core.explain import explain
from ece408_op.core.kernel import EPS32
from ece408_op.errors import Ece408Error
from ece408_op.graph.api import load_checkpoint, replace_convolution
from ece408_op.network.api import gpu_network
from ece408_op.plugin import op_times
from ece408_op.plugin.attributes import Attributes
from ece408_op.plugin.default_layout import OP_TYPE

from . import files, shapes

#: Images per step of `verify`: more images would need more memory for the layers' outputs.
VERIFY_STEP = 500

#: Images per step whose outputs are compared with float64.
COMPARED = 8

#: The images before and after a wrong image that are compared with likely mistakes too.
EXPLAINED = 2


@dataclass(frozen=True)
class Loaded:
    """A network ready to run: MXNet's symbol and its parameters, by name."""

    symbol: Any
    arg_params: dict[str, Any]
    aux_params: dict[str, Any]
    #: The Convolutions that ``New`` does not replace, by name, each with the reason.
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification:
    """The operator's layers compared with MXNet's Convolution and with float64."""

    #: The largest |New - Convolution| on the same input, over all elements of all layers of the operator.
    largest_difference: float
    #: The number of the ``compared`` images that both networks put into the same class.
    agreeing: int
    compared: int
    #: The largest error compared with float64, divided by the kernel's error bound; None if all layers are fused.
    worst: float | None
    #: No output was NaN, and no error was above its bound.
    right: bool
    failures: tuple[str, ...] = ()


def with_operator(
    network: files.Network, impl: str, device: str, precision: str = "float32", fuse: bool = False
) -> Loaded:
    """Return the network with ``New`` for every convolution that it supports; the options are replace_convolution's."""
    symbol, arg_params, aux_params = load_checkpoint(
        network.prefix, network.epoch, impl=impl, device=device, precision=precision
    )
    new = replace_convolution(symbol, arg_params, impl=impl, device=device, precision=precision, fuse=fuse, warn=False)
    return Loaded(new.symbol, new.arg_params or {}, aux_params, new.left)


def built_in(network: files.Network) -> Loaded:
    """Return the network with MXNet's own Convolution for every convolution."""
    graph = shapes.with_convolutions(files.read_graph(network.symbol))
    _, arg_params, aux_params = load_checkpoint(network.prefix, network.epoch)
    return Loaded(shapes.load_symbol(graph, network.symbol), arg_params, aux_params)


def on_gpu(network: Loaded, impl: str, precision: str = "float32", device_ids: Sequence[int] = (0,)) -> Loaded:
    """Return the network as one node that computes on GPUs and is bound on mx.cpu(); see gpu_network."""
    options: dict[str, Any] = {"impl": impl, "precision": precision, "device_ids": device_ids}
    return Loaded(*gpu_network(network.symbol, network.arg_params, network.aux_params, **options))


def predict(network: Loaded, images: np.ndarray, context: Any) -> np.ndarray:
    """Return the class (N,) of each of the images (N, C, H, W), float32, computed in one batch on an MXNet context.

    Raises Ece408Error if the network's first output is not (N, classes).
    """
    scores = bound(network, images.shape, context)(data=mx.nd.array(images, ctx=context)).asnumpy()
    if scores.ndim != 2:
        raise Ece408Error(
            f"expected scores (images, classes) as the network's first output, got {scores.shape}; add a Flatten"
        )
    return scores.argmax(axis=1)


def bound(network: Loaded, images: tuple[int, ...], context: Any) -> Callable[..., Any]:
    """Bind the network; return a function from ``data``, an NDArray of images, to the NDArray of the first output.

    Without ``data``, the function computes the output of the last images again.
    """
    given = _parameters(network, (name for name in network.symbol.list_inputs() if not name.endswith("label")))
    executor = network.symbol.simple_bind(context, grad_req="null", type_dict={"data": np.float32}, data=images)
    executor.copy_params_from(given, given, allow_extra_params=True)
    return lambda **data: executor.forward(is_train=False, **data)[0]


def verify(network: Loaded, plain: Loaded, images: np.ndarray, predictions: np.ndarray) -> Verification:
    """Compare the operator's layers with MXNet's Convolution and float64, and predictions with MXNet's, on mx.cpu().

    network has the ``New`` nodes, plain is the same network with MXNet's Convolution. images: (N, C, H, W), float32;
    predictions: (N,), the classes that ``network`` computed.
    """
    differences = _differences(network.symbol)
    alone = [layer for layer in layers(network.symbol) if not layer.attributes.fuse]
    arrays = [one for layer in alone for one in (layer.output, *layer.inputs)]
    watched = mx.sym.Group(differences + arrays)
    largest, classes, found, mistakes = 0.0, [], dict[str, Comparison](), dict[str, str]()
    for first in tqdm(range(0, len(images), VERIFY_STEP), desc="verifying", unit="step", disable=None, leave=False):
        part = images[first : first + VERIFY_STEP]
        outputs = run(watched, network, part)
        # Unlike the built-in max, np.max propagates NaN.
        largest = float(np.max([largest, *(one.asscalar() for one in outputs[: len(differences)])]))
        kernels = {call.layer: dispatch.find(call.implementation) for call in op_times.op_times()}
        given = iter(outputs[len(differences) :])
        for layer in alone:
            out, x, w, *bias = (next(given).asnumpy() for _ in (layer.output, *layer.inputs))
            least = 0.0
            if bias:
                # The kernel's output, up to the rounding of the sum with the bias.
                least = EPS32 * float(np.abs(out).max(initial=0))
                out = out.astype(np.float64) - bias[0].reshape(-1, 1, 1)
            problem = layer.attributes.problem(x.shape, w.shape)
            this = compare(out, x, w, kernels[layer.name], COMPARED, least, problem)
            if not this.passed and not problem.needs and layer.name not in mistakes:
                some = slice(max(0, this.index[0] - EXPLAINED + 1), this.index[0] + EXPLAINED)
                mistakes[layer.name] = explain(x[some], w, out[some]).sentence
            this = replace(this, index=(first + this.index[0], *this.index[1:]))
            found[layer.name] = max(found.get(layer.name, this), this, key=lambda one: (not one.passed, one.worst))
        classes.append(predict(plain, part, mx.cpu()))
    agreeing = int((np.concatenate(classes) == predictions).sum())
    right = bool(np.isfinite(largest)) and all(one.passed for one in found.values())
    worst = max((one.worst for one in found.values()), default=None)
    wrong = {name: one for name, one in found.items() if not one.passed}
    failures = tuple(f"layer {name}: {one}. {mistakes.get(name, '')}".rstrip(". ") for name, one in wrong.items())
    return Verification(largest, agreeing, len(predictions), worst, right, failures)


@dataclass(frozen=True)
class Layer:
    """A ``New`` node of a network: its name and attributes; its output and its inputs, data first, as symbols."""

    name: str
    attributes: Attributes
    output: Any
    inputs: tuple[Any, ...]


def layers(symbol: Any) -> list[Layer]:
    """Return the ``New`` nodes of a symbol in the order in which they run."""
    internals = symbol.get_internals()
    attributes = symbol.attr_dict()
    found = []
    for output in internals.list_outputs():
        name = output[: -len("_output")]
        if output.endswith("_output") and attributes.get(name, {}).get("op_type") == OP_TYPE:
            given = {key: text for key, text in attributes[name].items() if key != "op_type"}
            inputs = tuple(internals[output].get_children())
            found.append(Layer(name, Attributes.parse(given), internals[output], inputs))
    return found


def run(symbol: Any, network: Loaded, images: np.ndarray) -> list[Any]:
    """Return the outputs, NDArrays on mx.cpu(), of a symbol over the network's parameters and the images."""
    given = {name: array.astype("float32") for name, array in _parameters(network, symbol.list_inputs()).items()}
    data = mx.nd.array(images)
    executor = symbol.bind(mx.cpu(), {**given, "data": data}, grad_req="null", aux_states=given)
    return list(executor.forward(is_train=False))


def _parameters(network: Loaded, inputs: Iterable[str]) -> dict[str, Any]:
    """Return the parameters with these names, but for "data"; raises Ece408Error if some are missing."""
    known, names = {**network.arg_params, **network.aux_params}, [name for name in inputs if name != "data"]
    missing = ", ".join(name for name in names if name not in known)
    if missing:
        raise Ece408Error(f"expected parameters for every layer of the network, lacks {missing}")
    return {name: known[name] for name in names}


def _differences(symbol: Any) -> list[Any]:
    """Return, for each ``New`` of a symbol, the largest |New - Convolution| on the same input as a symbol.

    If tanh and pooling are fused into the ``New``, they are applied to the Convolution as well.
    """
    found = []
    for layer in layers(symbol):
        given = {**layer.attributes.convolution(), "no_bias": layer.attributes.no_bias}
        own = mx.sym.Convolution(*layer.inputs, **given)
        if layer.attributes.fuse:
            convention = "full" if layer.attributes.full else "valid"
            own = mx.sym.Activation(own, act_type="tanh")
            own = mx.sym.Pooling(own, kernel=(2, 2), stride=(2, 2), pool_type="max", pooling_convention=convention)
        found.append(mx.sym.max(mx.sym.abs(layer.output - own)))
    return found
