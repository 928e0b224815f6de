"""The operator fused with tanh and max-pooling: called through MXNet, and inserted into graphs."""

import json

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import GraphError, ProblemError
from ece408_op.models import files as models

mx = pytest.importorskip("mxnet")

POOL = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "max"}


def arrays(shape=(3, 2, 14, 19), filters=5, kernel=4):
    stream = np.random.RandomState(0)
    x = stream.uniform(-1, 1, shape).astype(np.float32)
    return mx.nd.array(x), mx.nd.array(stream.normal(size=(filters, shape[1], kernel, kernel)) / 4)


def test_bad_requests_say_why():
    x, w = arrays()
    with pytest.raises(ProblemError, match="fuse: expected one of tanh_pool, tanh_pool_full; got 'relu'"):
        ece408_op.New(x, w, kernel=(4, 4), num_filter=5, fuse="relu")
    with pytest.raises(mx.MXNetError, match="loops: it does not support tanh and 2 x 2 maxima in the same pass"):
        ece408_op.New(x, w, kernel=(4, 4), num_filter=5, fuse="tanh_pool", impl="loops").asnumpy()
    with pytest.raises(mx.MXNetError, match="at least 2 rows of the convolution.*got 1"):
        ece408_op.New(x[:, :, :4], w, kernel=(4, 4), num_filter=5, fuse="tanh_pool")


def names(symbol):
    return [node["name"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]


def network(pool=None, activation="tanh"):
    data = mx.sym.Variable("data")
    layer = mx.sym.Convolution(data, name="conv", kernel=(4, 4), num_filter=5, no_bias=True)
    layer = mx.sym.Activation(layer, name="act", act_type=activation)
    return mx.sym.Pooling(layer, name="pool", **{**POOL, **(pool or {})})


def assert_same(symbol, result):
    x, w = arrays((3, 2, 14, 19))
    want = symbol.bind(mx.cpu(), {"data": x, "conv_weight": w}).forward()[0].asnumpy()
    got = result.symbol.bind(mx.cpu(), {"data": x, "new0_weight": w}).forward()[0].asnumpy()
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("convention", ["valid", "full"])
def test_three_in_a_row_become_one(convention):
    symbol = network({"pooling_convention": convention})
    behind = mx.sym.Flatten(symbol, name="flat")
    result = ece408_op.replace_convolution(behind, fuse=True)
    assert names(result.symbol) == ["pool", "flat"]
    assert result.symbol.list_arguments() == ["data", "new0_weight"]
    assert_same(behind, result)
    again = ece408_op.replace_convolution(result.symbol, fuse=True)
    assert again.symbol.tojson() == result.symbol.tojson()
    with pytest.raises(GraphError, match="pool.*expected New as original files have it, got fuse"):
        ece408_op.save_checkpoint("unwritten", 1, result.symbol, {}, {})


def test_two_networks_in_one_graph_are_each_fused():
    first = mx.sym.tanh(ece408_op.New(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="a"), name="t")
    first = mx.sym.Pooling(first, name="p", **POOL)
    second = ece408_op.New(first, kernel=(2, 2), num_filter=3, name="b")
    second = mx.sym.Pooling(mx.sym.Activation(second, act_type="tanh"), name="q", **POOL)
    both = mx.sym.Group([second, mx.sym.Flatten(first, name="f")])
    result = ece408_op.replace_convolution(both, fuse=True)
    assert names(result.symbol) == ["p", "q", "f"]
    arguments = {"data": arrays()[0], "a_weight": mx.nd.random.normal(shape=(4, 2, 3, 3))}
    arguments["b_weight"] = mx.nd.random.normal(shape=(3, 4, 2, 2))
    for got, want in zip(*(symbol.bind(mx.cpu(), arguments).forward() for symbol in (result.symbol, both))):
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), atol=3e-6)


def with_internal(output):
    """Return the network with an inner value as another output."""
    symbol = network()
    return mx.sym.Group([symbol, symbol.get_internals()[output]])


@pytest.mark.parametrize(
    "symbol",
    [
        *(network(changes) for changes in ({"pool_type": "avg"}, {"stride": (1, 1)}, {"kernel": (3, 3)})),
        *(network(changes) for changes in ({"pad": (1, 1)}, {"global_pool": True}, {"pooling_convention": "same"})),
        network(activation="sigmoid"),
        with_internal("conv_output"),
        with_internal("act_output"),
        mx.sym.Group([network(), mx.sym.sum(network().get_internals()["act_output"])]),
    ],
)
def test_other_rows_stay(symbol):
    plain, result = (ece408_op.replace_convolution(symbol, fuse=fuse) for fuse in (False, True))
    assert names(result.symbol) == names(plain.symbol)


def test_an_original_file_is_opened_fused():
    found = models.find("ece408-low")
    symbol, _, _ = ece408_op.load_checkpoint(found.prefix, found.epoch, fuse=True, device="gpu")
    assert names(symbol)[:2] == ["pooling0", "flatten0"]
    assert symbol.attr_dict()["pooling0"]["device"] == "gpu"
