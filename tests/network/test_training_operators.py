"""The gradient of every operator that gpu_network trains, on random shapes: MXNet's own gradients and differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from network_case import mx, ndarrays, values
from operator_symbols import KINDS, NUMPY, deconvolution, moved, resampled
from test_network_operators import (
    CONVOLUTIONS,
    FUNCTION,
    PAIRS,
    POSITIVE,
    UNARY,
    examples,
    flag,
    padding,
    poolings,
    shape,
    side,
)

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.errors import GraphError
from ece408_op.network._definition import Operator
from ece408_op.network._elementwise import Activation
from ece408_op.network._layers import BatchNorm, Convolution, Deconvolution, New
from ece408_op.network._operators import OPERATORS
from ece408_op.network._pooling import Pooling

S = mx.sym
data = S.Variable("data")


pytestmark = pytest.mark.usefixtures("way")


def executor(symbol, args, aux, request="write"):
    gradients = {name: mx.nd.zeros(array.shape) for name, array in args.items() if "label" not in name}
    requests = {name: request if name in gradients else "null" for name in symbol.list_arguments()}
    states = {name: mx.nd.array(array) for name, array in aux.items()}
    return symbol.bind(mx.cpu(), ndarrays(args), gradients, requests, states)


def step(symbol, args, aux, heads):
    """Return the outputs, the gradients and the states after one step of training."""
    bound = executor(symbol, args, aux)
    outputs = [output.asnumpy() for output in bound.forward(is_train=True)]
    bound.backward(None if heads is None else [mx.nd.array(head) for head in heads])
    gradients = {name: array.asnumpy() for name, array in bound.grad_dict.items() if array is not None}
    return outputs, gradients, {name: array.asnumpy() for name, array in bound.aux_dict.items()}


def trained(symbol, args, aux, data_names):
    params = ndarrays({name: array for name, array in args.items() if name not in data_names})
    return ece408_op.gpu_network(symbol, params, ndarrays(aux), for_training=True)


#: The step of the differences: their error is about 1e-10.
STEP = 1e-6


def check_differences(symbol, args, aux, heads, gradients, terms):
    """Compare gradients with differences of MXNet's outputs in float64, along a random direction."""
    stream = np.random.RandomState(7)
    direction = {name: stream.uniform(-1, 1, array.shape) for name, array in args.items()}

    def value(distance):
        given = {name: mx.nd.array(array + distance * direction[name], dtype="d") for name, array in args.items()}
        states = {name: mx.nd.array(array, dtype="d") for name, array in aux.items()}
        outputs = symbol.bind(mx.cpu(), given, aux_states=states, grad_req="null").forward(is_train=True)
        return sum((head * output.asnumpy()).sum() for head, output in zip(heads, outputs))

    products = [(gradients[name].astype("d") * direction[name]).ravel() for name in args]
    expected = (value(STEP) - value(-STEP)) / (2 * STEP)
    bound = 4 * (terms + FUNCTION) * EPS32 * max(1, sum(np.abs(one).sum() for one in products))
    assert abs(sum(one.sum() for one in products) - expected) <= bound, (symbol.tojson(), expected, products)


def check(symbol, shapes, terms=1, seed=0, low=None, is_loss=False, args=None, smooth=True):
    """Compare a step with MXNet's, and with differences where outputs are smooth and no loss.

    terms: of each sum, for the error of a float32 sum in any order.
    """
    random, aux = values(symbol, shapes, seed)
    args = {**random, **(args or {})}
    if low is not None:
        args = {name: np.abs(array) + np.float32(low) for name, array in args.items()}
    stream = np.random.RandomState(seed + 1)
    heads = None if is_loss else [stream.uniform(-1, 1, s).astype("f") for s in symbol.infer_shape(**shapes)[1]]
    expected = step(symbol, args, aux, heads)
    node, _, states = trained(symbol, args, aux, (*shapes, "label"))
    got = step(node, args, {name: aux[name] for name in states}, heads)
    pairs = list(zip(expected[0], got[0]))
    for theirs, ours in zip(expected[1:], got[1:]):
        pairs += [(theirs[name], ours[name]) for name in ours]
    assert set(got[1]) == set(expected[1])
    if smooth and not is_loss:
        check_differences(symbol, args, aux, heads, got[1], terms)
    for theirs, ours in pairs:
        assert ours.shape == theirs.shape
        bound = 4 * (terms + FUNCTION) * EPS32 * np.abs(theirs).max(initial=1)
        assert np.abs(ours - theirs).max(initial=0) <= bound, (symbol.tojson(), ours, theirs)


# On a GPU, tests/kernels has all of this, and each shape would be compiled.
@pytest.mark.parametrize("way", ["numpy"], indirect=True)
@given(**CONVOLUTIONS)
@examples(40)
def test_convolution(way, batch, groups, channels, filters, image, bias, sizes):
    kernel = sizes["kernel"]
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(image, sizes["pad"], sizes["dilate"], kernel)))
    symbol = S.Convolution(data, num_filter=filters * groups, num_group=groups, no_bias=not bias, **sizes)
    check(symbol, {"data": (batch, channels * groups, *image)}, batch * image[0] * image[1] + channels * 9)


@given(adj=padding, target=flag, **CONVOLUTIONS)
@examples(40)
def test_deconvolution(batch, groups, channels, filters, image, bias, adj, target, sizes):
    symbol = deconvolution(image, filters, groups, bias, adj, target, sizes)
    assume(symbol is not None)
    terms = batch * image[0] * image[1] + max(channels, filters) * 9
    # MXNet ignores dilation in float64.
    check(symbol, {"data": (batch, channels * groups, *image)}, terms, smooth=sizes["dilate"] == (1, 1))


@given(sizes=shape, hidden=st.integers(1, 9), bias=flag, flatten=flag)
@examples(20)
def test_fully_connected(sizes, hidden, bias, flatten):
    assume(len(sizes) > 1)
    symbol = S.FullyConnected(data, num_hidden=hidden, no_bias=not bias, flatten=flatten)
    check(symbol, {"data": sizes}, int(np.prod(sizes)) + hidden)


#: MXNet's gradient of selu is wrong where x < 0, and the others are random in training.
OTHERS = ("LeakyReLU selu", "LeakyReLU rrelu", "Dropout")
#: MXNet computes these in float32 for float64 arrays, too: differences would be rounding errors.
IN_FLOAT32 = ("LeakyReLU leaky", "LeakyReLU prelu", "LeakyReLU gelu")


@pytest.mark.parametrize("name", [name for name in [*UNARY, *POSITIVE] if name not in OTHERS])
@given(sizes=shape)
@examples(6)
def test_one_input(name, sizes):
    assume("prelu" not in name or len(sizes) > 1)
    symbol = (UNARY.get(name) or POSITIVE[name])(data)
    words = {"low": 0.1 if name in POSITIVE else None, "is_loss": "Block" in name, "smooth": name not in IN_FLOAT32}
    check(symbol, {"data": sizes}, int(np.prod(sizes)), **words)


@pytest.mark.parametrize("name", PAIRS)
@given(sizes=shape, ones=st.lists(flag, min_size=4, max_size=4))
@examples(7)
def test_two_inputs(name, sizes, ones):
    other, terms = S.Variable("other"), int(np.prod(sizes))
    function = getattr(S, name, None) or getattr(S, f"elemwise_{name}")
    check(function(data, other), {"data": sizes, "other": sizes}, low=0.2)
    narrow = tuple(1 if one else n for one, n in zip(ones, sizes))
    for shapes in ({"data": sizes, "other": narrow}, {"data": narrow, "other": sizes}):
        check(getattr(S, f"broadcast_{name}")(data, other), shapes, terms, low=0.2)


@pytest.mark.parametrize("kind", KINDS)
@given(image=st.tuples(side, side), size=st.tuples(side, side))
@examples(15)
def test_resampling(kind, image, size):
    check(resampled(size, kind), {"data": (2, 3, *image)}, 121, smooth=False)


@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
@given(pooling=poolings(), equal=flag)
@examples(30)
def test_pooling(kind, pooling, equal):
    sizes, words = pooling
    # Of equal values, as behind a relu, the first one gets the gradient.
    symbol = S.Activation(data, act_type="relu") if equal else data
    check(S.Pooling(symbol, pool_type=kind, **words), {"data": sizes}, sizes[2] * sizes[3], smooth=not equal)


@given(
    sizes=shape,
    fixed=flag,
    stored=flag,
    eps=st.sampled_from([1e-5, 1e-3, 0.1]),
    momentum=st.sampled_from([0.9, 0.5, 0.0]),
    last=flag,
)
@examples(40)
def test_batch_norm(sizes, fixed, stored, eps, momentum, last):
    assume(len(sizes) > 1 and np.prod(sizes) > 2 * sizes[-1 if last else 1])
    words = {"fix_gamma": fixed, "use_global_stats": stored, "eps": eps, "momentum": momentum}
    symbol = S.BatchNorm(data, axis=-1 if last else 1, name="norm", **words)
    args = {"norm_gamma": np.ones(sizes[-1 if last else 1], "f")} if fixed else {}
    check(symbol, {"data": sizes}, 20 * np.prod(sizes), args=args)


def test_a_batch_norm_that_is_used_twice():
    """Its statistics change twice, in the order of the forward pass; MXNet changes them in the backward pass."""
    parameters = [S.Variable(name) for name in ("gamma", "beta", "moving_mean", "moving_var")]
    symbol = S.BatchNorm(data, *parameters) - S.BatchNorm(S.tanh(data), *parameters)
    args, aux = values(symbol, {"data": (5, 3, 4)})
    states = step(trained(symbol, args, aux, ["data"])[0], args, aux, [args["data"]])[2]
    for part in (args["data"].astype("d"), np.tanh(args["data"].astype("d"))):
        for name, new in (("moving_mean", part.mean((0, 2))), ("moving_var", part.var((0, 2)))):
            aux[name] = 0.9 * aux[name] + 0.1 * new
    for name, expected in aux.items():
        np.testing.assert_allclose(states[name], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "codes"), [((2, 3, 4), (4, 0, 2)), ((2, 3, 4), (0, -3)), ((2, 3, 4), (-4, 1, 2, -2))]
)
def test_reshape(sizes, codes):
    check(S.reshape(S.tanh(data), shape=codes) * 2, {"data": sizes})


@given(sizes=shape, random=st.randoms(use_true_random=False))
@examples(15)
def test_moving_and_joining(sizes, random):
    axes, shapes, terms = list(range(len(sizes))), {"data": sizes}, int(np.prod(sizes))
    random.shuffle(axes)
    check(S.transpose(data, axes=axes), shapes)
    axis = axes[0] - (len(sizes) if random.random() < 0.5 else 0)
    check(S.concat(data, data * 2, S.negative(data), dim=axis), shapes)
    some = tuple(axes[: random.randint(1, len(sizes))])
    exclude, keep = random.random() < 0.3 and len(some) < len(sizes), random.random() < 0.5
    for reduction in (S.mean, S.sum, S.max, S.min):
        check(reduction(S.relu(data), axis=some, exclude=exclude, keepdims=keep), shapes, terms, smooth=False)
        check(reduction(data, axis=some, exclude=exclude, keepdims=keep), shapes, terms)
    check(S.Flatten(data) * 2 if len(sizes) > 1 else S.mean(data), shapes, terms)


@given(sizes=shape, mode=st.sampled_from(["instance", "channel", "spatial"]))
@examples(25)
def test_l2_normalization(sizes, mode):
    assume(len(sizes) > (1 if mode == "instance" else 2))
    symbol = S.L2Normalization(data, mode=mode, eps=0.1)
    check(symbol, {"data": sizes}, 4 * int(np.prod(sizes)))


@given(sizes=shape, random=st.randoms(use_true_random=False))
@examples(25)
def test_moving(sizes, random):
    for symbol in moved(sizes, random):
        check(symbol, {"data": sizes}, 9)


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_operators(name):
    check(NUMPY[name](data.as_np_ndarray()), {"data": (4, 3, 5)}, 60, low=0.1, smooth=False)


@given(sizes=shape, axis=st.integers(-4, 3), temperature=st.sampled_from([None, 0.5, 3.0]))
@examples(25)
def test_softmax(sizes, axis, temperature):
    assume(-len(sizes) <= axis < len(sizes))
    check(S.softmax(data, axis=axis, temperature=temperature), {"data": sizes}, sizes[axis])
    check(S.log_softmax(data * 9, axis=axis, temperature=temperature), {"data": sizes}, 99 * sizes[axis])


@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    over=st.sampled_from([{}, {"multi_output": True}, {"preserve_shape": True}]),
    soft=flag,
    ignored=st.integers(-1, 2),
    words=st.fixed_dictionaries(
        {
            "grad_scale": st.sampled_from([1.0, 0.25]),
            "use_ignore": flag,
            "smooth_alpha": st.sampled_from([0.0, 0.1]),
            "normalization": st.sampled_from(["null", "batch", "valid"]),
        }
    ),
)
@examples(80)
def test_softmax_output(sizes, over, soft, ignored, words):
    assume(len(sizes) == 2 or (over and len(sizes) > 2))
    # MXNet divides by K - 1.
    assume(sizes[-1] > 1 or not words["smooth_alpha"])
    symbol = S.SoftmaxOutput(data, S.Variable("label"), ignore_label=ignored, **over, **words)
    classes = 1 if over.get("multi_output") else len(sizes) - 1
    labels = sizes if soft else (*sizes[:classes], *sizes[classes + 1 :])
    given_labels = np.random.RandomState(3).randint(-1, sizes[classes] + 1, labels).astype("f")
    shapes = {"data": sizes, "label": labels}
    check(symbol, shapes, int(np.prod(sizes)), args={"label": given_labels}, is_loss=True)


def test_selu():
    """MXNet's own gradient is wrong for negative values."""
    args = {"data": np.random.RandomState(4).uniform(-2, 2, (50,)).astype("f")}
    symbol, heads = S.LeakyReLU(data, act_type="selu"), [np.ones(50, "f")]
    node, *_ = trained(symbol, args, {}, ("data",))
    check_differences(symbol, args, {}, heads, step(node, args, {}, heads)[1], 1)


def test_dropout_is_mxnets_distribution_and_repeats_after_a_seed():
    x = np.ones((200, 100, 3), "f")
    for axes in ((), (1,)):
        symbol = S.Dropout(data, p=0.25, axes=axes)[0] * 2
        node, *_ = trained(symbol, {"data": x}, {}, ("data",))
        runs = []
        for seed in (7, 7, 8):
            mx.random.seed(seed)
            bound = executor(node, {"data": x}, {})
            first = bound.forward(is_train=True)[0].asnumpy()
            bound.backward([mx.nd.array(x)])
            assert np.array_equal(bound.grad_dict["data"].asnumpy(), first)
            runs.append((first, bound.forward(is_train=True)[0].asnumpy()))
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


def test_every_operator_has_a_gradient():
    launched = {Convolution, New, Deconvolution, BatchNorm, Pooling, Activation}
    assert {kind for kind in OPERATORS.values() if kind.gradients is Operator.gradients} == launched
