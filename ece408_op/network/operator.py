"""The node that stands for a whole network, as MXNet sees it: ``Custom`` of the type ``ece408_network``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import DeviceError, GraphError, ProblemError
from ece408_op.plugin import bridge, default_layout, mxnet_errors

from ._gpu import CUDNN
from ._op_definition import Shape
from ._plan import infer
from .engine import Engine, engine
from .graph import Network, parse

OP_TYPE = default_layout.NETWORK
IMPLS = (dispatch.AUTO, CUDNN)

#: What computes otherwise in training.
_TRAINED = ("BatchNorm", "Dropout")


class NetworkProp(mx.operator.CustomOpProp):
    """Shapes, types and the creation of the operator: data, labels and parameters in, the network's outputs out."""

    def __init__(self, **attributes: str) -> None:
        super().__init__(need_top_grad=True)
        self._given = attributes
        try:
            self._network: Network | None = parse(attributes.get("graph", ""))
        except GraphError as error:
            # Raised where MXNet can take it: a constructor that raises ends the process.
            self._network, self._reason = None, error

    def _parsed(self) -> Network:
        if self._network is None:
            raise self._reason
        return self._network

    def list_arguments(self) -> list[str]:
        """All arguments of the network, in its order."""
        return list(self._network.arguments) if self._network else ["data"]

    def list_auxiliary_states(self) -> list[str]:
        """Its states."""
        return [v.name for v in self._network.parameters if v.auxiliary] if self._network else []

    def list_outputs(self) -> list[str]:
        """Its outputs."""
        return [name for name, _ in self._network.outputs] if self._network else ["output"]

    @mxnet_errors.keeps_reason(asynchronous=False)
    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any], list[Any]]:
        """Shapes of arguments, outputs and states; outputs are unknown as long as some data is."""
        network = self._parsed()
        if self._given.get("__subgraph_name__"):
            raise ProblemError(
                f"gpu_network: expected no control flow around it, got {self._given['__subgraph_name__']!r}"
            )
        given = dict(zip(network.arguments, (list(shape) for shape in in_shape)))
        for variable in network.parameters:
            if variable.auxiliary or variable.shape is None:
                continue
            known = given[variable.name]
            if known and not _fits(known, variable.shape):
                raise ProblemError(
                    f"{variable.name}: expected shape {variable.shape}, which the network was made with, got "
                    f"{tuple(known)}"
                )
            given[variable.name] = list(variable.shape)
        states = [list(v.shape or ()) for v in network.parameters if v.auxiliary]
        data = {v.name: given[v.name] for v in network.data}
        if any(not shape or min(shape) < 0 for shape in data.values()):
            return [given[name] for name in network.arguments], [[] for _ in network.outputs], states
        shapes = infer(network, {name: tuple(shape) for name, shape in data.items()})
        for label in network.labels:
            node = network.nodes[label.node]
            if node.kind.label is not None and not given[label.name]:
                given[label.name] = list(node.kind.label(node.settings, shapes[node.inputs[0]]))
        outputs = [list(shapes[value]) for _, value in network.outputs]
        return [given[name] for name in network.arguments], outputs, states

    @mxnet_errors.keeps_reason(asynchronous=False)
    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """float32 for everything; labels, which nobody looks at, may have any type."""
        network = self._parsed()
        labels = {label.name for label in network.labels}
        types = []
        for name, dtype in zip(network.arguments, in_type):
            if name not in labels and dtype is not None and np.dtype(dtype) != np.float32:
                raise ProblemError(f"{name}: expected float32, got {np.dtype(dtype).name}; convert it with astype")
            types.append(np.float32 if dtype is None else dtype)
        states = [np.float32 for v in network.parameters if v.auxiliary]
        return types, [np.float32] * len(network.outputs), states

    @mxnet_errors.keeps_reason(asynchronous=False)
    def infer_storage_type(self, in_stype: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Dense arrays for everything."""
        for name, stype in zip(self._parsed().arguments, in_stype):
            bridge.check_dense(stype, name)
        return super().infer_storage_type(in_stype)

    @mxnet_errors.keeps_reason(asynchronous=False)
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> NetworkOp:
        """The operator for arrays of one shape; raises DeviceError where there is no such GPU."""
        network = self._parsed()
        if ctx.device_type == "gpu":
            raise DeviceError("gpu_network: expected arrays in mx.cpu(), got them in mx.gpu(); bind it in mx.cpu()")
        impl, precision = self._given.get("impl", dispatch.AUTO), self._given.get("precision", "float32")
        number = int(self._given.get("device_id", 0))
        return NetworkOp(network, engine(self._given["graph"], impl, precision, number))


class NetworkOp(mx.operator.CustomOp):
    """The network at work; MXNet calls forward from its worker threads, several at a time."""

    def __init__(self, network: Network, found: Engine) -> None:
        super().__init__()
        self._network, self._engine = network, found

    @mxnet_errors.keeps_reason(asynchronous=True)
    def forward(self, is_train: bool, req: Sequence[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Compute the outputs as ``req`` asks: null, write, inplace or add."""
        network = self._network
        if is_train and any(node.kind.names[0] in _TRAINED for node in network.nodes):
            raise DeviceError("gpu_network: expected inference, got is_train=True; pass is_train=False")
        if all(request == "null" for request in req):
            return
        states = [v.name for v in network.parameters if v.auxiliary]
        arrays = {**dict(zip(network.arguments, in_data)), **dict(zip(states, aux))}
        data = [bridge.cpu_view(arrays[v.name]) for v in network.data]
        parameters = [bridge.cpu_view(arrays[v.name]) for v in network.parameters]
        outputs = [bridge.cpu_view(array) for array in out_data]
        if any(not array.size for array in data):
            return
        # What is not simply written goes through an array aside; outputs may be the memory of data.
        aside = [
            np.empty_like(output)
            if request in ("null", "add") or any(np.may_share_memory(output, array) for array in (*data, *parameters))
            else output
            for output, request in zip(outputs, req)
        ]
        self._engine.run(data, parameters, aside)
        for output, target, request in zip(outputs, aside, req):
            if request == "add":
                np.add(output, target, out=output)
            elif request != "null" and target is not output:
                output[...] = target

    @mxnet_errors.keeps_reason(asynchronous=True)
    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """Raise: there is no gradient. The gradients are NaN, so that nobody trains on old values."""
        for gradient, request in zip(in_grad, req):
            if request != "null" and gradient.size and gradient.dtype == np.float32:
                bridge.cpu_view(gradient)[...] = np.nan
        raise DeviceError("there is no gradient; train the network that gpu_network was made from")


def register() -> None:
    """Make the operator known to MXNet; once a process."""
    mx.operator.register(OP_TYPE)(NetworkProp)


def _fits(got: Sequence[int], expected: Shape) -> bool:
    return len(got) == len(expected) and all(a in (-1, b) for a, b in zip(got, expected))


__all__ = ("IMPLS", "OP_TYPE", "NetworkOp", "NetworkProp", "register")
