"""The operators of arrays that gpu_network supports, on random shapes: outputs and gradients compared with MXNet's."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import operator_comparisons as case
import pytest
import test_layer_operators
from hypothesis import assume, example, given
from hypothesis import strategies as st
from network_case import S, data, mx, mxnets, ours
from training_case import bound, node_of, step

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.errors import GraphError
from ece408_op.network._definition import Operator
from ece408_op.network._elementwise import Activation
from ece408_op.network._layers import BatchNorm, Convolution, Deconvolution, New, Pooling
from ece408_op.network._network import OPERATORS, parse

N, X = mx.sym.np, mx.sym.npx

UNARY = {
    **{f"Activation {kind}": partial(S.Activation, act_type=kind) for kind in
       ("relu", "sigmoid", "tanh", "softrelu", "softsign")},
    **{f"LeakyReLU {kind}": partial(S.LeakyReLU, act_type=kind) for kind in
       ("leaky", "prelu", "elu", "selu", "gelu")},
    "LeakyReLU rrelu": lambda x: S.LeakyReLU(x, act_type="rrelu")[0],
    **{name: getattr(S, name) for name in
       ("relu", "sigmoid", "softsign", "tanh", "negative", "abs", "exp", "square", "BlockGrad")},
    "clip": lambda x: S.clip(x, -0.5, 0.25),
    "Dropout": lambda x: S.Dropout(x, p=0.5)[0],
    "_copy": S.identity,
    "_plus_scalar": lambda x: x + 1.5,
    "_minus_scalar": lambda x: x - 1.5,
    "_rminus_scalar": lambda x: 1.5 - x,
    "_mul_scalar": lambda x: x * 0.3,
    "_div_scalar": lambda x: x / 0.3,
    "_maximum_scalar": lambda x: S.maximum(x, 0.1),
    "_minimum_scalar": lambda x: S.minimum(x, 0.1),
    "_rpower_scalar": lambda x: 1.5**x,
    "add_n": lambda x: S.add_n(x, x, x * 2),
}  # fmt: skip
#: Those that need positive arguments.
POSITIVE = {
    "log": S.log,
    "sqrt": S.sqrt,
    "_rdiv_scalar": lambda x: 1.5 / x,
    "_power_scalar": lambda x: x**1.7,
}
#: MXNet's own executor cannot bind two of these in a row.
PLAIN = ("_copy", "BlockGrad", "Dropout")
#: MXNet's gradient of selu is wrong where x < 0, and the others are random in training.
NOT_TRAINED = ("LeakyReLU selu", "LeakyReLU rrelu", "Dropout")


@case.covers(*(name.split()[0] for name in [*UNARY, *POSITIVE]))
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
@given(sizes=case.shape)
@case.examples(9)
def test_one_input(way, name, sizes):
    assume("prelu" not in name or len(sizes) > 1)
    function, low = (POSITIVE[name], 0.1) if name in POSITIVE else (UNARY[name], None)
    symbol, shapes = function(data), {"data": sizes}
    if name in NOT_TRAINED:
        case.check_outputs(symbol, shapes, way)
    else:
        case.check(symbol, shapes, way, 1, int(np.prod(sizes)), low, is_loss=name == "BlockGrad")
    # Behind another node the output may overwrite its input.
    if not low and name not in PLAIN:
        case.check_outputs(function(data * 1.25) + function(symbol), shapes, way)


@pytest.mark.usefixtures("way")
def test_selu():
    """MXNet's own gradient is wrong for negative values."""
    x = np.random.RandomState(4).uniform(-2, 2, (50,)).astype("f")
    executor = step(bound(node_of(S.LeakyReLU(data, act_type="selu"), {"data": x}), {"data": x}, {}), [mx.nd.ones(50)])
    # SELU is scale max(0, x) + scale alpha min(0, exp(x) - 1) (Klambauer et al., 2017).
    expected = 1.0507009873554805 * np.where(x > 0, 1, 1.6732632423543772 * np.exp(x.astype("d")))
    np.testing.assert_allclose(executor.grad_dict["data"].asnumpy(), expected, rtol=case.FUNCTION * EPS32)


def test_gelu_behind_a_layer(way):
    symbol = S.LeakyReLU(S.FullyConnected(data, num_hidden=3, name="fc"), act_type="gelu")
    case.check_outputs(symbol, {"data": (2, 4)}, way, 4)


PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum", "power")
EQUAL = {"maximum": "_maximum", "minimum": "_minimum", "power": "_power"}


@case.covers(*(f"broadcast_{name}" for name in PAIRS), *(EQUAL.get(name, f"elemwise_{name}") for name in PAIRS))
@pytest.mark.parametrize("name", PAIRS)
@given(sizes=case.shape, ones=st.lists(case.flag, min_size=4, max_size=4))
@case.examples(10)
def test_two_inputs(way, name, sizes, ones):
    other, terms = S.Variable("other"), int(np.prod(sizes))
    function = getattr(S, name) if name in EQUAL else getattr(S, f"elemwise_{name}")
    case.check(function(data, other), {"data": sizes, "other": sizes}, way, low=0.2)
    narrow, broadcast = tuple(1 if one else n for one, n in zip(ones, sizes)), getattr(S, f"broadcast_{name}")
    for shapes in ({"data": sizes, "other": narrow}, {"data": narrow, "other": sizes}):
        case.check(broadcast(data, other), shapes, way, 1, terms, low=0.2)
        # Behind other nodes the output may overwrite its first input.
        case.check_outputs(broadcast(data * 2, other * 2), shapes, way, low=0.2)


def test_a_smaller_array_is_computed_before_it_is_broadcast():
    network = parse(S.broadcast_sub(S.exp(data), S.exp(S.Variable("other"))).tojson())
    assert [node.op for _, node in network.fused().operators] == ["exp", "exp", "broadcast_sub"]


@case.covers("Reshape")
@pytest.mark.parametrize(
    ("sizes", "codes", "reverse"), [((2, 3, 4), (2, -4, -1, 3, -2), False), ((8, 3, 2), (2, 4, -4, 0, 0), True)]
)
def test_reshape(way, sizes, codes, reverse):
    """MXNet itself reads the codes."""
    case.check(S.reshape(S.tanh(data), shape=codes, reverse=reverse) * 2, {"data": sizes}, way)


@pytest.mark.parametrize("words", [{"target_shape": (2, 0)}, {"shape": (0, -1), "target_shape": (0, 0)}], ids=str)
def test_reshape_in_its_older_form(way, words):
    case.check(S.Reshape(S.tanh(data), **words) * 2, {"data": (2, 3, 4)}, way)


@case.covers("L2Normalization")
@given(sizes=case.shape, mode=st.sampled_from(["instance", "channel", "spatial"]))
@case.examples(25)
def test_l2_normalization(way, sizes, mode):
    assume(len(sizes) > (1 if mode == "instance" else 2))
    terms = int(np.prod(sizes))
    case.check(S.L2Normalization(data, mode=mode, eps=0.1), {"data": sizes}, way, terms, 4 * terms)
    case.check_outputs(S.L2Normalization(data * 2, mode=mode), {"data": sizes}, way, terms)


@case.covers("_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D")
@pytest.mark.parametrize("kind", ["mean", "corners", "centers", "like"])
@given(image=st.tuples(case.side, case.side), size=st.tuples(case.side, case.side))
@example(image=(999, 2), size=(7, 3))  # far from the first row, MXNet's rounded positions differ most from exact ones
@case.examples(20)
def test_resampling(way, kind, image, size):
    other = {"other": (2, 1, *size)} if kind == "like" else {}
    case.check(case.resampled(size, kind), {"data": (2, 3, *image), **other}, way, 121)


def test_resampling_by_a_factor(way):
    symbol = S.contrib.BilinearResize2D(data, scale_height=2.0, scale_width=1.5)
    case.check(symbol, {"data": (1, 2, 3, 4)}, way, 12)


@case.covers("expand_dims", "squeeze", "SwapAxis", "slice_axis", "SliceChannel", "UpSampling", "Crop")
@case.covers("slice", "slice_like", "reshape_like", "repeat", "ones_like", "zeros_like")
@given(sizes=case.shape, random=st.randoms(use_true_random=False))
@case.examples(40)
def test_moving(way, sizes, random):
    for symbol in case.moved(sizes, random):
        case.check(symbol, {"data": sizes}, way, 1, 9)


@case.covers("broadcast_like", "broadcast_to", "broadcast_axis")
def test_broadcasting(way):
    shapes, other = {"data": (3, 1, 4, 1)}, S.Variable("other")
    case.check(S.broadcast_to(data, shape=(0, 2, 4, 5)), shapes, way, 10)
    case.check(S.broadcast_axis(data, axis=(1, 3), size=(2, 5)), shapes, way, 10)
    case.check(S.broadcast_like(data * 2, other), {**shapes, "other": (3, 2, 4, 5)}, way, 10)
    case.check(S.broadcast_like(data, other, lhs_axes=(1,), rhs_axes=(-1,)), {**shapes, "other": (7, 2)}, way, 10)


@case.covers("Pad")
@given(sizes=st.lists(st.integers(1, 5), min_size=4, max_size=5), random=st.randoms(use_true_random=False))
@example(sizes=[1, 1, 1, 1], random=Random(0))
@case.examples(25)
def test_padding(way, sizes, random):
    for symbol in case.padded(sizes, random):
        case.check(symbol, {"data": tuple(sizes)}, way, 1, 16)


@case.covers("transpose", "Concat", "mean", "sum", "max", "min")
@given(sizes=case.shape, random=st.randoms(use_true_random=False))
@case.examples(25)
def test_moving_and_joining(way, sizes, random):
    axes, shapes, terms = list(range(len(sizes))), {"data": sizes}, int(np.prod(sizes))
    random.shuffle(axes)
    case.check(S.transpose(data, axes=axes), shapes, way)
    case.check_outputs(S.transpose(data), shapes, way)
    axis = axes[0] - (len(sizes) if random.random() < 0.5 else 0)
    case.check(S.concat(data, data * 2, S.negative(data), dim=axis), shapes, way)
    some = tuple(axes[: random.randint(1, len(sizes))])
    exclude, keep = random.random() < 0.3 and len(some) < len(sizes), random.random() < 0.5
    for reduction in (S.mean, S.sum, S.max, S.min):
        case.check(reduction(data, axis=some, exclude=exclude, keepdims=keep), shapes, way, terms)
        case.check(reduction(S.relu(data)), shapes, way, terms)


@case.covers("softmax", "log_softmax", "SoftmaxActivation")
@given(sizes=case.shape, axis=st.integers(-4, 3), temperature=st.sampled_from([None, 0.5, 3.0]))
@case.examples(25)
def test_softmax(way, sizes, axis, temperature):
    assume(-len(sizes) <= axis < len(sizes))
    case.check(S.softmax(data, axis=axis, temperature=temperature), {"data": sizes}, way, sizes[axis])
    symbol = S.log_softmax(data * 9, axis=axis, temperature=temperature)
    case.check(symbol, {"data": sizes}, way, sizes[axis], 99 * sizes[axis])
    if len(sizes) > 1:
        mode = "instance" if len(sizes) == 2 else "channel"
        case.check(S.SoftmaxActivation(data, mode=mode), {"data": sizes}, way, sizes[1])


def test_a_value_behind_an_operator_of_several_outputs():
    """MXNet's rrelu has a second output, the random slopes."""
    symbol = S.concat(S.LeakyReLU(data, act_type="rrelu")[0], data, dim=1)
    (got,), (expected,) = (of(symbol, {"data": np.float32([[[-2, 3]]])}, {}) for of in (ours, mxnets))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_false_has_all_of_mxnets_spellings():
    for symbol in (S.BatchNorm(data, output_mean_var=0), S.softmax(data, use_length="false")):
        case.check_outputs(symbol, {"data": (2, 3)}, "numpy")


#: Operators of mx.np, for positive x (B, C, H).
NUMPY = {
    "arithmetic": lambda x: x + N.square(x) * 0.5 - x / (x + 2) + x ** N.sqrt(x),
    "with numbers": lambda x: (1.5 - (x + 2) * 0.25 - 1) / 3 + 2 / x + x**1.5 + 1.5**x,
    "functions": lambda x: N.abs(N.negative(x)) + N.tanh(N.exp(x)) + N.log(x) + X.relu(x - 1) * X.sigmoid(x),
    "joins": lambda x: N.concatenate([x, x * 2], axis=-1) + N.concatenate([x, x], axis=2),
    "shapes": lambda x: N.squeeze(N.expand_dims(N.transpose(x, (0, 2, 1)), 1), 1).reshape((4, -1)),
    "codes": lambda x: X.reshape(x * 2, (-2, -6, 1, -1, -4)) * 3,
    "means": lambda x: N.mean(x, axis=1, keepdims=True) * x - x.mean(axis=(0, 2), keepdims=True),
    "sums": lambda x: N.sum(x, axis=1) + N.max(x, axis=1) - N.min(x, axis=1) + N.transpose(x).sum(axis=(1,)).T,
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_operators(name, way):
    case.check(NUMPY[name](data.as_np_ndarray()), {"data": (4, 3, 5)}, way, 60, low=0.1)


def test_numpy_operators_of_all_axes_are_refused():
    x = data.as_np_ndarray()
    for name, symbol in (("mean", S.np.mean(x)), ("max", x.max()), ("sum", x.sum(axis=())), ("mean", x.mean(axis=()))):
        with pytest.raises(GraphError, match=rf"{name}\): axis: expected axes, got none, for which mx.np"):
            ece408_op.gpu_network(symbol, {})


def test_numpy_parameters_and_outputs_without_dimensions(way):
    x, scale = data.as_np_ndarray(), S.Variable("scale").as_np_ndarray()
    symbol = S.Group([N.sum(x * scale, axis=(0, 1)), x - scale])
    args = {"data": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.float32(0.5).reshape(())}
    with mx.util.np_shape(True):
        total, rest = ours(symbol, args, {}, way=way)
        assert total.shape == () and total == 7.5
        assert np.array_equal(rest, args["data"] - 0.5)
        with pytest.raises(GraphError, match=r"expected the shapes of all data .*, got \(2, 3\), \(\); give all"):
            ours(symbol, args, {}, data=("data", "scale"), way=way)


def test_every_operator_of_the_table_is_tested():
    assert test_layer_operators, "its tests are in the set"
    assert set(OPERATORS) - case.tested == set()


def test_every_operator_has_a_gradient():
    launched = {Convolution, New, Deconvolution, BatchNorm, Pooling, Activation}
    assert {kind for kind in OPERATORS.values() if kind.gradients is Operator.gradients} == launched


def test_nan_and_infinity_stay_what_they_are(way):
    x = np.array([[np.nan, 1, -1, np.inf], [-np.inf, 0, -0.0, 2]], np.float32)
    for symbol in (S.Activation(data, act_type="tanh"), S.clip(data, -2, 0.5), S.softsign(data)):
        (got,) = ours(symbol, {"data": x}, {}, way=way)
        (expected,) = mxnets(symbol, {"data": x}, {})
        assert np.allclose(got, expected, rtol=case.FUNCTION * EPS32, equal_nan=True), symbol
    # oneDNN's relu turns NaN into 0; ours does not.
    (got,) = ours(S.Activation(data, act_type="relu"), {"data": x}, {}, way=way)
    assert np.array_equal(got, [[np.nan, 1, 0, np.inf], [0, 0, 0, 2]], equal_nan=True)
