"""A whole network as MXNet's operator: ``Custom`` of the type ``ece408_network``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import DeviceError, GraphError, ProblemError
from ece408_op.plugin import bridge, default_layout, fast_custom_op, mxnet_errors
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import memory, pinned

from ._gpu import CUDNN
from ._gpu_update import check_unmarked, host_view
from ._inference import Inference
from ._network import Network, parse
from .engine import Engine, engine
from .trainer import Trainer, trainer_of

OP_TYPE = default_layout.NETWORK
#: The input with two random 24-bit numbers, which MXNet's generator draws in the graph, because the operator runs in a
#: worker thread of MXNet's, which has another generator.
SEED = "__seed__"
IMPLS = (dispatch.AUTO, CUDNN)

#: Replaces an unsupported graph until MXNet asks for the shapes, where the error can be raised.
_PLACEHOLDER = '{"nodes": [{"op": "null", "name": "data", "inputs": []}], "heads": [[0, 0, 0]]}'
#: The operators whose training results differ from those of inference.
_TRAINED = ("BatchNorm", "_contrib_SyncBatchNorm", "Dropout")


class NetworkProp(fast_custom_op.Deletable, mx.operator.CustomOpProp):
    """The node's arguments, states, outputs, shapes and types for MXNet, and the creation of its operator."""

    def __init__(self, **attributes: str) -> None:
        super().__init__(need_top_grad=True)
        self._given = attributes
        self._for_training, self._seeded = attributes.get("for_training") == "True", attributes.get("seeded") == "True"
        self._error: GraphError | None = None
        #: The engines of the last operator, kept alive with the symbol, because Gluon makes an operator for each call.
        self._engines: list[Engine] = []
        try:
            self._network = parse(attributes.get("graph", ""))
        except GraphError as error:
            # Raised later (``_parsed``): an exception in a constructor would end the process.
            self._network, self._error = parse(_PLACEHOLDER), error

    def _parsed(self) -> Network:
        if self._error:
            raise self._error
        return self._network

    def list_arguments(self) -> list[str]:
        """Return the names of the network's arguments, in its order, and of the random seed's input if there is one."""
        return [*self._network.arguments, *([SEED] if self._seeded else [])]

    def list_auxiliary_states(self) -> list[str]:
        """Return the names of the network's states."""
        return self._network.state_names

    def declare_backward_dependency(
        self, out_grad: Sequence[int], in_data: Sequence[int], out_data: Sequence[int]
    ) -> list[int]:
        """Return the arrays that the backward pass reads: labels, and the gradients to outputs that are not losses."""
        network = self._network
        read = [entry for entry, reads in zip(out_grad, network.reads_gradient) if reads]
        read += [entry for entry, name in zip(in_data, network.arguments) if name in network.names(network.labels)]
        return read or [in_data[0]]

    def list_outputs(self) -> list[str]:
        """Return the names of the outputs: "output", or output0 and so on."""
        count = len(self._network.outputs)
        return ["output"] if count == 1 else [f"output{number}" for number in range(count)]

    @mxnet_errors.reported_at_once
    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the shapes of arguments, outputs and states; those of outputs are [] while a data shape is unknown."""
        network = self._parsed()
        default_layout.check_subgraph(self._given, "gpu_network's node")
        shapes = dict(zip(network.arguments, (list(shape) for shape in in_shape)))
        for number, name in zip(network.parameters, network.names(network.parameters)):
            expected, got = network.shape(number), shapes.get(name)  # that of a state is not given
            if got and (len(got) != len(expected) or any(a not in (-1, b) for a, b in zip(got, expected))):
                raise ProblemError(
                    f"{name}: expected shape {expected}, with which gpu_network was called, got {tuple(got)}"
                )
            shapes[name] = list(expected)
        states = [shapes[name] for name in network.state_names]
        data = [tuple(shapes[name]) for name in network.names(network.data)]
        outputs: list[Any] = [[] for _ in network.outputs]
        if all(shape and min(shape) >= 0 for shape in data):
            values = network.infer(data)
            for number, name in zip(network.labels, network.names(network.labels)):
                shapes[name] = shapes[name] or list(values[number])
            outputs = [list(values[value]) for value in network.outputs]
        return [shapes[name] for name in network.arguments] + [[2]] * self._seeded, outputs, states

    @mxnet_errors.reported_at_once
    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return float32 for everything except labels, which may have any type."""
        network = self._parsed()
        labels = network.names(network.labels)
        types = []
        for name, dtype in zip(network.arguments, in_type):
            if name not in labels:
                bridge.check_float32(dtype, name)
            types.append(np.float32 if dtype is None else dtype)
        types += [np.float32] * self._seeded
        states = [np.float32] * len(network.states)
        return types, [np.float32] * len(network.outputs), states

    @mxnet_errors.reported_at_once
    def infer_storage_type(self, in_stype: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Return the dense storage type for all arrays; raises ProblemError for sparse arguments."""
        for name, stype in zip(self._parsed().arguments, in_stype):
            bridge.check_dense(stype, name)
        return super().infer_storage_type(in_stype)

    @mxnet_errors.reported_at_once
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> NetworkOp:
        """Return the operator for arrays of one shape; raises DeviceError if there is no such GPU."""
        network = self._parsed()
        if ctx.device_type == "gpu":
            raise DeviceError("gpu_network: expected arrays in mx.cpu(), got them in mx.gpu(); bind it in mx.cpu()")
        names = network.names(network.data)
        data = [tuple(shape) for name, shape in zip(network.arguments, in_shapes) if name in names]
        if () in data:  # a label whose shape MXNet does not infer, or in mx.np a number
            got = ", ".join(map(str, data))
            expected = "the shapes of all data and labels, with at least one dimension"
            raise GraphError(f"network: expected {expected}, got {got}; give all of them")
        given = {"impl": dispatch.AUTO, "precision": "float32", "device_ids": "0", **self._given}
        options = given["graph"], given["impl"], given["precision"]
        engines = [engine(*options, int(word)) for word in given["device_ids"].split(",")]
        self._engines = engines
        trainer = trainer_of(given["graph"], engines) if self._for_training else None
        return NetworkOp(network, Inference(engines), trainer, given.get("gradients") == "gpu")


class NetworkOp(fast_custom_op.FastCustomOp):
    """The operator for arrays of one shape; MXNet calls forward from its worker threads, several at a time."""

    def __init__(self, network: Network, inference: Inference, trainer: Trainer | None, leaves_gradients: bool) -> None:
        super().__init__()
        self._network, self._inference, self._trainer = network, inference, trainer
        self._leaves_gradients = leaves_gradients
        # Computed once for all calls, because there may be hundreds of parameters.
        self._arguments = network.arguments
        numbers = {node.name: number for number, node in enumerate(network.graph.nodes)}
        self._numbers = [numbers[name] for name in self._arguments]
        self._reads_gradient = network.reads_gradient
        places = {name: place for place, name in enumerate((*self._arguments, *network.state_names))}
        self._data, self._labels, self._parameters = (
            [places[name] for name in network.names(some)]
            for some in (network.data, network.labels, network.parameters)
        )
        #: The shapes of the parameters, by number, because each query of an MXNet array takes microseconds.
        self._shapes = {number: network.shape(number) for number in network.parameters}
        #: The trainer's result for the last forward pass in training.
        self._before: Any = None
        #: Whether the last forward pass had an empty batch.
        self._empty = False

    @mxnet_errors.reported_with_outputs
    def forward(self, is_train: bool, req: Sequence[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Compute the outputs as ``req`` asks: null, write, inplace or add."""
        network, trainer = self._network, self._trainer if is_train else None
        if is_train and not trainer and any(node.op in _TRAINED for _, node in network.operators):
            raise DeviceError(
                "gpu_network: expected inference, got is_train=True; pass is_train=False, or for_training=True to "
                "gpu_network"
            )
        if all(request == "null" for request in req) and not trainer:
            return
        count = len(self._arguments)
        data = [bridge.cpu_view(in_data[place]) for place in self._data]
        # Drop the last pass, so that this one can use its memory.
        self._before, self._empty = None, any(not array.size for array in data)
        if self._empty:
            return
        handles = (*in_data.handles[:count], *aux.handles)
        addresses = cache(lambda: bridge.addresses_of([handles[place] for place in self._parameters]))

        @cache
        def filled() -> tuple[list[np.ndarray], list[np.ndarray]]:
            """Return the outputs, and the arrays to compute: temporary ones for outputs that share memory with data or
            parameters, are added to, or are not wanted.
            """
            outputs = [np.atleast_1d(bridge.cpu_view(array)) for array in out_data]
            aside = [r in ("null", "add") or self._overlaps(y, data, addresses()) for y, r in zip(outputs, req)]
            return outputs, [np.empty_like(y) if apart else y for y, apart in zip(outputs, aside)]

        with pinned.using(data, wants=True) as flags:
            if trainer:
                # The forward pass changes the states, because MXNet does not expect the backward pass to do so.
                targets = filled()[1]
                views = {number: host_view(at, shape) for at, (number, shape) in zip(addresses(), self._shapes.items())}
                if self._leaves_gradients:
                    check_unmarked(views.values())
                states = {number: view for number, view in views.items() if number in network.states}
                words = [int(word) for array in in_data[count:] for word in bridge.cpu_view(array)]
                seed = words[0] << 32 | words[1] if words else 0
                given = data, [*views.values()], targets, states, seed, flags
                self._before = trainer.forward(*given, lambda: self._label_views(in_data), [self.release])
            else:
                self._inference.run(data, addresses, lambda: filled()[1], flags, meanwhile=[self.release])
        _fill(*filled(), req)

    def _overlaps(self, output: np.ndarray, data: Sequence[np.ndarray], parameters: Sequence[int]) -> bool:
        first = memory.address(output)
        last = first + output.nbytes
        return any(np.may_share_memory(output, array) for array in data) or any(
            at < last and first < at + ITEM_BYTES * prod(shape) for at, shape in zip(parameters, self._shapes.values())
        )

    @mxnet_errors.reported_with_outputs
    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """Compute the gradients as ``req`` asks.

        Without ``for_training``, raises and fills the gradients with NaN, so that no training uses old values.
        """
        network, trainer, before = self._network, self._trainer, self._before
        requests = dict(zip(self._numbers, req))
        asked = {number: array for number, array in zip(self._numbers, in_grad) if requests[number] != "null"}
        parameters = [number for number in asked if number in self._shapes]
        addresses = bridge.addresses(asked[number] for number in parameters)
        gradients = {number: host_view(at, self._shapes[number]) for number, at in zip(parameters, addresses)}
        for number, array in asked.items():
            if number not in gradients and array.size and array.dtype == np.float32:
                gradients[number] = bridge.cpu_view(array)
        if not trainer:
            for gradient in gradients.values():
                gradient[...] = np.nan
            raise DeviceError("there is no gradient; pass for_training=True to gpu_network")
        if self._empty:
            for number, gradient in gradients.items():
                if requests[number] != "add":
                    gradient[...] = 0
            return
        if before is None:
            raise DeviceError(
                "backward: expected a forward pass with is_train=True before (in Gluon, autograd.record with "
                "train_mode=True), got none"
            )
        deferred: dict[int, np.ndarray] = {}
        if self._leaves_gradients:
            for number in parameters:
                if requests[number] == "add":
                    name = network.graph.nodes[number].name
                    raise ProblemError(f"{name}: expected grad_req write with gradients='gpu', got add")
                deferred[number] = gradients.pop(number)
        targets = {
            number: np.empty_like(gradient) if requests[number] == "add" else gradient
            for number, gradient in gradients.items()
        }
        read = {place: bridge.cpu_view(out_grad[place]) for place, reads in enumerate(self._reads_gradient) if reads}
        trainer.backward(before, self._label_views(in_data), read, targets, deferred, meanwhile=[self.release])
        _fill(list(gradients.values()), list(targets.values()), [requests[number] for number in gradients])

    def _label_views(self, in_data: Any) -> list[np.ndarray]:
        """Return the labels' values as float32: a view of an array that is float32, else a copy."""
        arrays = [in_data[place] for place in self._labels]
        return [
            bridge.cpu_view(one) if one.dtype == np.float32 else np.ascontiguousarray(one.asnumpy(), np.float32)
            for one in arrays
        ]


def _fill(arrays: Sequence[np.ndarray], computed: Sequence[np.ndarray], req: Sequence[str]) -> None:
    """Copy or add the results in temporary arrays to MXNet's arrays, as each request asks."""
    for array, result, request in zip(arrays, computed, req):
        if request == "add":
            np.add(array, result, out=array)
        elif request != "null" and result is not array:
            array[...] = result


@cache
def register() -> None:
    """Register the operator and the optimisers with MXNet, once per process."""
    mx.operator.register(OP_TYPE)(NetworkProp)
    import_module(".optimizer", __package__)
