"""Every operator that gpu_network takes, alone, on random shapes, against MXNet's own on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from network_case import WAYS, mx, mxnets, ours, require, values

from ece408_op.core.kernel import EPS32
from ece408_op.network._operators import OPERATORS

S = mx.sym
data = S.Variable("data")
tested = set()

#: Errors of a function of one element, in units in the last place: those of CUDA's are at most 4 for tanhf and less
#: for the others (CUDA C++ Programming Guide, mathematical functions); oneDNN's approximate tanh and logistic err by
#: more, mostly near zero, where they are exact to some units of the last place of one.
FUNCTION = 32


def hold(symbol, shapes, way, products=1, seed=0, names=("data",), low=None):
    """Compare; ``products``: terms of each sum, for the error of a float32 sum in any order."""
    args, aux = values(symbol, shapes, seed)
    if low is not None:
        args = {n: np.abs(a) + np.float32(low) for n, a in args.items()}
    expected = mxnets(symbol, args, aux)
    got = ours(symbol, args, aux, names, way)
    assert len(got) == len(expected)
    for ours_, theirs in zip(got, expected):
        assert ours_.shape == theirs.shape
        largest = np.abs(theirs).max(initial=1)
        bound = 2 * (products + FUNCTION) * EPS32 * largest * (1 if products == 1 else np.sqrt(products))
        assert np.abs(ours_ - theirs).max(initial=0) <= bound


def examples(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
    )


def covers(*names):
    tested.update(names)
    return lambda test: test


side = st.integers(1, 11)
pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
shape = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("way", WAYS)
@covers("Convolution")
def test_convolution(way):
    require(way)

    @given(
        batch=st.integers(1, 3),
        groups=st.integers(1, 3),
        channels=st.integers(1, 4),
        filters=st.integers(1, 4),
        image=st.tuples(side, side),
        kernel=pair,
        stride=pair,
        pad=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        dilate=pair,
        bias=st.booleans(),
        act=st.booleans(),
    )
    @examples(60)
    def check(batch, groups, channels, filters, image, kernel, stride, pad, dilate, bias, act):
        assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(image, pad, dilate, kernel)))
        symbol = S.Convolution(
            data,
            kernel=kernel,
            stride=stride,
            pad=pad,
            dilate=dilate,
            num_filter=filters * groups,
            num_group=groups,
            no_bias=not bias,
        )
        symbol = S.Activation(symbol, act_type="relu") if act else symbol
        hold(symbol, {"data": (batch, channels * groups, *image)}, way, channels * kernel[0] * kernel[1] + 1)

    check()


@pytest.mark.parametrize("way", WAYS)
@covers("New")
def test_new(way):
    require(way)

    @given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.tuples(side, side), st.integers(1, 4))
    @examples(20)
    def check(batch, channels, filters, image, kernel):
        assume(min(image) >= kernel)
        symbol = S.Custom(data, op_type="New", kernel=(kernel, kernel), num_filter=filters, name="new0")
        hold(symbol, {"data": (batch, channels, *image)}, way, channels * kernel**2)

    check()


@pytest.mark.parametrize("way", WAYS)
@covers("FullyConnected", "Flatten")
def test_fully_connected(way):
    require(way)

    @given(shape, st.integers(1, 9), st.booleans(), st.booleans(), st.booleans())
    @examples(30)
    def check(sizes, hidden, bias, flatten, act):
        assume(len(sizes) > 1)
        symbol = S.FullyConnected(data, num_hidden=hidden, no_bias=not bias, flatten=flatten)
        symbol = S.Activation(symbol, act_type="tanh") if act else symbol
        hold(symbol, {"data": sizes}, way, int(np.prod(sizes[1:])) + 1)
        hold(S.FullyConnected(S.Flatten(data), num_hidden=hidden), {"data": sizes}, way, int(np.prod(sizes[1:])) + 1)

    check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
@covers("Pooling")
def test_pooling(kind, way):
    require(way)

    @given(
        st.tuples(st.integers(1, 3), st.integers(1, 4), side, side),
        pair,
        pair,
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
        st.sampled_from(["valid", "full"]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )
    @examples(60)
    def check(sizes, kernel, stride, pad, convention, count, whole, act):
        assume(all(p < k <= n + 2 * p for p, k, n in zip(pad, kernel, sizes[2:])))
        assume(convention == "valid" or all(s <= k for s, k in zip(stride, kernel)))
        symbol = S.Activation(data, act_type="tanh") if act else data
        symbol = S.Pooling(
            symbol,
            kernel=kernel,
            stride=stride,
            pad=pad,
            pool_type=kind,
            pooling_convention=convention,
            count_include_pad=count,
            global_pool=whole,
        )
        hold(symbol, {"data": sizes}, way, sizes[2] * sizes[3])

    check()


@pytest.mark.parametrize("way", WAYS)
@covers("BatchNorm")
def test_batch_norm(way):
    require(way)

    @given(shape, st.booleans(), st.sampled_from([1e-5, 1e-3, 0.1]), st.booleans(), st.booleans())
    @examples(30)
    def check(sizes, fixed, eps, last, act):
        assume(len(sizes) > 1)
        symbol = S.BatchNorm(data, fix_gamma=fixed, eps=eps, axis=-1 if last else 1)
        symbol = S.Activation(symbol, act_type="relu") if act else symbol
        hold(symbol, {"data": sizes}, way)

    check()


UNARY = {
    **{f"Activation {kind}": lambda x, kind=kind: S.Activation(x, act_type=kind) for kind in
       ("relu", "sigmoid", "tanh", "softrelu", "softsign")},
    **{f"LeakyReLU {kind}": lambda x, kind=kind: S.LeakyReLU(x, act_type=kind) for kind in
       ("leaky", "prelu", "elu", "selu", "gelu")},
    "LeakyReLU rrelu": lambda x: S.LeakyReLU(x, act_type="rrelu")[0],
    "clip": lambda x: S.clip(x, -0.5, 0.25),
    "relu": S.relu,
    "sigmoid": S.sigmoid,
    "softsign": S.softsign,
    "tanh": S.tanh,
    "negative": S.negative,
    "abs": S.abs,
    "exp": S.exp,
    "square": S.square,
    "Dropout": lambda x: S.Dropout(x, p=0.5)[0],
    "_copy": S.identity,
    "BlockGrad": S.BlockGrad,
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
#: Two of them in a row are more than MXNet's own executor can bind.
PLAIN = ("_copy", "BlockGrad", "Dropout")
tested.update(name.split()[0] for name in [*UNARY, *POSITIVE])


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
def test_one_input(name, way):
    require(way)
    positive = name in POSITIVE
    function = POSITIVE[name] if positive else UNARY[name]

    @given(shape, st.booleans())
    @examples(12)
    def check(sizes, twice):
        assume("prelu" not in name or len(sizes) > 1)
        symbol = function(data)
        # Behind another node the output may take the place of its input.
        if twice and not positive and name not in PLAIN:
            symbol = function(data * 1.25) + function(symbol)
        hold(symbol, {"data": sizes}, way, low=0.1 if positive else None)

    check()


PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum", "power")
EQUAL = {"maximum": "_maximum", "minimum": "_minimum", "power": "_power"}
tested.update(f"broadcast_{name}" for name in PAIRS)
tested.update(EQUAL.get(name, f"elemwise_{name}") for name in PAIRS)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("name", PAIRS)
def test_two_inputs(name, way):
    require(way)
    other = S.Variable("other")

    @given(shape, st.data())
    @examples(15)
    def check(sizes, draw):
        ones = draw.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
        narrow = tuple(1 if one else n for one, n in zip(ones, sizes))
        function = (
            getattr(S, EQUAL[name], None) or getattr(S, name) if name in EQUAL else getattr(S, f"elemwise_{name}")
        )
        positive = {"low": 0.2}
        hold(function(data, other), {"data": sizes, "other": sizes}, way, names=("data", "other"), **positive)
        broadcast = getattr(S, f"broadcast_{name}")
        hold(broadcast(data, other), {"data": sizes, "other": narrow}, way, names=("data", "other"), **positive)

    check()


CODES = [
    ((2, 3, 4), (4, 0, 2), False),
    ((2, 3, 4), (2, 0, 0), False),
    ((2, 3, 4), (6, 1, -1), False),
    ((2, 3, 4), (3, -1, 8), False),
    ((2, 3, 4), (-1,), False),
    ((2, 3, 4), (-2,), False),
    ((2, 3, 4), (2, -2), False),
    ((2, 3, 4), (-2, 1, 1), False),
    ((2, 3, 4), (-3, 4), False),
    ((2, 3, 4, 5), (-3, -3), False),
    ((2, 3, 4), (0, -3), False),
    ((2, 3, 4), (-4, 1, 2, -2), False),
    ((2, 3, 4), (2, -4, -1, 3, -2), False),
    ((10, 5, 4), (-1, 0), True),
    ((8, 3), (-4, 2, -1, 0), False),
    ((8, 3, 2), (2, 4, -4, 0, 0), True),
]


@pytest.mark.parametrize(("sizes", "codes", "reverse"), CODES)
@covers("Reshape")
def test_reshape(sizes, codes, reverse):
    hold(S.reshape(data, shape=codes, reverse=reverse), {"data": sizes}, "numpy")
    hold(S.reshape(S.tanh(data), shape=codes, reverse=reverse) * 2, {"data": sizes}, "numpy")


@pytest.mark.parametrize("way", WAYS[:2])
@covers("transpose", "Concat", "mean")
def test_moving_and_joining(way):
    require(way)

    @given(shape, st.randoms(use_true_random=False))
    @examples(25)
    def check(sizes, random):
        axes = list(range(len(sizes)))
        random.shuffle(axes)
        hold(S.transpose(data, axes=axes), {"data": sizes}, way)
        hold(S.transpose(data), {"data": sizes}, way)
        axis = axes[0] - (len(sizes) if random.random() < 0.5 else 0)
        hold(S.concat(data, data * 2, S.negative(data), dim=axis), {"data": sizes}, way)
        some = tuple(axes[: random.randint(1, len(sizes))])
        exclude, keep = random.random() < 0.3 and len(some) < len(sizes), random.random() < 0.5
        hold(S.mean(data, axis=some, exclude=exclude, keepdims=keep), {"data": sizes}, way, int(np.prod(sizes)))
        hold(S.mean(data), {"data": sizes}, way, int(np.prod(sizes)))

    check()


@pytest.mark.parametrize("way", WAYS[:2])
@covers("softmax", "log_softmax", "SoftmaxOutput")
def test_softmax(way):
    require(way)

    @given(shape, st.integers(-4, 3), st.sampled_from([None, 0.5, 3.0]), st.sampled_from(["", "multi", "preserve"]))
    @examples(25)
    def check(sizes, axis, temperature, kind):
        assume(-len(sizes) <= axis < len(sizes))
        hold(S.softmax(data, axis=axis, temperature=temperature), {"data": sizes}, way, sizes[axis])
        hold(S.log_softmax(data * 9, axis=axis), {"data": sizes}, way, sizes[axis])
        assume(len(sizes) == 2 or (kind and len(sizes) > 2))
        label = S.Variable("softmax_label")
        symbol = S.SoftmaxOutput(data, label, multi_output=kind == "multi", preserve_shape=kind == "preserve")
        hold(symbol, {"data": sizes}, way, int(np.prod(sizes)), names=("data", "softmax_label"))

    check()


def test_every_operator_of_the_table_is_tested():
    assert set(OPERATORS) - tested == set()


@pytest.mark.parametrize("way", WAYS[:2])
def test_nan_and_infinity_stay_what_they_are(way):
    require(way)
    x = np.array([[np.nan, 1, -1, np.inf], [-np.inf, 0, -0.0, 2]], np.float32)
    for symbol in (S.Activation(data, act_type="tanh"), S.clip(data, -2, 0.5), S.softsign(data)):
        (got,) = ours(symbol, {"data": x}, {}, ("data",), way)
        (expected,) = mxnets(symbol, {"data": x}, {})
        assert np.allclose(got, expected, rtol=FUNCTION * EPS32, equal_nan=True), symbol
    # oneDNN's relu makes nothing of a NaN: here it stays.
    (got,) = ours(S.Activation(data, act_type="relu"), {"data": x}, {}, ("data",), way)
    assert np.array_equal(got, [[np.nan, 1, 0, np.inf], [0, 0, 0, 2]], equal_nan=True)
