"""What only a GPU shows of whole networks: Gluon's against MXNet's CPU, memory, exit, a missing library."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from gpu_case import require_gpu
from network_case import mx, mxnets, ours, require, values

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.errors import DeviceError
from ece408_op.network import _cudnn

pytestmark = pytest.mark.gpu
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
S = mx.sym
data = S.Variable("data")
ZOO = ["resnet18_v1", "vgg11", "squeezenet1.0", "mobilenet1.0", "densenet121"]


@pytest.fixture(autouse=True)
def gpu():
    """Skip where there is no GPU."""
    require_gpu()


def test_no_such_gpu():
    node = ece408_op.gpu_network(data * 2, {}, device_id=99)[0]
    with pytest.raises(DeviceError, match="expected a number from 0 to"):
        node.bind(mx.cpu(), {"data": mx.nd.ones((2, 2))}).forward(is_train=False)


def test_without_cudnn_a_clear_error(monkeypatch):
    _cudnn.library.cache_clear()
    monkeypatch.setitem(sys.modules, "cudnn", None)
    node = ece408_op.gpu_network(data * 3, {}, impl="cudnn")[0]
    with pytest.raises(DeviceError, match=r"pip install .*\[cudnn\]"):
        node.bind(mx.cpu(), {"data": mx.nd.ones((2, 2))}).forward(is_train=False)
    args, aux = values(S.Convolution(data, kernel=(3, 3), num_filter=40, pad=(1, 1)), {"data": (9, 40, 9, 9)})
    symbol = S.Convolution(data, kernel=(3, 3), num_filter=40, pad=(1, 1), name="convolution0")
    args = dict(zip(symbol.list_arguments(), args.values()))
    assert np.abs(ours(symbol, args, aux, ("data",), "auto")[0] - mxnets(symbol, args, aux)[0]).max() < 1e-3
    _cudnn.library.cache_clear()


def test_many_calls_leave_no_memory_behind():
    cupy = require_gpu()
    node, *_ = ece408_op.gpu_network(S.softmax(S.Pooling(S.tanh(data), kernel=(2, 2))), {})
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((64, 3, 40, 40))})

    def used(calls):
        for _ in range(calls):
            executor.forward(is_train=False)[0].wait_to_read()
        return cupy.get_default_memory_pool().total_bytes()

    before = used(30)
    assert used(500) <= before


def test_exit_with_calls_pending():
    program = (
        "import ece408_op, mxnet as mx\n"
        "s = mx.sym.tanh(mx.sym.Variable('data')) * 2\n"
        "n = ece408_op.gpu_network(s, {})[0]\n"
        "x = mx.nd.ones((3000, 50, 20))\n"
        "g = [a for a in n.attr_dict().values()][0]['graph']\n"
        "for _ in range(4):\n"
        "    x = mx.nd.Custom(x, op_type='ece408_network', graph=g)\n"
        "print('leaving')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr


@pytest.mark.parametrize("impl", ["auto", "cudnn"])
@pytest.mark.parametrize("name", ZOO)
def test_gluons_networks(name, impl):
    """Seeded random weights, against MXNet's CPU: each layer errs by at most n u, and hands on what came to it."""
    require(impl)
    mx.random.seed(11)
    network = mx.gluon.model_zoo.vision.get_model(name)
    network.initialize(mx.init.Xavier(magnitude=2))
    x = np.random.RandomState(5).uniform(-1, 1, (4, 3, 224, 224)).astype("f")
    network(mx.nd.array(x[:1])).wait_to_read()
    symbol = network(data)
    params = {n: p.data().asnumpy() for n, p in network.collect_params().items()}
    args = {**{n: params[n] for n in symbol.list_arguments() if n != "data"}, "data": x}
    aux = {n: params[n] for n in symbol.list_auxiliary_states()}
    (expected,), (got,) = mxnets(symbol, args, aux), ours(symbol, args, aux, ("data",), impl)
    products = sum(int(np.prod(a.shape[1:])) for n, a in args.items() if n.endswith("weight"))
    worst, allowed = np.abs(got - expected).max(), products * EPS32 * np.abs(expected).max()
    print(f"{name} {impl}: off by {worst:.3g}, allowed {allowed:.3g}, largest output {np.abs(expected).max():.3g}")
    assert worst <= allowed
