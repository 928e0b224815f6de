"""Which values of a network are split activations, and where they are converted."""

import pytest
from cuda_layers import H200
from network_case import S, data, mx, mxnets, ours, text_of, values

import ece408_op
from ece408_op.network import _formats, _split_layers
from ece408_op.network._fusion import Combination
from ece408_op.network._network import parse


def wide(x, name, filters=32, kernel=3, pad=1, **others):
    return S.Convolution(x, num_filter=filters, kernel=(kernel, kernel), pad=(pad, pad), name=name, **others)


def relu(x, name):
    return S.Activation(x, act_type="relu", name=name)


def formats_of(symbol, shape):
    """Return what with_formats returns."""
    args, aux = values(symbol, {"data": shape})
    node, _, _ = ece408_op.gpu_network(
        symbol, {n: mx.nd.array(a) for n, a in args.items() if n != "data"}, {n: mx.nd.array(a) for n, a in aux.items()}
    )
    network = parse(text_of(node)).fused()
    shapes = network.infer([shape])
    return _formats.with_formats(network, shapes, lambda *each: _split_layers.accepts(H200, *each))


def formats(symbol, shape):
    """Return the operators that compute split activations, and the conversions, by name in order."""
    found, _, split = formats_of(symbol, shape)
    nodes = [node for number, node in found.operators if number in split]
    return [node.name for node in nodes], [node.name for _, node in found.operators if node.op in ("split", "join")]


def network_of(middle):
    """Return a network with something between two wide layers."""
    return S.FullyConnected(wide(middle(relu(wide(data, "first"), "act")), "second"), num_hidden=5, name="last")


def bounded_but_nan_at_zero(x):
    return x * S.softsign(1 / x)


@pytest.mark.parametrize(
    ("middle", "split"),
    [
        (lambda x: S.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name="middle"), True),
        (lambda x: S.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", name="middle"), True),
        (lambda x: S.BatchNorm(S.Concat(x, wide(x, "side"), dim=1), name="middle"), True),
        (lambda x: wide(x, "middle", num_group=32), True),
        (lambda x: S.clip(S.Pooling(x, kernel=(2, 2), name="pool"), 0, 6, name="middle"), True),
        (lambda x: S.Dropout(x, name="middle"), True),
        (lambda x: S.clip(x, -1, 2, name="middle"), True),
        (lambda x: S.clip(x, 1, 2, name="middle"), False),
        (lambda x: S.LeakyReLU(x, slope=0.1, name="middle"), True),
        (lambda x: S.LeakyReLU(x, slope=2, name="middle"), False),
        (lambda x: S.LeakyReLU(x, act_type="prelu", name="middle"), True),
        (lambda x: S.LeakyReLU(x, S.Variable("gamma", shape=(1,)), act_type="prelu", name="middle"), True),
        (lambda x: S.LeakyReLU(x, act_type="gelu", name="middle"), True),
        (lambda x: x * S.sigmoid(x), True),
        (lambda x: x * S.clip(x + 3, 0, 6) / 6, True),
        (lambda x: x * S.tanh(S.Activation(x, act_type="softrelu")), True),
        (lambda x: x * S.clip(x + 3, 0, 6), False),
        (lambda x: x * S.minimum(S.maximum(x + 3, 0), 6) / 6, True),
        (lambda x: S.maximum(x, 0.5), False),
        (lambda x: x * 0.5 + wide(x, "side"), True),
        (lambda x: S.relu(S.Pooling(x, kernel=(1, 1)) + S.tanh(x)), True),
        (lambda x: x * 2, False),
        (lambda x: S.exp(x, name="middle"), False),
        (lambda x: bounded_but_nan_at_zero(wide(x, "inner")), False),
        (lambda x: S.Activation(x, act_type="sigmoid", name="middle"), False),
        (lambda x: S.Concat(x, wide(x, "side", 33), dim=1, name="middle"), False),
        (S.square, False),
    ],
)
def test_values_stay_split_between_layers_that_can_compute_them(middle, split):
    symbol = network_of(middle)
    names, converted = formats(symbol, (2, 3, 8, 8))
    # The first layer converts its images itself; between others it gains nothing.
    assert set(names) >= {"second", "last"} | ({"first"} if split else set())
    assert converted[-1] == "last_join"
    assert (len(converted) == 1) == split, converted
    args, aux = values(symbol, {"data": (2, 3, 8, 8)})
    (expected,), (got,) = mxnets(symbol, args, aux), ours(symbol, args, aux)
    assert abs(got - expected).max() <= 1e-4 * abs(expected).max()


def squeeze_and_excitation(x, factor=S.sigmoid, wrap=lambda one: one):
    squeezed = S.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", name="squeeze")
    excited = factor(wide(relu(wide(squeezed, "one", 32), "one_act"), "two"))
    return S.broadcast_mul(x, wrap(excited))


def times_rows_and_columns(x, factor):
    """Multiply images of 8 channels, 2 x 8, of a batch of 2."""
    return S.broadcast_mul(S.Pooling(x, kernel=(4, 1), stride=(4, 1), pool_type="avg"), factor)


def times_itself(x):
    return S.elemwise_mul(x, x) + wide(x, "side")


@pytest.mark.parametrize(
    ("middle", "split"),
    [
        (squeeze_and_excitation, True),
        (lambda x: relu(squeeze_and_excitation(wide(x, "inner")) + x, "sum"), True),
        (lambda x: squeeze_and_excitation(x, lambda v: S.clip(v + 3, 0, 6) / 6), True),
        (lambda x: squeeze_and_excitation(x, wrap=lambda v: S.Reshape(v, shape=(0, 0, 1, 1))), True),
        (lambda x: squeeze_and_excitation(x, S.exp), False),
        (lambda x: S.broadcast_mul(x, S.sigmoid(S.Pooling(x, global_pool=True, kernel=(8, 8)) * 2)), True),
        (lambda x: S.broadcast_mul(S.tanh(S.slice_axis(x, axis=1, begin=0, end=1)), x), False),
        (lambda x: times_rows_and_columns(wide(x, "inner", 8), S.sigmoid(S.Variable("factor", shape=(2, 8)))), False),
        (lambda x: times_itself(S.tanh(S.Pooling(x, global_pool=True, kernel=(8, 8)))), False),
    ],
)
def test_a_factor_per_image_and_channel_leaves_values_split(middle, split):
    symbol = network_of(middle)
    found, _, split_values = formats_of(symbol, (2, 3, 8, 8))
    products = [n for n, node in found.operators if isinstance(node.operator, Combination) and node.operator.has_factor]
    assert [number in split_values for number in products] == ([split] if products else [])
    assert products or not split
    args, aux = values(symbol, {"data": (2, 3, 8, 8)})
    (expected,), (got,) = mxnets(symbol, args, aux), ours(symbol, args, aux)
    assert abs(got - expected).max() <= 1e-4 * abs(expected).max()


first = relu(wide(data, "first"), "act")


@pytest.mark.parametrize(
    ("symbol", "channels", "split", "converted"),
    [
        (S.Group([S.exp(first), S.square(first), wide(first, "second")]), 3, ["first", "second"], ["first", "second"]),
        (S.exp(wide(data, "only")), 64, [], []),
        (wide(S.Pooling(wide(data, "a", 8), kernel=(2, 2), stride=(2, 2)), "b", 12), 1, [], []),
    ],
    ids=["two readers of one conversion", "a layer alone", "one channel and few filters"],
)
def test_values_are_split_where_a_layer_gains_by_it(symbol, channels, split, converted):
    assert formats(symbol, (2, channels, 8, 8)) == (split, [f"{name}_join" for name in converted])
