"""gpu_network's graphs: checked, with all reasons in one error, fused, placed in memory; no GPU needed."""

from __future__ import annotations

import json
import time
from functools import partial
from math import prod

import numpy as np
import pytest
from cuda_layers import H200
from hypothesis import given, settings
from hypothesis import strategies as st
from network_case import S, data, fused, mx, mxnets, ndarrays, one_node, ours, text_of, values

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.errors import GraphError, ProblemError
from ece408_op.network._gpu import Chooser
from ece408_op.network._network import parse, splits
from ece408_op.network._schedule import Schedule, plan


def classifier():
    """A little of everything: a branch, a join, labels."""
    x = S.Convolution(data, kernel=(3, 3), num_filter=4, pad=(1, 1), name="conv0")
    x = S.BatchNorm(x, name="norm0", fix_gamma=False)
    x = S.Activation(x, act_type="relu", name="relu0")
    branch = S.Convolution(x, kernel=(1, 1), num_filter=4, no_bias=True, name="conv1")
    x = S.Pooling(S.Activation(x + branch, act_type="tanh"), kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = S.concat(x, x * 2, dim=1)
    x = S.FullyConnected(S.Flatten(x), num_hidden=5, name="fc0")
    return S.SoftmaxOutput(x, name="softmax")


def test_the_node_has_the_networks_arguments_states_and_outputs():
    symbol = classifier()
    (node, params, states), args, aux = one_node(symbol, {"data": (2, 3, 8, 8)})
    assert node.list_arguments() == symbol.list_arguments()
    assert sorted(node.list_auxiliary_states()) == sorted(symbol.list_auxiliary_states())
    assert node.list_outputs() == symbol.list_outputs()
    assert set(params) == set(args) - {"data", "softmax_label"}
    assert set(states) == set(aux)
    assert node.infer_shape(data=(7, 3, 8, 8)) == symbol.infer_shape(data=(7, 3, 8, 8))
    assert [op["op"] for op in json.loads(node.tojson())["nodes"] if op["op"] != "null"] == ["Custom"]


def test_unknown_shapes_stay_unknown():
    (node, *_), _, _ = one_node(classifier(), {"data": (2, 3, 8, 8)})
    arguments, outputs, states = node.infer_shape_partial()
    shapes = dict(zip(node.list_arguments(), arguments))
    assert shapes["fc0_weight"] == (5, 128)
    assert outputs == [()]
    assert states == [(4,), (4,)]


def test_labels_need_not_be_float32():
    (node, *_), _, _ = one_node(classifier(), {"data": (2, 3, 8, 8)})
    types, _, _ = node.infer_type(data=np.float32, softmax_label=np.int32)
    assert types[-1] is np.int32
    with pytest.raises(mx.MXNetError, match="data: expected float32, got float16"):
        node.infer_type(data=np.float16)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"data": (2, 4, 8, 8)}, r"operator conv0: Shape inconsistent, .* = \[4,3,3,3\], .*=\(4,4,3,3\)"),
        ({"data": (2, 3, 8)}, r"got shape \(2, 3, 8\), for which MXNet says: Error in operator conv0: .*4D"),
        ({"data": (2, 3, 8, 8), "fc0_bias": (6,)}, "fc0_bias: expected shape .5,."),
    ],
)
def test_shapes_that_do_not_fit(given_, message):
    (node, *_), _, _ = one_node(classifier(), {"data": (2, 3, 8, 8)})
    with pytest.raises(mx.MXNetError, match=message):
        node.infer_shape(**given_)


def test_everything_unsupported_is_named():
    """By node, operator and attribute, all in one error that says what to do."""
    x = S.Deconvolution(S.LRN(data, nsize=3, name="local"), kernel=(2,), num_filter=2, name="up")
    x = S.Pooling(x, kernel=(2, 2), pool_type="lp", p_value=2, name="norms")
    x = S.Convolution(x, kernel=(1, 1, 1), num_filter=2, name="deep")
    x = S.Convolution(x, kernel=(1, 1), num_filter=2, layout="NHWC", name="last")
    x = S.softmax(S.Dropout(x, mode="always", name="drop"), dtype="float16", name="half")
    with pytest.raises(GraphError) as caught:
        ece408_op.gpu_network(S.dot(S.Custom(x, op_type="New", kernel=(2, 2), name="new"), data, name="dot"), {})
    assert str(caught.value) == (
        "network: expected nodes that gpu_network supports, got 9 that it does not: "
        "'local' (LRN): unsupported operator; "
        "'up' (Deconvolution): kernel: expected rows and columns, two whole numbers, got (2,); "
        "'norms' (Pooling): pool_type: expected one of max, avg, sum, got lp; "
        "'deep' (Convolution): kernel: expected rows and columns, two whole numbers, got (1, 1, 1); "
        "'last' (Convolution): layout: expected NCHW, got NHWC; "
        "'drop' (Dropout): mode: expected training, got always; "
        "'half' (softmax): dtype: expected float32, got float16; "
        "'new' (New): num_filter: expected a value, got none; New needs kernel=(K, L) and num_filter=M; "
        "'dot' (dot): unsupported operator. Change them, or let MXNet compute them between separate gpu_network nodes"
    )


def test_an_unsupported_operator_of_several_outputs_is_named_once():
    parts = S.topk(data, k=3, ret_typ="both", name="parts")
    with pytest.raises(GraphError, match=r"got 1 that it does not: 'parts' \(topk\): unsupported operator\. "):
        ece408_op.gpu_network(parts[0] + parts[1], {})


def test_each_part_of_a_split_is_a_value():
    parts = S.split(S.tanh(data), num_outputs=3, name="parts")
    args, _ = values(parts, {"data": (2, 6, 4)})
    for symbol in (parts, parts[1], S.Group([parts[2], parts[0], parts[2] * 2])):
        got, expected = ours(symbol, args, {}), mxnets(symbol, args, {})
        assert len(got) == len(expected)
        for ours_, theirs in zip(got, expected):
            np.testing.assert_allclose(ours_, theirs, rtol=1e-5)


def test_attributes_and_inputs_are_checked():
    def error(op, inputs=1, **attrs):
        nodes = [{"op": "null", "name": f"x{n}", "inputs": []} for n in range(inputs)]
        nodes.append({"op": op, "name": "node", "attrs": attrs, "inputs": [[n, 0, 0] for n in range(inputs)]})
        with pytest.raises(GraphError) as caught:
            parse(json.dumps({"nodes": nodes, "arg_nodes": [], "heads": [[inputs, 0, 0]]}))
        return str(caught.value).partition("'node' ")[2].partition(". Change")[0]

    assert error("relu", slope="1", deep="2") == "(relu): deep, slope: unsupported attribute"
    assert error("relu", inputs=2) == "(relu): expected 1 inputs, data; got 2"
    assert error("slice_axis", 2, begin="0") == "(slice_axis): expected 1 inputs, data; got 2"
    assert error("FullyConnected", 2, num_hidden="3").endswith("expected 3 inputs, data, weight, bias; got 2")
    assert error("clip", a_min="0") == "(clip): a_max: expected a number, got none"
    assert error("clip", a_min="2", a_max="-1") == "(clip): a_min: expected at most a_max, -1.0, got 2.0"
    assert error("clip", a_min="-1", a_max="nan") == "(clip): a_min: expected at most a_max, nan, got -1.0"
    assert error("Concat", 2, dim="1.5") == "(Concat): dim: expected a whole number, got 1.5"
    assert error("mean", keepdims="maybe") == "(mean): keepdims: expected True or False, got maybe"
    assert error("UpSampling", 2, scale="2") == "(UpSampling): expected 1 inputs, data; got 2"
    assert error("Reshape", shape="(a,)") == "(Reshape): shape: expected whole numbers, got (a,)"
    assert error("softmax", use_length="1") == "(softmax): use_length: expected False, got 1"
    assert "(Pooling): pad: expected less than" in error("Pooling", kernel="(2, 2)", pad="(2, 2)")
    assert error("Pad", pad_width="(0, 0)").endswith("expected 8 or 10 whole numbers of at least 0, got (0, 0)")
    assert error("slice", begin="(x,)", end="(1,)") == "(slice): begin: expected whole numbers or None, got (x,)"
    assert "of at least 0, got (0, 0, 0, 0, -1" in error("Pad", pad_width="(0, 0, 0, 0, -1, 0, 0, 0)")
    assert "expected positive sizes" in error("Convolution", 3, kernel="(0, 1)", num_filter="1")


def padded_pool():
    return S.Pooling(data, kernel=(2, 2), stride=(2, 2), pad=(1, 1), pooling_convention="full", name="x")


def deconvolution(**words):
    return S.Deconvolution(data, kernel=(3, 3), num_filter=2, name="x", **words)


@pytest.mark.parametrize(
    ("symbol", "shape", "message"),
    [
        (S.split(data, num_outputs=2, name="x")[1], (2, 3), "You are trying to split the 1-th axis"),
        (S.slice_axis(data, axis=1, begin=3, end=5, name="x"), (2, 3), "Invalid end for end=5 as axis_size is 3"),
        (S.squeeze(data, axis=1, name="x"), (2, 3), "cannot select an axis to squeeze out which has size=3"),
        (S.UpSampling(data, scale=2, sample_type="nearest", name="x"), (2, 3), "Input data should be 4D"),
        (S.repeat(data, repeats=2, name="x"), (2, 3), r"\(repeat\): axis: expected a whole number, got none"),
        (padded_pool(), (1, 1, 7, 8), r"\(Pooling\): pooling_convention: expected windows that touch the"),
        (deconvolution(pad=(2, 3)), (2, 3, 3, 4), "pad, target_shape: expected at least one row and column of output"),
        (deconvolution(target_shape=(0, 3), stride=(2, 2)), (2, 3, 3, 4), "expected at least one row and column"),
        (S.reshape(data, shape=(4, 4), name="x"), (2, 3), r"shape: expected 6 elements, as \(2, 3\) has, got \(4, 4\)"),
        (S.reshape(data, shape=(4, -1), name="x"), (2, 3), r"expected 6 elements, as \(2, 3\) has, got \(4, 1\)"),
        (S.reshape(data, shape=(-1, -1), name="x"), (2, 3), "One and only one dim can be inferred"),
        (S.softmax(data, axis=2, name="x"), (2, 3), r"\(softmax\): axis: expected one of 2 dimensions, got 2"),
        (S.log_softmax(data, axis=-3, name="x"), (2, 3), r"\(log_softmax\): axis: expected one of 2 dimensions"),
        (S.SoftmaxActivation(data, name="x"), (2, 3, 4), r"mode: expected .* or channel with more, got instance"),
        (S.SoftmaxActivation(data, mode="channel", name="x"), (2, 3), r"mode: .* got channel with \(2, 3\)"),
        (S.Crop(data, h_w=(3, 3), offset=(0, 2), name="x"), (1, 1, 4, 4), r"inside \(1, 1, 4, 4\), got 2 to 5"),
        (S.transpose(data, axes=(0, 0), name="x"), (2, 3), r"axes: expected each of 2 dimensions once, got \(0, 0\)"),
        (S.LeakyReLU(data, S.Variable("x_gamma"), act_type="prelu", name="x"), (2, 3), r"gamma: .* got shape \(2,\)"),
    ],
)
def test_data_that_do_not_fit(symbol, shape, message):
    params = {"x_weight": mx.nd.zeros((3, 2, 3, 3)), "x_gamma": mx.nd.ones(2)}
    node, *_ = ece408_op.gpu_network(symbol, {n: a for n, a in params.items() if n in symbol.list_arguments()})
    with pytest.raises(mx.MXNetError, match=rf"('x'|got shape .{str(shape)[1:-1]}.*operator x).*{message}"):
        node.infer_shape(data=shape)


def test_outputs_beyond_the_first_are_unsupported():
    graph = json.loads(S.BatchNorm(data, name="norm").tojson())
    graph["heads"] = [[len(graph["nodes"]) - 1, 1, 0]]
    with pytest.raises(GraphError, match=r"'norm' \(BatchNorm\): the network uses output 1, only output 0"):
        parse(json.dumps(graph))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "sliding_window"}, "impl: expected one of auto, cudnn"),
        ({"precision": "fp8"}, "precision: expected one of"),
        ({"device_id": -1}, "device_id: expected"),
        ({"device_id": True}, "device_id: expected"),
        ({"device_ids": []}, "device_ids: expected distinct GPU numbers"),
        ({"device_ids": [0, 0]}, "device_ids: expected distinct GPU numbers"),
        ({"device_ids": 2}, "device_ids: expected distinct GPU numbers"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises(ProblemError, match=message):
        ece408_op.gpu_network(data * 2, {}, **options)


def test_a_symbol_of_mx_np_stays_one():
    node, _, _ = ece408_op.gpu_network((data * 2).as_np_ndarray(), {})
    assert type(node) is type(data.as_np_ndarray())
    assert node.list_arguments() == ["data"]


def test_parameters_that_are_no_dense_arrays(capfd):
    with pytest.raises(GraphError, match="arg_params: expected a dictionary of arrays by name, got NoneType"):
        ece408_op.gpu_network(data * 2, None)
    with pytest.raises(GraphError, match="aux_params: expected arrays by name, got int for 'mean'"):
        ece408_op.gpu_network(data * 2, {}, {"mean": 3})
    with pytest.raises(GraphError, match="aux_params: expected arrays for norm_moving_mean, norm_moving_var, got none"):
        ece408_op.gpu_network(S.BatchNorm(data, name="norm"), ndarrays(dict.fromkeys(["norm_gamma", "norm_beta"], [1])))
    layer = S.FullyConnected(S.Convolution(data, kernel=(1, 1), num_filter=1, name="a"), S.Variable("w"), num_hidden=1)
    with pytest.raises(GraphError, match="arg_params: expected arrays for a_weight, fullyconnected.*_bias, got none"):
        ece408_op.gpu_network(layer, {"a_bias": mx.nd.ones((1,))})
    with pytest.raises(GraphError, match="at least one input that is not a parameter"):
        ece408_op.gpu_network(S.tanh(data), {"data": mx.nd.ones((2, 2))})
    weight = mx.nd.ones((3, 4)).tostype("row_sparse")
    layer = mx.sym.FullyConnected(data, num_hidden=3, no_bias=True, name="layer")
    with pytest.raises(ProblemError, match="layer_weight: expected a dense array, got a row_sparse one"):
        ece408_op.gpu_network(layer, {"layer_weight": weight})
    node, *_ = ece408_op.gpu_network(layer, {"layer_weight": mx.nd.ones((3, 4))})
    with pytest.raises(mx.MXNetError, match="layer_weight: expected a dense array, got a row_sparse one"):
        node.bind(mx.cpu(), {"data": mx.nd.ones((2, 4)), "layer_weight": weight})
    assert capfd.readouterr().out == ""


def test_a_broken_graph_is_an_error_and_not_the_end():
    node = mx.sym.Custom(data, op_type="ece408_network", graph="{", name="broken")
    with pytest.raises(mx.MXNetError, match="expected a symbol in JSON"):
        node.infer_shape(data=(1,))


def test_activations_become_epilogues_and_go_behind_a_maximum():
    nodes = [node for _, node in fused(classifier(), {"data": (2, 3, 8, 8)}).operators]
    expected = "Convolution, Convolution, Pooling, _mul_scalar, Concat, Flatten, FullyConnected, SoftmaxOutput"
    assert ", ".join(node.op for node in nodes) == expected
    assert [node.epilogue and node.epilogue.activation for node in nodes] == ["relu", None, "tanh", *[None] * 5]


def test_a_batch_norm_joins_the_convolution_only_where_its_factors_are_the_filters():
    x = S.Convolution(data, kernel=(1, 1), num_filter=8)
    computed = S.BatchNorm(x, gamma=S.Variable("gamma") * 2)
    for symbol, ops in (
        (S.BatchNorm(x), ["Convolution"]),
        (S.BatchNorm(x, axis=2), ["Convolution", "BatchNorm"]),
        (computed, ["Convolution", "_mul_scalar", "BatchNorm"]),
        (S.BatchNorm(S.BatchNorm(x)), ["Convolution", "BatchNorm"]),
        (S.BatchNorm(S.relu(x)), ["Convolution", "BatchNorm"]),
        (S.BatchNorm(x) + x, ["Convolution", "BatchNorm", "elemwise_add"]),
    ):
        nodes = [node.op for _, node in fused(symbol, {"data": (2, 3, 8, 8)}).operators]
        assert sorted(nodes) == sorted(ops)


@pytest.mark.parametrize(
    ("layer", "words", "joined"),
    [
        (S.Convolution, {}, True),
        (partial(S.Custom, op_type="New"), {}, True),
        (partial(S.Custom, op_type="New", impl="register_blocked"), {}, False),
        (S.Deconvolution, {}, False),
        (S.Convolution, {"constant_value": 0.5}, False),
        (S.Convolution, {"mode": "edge"}, False),
        (S.Convolution, {"pad_width": (0, 0, 0, 0, 1, 1, 1, 2)}, False),
    ],
)
def test_zeros_on_all_sides_become_the_padding_of_a_convolution(layer, words, joined):
    x = S.Pad(data, **{"mode": "constant", "pad_width": (0, 0, 0, 0, 1, 1, 2, 2), **words})
    words = {"kernel": (3, 3), "num_filter": 4, "no_bias": True, "name": "conv"}
    words |= {"pad": (1, 0)} if layer is S.Convolution else {}
    symbol, shapes = layer(x, **words), {"data": (2, 3, 5, 4)}
    assert [node.op for _, node in fused(symbol, shapes).operators][:-1] == (["Pad"] if not joined else [])
    args, _ = values(symbol, shapes)
    (expected,) = mxnets((layer if layer is S.Deconvolution else S.Convolution)(x, **words), args, {})
    np.testing.assert_allclose(ours(symbol, args, {})[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_a_cuda_graph_repeats_a_batch_norm_only_if_its_parameters_are_known(known):
    """Otherwise it allocates memory at each call."""
    network = fused(S.BatchNorm(data, name="norm"), {"data": (2, 3, 4)})
    chooser = Chooser("auto", "float32", H200)
    schedule = Schedule(network, network.infer([(2, 3, 4)]), chooser.choose, chooser.accepts)
    schedule.prepare({number: np.ones(3, "f") for number in network.parameters if known})
    assert schedule.repeatable is known


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("layer", [S.Convolution, S.Deconvolution])
@pytest.mark.parametrize(("bias", "fixed"), [(False, False), (True, True), (True, False)])
def test_a_batch_norm_becomes_part_of_the_filters_and_the_bias(layer, groups, bias, fixed):
    """The kernel and the pass after it get the filters and the bias of MXNet's definition, computed in float64."""
    shapes = {"data": (2, 2 * groups, 6, 7)}
    plain = layer(data, kernel=(2, 3), num_filter=6, num_group=groups, no_bias=not bias, name="conv")
    ((_, node),) = fused(S.BatchNorm(plain, fix_gamma=fixed, eps=0.01, name="norm"), shapes).operators
    args, aux = values(S.BatchNorm(plain, fix_gamma=fixed, eps=0.01, name="norm"), shapes)
    own = {name: args[name] for name in plain.list_arguments()}
    (y,), factors = mxnets(plain, own, {}), (args["norm_gamma"], args["norm_beta"], *aux.values())
    gamma, beta, mean, variance = (array.astype("d").reshape(-1, 1, 1) for array in factors)
    expected = (y - mean) / np.sqrt(variance + 0.01) * (1 if fixed else gamma) + beta
    filters, shift = node.operator.folded([*own.values(), *factors])
    assert filters.dtype == shift.dtype == np.float32
    got = mxnets(layer(data, kernel=(2, 3), num_filter=6, num_group=groups, no_bias=False, name="conv"),
                 {**own, "conv_weight": filters, "conv_bias": shift}, {})[0]  # fmt: skip
    assert np.abs(got - expected).max() <= 2 * (2 * 6 + 4) * EPS32 * max(1, np.abs(expected).max())


#: Views, operators that can work in place, and others.
MAKERS = (
    lambda x, y: x + y,
    lambda x, y: x * 2,
    lambda x, y: S.tanh(x),
    lambda x, y: S.reshape(x, shape=(0, -1)),
    lambda x, y: S.transpose(S.transpose(x)),
    lambda x, y: S.LeakyReLU(x),
    lambda x, y: S.add_n(x, y, x),
)


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_no_two_living_values_share_memory(seed):
    """Random graphs in the planned memory, which starts as NaN, give what MXNet gives; parameters stay as they are."""
    stream = np.random.RandomState(seed)
    w = S.Variable("w")
    live = [data, w]
    for _ in range(stream.randint(1, 12)):
        x, y = (live[i] for i in stream.randint(len(live), size=2))
        live.append(MAKERS[stream.randint(len(MAKERS))](x, y))
    symbol = S.Group([w - data, live[-1], live[stream.randint(len(live))] * 1])
    args = {name: stream.uniform(-1, 1, (2, 3)).astype("f") for name in ("data", "w")}
    for got, expected in zip(ours(symbol, args, {}, calls=2), mxnets(symbol, args, {})):
        assert np.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_long_chains_of_elementwise_operators_are_fused_in_seconds():
    x = y = data
    for number in range(399):
        w = S.exp(S.Variable(f"w{number}"))  # both chains read it, so that it is computed once
        x, y = x * w, y - w
    start = time.monotonic()
    assert len(parse(S.Group([x, y]).tojson()).fused().operators) == 399 + 2 * 133
    assert time.monotonic() - start < 10


def test_a_value_that_an_elementwise_chain_and_another_node_read_is_computed():
    x = S.tanh(data)
    symbol = S.Group([x * S.sigmoid(x) - S.Variable("w"), S.transpose(x)])
    args, _ = values(symbol, {"data": (2, 3)})
    for got, expected in zip(ours(symbol, args, {}), mxnets(symbol, args, {})):
        assert np.allclose(got, expected, rtol=1e-5)


IMAGES = (1, 3, 224, 224)


@pytest.mark.parametrize("name", ["resnet18_v1", "vgg11", "squeezenet1.0", "mobilenet1.0", "densenet121"])
def test_gluons_networks_are_supported_and_planned(name):
    symbol = mx.gluon.model_zoo.vision.get_model(name)(data)
    arguments, outputs, states = symbol.infer_shape(data=IMAGES)
    params = {n: mx.nd.empty(s) for n, s in zip(symbol.list_arguments(), arguments) if n != "data"}
    aux = {n: mx.nd.empty(s) for n, s in zip(symbol.list_auxiliary_states(), states)}
    node, *_ = ece408_op.gpu_network(symbol, params, aux)
    assert node.infer_shape(data=IMAGES)[1] == outputs
    network = parse(text_of(node)).fused()
    shapes = network.infer([IMAGES])
    # A value lives no longer than it is read: far less memory than all of them together.
    assert plan(network, shapes).bytes < sum(4 * prod(shapes[number]) for number, _ in network.operators) / 2
    assert splits(network, (IMAGES,))
