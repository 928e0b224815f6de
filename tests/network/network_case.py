"""What the tests of whole networks share: MXNet's CPU operators as the reference, and gpu_network."""

from contextlib import nullcontext

import gpu_case
import network_fake
import numpy as np
import pytest

import ece408_op
from ece408_op.network._network import parse
from ece408_op.plugin import mxnet_import

try:
    mx = mxnet_import.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

S = mx.sym
data = S.Variable("data")

#: The ways that tests compute a network: on NumPy in place of CuPy, and on a GPU by either implementation.
WAYS = ["numpy", pytest.param("auto", marks=pytest.mark.gpu), pytest.param("cudnn", marks=pytest.mark.gpu)]

#: For tests that need no GPU, or that only NumPy's stand-in for one can do.
on_numpy = pytest.mark.parametrize("way", ["numpy"], indirect=True)


def require(way):
    """Skip the test if this machine cannot compute that way."""
    if way != "numpy":
        gpu_case.require_gpu()
    if way == "cudnn":
        pytest.importorskip("cudnn")


def text_of(symbol):
    """Return the graph in the node of a gpu_network."""
    (node,) = (attrs for attrs in symbol.attr_dict().values() if attrs.get("op_type") == "ece408_network")
    return node["graph"]


def ndarrays(arrays):
    return {name: mx.nd.array(array) for name, array in arrays.items()}


def values(symbol, shapes, seed=0):
    """Return uniform data and parameters by name, and states; variances are positive."""
    stream = np.random.RandomState(seed)
    arguments, _, states = symbol.infer_shape(**shapes)
    args = {n: stream.uniform(-1, 1, s).astype("f") for n, s in zip(symbol.list_arguments(), arguments)}
    aux = {n: stream.uniform(0.5, 2, s).astype("f") for n, s in zip(symbol.list_auxiliary_states(), states)}
    return args, aux


def one_node(symbol, shapes):
    """Return gpu_network's symbol, parameters and states, and the values of all arguments and states."""
    args, aux = values(symbol, shapes)
    params = ndarrays({n: a for n, a in args.items() if n not in (*shapes, "softmax_label")})
    return ece408_op.gpu_network(symbol, params, ndarrays(aux)), args, aux


def fused(symbol, shapes):
    """Return the network that the GPU computes."""
    (node, *_), _, _ = one_node(symbol, shapes)
    return parse(text_of(node)).fused()


def mxnets(symbol, args, aux):
    """Return the outputs of MXNet's own operators on the CPU."""
    executor = symbol.bind(mx.cpu(), ndarrays(args), aux_states=ndarrays(aux), grad_req="null")
    return [output.asnumpy() for output in executor.forward(is_train=False)]


def inference_of(symbol, args, aux=(), data=("data",), **options):
    """Return an executor of gpu_network; ``data`` names the arguments that are no parameters."""
    params = ndarrays({n: a for n, a in args.items() if n not in data})
    node, params, states = ece408_op.gpu_network(symbol, params, ndarrays(dict(aux)), **options)
    given = ndarrays({n: a for n, a in args.items() if n in node.list_arguments()})
    return node.bind(mx.cpu(), given, aux_states=states, grad_req="null")


def ours(symbol, args, aux, data=("data",), way="numpy", calls=1, **options):
    """Return the outputs of the last call of that executor."""
    with computing(way):
        executor = inference_of(symbol, args, aux, data, **{"impl": "auto" if way == "numpy" else way, **options})
        for _ in range(calls):
            outputs = [output.asnumpy() for output in executor.forward(is_train=False)]
        return outputs


def updater(rule="gpusgd", **words):
    """Return a function that updates a parameter, by default with a quarter of its gradient."""
    words = words or {"learning_rate": 0.25}
    return mx.optimizer.get_updater(mx.optimizer.create(rule, **words))


def computing(way):
    """Return a context manager: networks compute that way inside."""
    require(way)
    return network_fake.installed() if way == "numpy" else nullcontext()


def require_gpus(way, count):
    """Skip a test that computes on GPUs where there are fewer."""
    if way != "numpy":
        gpu_case.require_gpus(count)
