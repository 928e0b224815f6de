"""The operator in Gluon: Conv2D in place of MXNet's, and networks whose layers are replaced."""

import pickle

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import ProblemError

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

MODES = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}


def network(convolution, **options):
    """Layers with every attribute, of sizes that are not known yet."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(convolution(8, 3, padding=1, activation="relu", **options))
        net.add(convolution(8, (3, 1), strides=(2, 1), dilation=(1, 2), groups=4, use_bias=False, **options))
        net.add(
            nn.BatchNorm(), convolution(6, 2, bias_initializer="ones", **options), nn.GlobalAvgPool2D(), nn.Dense(3)
        )
    return net


def started(net, mode=None, seed=1):
    """The network with weights that depend on their shapes alone."""
    net.initialize(mx.init.Xavier())
    if mode is not None:
        net.hybridize(**mode)
    net(images())
    random = np.random.RandomState(seed)
    for parameter in net.collect_params(".*weight").values():
        parameter.set_data(mx.nd.array(random.standard_normal(parameter.shape) / 4))
    return net


def images():
    return mx.nd.array(np.random.RandomState(0).standard_normal((5, 3, 13, 12)))


def losses(net, steps=5):
    """The losses of some steps of training."""
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    found, labels = [], mx.nd.array([0, 1, 2, 0, 1])
    for _ in range(steps):
        with mx.autograd.record():
            loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(images()), labels).mean()
        loss.backward()
        trainer.step(1)
        found.append(loss.asscalar())
    return np.array(found)


@pytest.mark.parametrize("mode", MODES)
def test_it_has_mxnets_parameters_and_learns_what_mxnets_learns(mode):
    own, mine = (started(network(layer), MODES[mode]) for layer in (nn.Conv2D, ece408_op.gluon.Conv2D))
    shapes = [[(name, p.shape) for name, p in net.collect_params().items()] for net in (own, mine)]
    assert shapes[0] == shapes[1]
    np.testing.assert_allclose(losses(mine), losses(own), rtol=1e-4)
    np.testing.assert_allclose(mine(images()).asnumpy(), own(images()).asnumpy(), rtol=1e-3, atol=1e-4)


def imported(net, prefix):
    """The network by the files that it exports."""
    net.export(prefix)
    return mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")


def test_files_of_mxnets_layer_load_and_exported_networks_are_replaced(tmp_path):
    own, mine = started(network(nn.Conv2D), {}), started(network(ece408_op.gluon.Conv2D), {}, seed=2)
    want = own(images()).asnumpy()
    own.save_parameters(str(tmp_path / "own.params"))
    mine.load_parameters(str(tmp_path / "own.params"))
    np.testing.assert_allclose(mine(images()).asnumpy(), want, rtol=1e-4, atol=1e-6)
    exported = imported(mine, str(tmp_path / "mine"))
    np.testing.assert_array_equal(exported(images()).asnumpy(), mine(images()).asnumpy())
    exported = imported(own, str(tmp_path / "own"))
    exported(images())
    result = ece408_op.gluon.replace(exported)
    assert (len(result.replaced), result.left) == (3, {})
    assert set(exported.collect_params()) == set(own.collect_params())
    np.testing.assert_allclose(exported(images()).asnumpy(), want, rtol=1e-4, atol=1e-6)


def test_options_go_to_the_operator_and_wrong_ones_are_refused():
    layer = ece408_op.gluon.Conv2D(4, 3, in_channels=3, impl="im2col", prefix="first_")
    layer.initialize()
    ece408_op.clear_op_times()
    layer(images()).wait_to_read()
    assert [(call.layer, call.implementation) for call in ece408_op.op_times()] == [("first_fwd", "im2col")]
    with pytest.raises(ProblemError, match="impl: expected one of"):
        ece408_op.gluon.Conv2D(4, 3, impl="fastest")
    with pytest.raises(ProblemError, match="layout: expected NCHW, got 'NHWC'"):
        ece408_op.gluon.Conv2D(4, 3, layout="NHWC")


def test_casts_of_mixed_precision_stay():
    data, x = mx.sym.Variable("data", dtype="float32"), images()
    rounded = mx.sym.amp_cast(mx.sym.amp_cast(data, dtype="float16"), dtype="float32")
    block = mx.gluon.SymbolBlock(ece408_op.New(rounded, kernel=(3, 3), num_filter=2), [data])
    block.initialize()
    np.testing.assert_array_equal(block(x).asnumpy(), block(x.astype("float16").astype("float32")).asnumpy())


def test_arrays_of_mx_np():
    with mx.util.np_shape(True), mx.util.np_array(True):
        own, mine = (layer(4, 3, in_channels=3, prefix="a_") for layer in (nn.Conv2D, ece408_op.gluon.Conv2D))
        for net in (own, mine):
            net.initialize(mx.init.One())
        data = images().as_np_ndarray()
        for hybridize in (False, True):
            mine.hybridize(hybridize)
            y = mine(data)
            assert type(y) is mx.np.ndarray
            np.testing.assert_allclose(y.asnumpy(), own(data).asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replaced_network_keeps_its_parameters_and_trains_on(when, mode):
    own, net = (started(network(nn.Conv2D), MODES[mode]) for _ in range(2))
    parameters = dict(net.collect_params().items())
    if when == "after":
        losses(own)
        losses(net)
    result = ece408_op.gluon.replace(net)
    assert (result.replaced, result.left) == (["net_conv0", "net_conv1", "net_conv2"], {})
    assert dict(net.collect_params().items()) == parameters
    ece408_op.clear_op_times()
    np.testing.assert_allclose(net(images()).asnumpy(), own(images()).asnumpy(), rtol=1e-4, atol=1e-5)
    assert [call.layer for call in ece408_op.op_times()] == ["net_conv0_fwd", "net_conv1_fwd", "net_conv2_fwd"]
    np.testing.assert_allclose(losses(net), losses(own), rtol=1e-3)


def test_a_replaced_network_stays_replaced_when_it_is_pickled():
    net = started(network(nn.Conv2D))
    ece408_op.gluon.replace(net)
    want = net(images()).asnumpy()
    copied = pickle.loads(pickle.dumps(net))
    ece408_op.clear_op_times()
    np.testing.assert_array_equal(copied(images()).asnumpy(), want)
    assert [call.layer for call in ece408_op.op_times()] == ["net_conv0_fwd", "net_conv1_fwd", "net_conv2_fwd"]


def test_mxnets_layer_takes_the_place_of_a_replaced_one():
    net = nn.HybridSequential()
    net.first = nn.Conv2D(4, 3)
    ece408_op.gluon.replace(net)
    net.first = nn.Conv2D(6, 3)
    assert ece408_op.gluon.replace(net).replaced == [net.first.name]


def test_other_convolutions_are_left_with_the_reason():
    class Special(nn.Conv2D):
        pass

    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Conv2D(4, 3), nn.Conv3D(4, 3), nn.Conv2D(4, 3, layout="NHWC"), Special(4, 3), nn.Conv2DTranspose(4, 3)
        )
    net[0].cast("float64")
    left = ece408_op.gluon.replace(net).left
    assert [reason.split(":")[0] for reason in left.values()] == [
        "type float64",
        "class Conv3D",
        "layout NHWC",
        "class Special",
    ]
    with pytest.raises(ProblemError, match="block: expected a Gluon block, got str"):
        ece408_op.gluon.replace("net")


def test_layers_that_mxnet_computes_faster_are_left_when_asked():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(32, 3, in_channels=5), nn.Conv2D(32, 3, in_channels=32), nn.Conv2D(32, 3))
    result = ece408_op.gluon.replace(net, where="faster")
    assert result.replaced == ["net_conv0"]
    assert result.left == {
        "net_conv1": "MXNet's own Convolution is expected to be faster",
        "net_conv2": "its shape is not known yet; compute one batch first",
    }
    assert len(ece408_op.gluon.replace(net).replaced) == 3
