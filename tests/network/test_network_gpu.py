"""What only a GPU shows of whole networks: Gluon's against MXNet's CPU, memory, exit, a missing library."""

import gc

import numpy as np
import pytest
from gpu_case import require_gpu
from network_case import S, data, inference_of, mx, mxnets, ours, require, values
from process import printed, wait_until
from training_case import bound, node_of, step

import ece408_op
from ece408_op.bench import _networks
from ece408_op.core.kernel import EPS32
from ece408_op.errors import DeviceError
from ece408_op.network import engine
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu
layer = S.Convolution(data, num_filter=16, kernel=(3, 3), pad=(1, 1), name="layer")
ZOO = ["resnet18_v1", "vgg11", "squeezenet1.0", "mobilenet1.0", "densenet121"]


@pytest.fixture(autouse=True)
def gpu():
    """Skip where there is no GPU."""
    require_gpu()


def test_the_memory_of_passes_that_a_cuda_graph_repeats_is_free_after_them():
    shape = 64, 16, 64, 64
    symbol = S.Activation(S.Convolution(data, num_filter=16, kernel=(3, 3), pad=(1, 1)), act_type="relu")
    args, _ = values(symbol, {"data": shape})

    def megabytes():
        free, total = cuda.cupy().cuda.runtime.memGetInfo()
        return (total - free) >> 20

    def trained():
        executor = bound(node_of(symbol, args, inputs=("data",)), args, {})
        for _ in range(3):
            step(executor, [mx.nd.ones(shape)])
        mx.nd.waitall()
        return megabytes()

    def left():
        gc.collect()
        engine.clear()
        cuda.cupy().get_default_memory_pool().free_all_blocks()
        return megabytes()

    trained()
    for _ in range(5):  # other programs may use the GPU at the same time
        before, most, after = left(), trained(), left()
        if most - before > 32 and after - before < 8:
            return
    pytest.fail(f"expected the memory of before, {before} MB, after training with {most} MB; got {after} MB")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("symbol", [layer, S.transpose(layer)], ids=["a CUDA graph", "none"])
def test_the_memory_of_a_network_is_free_without_a_garbage_collection(symbol):
    args, _ = values(symbol, {"data": (64, 16, 64, 64)})
    pool = cuda.cupy().get_default_memory_pool()
    engine.clear()
    before = pool.used_bytes()
    executor = inference_of(symbol, args)
    for _ in range(3):
        executor.forward(is_train=False)[0].wait_to_read()
    engine.clear()
    assert pool.used_bytes() - before > 8 << 20
    del executor
    wait_until(lambda: pool.used_bytes() - before <= 1 << 20)


def test_no_such_gpu():
    node = ece408_op.gpu_network(data * 2, {}, device_id=99)[0]
    with pytest.raises(DeviceError, match="expected a number from 0 to"):
        node.bind(mx.cpu(), {"data": mx.nd.ones((2, 2))}).forward(is_train=False)


def test_without_cudnn_a_clear_error_and_other_implementations(tmp_path):
    (tmp_path / "cudnn.py").write_text("raise ImportError('there is none')")
    program = """
import ece408_op, mxnet as mx
from ece408_op.errors import DeviceError
data = mx.sym.Variable("data")
layer = mx.sym.Convolution(data, kernel=(3, 3), num_filter=40, pad=(1, 1), no_bias=True, name="layer")
x, w = mx.nd.random.uniform(shape=(9, 40, 9, 9)), mx.nd.random.uniform(shape=(40, 40, 3, 3))
outputs = {}
for impl in ("auto", "cudnn"):
    node = ece408_op.gpu_network(layer, {"layer_weight": w}, impl=impl)[0]
    try:
        outputs[impl] = node.bind(mx.cpu(), {"data": x, "layer_weight": w}).forward(is_train=False)[0]
    except DeviceError as error:
        print(error)
expected = mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=40, pad=(1, 1), no_bias=True)
print(list(outputs), float((outputs["auto"] - expected).abs().max().asscalar()) < 1e-3)
"""
    message, result = printed("-c", program, first=[tmp_path]).splitlines()
    assert "pip install" in message
    assert "[cudnn]" in message
    assert result == "['auto'] True"


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
    for _ in range(2):
        assert printed("-c", program) == "leaving\n"


def compare_with_mxnet(name, impl, images, step):
    """Compare a network of Gluon's with MXNet's CPU: each layer adds at most n u to the error."""
    require(impl)
    network, image = _networks.gluons(name, seed=11)
    params, aux = ({n: a.asnumpy() for n, a in arrays.items()} for arrays in (network.arg_params, network.aux_params))
    x = np.random.RandomState(5).uniform(-1, 1, (images, *image)).astype("f")
    parts = (x[first : first + step] for first in range(0, images, step))
    expected = np.concatenate([mxnets(network.symbol, {**params, "data": part}, aux)[0] for part in parts])
    (got,) = ours(network.symbol, {**params, "data": x}, aux, way=impl)
    products = sum(int(np.prod(a.shape[1:])) for n, a in params.items() if n.endswith("weight"))
    worst, allowed = np.abs(got - expected).max(), products * EPS32 * np.abs(expected).max()
    print(f"{name} {impl}: off by {worst:.3g}, allowed {allowed:.3g}, largest output {np.abs(expected).max():.3g}")
    assert worst <= allowed
    assert (got.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("impl", ["auto", "cudnn"])
@pytest.mark.parametrize("name", ZOO)
def test_gluons_networks(name, impl):
    compare_with_mxnet(name, impl, images=4, step=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _networks.SETS["zoo"])
def test_the_predictions_of_1000_images_are_mxnets(name):
    compare_with_mxnet(name, "auto", images=1000, step=125)
