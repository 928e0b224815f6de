"""The layers that gpu_network supports, on random shapes: outputs and gradients compared with MXNet's."""

from __future__ import annotations

import numpy as np
import operator_comparisons as case
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from network_case import WAYS, S, data, mx, ours, values
from training_case import bound, node_of, step

import ece408_op
from ece408_op.errors import GraphError


def relu(symbol):
    return S.Activation(symbol, act_type="relu")


@case.covers("Convolution")
@pytest.mark.parametrize("way", WAYS)
@given(act=case.flag, **case.CONVOLUTIONS)
@case.examples(60)
def test_convolution(way, batch, groups, channels, filters, image, bias, act, sizes):
    kernel = sizes["kernel"]
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(image, sizes["pad"], sizes["dilate"], kernel)))
    symbol = S.Convolution(data, num_filter=filters * groups, num_group=groups, no_bias=not bias, **sizes)
    shapes = {"data": (batch, channels * groups, *image)}
    case.check_outputs(relu(symbol) if act else symbol, shapes, way, channels * kernel[0] * kernel[1] + 1)
    if way == "numpy":  # on a GPU, tests/kernels has all of this, and each shape would be compiled
        case.check_gradients(symbol, shapes, way, batch * image[0] * image[1] + channels * 9)


@case.covers("Deconvolution")
@pytest.mark.parametrize("way", WAYS)
@given(adj=case.padding, target=case.flag, norm=case.flag, act=case.flag, **case.CONVOLUTIONS)
@case.examples(60)
def test_deconvolution(way, batch, groups, channels, filters, image, bias, adj, target, norm, act, sizes):
    symbol = case.deconvolution(image, filters, groups, bias, adj, target, sizes)
    assume(symbol is not None)
    shapes = {"data": (batch, channels * groups, *image)}
    followed = S.BatchNorm(symbol, fix_gamma=False) if norm else symbol
    terms = channels * sizes["kernel"][0] * sizes["kernel"][1] + 1 + norm
    case.check_outputs(relu(followed) if act else followed, shapes, way, terms)
    if way != "cudnn":
        terms = batch * image[0] * image[1] + max(channels, filters) * 9
        case.check_gradients(symbol, shapes, way, terms)


def test_the_target_shape_of_a_deconvolution_decides_pad_and_adj():
    """As MXNet documents and computes without oneDNN."""
    outputs = []
    for words in ({"target_shape": (8, 10), "adj": (0, 1), "pad": (2, 0)}, {"pad": (1, 2), "adj": (1, 1)}):
        symbol = S.Deconvolution(data, kernel=(3, 4), stride=(2, 3), num_filter=2, **words)
        args, _ = values(symbol, {"data": (2, 3, 4, 4)})
        outputs += ours(symbol, args, {})
    assert outputs[0].shape == (2, 2, 8, 10)
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("way", WAYS)
@given(
    bias=case.flag,
    fixed=case.flag,
    added=st.sampled_from([None, "left", "right", "itself", "broadcast"]),
    act=case.flag,
    between=case.flag,
    filters=st.integers(1, 4),
)
@case.examples(40)
def test_what_follows_a_convolution(way, bias, fixed, added, act, between, filters):
    """Normalizations, additions and activations: those that join the convolution, and those that can't."""
    same = {"kernel": (3, 3), "pad": (1, 1)}
    x = S.Convolution(data, num_filter=filters, no_bias=not bias, **same)
    other = S.Convolution(data, num_filter=filters, **same) * 2
    y = S.BatchNorm(x, fix_gamma=fixed)
    y = {"left": y + other, "right": other + y, "itself": y + y * 1, "broadcast": S.broadcast_add(y, other)}.get(
        added, y
    )
    y = S.Activation(y, act_type="relu") if act else y
    # A value that is an output as well stays.
    outputs = S.Group([y, x * 1]) if between else y
    case.check_outputs(outputs, {"data": (2, 3, 5, filters)}, way, 2 * 9 * 3 + 8)


@case.covers("New")
@pytest.mark.parametrize("way", WAYS)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 4),
    filters=st.integers(1, 5),
    image=st.tuples(case.side, case.side),
    kernel=st.integers(1, 4),
)
@case.examples(20)
def test_new(way, batch, channels, filters, image, kernel):
    assume(min(image) >= kernel)
    symbol = S.Custom(data, op_type="New", kernel=(kernel, kernel), num_filter=filters, name="new0")
    case.check_outputs(symbol, {"data": (batch, channels, *image)}, way, channels * kernel**2)


@case.covers("FullyConnected", "Flatten")
@pytest.mark.parametrize("way", WAYS)
@given(sizes=case.shape, hidden=st.integers(1, 9), bias=case.flag, flatten=case.flag)
@case.examples(30)
def test_fully_connected(way, sizes, hidden, bias, flatten):
    assume(len(sizes) > 1)
    terms = int(np.prod(sizes[1:])) + 1
    symbol = S.FullyConnected(data, num_hidden=hidden, no_bias=not bias, flatten=flatten)
    case.check(symbol, {"data": sizes}, way, terms, int(np.prod(sizes)) + hidden)
    case.check_outputs(S.Activation(symbol, act_type="tanh"), {"data": sizes}, way, terms)
    case.check_outputs(S.FullyConnected(S.Flatten(data), num_hidden=hidden), {"data": sizes}, way, terms)


@case.covers("Pooling")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
@given(pooling=case.poolings(), act=st.sampled_from([None, "tanh", "relu"]))
@case.examples(60)
def test_pooling(way, kind, pooling, act):
    """Of equal values, as behind a relu, the first one gets the gradient."""
    sizes, words = pooling
    symbol = S.Pooling(S.Activation(data, act_type=act) if act else data, pool_type=kind, **words)

    def fit(image):
        windows = zip(image, words["pad"], words["kernel"], words["stride"])
        return all((n + 2 * p - k) % s == 0 for n, p, k, s in windows)

    # The gradient of a mean is oneDNN's where windows fit an image of the output's size. Where they do not fit the
    # input, oneDNN counts elements beyond the padding there, which the mean does not have.
    wrong = kind == "avg" and words["pooling_convention"] == "full" and words["count_include_pad"]
    wrong &= fit(symbol.infer_shape(data=sizes)[1][0][2:]) and not fit(sizes[2:]) and not words["global_pool"]
    (case.check_outputs if wrong else case.check)(symbol, {"data": sizes}, way, sizes[2] * sizes[3])


@case.covers("BatchNorm", "_contrib_SyncBatchNorm")
@pytest.mark.parametrize("way", WAYS)
@given(
    sizes=case.shape,
    fixed=case.flag,
    stored=case.flag,
    eps=st.sampled_from([1e-5, 1e-3, 0.1]),
    momentum=st.sampled_from([0.9, 0.5, 0.0]),
    last=case.flag,
)
@case.examples(40)
def test_batch_norm(way, sizes, fixed, stored, eps, momentum, last):
    assume(len(sizes) > 1)
    words = {"fix_gamma": fixed, "use_global_stats": stored, "eps": eps, "momentum": momentum}
    symbol = S.BatchNorm(data, axis=-1 if last else 1, name="norm", **words)
    if not last and momentum == 0.5:
        # MXNet keeps one array of sums per key, for any number of channels.
        symbol = S.contrib.SyncBatchNorm(data, ndev=1, key=f"norm{sizes[1]}", name="norm", **words)
    for each in (symbol, relu(symbol)):
        case.check_outputs(each, {"data": sizes}, way)
    if way != "cudnn" and np.prod(sizes) > 2 * sizes[-1 if last else 1]:
        args = {"norm_gamma": np.ones(sizes[-1 if last else 1], "f")} if fixed else {}
        case.check_gradients(symbol, {"data": sizes}, way, 20 * np.prod(sizes), args=args)


@pytest.mark.usefixtures("way")
def test_a_batch_norm_that_is_used_twice():
    """Its statistics change twice, in the order of the forward pass; MXNet changes them in the backward pass."""
    parameters = [S.Variable(name) for name in ("gamma", "beta", "moving_mean", "moving_var")]
    symbol = S.BatchNorm(data, *parameters) - S.BatchNorm(S.tanh(data), *parameters)
    args, aux = values(symbol, {"data": (5, 3, 4)})
    states = step(bound(node_of(symbol, args, aux), args, aux), [mx.nd.array(args["data"])]).aux_dict
    for part in (args["data"].astype("d"), np.tanh(args["data"].astype("d"))):
        for name, new in (("moving_mean", part.mean((0, 2))), ("moving_var", part.var((0, 2)))):
            aux[name] = 0.9 * aux[name] + 0.1 * new
    for name, expected in aux.items():
        np.testing.assert_allclose(states[name].asnumpy(), expected, rtol=1e-5)


def test_a_batch_norm_with_computed_parameters(way):
    """Both write to the memory of data * 2."""
    norm = S.BatchNorm(data * 2, S.exp(S.Variable("gamma", shape=(3,))), fix_gamma=False)
    for symbol in (norm, S.LeakyReLU(norm, act_type="gelu")):
        case.check_outputs(symbol, {"data": (2, 3, 4)}, way)


@case.covers("InstanceNorm")
@given(sizes=st.lists(st.integers(1, 5), min_size=3, max_size=5).map(tuple))
@case.examples(20)
def test_instance_norm(way, sizes):
    terms = int(np.prod(sizes))
    case.check(S.InstanceNorm(data, eps=0.1), {"data": sizes}, way, terms, 40 * terms)
    case.check_outputs(S.InstanceNorm(data) * 2, {"data": (2, 3, 40)}, way, 40)


@case.covers("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")
@pytest.mark.parametrize("kind", [S.LinearRegressionOutput, S.LogisticRegressionOutput, S.MAERegressionOutput])
@pytest.mark.parametrize(("sizes", "labels"), [((4, 1), (4,)), ((1, 3), (1, 3)), ((2, 3, 5), (2, 3, 5)), ((3,), (3,))])
def test_regression_outputs(way, kind, sizes, labels):
    symbol = kind(data, S.Variable("label"), grad_scale=0.5)
    case.check(symbol, {"data": sizes, "label": labels}, way, is_loss=True)


@case.covers("SoftmaxOutput")
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    over=st.sampled_from([{}, {"multi_output": True}, {"preserve_shape": True}]),
    soft=case.flag,
    ignored=st.integers(-1, 2),
    words=st.fixed_dictionaries(
        {
            "grad_scale": st.sampled_from([1.0, 0.25]),
            "use_ignore": case.flag,
            "smooth_alpha": st.sampled_from([0.0, 0.1]),
            "normalization": st.sampled_from(["null", "batch", "valid"]),
        }
    ),
)
@case.examples(80)
def test_softmax_output(way, sizes, over, soft, ignored, words):
    assume(len(sizes) == 2 or (over and len(sizes) > 2))
    # MXNet divides by K - 1.
    assume(sizes[-1] > 1 or not words["smooth_alpha"])
    symbol = S.SoftmaxOutput(data, S.Variable("label"), ignore_label=ignored, **over, **words)
    classes = 1 if over.get("multi_output") else len(sizes) - 1
    labels = sizes if soft else (*sizes[:classes], *sizes[classes + 1 :])
    given_labels = np.random.RandomState(3).randint(-1, sizes[classes] + 1, labels).astype("f")
    shapes = {"data": sizes, "label": labels}
    case.check(symbol, shapes, way, int(np.prod(sizes)), args={"label": given_labels}, is_loss=True)
    if not soft:
        node, _, _ = ece408_op.gpu_network(symbol, {})
        assert node.infer_shape(data=sizes)[0] == symbol.infer_shape(data=sizes)[0]


@pytest.mark.usefixtures("way")
def test_dropout_is_mxnets_distribution_and_repeats_after_a_seed():
    x = np.ones((200, 100, 3), "f")
    for axes in ((), (1,)):
        symbol = S.Dropout(data, p=0.25, axes=axes)[0] * 2
        node = node_of(symbol, {"data": x})
        runs = []
        for seed in (7, 7, 8):
            mx.random.seed(seed)
            executor = bound(node, {"data": x}, {})
            first = executor.forward(is_train=True)[0].asnumpy()
            executor.backward([mx.nd.array(x)])
            assert np.array_equal(executor.grad_dict["data"].asnumpy(), first)
            runs.append((first, executor.forward(is_train=True)[0].asnumpy()))
        assert np.array_equal(runs[0], runs[1])
        assert not np.array_equal(runs[0][0], runs[0][1])
        assert not np.array_equal(runs[0][0], runs[2][0])
        decisions = runs[0][0] if not axes else runs[0][0][:, :1]
        assert axes == () or (runs[0][0] == decisions).all()
        kept = decisions > 0
        assert np.allclose(runs[0][0][runs[0][0] > 0], 2 / 0.75)
        # Five standard deviations of the share, and of the correlation of neighbours.
        assert abs(kept.mean() - 0.75) <= 5 * np.sqrt(0.75 * 0.25 / kept.size)
        flat = kept.reshape(-1) - kept.mean()
        assert abs((flat[1:] * flat[:-1]).mean()) <= 5 * 0.75 * 0.25 / np.sqrt(kept.size)


@pytest.mark.parametrize(
    ("symbol", "reason"),
    [
        (S.LeakyReLU(data, act_type="rrelu")[0], "'leakyrelu[0-9]+' .*rrelu has no gradient"),
        (S.SoftmaxOutput(data, out_grad=True, name="softmax"), "'softmax' .*out_grad"),
    ],
)
def test_an_operator_without_a_gradient_is_refused(symbol, reason):
    assert ece408_op.gpu_network(symbol, {})
    with pytest.raises(GraphError, match=f"for_training: expected operators with a gradient, got 1 without: {reason}"):
        ece408_op.gpu_network(symbol, {}, for_training=True)
