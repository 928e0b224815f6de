"""gpu_network through MXNet's entry points, on NumPy and on a GPU: Module, executors, SymbolBlock, threads."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import network_fake
import numpy as np
import pytest
from network_case import S, data, inference_of, mx, mxnets, ndarrays, on_numpy, ours, text_of, values
from process import printed

import ece408_op
from ece408_op.core import dispatch
from ece408_op.errors import DeviceError, GraphError, UnsupportedError
from ece408_op.network import engine
from ece408_op.network.operator import NetworkProp

pytestmark = pytest.mark.usefixtures("way")


def course(filters=8, side=20):
    x = S.Custom(data, op_type="New", kernel=(5, 5), num_filter=filters, name="new0")
    x = S.Pooling(S.Activation(x, act_type="tanh"), kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = S.Activation(S.FullyConnected(S.Flatten(x), num_hidden=30, name="fc0"), act_type="tanh")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=10, name="fc1"), name="softmax")


def bound_module(batch, seed=0):
    """A Module of the network on the GPU, its parameters, data and expected output."""
    symbol = course()
    args, aux = values(symbol, {"data": (batch, 1, 20, 20)}, seed)
    (expected,) = mxnets(symbol, args, aux)
    params = ndarrays({n: a for n, a in args.items() if n not in ("data", "softmax_label")})
    node, params, states = ece408_op.gpu_network(symbol, params)
    module = mx.mod.Module(node, label_names=["softmax_label"])
    module.bind([("data", (batch, 1, 20, 20))], [("softmax_label", (batch,))], for_training=False)
    module.set_params(params, states)
    return module, args, expected


def forward(module, args):
    batch = mx.io.DataBatch([mx.nd.array(args["data"])], [mx.nd.array(args["softmax_label"])])
    module.forward(batch, is_train=False)
    return module.get_outputs()[0].asnumpy()


@pytest.mark.parametrize("batch", [1, 7, 3000])
def test_a_module_gives_what_mxnet_gives(batch):
    module, args, expected = bound_module(batch)
    for _ in range(3):
        ece408_op.clear_op_times()
        assert np.abs(forward(module, args) - expected).max() < 1e-5
        (call,) = ece408_op.op_times()
        assert (call.layer, call.device, call.problem.batch) == ("new0", "gpu", batch)
        assert call.seconds > 0


def test_parameters_that_change_are_renewed():
    module, args, _ = bound_module(50)
    forward(module, args)
    for seed in (1, 2):
        other, _ = values(course(), {"data": (50, 1, 20, 20)}, seed)
        other["data"] = args["data"]
        module.set_params({n: mx.nd.array(a) for n, a in other.items() if n in module.get_params()[0]}, {})
        assert np.abs(forward(module, other) - mxnets(course(), other, {})[0]).max() < 1e-5


# SymbolBlock.imports gives its inputs no type.
@pytest.mark.filterwarnings(r"ignore:Cannot decide type for the following arguments:UserWarning:mxnet\.gluon\.block")
def test_saved_and_loaded_by_module_and_by_gluon(tmp_path):
    module, args, expected = bound_module(6)
    prefix = str(tmp_path / "net")
    module.save_checkpoint(prefix, 3)
    loaded = mx.mod.Module.load(prefix, 3, label_names=["softmax_label"])
    loaded.bind([("data", (6, 1, 20, 20))], [("softmax_label", (6,))], for_training=False)
    assert np.abs(forward(loaded, args) - expected).max() < 1e-5
    block = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data", "softmax_label"], f"{prefix}-0003.params")
    for flags in (None, {}, {"static_alloc": True, "static_shape": True}):
        if flags is not None:
            block.hybridize(**flags)
        for _ in range(3):
            got = block(mx.nd.array(args["data"]), mx.nd.array(args["softmax_label"]))
            assert np.abs(got.asnumpy() - expected).max() < 1e-5


def test_images_from_a_layer_of_mxnets_own():
    """oneDNN leaves them in a blocked layout."""
    symbol = S.Convolution(data, kernel=(1, 1), num_filter=8, no_bias=True, name="conv0")
    weight = np.random.RandomState(0).normal(size=(8, 64, 1, 1)).astype("f")
    node, params, _ = ece408_op.gpu_network(symbol, {"conv0_weight": mx.nd.array(weight)})
    block = mx.gluon.SymbolBlock(node, [S.Variable("data", dtype="float32")])
    block.collect_params().initialize()
    block.collect_params()["conv0_weight"].set_data(params["conv0_weight"])
    before = mx.gluon.nn.Conv2D(64, 3, in_channels=16)
    before.initialize()
    block.hybridize()
    for _ in range(6):
        x = before(mx.nd.random.uniform(shape=(200, 16, 20, 20)))
        expected = np.einsum("oc,bchw->bohw", weight[:, :, 0, 0], x.asnumpy())
        assert np.abs(block(x).asnumpy() - expected).max() < 1e-4


def test_filters_that_a_layer_of_mxnets_own_has_used():
    """oneDNN leaves them in a blocked layout."""
    layer, x = mx.gluon.nn.Conv2D(64, 3, in_channels=64, use_bias=False), mx.nd.random.uniform(shape=(8, 64, 9, 9))
    layer.initialize()
    expected = layer(x).asnumpy()
    node, params, _ = ece408_op.gpu_network(layer(data), {layer.weight.name: layer.weight.data()})
    got = node.bind(mx.cpu(), {"data": x, **params}).forward(is_train=False)[0].asnumpy()
    assert np.abs(got - expected).max() < 1e-4


@pytest.mark.parametrize("request_", ["null", "write", "inplace", "add"])
def test_each_request_of_a_forward(request_):
    module, args, expected = bound_module(9)
    symbol = module.symbol
    prop = NetworkProp(graph=text_of(symbol))

    class Arrays(list):
        @property
        def handles(self):
            return [array.handle.value for array in self]

    arrays = Arrays(mx.nd.array(args[name]) for name in prop.list_arguments())
    out = mx.nd.full(expected.shape, 3)
    mx.nd.waitall()  # the engine does so for an operator that it calls itself
    prop.create_operator(mx.cpu(), [], []).forward(False, [request_], arrays, [out], Arrays())
    plus = {"null": 3, "add": expected + 3}.get(request_, expected)
    assert np.abs(out.asnumpy() - plus).max() < 1e-5


def test_a_network_written_over_its_images():
    x = np.random.RandomState(0).uniform(-1, 1, (500, 7, 7)).astype("f")
    node, *_ = ece408_op.gpu_network(S.LeakyReLU(data) + S.tanh(data), {})
    array = mx.nd.array(x)
    mx.nd.Custom(array, op_type="ece408_network", graph=text_of(node), out=array)
    assert np.allclose(array.asnumpy(), np.where(x > 0, x, 0.25 * x) + np.tanh(x), atol=1e-6)


def test_eight_threads_at_once():
    """Forwards at once. Bound one after another: MXNet's bind writes into its oneDNN backend, whoever else does so."""
    bound = [bound_module(20 + seed, seed) for seed in range(8)]

    def work(seed):
        module, args, expected = bound[seed]
        for _ in range(5):
            assert np.abs(forward(module, args) - expected).max() < 1e-5

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


AT_EXIT = """
import atexit
import network_fake
from network_case import mx
import ece408_op

fake = network_fake.installed()
fake.__enter__()
args = {"data": mx.nd.ones((300, 20)), "factor": mx.nd.full((1, 20), 2)}
node, *_ = ece408_op.gpu_network(mx.sym.broadcast_mul(*map(mx.sym.Variable, args)), {"factor": args["factor"]})
executor = node.bind(mx.cpu(), args, grad_req="null")
atexit.register(lambda: print((executor.forward()[0].asnumpy() == 2).all()))
"""


def test_a_first_call_while_the_interpreter_exits():
    assert printed("-c", AT_EXIT, first=[Path(__file__).parent]) == "True\n"


def images_per_chunk():
    found = engine.engines()[-1]
    return [made.batches[0].images for made in found.batches.values()]


def test_a_batch_too_large_for_memory_is_split(monkeypatch):
    module, args, expected = bound_module(1001)
    free = engine.engines()[0].gpu.cuda.runtime.memGetInfo()[0]
    monkeypatch.setattr(engine, "MEMORY_SHARE", 40_000 / free)
    assert np.abs(forward(module, args) - expected).max() < 1e-5
    assert images_per_chunk()[0] < 1001 / engine.MOST_CHUNKS


@on_numpy  # no test fills a real GPU's memory
def test_if_memory_runs_out_fewer_images_are_tried(monkeypatch):
    forward(*bound_module(2)[:2])  # cuBLAS has its workspace
    engine.clear()
    monkeypatch.setattr(network_fake.Gpu, "largest", 100_000)
    module, args, expected = bound_module(301)
    assert np.abs(forward(module, args) - expected).max() < 1e-5
    assert 1 < images_per_chunk()[0] < 30
    monkeypatch.setattr(network_fake.Gpu, "largest", 100)
    other = bound_module(5)
    with pytest.raises(DeviceError, match="expected room for 1 image of the network"):
        forward(*other[:2])


def test_a_batch_whose_images_are_mixed_is_computed_whole(way, monkeypatch):
    for name, value in (("CHUNK_BYTES", 1), ("LEAST_IMAGES", 2)):
        monkeypatch.setattr(engine, name, value)
    symbol = S.softmax(S.transpose(data), axis=0)
    x = np.random.RandomState(0).uniform(-1, 1, (40, 30)).astype("f")
    assert np.allclose(ours(symbol, {"data": x}, {}, way=way)[0], mxnets(symbol, {"data": x}, {})[0], atol=1e-6)


def new(filters=8, **attributes):
    return S.Custom(data, op_type="New", kernel=(5, 5), num_filter=filters, name="new0", **attributes)


def outputs_of_new(way, named, channels=1, filters=8, impl="auto"):
    """Return the output of one New by gpu_network, and MXNet's."""
    args, _ = values(new(filters), {"data": (3, channels, 20, 20)})
    return ours(new(filters, impl=named), args, {}, way=way, impl=impl)[0], mxnets(new(filters), args, {})[0]


@pytest.mark.parametrize("attributes", [{"device": "cpu"}, {"impl": "direct"}, {"impl": "loops", "device": "gpu"}])
def test_a_new_for_the_cpu_is_refused_by_name(attributes):
    name, value = next(iter(attributes.items()))
    with pytest.raises(GraphError, match=rf"'new0' \(New\): {name}: expected the GPU, got {value}; .*device='gpu'"):
        ece408_op.gpu_network(new(**attributes), {})


@pytest.mark.parametrize("impl", ["auto", "cudnn"])
@pytest.mark.parametrize("named", ["naive", "register_blocked"])
def test_a_new_is_computed_by_the_implementation_that_it_names(way, named, impl):
    if impl == "cudnn":
        pytest.importorskip("cudnn")
    got, expected = outputs_of_new(way, named, impl=impl)
    assert np.abs(got - expected).max() < 1e-5
    if way == "numpy":
        used = [network_fake.Chooser.chosen["new0"].name]
    else:  # the last record is that of the expected output
        used = [record.implementation for record in ece408_op.op_times() if record.device == "gpu"][-1:]
    assert used == [named]


def test_kernels_plan_for_the_alignments_that_they_know(way):
    naive, alignments = dispatch.find("naive"), []

    def plan(problem, chip, aligned):
        alignments.append(aligned)
        return naive.plan(problem, chip, aligned)

    with dispatch.added(replace(naive, name="mine", plan=plan)):
        outputs_of_new(way, "mine")
    assert {*alignments} <= {4, 8, 16}


def test_a_named_implementation_that_cannot_compute_its_layer_raises(way):
    with pytest.raises(UnsupportedError, match=r"'new0' \(New\): impl: .*unrolled: filters: at most 65536 bytes"):
        outputs_of_new(way, "unrolled", 200, 200)


@on_numpy  # test_network_split has the GPU's results
@pytest.mark.parametrize(("rows", "chosen"), [(130, "split_fully_connected"), (120, "cublas")])
def test_large_fully_connected_layers_are_computed_in_split_precision(rows, chosen):
    symbol = S.Activation(S.FullyConnected(data, num_hidden=70, name="fc"), act_type="relu")
    args, _ = values(symbol, {"data": (rows, 1030)})
    assert np.abs(ours(symbol, args, {})[0] - mxnets(symbol, args, {})[0]).max() < 1e-4
    assert network_fake.Chooser.chosen["fc"].name == chosen


@pytest.mark.parametrize("symbol", [S.Dropout(data), S.BatchNorm(data), S.contrib.SyncBatchNorm(data, key="norm")])
def test_training_is_refused(symbol):
    args, aux = values(symbol, {"data": (2, 2)})
    executor = inference_of(symbol, args, aux)
    with pytest.raises(mx.MXNetError, match="expected inference"):
        executor.forward(is_train=True)[0].asnumpy()
    node = ece408_op.gpu_network(data * 2, {})[0]
    gradient = mx.nd.ones((2, 2))
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((2, 2))}, {"data": gradient})
    executor.forward(is_train=True)[0].wait_to_read()
    with pytest.raises(mx.MXNetError, match="there is no gradient; pass for_training=True to gpu_network"):
        executor.backward(mx.nd.ones((2, 2)))
        gradient.wait_to_read()
    assert np.isnan(gradient.asnumpy()).all()


@on_numpy
def test_device_id_names_the_gpu():
    symbol = ece408_op.gpu_network(data * 2, {}, device_id=3)[0]
    symbol.bind(mx.cpu(), {"data": mx.nd.ones((2, 2))}).forward(is_train=False)[0].wait_to_read()
    assert engine.engines()[-1].gpu.device.id == 3


def test_a_label_without_a_shape_is_asked_for():
    """MXNet infers none for a label that is reshaped."""
    label = S.Reshape(S.Variable("softmax_label"), shape=(-1,))
    symbol = S.SoftmaxOutput(S.FullyConnected(data, num_hidden=4, name="fc"), label, name="softmax")
    args = {"fc_weight": mx.nd.ones((4, 6)), "fc_bias": mx.nd.zeros(4)}
    node, *_ = ece408_op.gpu_network(symbol, args, for_training=True)
    error = r"expected the shapes of all data and labels, with at least one dimension, got \(5, 6\), \(\); give all"
    with pytest.raises(RuntimeError, match=error):
        node.simple_bind(mx.cpu(), data=(5, 6))
    executor = node.simple_bind(mx.cpu(), data=(5, 6), softmax_label=(5, 1))
    executor.forward(is_train=True)
    assert executor.outputs[0].asnumpy().shape == (5, 4)
