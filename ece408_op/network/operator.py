"""A whole network as MXNet's operator: ``Custom`` of the type ``ece408_network``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import DeviceError, GraphError, ProblemError
from ece408_op.plugin import bridge, default_layout, mxnet_errors
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import memory

from ._gpu import CUDNN
from ._network import Network, parse
from ._several_gpus import SeveralGpus
from .engine import Engine, engine

OP_TYPE = default_layout.NETWORK
IMPLS = (dispatch.AUTO, CUDNN)

#: The operators that compute something else in training.
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
        """Return the names of all arguments of the network, in its order."""
        return self._network.arguments if self._network else ["data"]

    def list_auxiliary_states(self) -> list[str]:
        """Return the names of its states."""
        return self._network.state_names if self._network else []

    def list_outputs(self) -> list[str]:
        """Return the names of its outputs."""
        count = len(self._network.outputs) if self._network else 1
        return ["output"] if count == 1 else [f"output{number}" for number in range(count)]

    @mxnet_errors.reported_at_once
    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the shapes of arguments, outputs and states; outputs are unknown while some data is."""
        network = self._parsed()
        if self._given.get("__subgraph_name__"):
            raise ProblemError(
                f"gpu_network: expected no control flow around it, got {self._given['__subgraph_name__']!r}"
            )
        shapes = dict(zip(network.arguments, (list(shape) for shape in in_shape)))
        states = []
        for number, name in zip(network.parameters, network.names(network.parameters)):
            expected = network.shape(number)
            if number in network.states:
                states.append(list(expected))
                continue
            got = shapes[name]
            if got and (len(got) != len(expected) or any(a not in (-1, b) for a, b in zip(got, expected))):
                raise ProblemError(
                    f"{name}: expected shape {expected}, with which gpu_network was called, got {tuple(got)}"
                )
            shapes[name] = list(expected)
        data = {name: tuple(shapes[name]) for name in network.names(network.data)}
        if any(not shape or min(shape) < 0 for shape in data.values()):
            return [shapes[name] for name in network.arguments], [[] for _ in network.outputs], states
        values = network.infer(data)
        for _, node in network.operators:
            label = node.operator.label_shape(values[node.inputs[0].node])
            name = network.graph.nodes[node.inputs[-1].node].name
            if label is not None and not shapes.get(name, True):
                shapes[name] = list(label)
        outputs = [list(values[value]) for value in network.outputs]
        return [shapes[name] for name in network.arguments], outputs, states

    @mxnet_errors.reported_at_once
    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return float32 for everything but labels, which may have any type."""
        network = self._parsed()
        labels = network.names(network.labels)
        types = []
        for name, dtype in zip(network.arguments, in_type):
            if name not in labels and dtype is not None and np.dtype(dtype) != np.float32:
                raise ProblemError(f"{name}: expected float32, got {np.dtype(dtype).name}; convert it with astype")
            types.append(np.float32 if dtype is None else dtype)
        states = [np.float32] * len(network.states)
        return types, [np.float32] * len(network.outputs), states

    @mxnet_errors.reported_at_once
    def infer_storage_type(self, in_stype: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Return dense arrays for everything; raises ProblemError for others."""
        for name, stype in zip(self._parsed().arguments, in_stype):
            bridge.check_dense(stype, name)
        return super().infer_storage_type(in_stype)

    @mxnet_errors.reported_at_once
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> NetworkOp:
        """Return the operator for arrays of one shape; raises DeviceError if there is no such GPU."""
        network = self._parsed()
        if ctx.device_type == "gpu":
            raise DeviceError("gpu_network: expected arrays in mx.cpu(), got them in mx.gpu(); bind it in mx.cpu()")
        impl, precision = self._given.get("impl", dispatch.AUTO), self._given.get("precision", "float32")
        # Symbols that were saved before there was device_ids have device_id.
        numbers = [int(word) for word in self._given.get("device_ids", self._given.get("device_id", "0")).split(",")]
        engines = [engine(self._given["graph"], impl, precision, number) for number in numbers]
        return NetworkOp(network, engines[0] if len(engines) == 1 else SeveralGpus(engines, numbers))


class NetworkOp(mx.operator.CustomOp):
    """The operator for arrays of one shape; MXNet calls forward from its worker threads, several at a time."""

    def __init__(self, network: Network, found: Engine | SeveralGpus) -> None:
        super().__init__()
        self._network, self._engine = network, found
        places = {name: place for place, name in enumerate((*network.arguments, *network.state_names))}
        self._data = [places[name] for name in network.names(network.data)]
        self._parameters = [places[name] for name in network.names(network.parameters)]
        self._sizes = [ITEM_BYTES * prod(network.shape(number)) for number in network.parameters]

    @mxnet_errors.reported_with_outputs
    def forward(self, is_train: bool, req: Sequence[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Compute the outputs as ``req`` asks: null, write, inplace or add."""
        network = self._network
        if is_train and any(node.op in _TRAINED for _, node in network.operators):
            raise DeviceError("gpu_network: expected inference, got is_train=True; pass is_train=False")
        if all(request == "null" for request in req):
            return
        arrays = (*in_data, *aux)
        data = [bridge.cpu_view(arrays[place]) for place in self._data]
        parameters = bridge.addresses(arrays[place] for place in self._parameters)
        outputs = [bridge.cpu_view(array) for array in out_data]
        if any(not array.size for array in data):
            return
        # An output that is added, or that shares memory with data, is computed into a temporary array.
        targets = [
            np.empty_like(output) if request in ("null", "add") or self._overlaps(output, data, parameters) else output
            for output, request in zip(outputs, req)
        ]
        self._engine.run(data, parameters, targets)
        for output, target, request in zip(outputs, targets, req):
            if request == "add":
                np.add(output, target, out=output)
            elif request != "null" and target is not output:
                output[...] = target

    def _overlaps(self, output: np.ndarray, data: Sequence[np.ndarray], parameters: Sequence[int]) -> bool:
        first = memory.address(output)
        last = first + output.nbytes
        return any(np.may_share_memory(output, array) for array in data) or any(
            address < last and first < address + size for address, size in zip(parameters, self._sizes)
        )

    @mxnet_errors.reported_with_outputs
    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """Raise: there is no gradient. The gradients are NaN, so that nobody trains on old values."""
        for gradient, request in zip(in_grad, req):
            if request != "null" and gradient.size and gradient.dtype == np.float32:
                bridge.cpu_view(gradient)[...] = np.nan
        raise DeviceError("there is no gradient; train the network that gpu_network was made from")


def register() -> None:
    """Register the operator with MXNet, once per process."""
    mx.operator.register(OP_TYPE)(NetworkProp)


__all__ = ("IMPLS", "OP_TYPE", "NetworkOp", "NetworkProp", "register")
