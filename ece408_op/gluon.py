"""The operator in Gluon: the layer ``Conv2D``, ``replace`` for existing networks, and ``on_gpu`` for whole networks.

net = mx.gluon.model_zoo.vision.resnet18_v1()
ece408_op.gluon.replace(net)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from ece408_op.errors import ProblemError
from ece408_op.graph import api
from ece408_op.network.api import gpu_network
from ece408_op.plugin.builder import Convolution


class Conv2D(nn.Conv2D):  # type: ignore[misc] # MXNet has no types
    """mxnet.gluon.nn.Conv2D, computed by the operator: float32 in layout NCHW, with the same parameter names.

    Args:
        args, keywords: those of mxnet.gluon.nn.Conv2D.
        impl: as in ``ece408_op.New``.
        device: as in ``ece408_op.New``.
        precision: as in ``ece408_op.New``.

    Raises:
        ProblemError: another layout, or an unknown option.
    """

    _options: dict[str, Any]

    def __init__(
        self, *args: Any, impl: str = "auto", device: str | None = None, precision: str = "float32", **keywords: Any
    ) -> None:
        super().__init__(*args, **keywords)
        self._options = api.checked_options(impl, device, precision)
        if self._kwargs["layout"] != "NCHW":
            raise ProblemError(f"layout: expected NCHW, got {self._kwargs['layout']!r}; transpose the arrays")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:  # noqa: N803 (as in MXNet)
        """Return the convolution of x, with the layer's activation applied if it has one."""
        # A symbol gets the block's prefix in front of its name.
        name = "fwd" if isinstance(x, mx.sym.Symbol) else f"{self.name}_fwd"
        y = Convolution(x, weight, bias, name=name, **self._options, **self._kwargs)
        return y if self.act is None else self.act(y)


def on_gpu(block: Any, *examples: Any, **options: Any) -> Any:
    """Return a block that computes a HybridBlock on a GPU, for arrays in ``mx.cpu()``, in training and inference.

    The new block shares the Parameter objects of ``block``, so that a trainer of one block trains the other, and its
    save_parameters and load_parameters are those of ``block``, and it can take the place of ``block`` in another block:
    ``net.features = on_gpu(net.features, x)``. It returns the same outputs, several as one list.
    ``gpu_network`` computes the forward and backward passes.

    Args:
        block: the network, initialised.
        examples: one array per input; only the shapes matter, which complete the shapes of the parameters.
        options: impl, precision, device_id, device_ids and gradients of ``gpu_network``.

    Raises:
        ProblemError: block is not a HybridBlock or not float32, or there is no example; or as ``gpu_network``.
        GraphError: as ``gpu_network``, with ``for_training``.
    """
    if not isinstance(block, mx.gluon.HybridBlock):
        raise ProblemError(f"block: expected a HybridBlock, got {type(block).__name__}")
    if not examples:
        raise ProblemError("examples: expected an array for each input of the block, got none")
    if others := [type(one).__name__ for one in examples if not hasattr(one, "shape")]:
        raise ProblemError(f"examples: expected arrays, got {', '.join(others)}")
    if isinstance(block, _OnGpu):
        block = block.original
    names = ["data"] if len(examples) == 1 else [f"data{number}" for number in range(len(examples))]
    # The type lets MXNet infer the types of the parameters.
    variables = [mx.sym.Variable(name, dtype=np.float32) for name in names]
    if mx.util.is_np_array():
        variables = [variable.as_np_ndarray() for variable in variables]
    outputs, _ = mx.gluon.block._flatten(block(*variables), "output")
    symbol = outputs[0] if len(outputs) == 1 else mx.sym.Group(outputs, type(outputs[0]))
    inferred = symbol.infer_shape(**{name: example.shape for name, example in zip(names, examples)})
    parameters, arrays = block.collect_params(), []
    # block.infer_shape would fail for a block with parameters on which its output does not depend.
    for needed, shapes in zip((symbol.list_arguments(), symbol.list_auxiliary_states()), inferred[::2]):
        for name, shape in zip(needed, shapes or ()):
            if name in parameters:
                parameters[name].shape = shape
                parameters[name]._finish_deferred_init()
                if (dtype := np.dtype(parameters[name].dtype)) != np.float32:
                    raise ProblemError(f"{name}: expected float32, got {dtype}; cast the block")
        arrays.append({name: parameters[name].data() for name in needed if name in parameters})
    node, *_ = gpu_network(symbol, *arrays, for_training=True, **options)
    return _OnGpu(node, variables, block)


class _OnGpu(mx.gluon.SymbolBlock):  # type: ignore[misc] # MXNet has no types
    """A block that computes the block ``original`` on a GPU, and saves and loads that block's parameter files."""

    original: Any

    def __init__(self, node: Any, variables: list[Any], original: Any) -> None:
        shared = original.collect_params()
        super().__init__(node, variables, shared)
        # In the original's order, not the graph's, because programs pair the parameters of two blocks by their order.
        self.params._params = {name: own for name, own in shared.items() if name in self.params}
        # Block.__setattr__ would make the original block a child.
        object.__setattr__(self, "original", original)

    @property  # type: ignore[misc] # object's can be assigned
    def __class__(self) -> Any:
        """The original's class: a block only accepts a child of the class of the child that was there before."""
        return type(vars(self).get("original", self))

    def __repr__(self) -> str:
        return f"on_gpu({self.original})"

    def forward(self, *arrays: Any) -> Any:
        # A DataLoader makes arrays in shared or pinned memory; MXNet refuses them in a graph with arrays in mx.cpu().
        moved = (isinstance(x, mx.nd.NDArray) and x.context.device_type.startswith("cpu_") for x in arrays)
        return super().forward(*(x.as_in_context(mx.cpu()) if moves else x for x, moves in zip(arrays, moved)))

    def _collect_params_with_prefix(self, prefix: str = "") -> Any:
        # The names in the files of a block that contains this one.
        return self.original._collect_params_with_prefix(prefix)

    def save_parameters(self, *args: Any, **keywords: Any) -> None:
        self.original.save_parameters(*args, **keywords)

    def load_parameters(self, *args: Any, **keywords: Any) -> None:
        self.original.load_parameters(*args, **keywords)


class Replaced(NamedTuple):
    """The result of ``replace``.

    Attributes:
        replaced: the names of the replaced layers.
        left: for each other convolution, by name, the reasons why it is not replaced.
    """

    replaced: list[str]
    left: dict[str, str]


def replace(
    block: Any, *, impl: str = "auto", device: str | None = None, precision: str = "float32", where: str = "all"
) -> Replaced:
    """Make the 2-D convolutions of a Gluon block compute with the operator, in place, before training or after.

    Nothing else changes: parameters, their names and trainers stay valid. Layers of class Conv2D and convolutions of a
    SymbolBlock are replaced. ``F.Convolution`` in a block's own code is not replaced; use ``replace_convolution`` on
    the block's symbol. Layers that are replaced already get the new options.

    Args:
        block: a Gluon block, with all its children.
        impl: as in ``ece408_op.New``.
        device: as in ``ece408_op.New``.
        precision: as in ``ece408_op.New``.
        where: as in ``ece408_op.replace_convolution``. With "faster", a layer of unknown shape is not replaced: compute
            one batch first.

    Raises:
        ProblemError: an option is unknown, or block is not a Gluon block.
    """
    options = api.checked_options(impl, device, precision, where)
    if not isinstance(block, mx.gluon.Block):
        raise ProblemError(f"block: expected a Gluon block, got {type(block).__name__}")
    result = Replaced([], {})
    for layer in _blocks(block):
        if isinstance(layer, mx.gluon.SymbolBlock):
            _replace_in_symbol(layer, options, where, result)
        elif isinstance(layer, nn.conv_layers._Conv) and layer._op_name in ("Convolution", "convolution"):
            reasons = [] if type(layer) is Conv2D else _reasons(layer, options, where)
            if reasons:
                result.left[layer.name] = "; ".join(reasons)
                continue
            if type(layer) is not Conv2D:
                # Its class stays, because MXNet lets only that class take its place. A bound method would be pickled as
                # the class's own.
                layer.hybrid_forward = partial(Conv2D.hybrid_forward, layer)
            layer._options = options
            result.replaced.append(layer.name)
    for layer in _blocks(block):
        if isinstance(layer, mx.gluon.HybridBlock):
            layer._clear_cached_op()
    return result


def _blocks(block: Any) -> list[Any]:
    """Return a block and all blocks inside it, each once."""
    found: list[Any] = []
    block.apply(found.append)
    return list(dict.fromkeys(found))


def _reasons(layer: Any, options: dict[str, Any], where: str) -> list[str]:
    """Return every reason why a convolution cannot be replaced."""
    reasons = []
    if type(layer) is not nn.Conv2D:
        reasons.append(f"class {type(layer).__name__}: expected Conv2D")
    if layer._kwargs["layout"] != "NCHW":
        reasons.append(f"layout {layer._kwargs['layout']}: New takes NCHW only")
    if np.dtype(layer.weight.dtype) != np.float32:
        reasons.append(f"type {layer.weight.dtype}: New takes float32 only")
    if where == "faster" and not reasons:
        shape = layer.weight.shape
        if not shape or min(shape) < 1:
            reasons.append("its shape is not known yet; compute one batch first")
        elif api.is_slower(shape, layer._kwargs, options):
            reasons.append(api.SLOWER)
    return reasons


def _replace_in_symbol(layer: Any, options: dict[str, Any], where: str, result: Replaced) -> None:
    """Replace the convolutions in the graph of a SymbolBlock."""
    inputs, symbol = layer._cached_graph
    parameters = {p.name: p for p in layer.collect_params().values() if p.shape and min(p.shape) > 0}
    found = api.replace_convolution(symbol, parameters, where=where, renames=False, warn=False, **options)
    layer._cached_graph = inputs, found.symbol
    result.replaced.extend(found.replaced)
    result.left.update(found.left)
