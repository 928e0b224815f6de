"""What the tests of whole networks share: MXNet's CPU operators as the reference, and the ways to compute beside it."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_case import require_gpu

import ece408_op
from ece408_op.network import _cudnn, _plan, _run
from ece408_op.network._fuse import fused
from ece408_op.network.graph import parse
from ece408_op.plugin import mxnet_import
from ece408_op.runtime import cuda

try:
    mx = mxnet_import.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

#: The ways that a network is computed in tests: NumPy by the same plan, and on a GPU.
WAYS = [
    "numpy",
    pytest.param("auto", marks=pytest.mark.gpu),
    pytest.param("cudnn", marks=pytest.mark.gpu),
]


def require(way):
    """Skip the test where this machine cannot go that way."""
    if way != "numpy":
        require_gpu()
    if way == "cudnn" and not _cudnn.is_there():
        pytest.skip("cuDNN or nvidia-cudnn-frontend is not installed")


def text_of(symbol):
    """The graph that the node of a gpu_network keeps."""
    (node,) = (attrs for attrs in symbol.attr_dict().values() if attrs.get("op_type") == "ece408_network")
    return node["graph"]


def values(symbol, shapes, seed=0):
    """Uniform data and parameters by name, and states of which variances are positive."""
    stream = np.random.RandomState(seed)
    arguments, _, states = symbol.infer_shape(**shapes)
    args = {n: stream.uniform(-1, 1, s).astype("f") for n, s in zip(symbol.list_arguments(), arguments)}
    aux = {n: stream.uniform(0.5, 2, s).astype("f") for n, s in zip(symbol.list_auxiliary_states(), states)}
    return args, aux


def mxnets(symbol, args, aux):
    """The outputs by MXNet's own operators on the CPU."""
    arrays = ({n: mx.nd.array(a) for n, a in some.items()} for some in (args, aux))
    given, states = arrays
    executor = symbol.bind(mx.cpu(), given, aux_states=states, grad_req="null")
    return [output.asnumpy() for output in executor.forward(is_train=False)]


def ours(symbol, args, aux, data, way="numpy"):
    """The outputs by gpu_network: ``data`` names the arguments that are no parameters."""
    params = {n: mx.nd.array(a) for n, a in args.items() if n not in data}
    states = {n: mx.nd.array(a) for n, a in aux.items()}
    impl = "auto" if way == "numpy" else way
    symbol, params, states = ece408_op.gpu_network(symbol, params, states, impl=impl)
    given = {n: mx.nd.array(a) for n, a in args.items() if n in symbol.list_arguments()}
    if way != "numpy":
        executor = symbol.bind(mx.cpu(), given, aux_states=states, grad_req="null")
        return [output.asnumpy() for output in executor.forward(is_train=False)]
    network = fused(parse(text_of(symbol)))
    shapes = _plan.infer(network, {v.name: args[v.name].shape for v in network.data})
    return _run.compute(network, shapes, {v.value: {**args, **aux}[v.name] for v in network.variables})


def gpu_memory():
    """Free bytes of the GPU, once CuPy has given back what it keeps."""
    cuda.cupy().get_default_memory_pool().free_all_blocks()
    return cuda.cupy().cuda.runtime.memGetInfo()[0]
