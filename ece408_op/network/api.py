"""``gpu_network``: turn a network's symbol and parameters into one node that computes the whole network on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from ece408_op.errors import GraphError, ProblemError
from ece408_op.graph.api import graph_of
from ece408_op.graph.node_conversion import check_arrays
from ece408_op.graph.symbol_graph import VARIABLE, Graph
from ece408_op.plugin import bridge, default_layout
from ece408_op.plugin.attributes import PRECISIONS, is_mxnets_own

from ._definition import SHAPE
from ._network import Network, named_inputs, parse
from .operator import IMPLS, OP_TYPE

#: The names of layers' inputs that are parameters.
_PARAMETERS = ("weight", "bias", "gamma", "beta")


def gpu_network(
    symbol: Any,
    arg_params: Mapping[str, Any],
    aux_params: Mapping[str, Any] | None = None,
    *,
    impl: str = "auto",
    precision: str = "float32",
    device_id: int = 0,
    device_ids: Sequence[int] | None = None,
    for_training: bool = False,
    gradients: str = "cpu",
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a network as one operator node that computes on a GPU, with inputs and outputs in ``mx.cpu()``.

    At inference, dropout does nothing, and BatchNorm uses its stored mean and variance. Inputs that are not parameters
    are data; labels that only losses read are ignored. The parameters are float32 and stay on the GPU. While the GPU
    computes, each call compares them with the arrays that MXNet passes, except an executor's arrays that MXNet has not
    written since the last call. If they differ, the call sends the new parameters and computes again. MXNet does not
    count writes through shared memory, as by ``to_dlpack_for_write``: after one, let MXNet write too, as by
    ``weight *= 1``. Any program that imports ``ece408_op`` can load the saved symbol.

    With ``for_training``, a forward pass with is_train=True keeps its values on the GPU, and the backward pass computes
    the gradients to data and parameters; MXNet computes the loss and the update. A forward pass copies the parameters
    to the GPU, and a backward pass copies their gradients back. Train without MXNET_BACKWARD_DO_MIRROR and
    force_mirroring: with them, executors run the forward pass twice per step, and each run updates BatchNorm's moving
    statistics.

    Args:
        symbol: the network, an MXNet Symbol.
        arg_params: its parameters by name.
        aux_params: its auxiliary states by name.
        impl: "auto" for the fastest implementation known for each layer, or "cudnn" for cuDNN and cuBLAS in all
            convolutions and fully connected layers. A ``New`` node that names an implementation uses that one.
        precision: "float32"; "tf32" or "fp16" allow convolutions that round the factors of each product to 11 bits.
        device_id: the GPU's number.
        device_ids: the numbers of several GPUs of this host, in place of device_id. Each computes its share of
            each batch, and ``op_times`` has a record for each GPU. In training, NCCL sums the GPUs' gradients, and
            BatchNorm uses the statistics of the whole batch: the results equal those of one GPU except for rounding.
        for_training: whether the node has gradients.
        gradients: with ``for_training``, where the backward pass leaves the gradients to parameters. With "gpu" they
            stay on the GPU for an optimiser that updates there, "gpusgd" or "gpuadam", and MXNet's arrays for them
            contain NaN.

    Returns:
        (symbol, arg_params, aux_params) for Module, executors and SymbolBlock. Arguments, states and a single output
            keep their names; several outputs are named network_output0 and so on, in their order.

    Raises:
        GraphError: the graph has unsupported nodes; the message has the name, operator and attribute of each. A
            ``New`` whose device or impl is for the CPU is unsupported, and with ``for_training`` also an operator
            without a gradient.
        ProblemError: an option is unknown, or an array is sparse. The first call raises it if several GPUs are to
            share the images of a network that does not compute each image by itself.
        DeviceError: there is no such GPU; raised when the network is bound. For training on several GPUs, NCCL is
            missing; raised by the first pass that needs it.
        UnsupportedError: the implementation that a ``New`` names cannot compute it; raised by the first call.
    """
    graph = graph_of(symbol)
    choices = (("impl", impl, IMPLS), ("precision", precision, PRECISIONS), ("gradients", gradients, ("cpu", "gpu")))
    for name, value, known in choices:
        if value not in known:
            raise ProblemError(f"{name}: expected one of {', '.join(known)}; got {value!r}")
    if gradients == "gpu" and not for_training:
        raise ProblemError("gradients: expected cpu without for_training, got gpu")
    numbers = _gpu_numbers(device_id, device_ids)
    for params, name in ((arg_params, "arg_params"), (aux_params or {}, "aux_params")):
        check_arrays(params, name)
    states = dict(aux_params or {})
    text = _text(graph, {**arg_params, **states})
    network = parse(text)
    if for_training:
        network.check_gradients(several=len(numbers) > 1)
    for name, missing in (
        ("arg_params", _missing_parameters(network)),
        ("aux_params", network.states & {*network.data}),
    ):
        if missing:
            expected = ", ".join(network.names(tuple(sorted(missing))))
            raise GraphError(
                f"{name}: expected arrays for {expected}, got none; for a new network, bind and initialise a "
                "Module of the symbol, and pass the results of its get_params"
            )
    if not network.data:
        raise GraphError("symbol: expected at least one input that is not a parameter, got none")
    used = set(network.names(network.parameters))
    seeded = for_training and network.is_random
    (name, *others) = [output.rsplit("_", 1)[0] for output in symbol.list_outputs()]
    node = mx.sym.Custom(
        *_inputs(symbol, network, for_training, seeded),
        op_type=OP_TYPE,
        name=name if not others else "network",
        graph=text,
        impl=impl,
        precision=precision,
        device_ids=",".join(map(str, numbers)),
        **({"for_training": "True", "seeded": str(seeded), "gradients": gradients} if for_training else {}),
    )
    if isinstance(symbol, mx.sym.np._Symbol):
        node = node.as_np_ndarray()
    arguments = {key: value for key, value in arg_params.items() if key in used}
    states = {key: value for key, value in states.items() if key in used}
    for key, array in (*arguments.items(), *states.items()):
        if isinstance(array, mx.nd.NDArray) and not bridge.on_gpu(array):
            # MXNet's convolutions on the CPU leave filters in a blocked layout; each forward pass would convert them.
            bridge.check_dense(array.stype, key)
            default_layout.reorder(array)
    return node, arguments, states


def _gpu_numbers(device_id: int, device_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of the GPUs; raises ProblemError unless they are distinct integers of at least 0."""
    name, got = ("device_id", device_id) if device_ids is None else ("device_ids", device_ids)
    numbers = (device_id,) if device_ids is None else tuple(device_ids) if isinstance(device_ids, Sequence) else ()
    valid = numbers and all(type(number) is int and number >= 0 for number in numbers)
    if not valid or len({*numbers}) != len(numbers):
        raise ProblemError(f"{name}: expected distinct GPU numbers of at least 0, got {got!r}")
    return numbers


def _missing_parameters(network: Network) -> set[int]:
    """Return the variables that MXNet or Gluon made for layers' parameters, and for which no array is given."""
    data, found = {*network.data} - network.states, set()
    for _, node in network.operators:
        for role, value in named_inputs(node):
            made = {f"{node.name}_{role}", f"{node.name.removesuffix('_fwd')}_{role}"}
            if role in _PARAMETERS and value in data and network.graph.nodes[value].name in made:
                found.add(value)
    return found


def _inputs(symbol: Any, network: Network, for_training: bool, seeded: bool) -> list[Any]:
    """Return the node's inputs: arguments, two random numbers as the seed if it is seeded, and states."""
    # An optimiser reads the attributes of variables, such as the learning rate's multiplier. All variables of the node
    # are on its device, so none keeps a group of its own.
    found = symbol.attr_dict() if for_training else {}
    attributes = {name: {k: v for k, v in own.items() if "ctx_group" not in k} for name, own in found.items()}
    arguments, states = (
        [mx.sym.Variable(name, attr=attributes.get(name)) for name in names]
        for names in (network.arguments, network.state_names)
    )
    return [*arguments, *([mx.sym.random.uniform(0, 1 << 24, shape=(2,))] if seeded else []), *states]


def _text(graph: Graph, parameters: Mapping[str, Any]) -> str:
    """Return the graph's JSON for the node's attribute: without MXNet's own attributes, with the parameters' shapes."""
    for node in graph.nodes:
        if node.op != VARIABLE:
            node.attrs = {k: v for k, v in node.attrs.items() if not is_mxnets_own(k)}
            continue
        array = parameters.get(node.name)
        node.attrs = {} if array is None else {SHAPE: str(tuple(array.shape))}
    return Graph(graph.nodes, graph.heads).dump(indent=None)
