"""Every operator that gpu_network supports, alone, on random shapes, against MXNet's own on the CPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from network_case import WAYS, mx, mxnets, ours, require, values
from operator_symbols import KINDS, NUMPY, deconvolution, moved, resampled

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.errors import GraphError
from ece408_op.network._operators import OPERATORS

S = mx.sym
data = S.Variable("data")
#: cuDNN computes convolutions alone.
WITHOUT_CUDNN = WAYS[:2]
tested = set()

#: Errors of a function of one element, in units in the last place: CUDA's functions err by at most 4, for tanhf (CUDA
#: C++ Programming Guide, mathematical functions); oneDNN's approximate tanh and logistic err by more, mostly near zero,
#: where they are exact to some units in the last place of one.
FUNCTION = 32


def check_outputs(symbol, shapes, way, terms=1, low=None):
    """Compare; ``terms``: terms of each sum, for the error of a float32 sum in any order. ``shapes``: of the data."""
    args, aux = values(symbol, shapes, 0)
    if low is not None:
        args = {n: np.abs(a) + np.float32(low) for n, a in args.items()}
    expected = mxnets(symbol, args, aux)
    got = ours(symbol, args, aux, (*shapes, "softmax_label"), way)
    assert len(got) == len(expected)
    for ours_, theirs in zip(got, expected):
        assert ours_.shape == theirs.shape
        largest = np.abs(theirs).max(initial=1)
        bound = 2 * (terms + FUNCTION) * EPS32 * largest * (1 if terms == 1 else np.sqrt(terms))
        assert np.abs(ours_ - theirs).max(initial=0) <= bound


@pytest.fixture(autouse=True)
def required(request):
    """Skip what this machine cannot compute."""
    require(getattr(request.node, "callspec", None) and request.node.callspec.params.get("way") or "numpy")


def examples(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
    )


def covers(*names):
    tested.update(names)
    return lambda test: test


side = st.integers(1, 11)
pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
padding = st.tuples(st.integers(0, 2), st.integers(0, 2))
shape = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
flag = st.booleans()


@st.composite
def poolings(draw):
    """Return the shape of the data, and a Pooling's attributes but for its kind."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), side, side))
    kernel, stride, pad = draw(st.tuples(pair, pair, padding))
    assume(all(p < k <= n + 2 * p for p, k, n in zip(pad, kernel, sizes[2:])))
    full = draw(flag)
    if full:
        # A window that has only padding is refused.
        last_windows = (-((k - n - 2 * p) // s) * s - p for n, p, k, s in zip(sizes[2:], pad, kernel, stride))
        assume(all(start < n for start, n in zip(last_windows, sizes[2:])))
    words = {"kernel": kernel, "stride": stride, "pad": pad, "pooling_convention": "full" if full else "valid"}
    return sizes, {**words, **draw(st.fixed_dictionaries({"count_include_pad": flag, "global_pool": flag}))}


CONVOLUTIONS = {
    "batch": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "channels": st.integers(1, 4),
    "filters": st.integers(1, 4),
    "image": st.tuples(side, side),
    "bias": flag,
    "sizes": st.fixed_dictionaries({"kernel": pair, "stride": pair, "pad": padding, "dilate": pair}),
}


@covers("Convolution")
@pytest.mark.parametrize("way", WAYS)
@given(act=flag, **CONVOLUTIONS)
@examples(60)
def test_convolution(way, batch, groups, channels, filters, image, bias, act, sizes):
    kernel = sizes["kernel"]
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(image, sizes["pad"], sizes["dilate"], kernel)))
    symbol = S.Convolution(data, num_filter=filters * groups, num_group=groups, no_bias=not bias, **sizes)
    symbol = S.Activation(symbol, act_type="relu") if act else symbol
    check_outputs(symbol, {"data": (batch, channels * groups, *image)}, way, channels * kernel[0] * kernel[1] + 1)


@covers("Deconvolution")
@pytest.mark.parametrize("way", WAYS)
@given(adj=padding, target=flag, norm=flag, act=flag, **CONVOLUTIONS)
@examples(60)
def test_deconvolution(way, batch, groups, channels, filters, image, bias, adj, target, norm, act, sizes):
    symbol = deconvolution(image, filters, groups, bias, adj, target, sizes)
    assume(symbol is not None)
    symbol = S.BatchNorm(symbol, fix_gamma=False) if norm else symbol
    symbol = S.Activation(symbol, act_type="relu") if act else symbol
    terms = channels * sizes["kernel"][0] * sizes["kernel"][1] + 1
    check_outputs(symbol, {"data": (batch, channels * groups, *image)}, way, terms + norm)


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
    bias=flag,
    fixed=flag,
    added=st.sampled_from([None, "left", "right", "itself", "broadcast"]),
    act=flag,
    between=flag,
    filters=st.integers(1, 4),
)
@examples(40)
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
    check_outputs(outputs, {"data": (2, 3, 5, filters)}, way, 2 * 9 * 3 + 8)


@covers("New")
@pytest.mark.parametrize("way", WAYS)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 4),
    filters=st.integers(1, 5),
    image=st.tuples(side, side),
    kernel=st.integers(1, 4),
)
@examples(20)
def test_new(way, batch, channels, filters, image, kernel):
    assume(min(image) >= kernel)
    symbol = S.Custom(data, op_type="New", kernel=(kernel, kernel), num_filter=filters, name="new0")
    check_outputs(symbol, {"data": (batch, channels, *image)}, way, channels * kernel**2)


@covers("FullyConnected", "Flatten")
@pytest.mark.parametrize("way", WAYS)
@given(sizes=shape, hidden=st.integers(1, 9), bias=flag, flatten=flag, act=flag)
@examples(30)
def test_fully_connected(way, sizes, hidden, bias, flatten, act):
    assume(len(sizes) > 1)
    terms = int(np.prod(sizes[1:])) + 1
    symbol = S.FullyConnected(data, num_hidden=hidden, no_bias=not bias, flatten=flatten)
    check_outputs(S.Activation(symbol, act_type="tanh") if act else symbol, {"data": sizes}, way, terms)
    check_outputs(S.FullyConnected(S.Flatten(data), num_hidden=hidden), {"data": sizes}, way, terms)


@covers("Pooling")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
@given(pooling=poolings(), act=flag)
@examples(60)
def test_pooling(way, kind, pooling, act):
    sizes, words = pooling
    symbol = S.Activation(data, act_type="tanh") if act else data
    check_outputs(S.Pooling(symbol, pool_type=kind, **words), {"data": sizes}, way, sizes[2] * sizes[3])


@covers("_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D")
@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@pytest.mark.parametrize("kind", KINDS)
@given(image=st.tuples(side, side), size=st.tuples(side, side))
@examples(20)
def test_resampling(way, kind, image, size):
    check_outputs(resampled(size, kind), {"data": (2, 3, *image)}, way, 121)


@covers("BatchNorm")
@pytest.mark.parametrize("way", WAYS)
@given(sizes=shape, fixed=flag, eps=st.sampled_from([1e-5, 1e-3, 0.1]), last=flag, act=flag)
@examples(30)
def test_batch_norm(way, sizes, fixed, eps, last, act):
    assume(len(sizes) > 1)
    symbol = S.BatchNorm(data, fix_gamma=fixed, eps=eps, axis=-1 if last else 1)
    check_outputs(S.Activation(symbol, act_type="relu") if act else symbol, {"data": sizes}, way)


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
tested.update(name.split()[0] for name in [*UNARY, *POSITIVE])


@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
@given(sizes=shape, twice=flag)
@examples(9)
def test_one_input(way, name, sizes, twice):
    positive = name in POSITIVE
    function = POSITIVE[name] if positive else UNARY[name]
    assume("prelu" not in name or len(sizes) > 1)
    symbol = function(data)
    # Behind another node the output may overwrite its input.
    if twice and not positive and name not in PLAIN:
        symbol = function(data * 1.25) + function(symbol)
    check_outputs(symbol, {"data": sizes}, way, low=0.1 if positive else None)


PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum", "power")
EQUAL = {"maximum": "_maximum", "minimum": "_minimum", "power": "_power"}
tested.update(f"broadcast_{name}" for name in PAIRS)
tested.update(EQUAL.get(name, f"elemwise_{name}") for name in PAIRS)


@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@pytest.mark.parametrize("name", PAIRS)
@given(sizes=shape, ones=st.lists(flag, min_size=4, max_size=4))
@examples(10)
def test_two_inputs(way, name, sizes, ones):
    other = S.Variable("other")
    function = getattr(S, name) if name in EQUAL else getattr(S, f"elemwise_{name}")
    check_outputs(function(data, other), {"data": sizes, "other": sizes}, way, low=0.2)
    narrow = tuple(1 if one else n for one, n in zip(ones, sizes))
    for shapes in ({"data": sizes, "other": narrow}, {"data": narrow, "other": sizes}):
        check_outputs(getattr(S, f"broadcast_{name}")(data, other), shapes, way, low=0.2)
        # Behind other nodes the output may overwrite its first input.
        check_outputs(getattr(S, f"broadcast_{name}")(data * 2, other * 2), shapes, way, low=0.2)


@covers("Reshape")
@pytest.mark.parametrize(
    ("sizes", "codes", "reverse"), [((2, 3, 4), (2, -4, -1, 3, -2), False), ((8, 3, 2), (2, 4, -4, 0, 0), True)]
)
def test_reshape(sizes, codes, reverse):
    """MXNet itself reads the codes."""
    check_outputs(S.reshape(S.tanh(data), shape=codes, reverse=reverse) * 2, {"data": sizes}, "numpy")


@covers("L2Normalization")
@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@given(sizes=shape, mode=st.sampled_from(["instance", "channel", "spatial"]), eps=st.sampled_from([1e-10, 0.1]))
@examples(20)
def test_l2_normalization(way, sizes, mode, eps):
    assume(len(sizes) > (1 if mode == "instance" else 2))
    check_outputs(S.L2Normalization(data * 2, mode=mode, eps=eps), {"data": sizes}, way, int(np.prod(sizes)))


@covers("expand_dims", "squeeze", "SwapAxis", "slice_axis", "SliceChannel", "UpSampling")
@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@given(sizes=shape, random=st.randoms(use_true_random=False))
@examples(40)
def test_moving(way, sizes, random):
    for symbol in moved(sizes, random):
        check_outputs(symbol, {"data": sizes}, way)


@covers("transpose", "Concat", "mean", "sum", "max", "min")
@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@given(sizes=shape, random=st.randoms(use_true_random=False))
@examples(25)
def test_moving_and_joining(way, sizes, random):
    axes, shapes, terms = list(range(len(sizes))), {"data": sizes}, int(np.prod(sizes))
    random.shuffle(axes)
    check_outputs(S.transpose(data, axes=axes), shapes, way)
    check_outputs(S.transpose(data), shapes, way)
    axis = axes[0] - (len(sizes) if random.random() < 0.5 else 0)
    check_outputs(S.concat(data, data * 2, S.negative(data), dim=axis), shapes, way)
    some = tuple(axes[: random.randint(1, len(sizes))])
    exclude, keep = random.random() < 0.3 and len(some) < len(sizes), random.random() < 0.5
    for reduction in (S.mean, S.sum, S.max, S.min):
        check_outputs(reduction(data, axis=some, exclude=exclude, keepdims=keep), shapes, way, terms)
        check_outputs(reduction(data), shapes, way, terms)


@covers("softmax", "log_softmax", "SoftmaxOutput")
@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@given(
    sizes=shape,
    axis=st.integers(-4, 3),
    temperature=st.sampled_from([None, 0.5, 3.0]),
    over=st.sampled_from([{}, {"multi_output": True}, {"preserve_shape": True}]),
)
@examples(25)
def test_softmax(way, sizes, axis, temperature, over):
    assume(-len(sizes) <= axis < len(sizes))
    check_outputs(S.softmax(data, axis=axis, temperature=temperature), {"data": sizes}, way, sizes[axis])
    check_outputs(S.log_softmax(data * 9, axis=axis), {"data": sizes}, way, sizes[axis])
    assume(len(sizes) == 2 or (over and len(sizes) > 2))
    symbol = S.SoftmaxOutput(data, S.Variable("softmax_label"), **over)
    check_outputs(symbol, {"data": sizes}, way, int(np.prod(sizes)))
    node, _, _ = ece408_op.gpu_network(symbol, {})
    assert node.infer_shape(data=sizes)[0] == symbol.infer_shape(data=sizes)[0]


@pytest.mark.parametrize("way", WITHOUT_CUDNN)
@pytest.mark.parametrize("name", NUMPY)
def test_numpy_operators(name, way):
    check_outputs(NUMPY[name](data.as_np_ndarray()), {"data": (4, 3, 5)}, way, 60, low=0.1)


def test_numpy_operators_of_all_axes_are_refused():
    x = data.as_np_ndarray()
    for name, symbol in (("mean", S.np.mean(x)), ("max", x.max()), ("sum", x.sum(axis=())), ("mean", x.mean(axis=()))):
        with pytest.raises(GraphError, match=rf"{name}\): axis: expected axes, got none, for which mx.np"):
            ece408_op.gpu_network(symbol, {})


def test_every_operator_of_the_table_is_tested():
    assert set(OPERATORS) - tested == set()


@pytest.mark.parametrize("way", WITHOUT_CUDNN)
def test_nan_and_infinity_stay_what_they_are(way):
    x = np.array([[np.nan, 1, -1, np.inf], [-np.inf, 0, -0.0, 2]], np.float32)
    for symbol in (S.Activation(data, act_type="tanh"), S.clip(data, -2, 0.5), S.softsign(data)):
        (got,) = ours(symbol, {"data": x}, {}, way=way)
        (expected,) = mxnets(symbol, {"data": x}, {})
        assert np.allclose(got, expected, rtol=FUNCTION * EPS32, equal_nan=True), symbol
    # oneDNN's relu turns NaN into 0; ours does not.
    (got,) = ours(S.Activation(data, act_type="relu"), {"data": x}, {}, way=way)
    assert np.array_equal(got, [[np.nan, 1, 0, np.inf], [0, 0, 0, 2]], equal_nan=True)
