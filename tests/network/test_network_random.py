"""Random networks against MXNet: odd shapes, branches, several inputs and outputs, shared filters, split values."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from network_case import WAYS, S, mx, mxnets, ours, require, values

#: Networks, layers of one, and the most elements of a value.
NETWORKS, LAYERS, MOST = 12, 16, 100_000


def pair(stream, least, most):
    return tuple(int(n) for n in stream.randint(least, most + 1, 2))


def convolution(stream, x, channels):
    groups = int(stream.choice([1, 1, 2, channels]))
    groups = groups if channels % groups == 0 else 1
    sizes = {"kernel": pair(stream, 1, 4), "stride": pair(stream, 1, 2), "pad": pair(stream, 0, 2)}
    filters = groups * int(stream.choice([3, 24, 32]) if groups < channels or groups == 1 else 1)
    options = {"num_group": groups, "dilate": pair(stream, 1, 2), "no_bias": bool(stream.randint(2))}
    return S.Convolution(x, num_filter=filters, **options, **sizes)


def deconvolution(stream, x, channels):
    stride, groups = pair(stream, 1, 3), int(stream.choice([1, channels]))
    sizes = {"kernel": pair(stream, 1, 4), "stride": stride, "adj": tuple(int(stream.randint(n)) for n in stride)}
    filters = groups * int(stream.choice([3, 32]) if groups == 1 else 1)
    return S.Deconvolution(x, num_filter=filters, num_group=groups, no_bias=bool(stream.randint(2)), **sizes)


def residual(stream, x, channels):
    stride = pair(stream, 1, 3)
    inner = S.BatchNorm(S.Convolution(x, kernel=(3, 3), pad=(1, 1), stride=stride, num_filter=32), fix_gamma=False)
    return S.relu(inner + S.Convolution(x, kernel=(1, 1), stride=stride, num_filter=32, no_bias=True))


def shared(stream, x, channels):
    """Two convolutions with one filter."""
    weight = S.Variable(f"shared{stream.randint(1 << 30)}_weight")
    sizes = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels, "no_bias": True}
    return S.Convolution(S.tanh(S.Convolution(x, weight, **sizes)), weight, **sizes)


def pooling(stream, x, channels):
    sizes = {"kernel": pair(stream, 2, 3), "stride": pair(stream, 1, 2)}
    kind = str(stream.choice(["max", "avg", "sum"]))
    if stream.randint(2):  # every window touches the image
        return S.Pooling(x, pool_type=kind, pooling_convention="full", **sizes)
    return S.Pooling(x, pool_type=kind, pad=pair(stream, 0, 1), **sizes)


def shuffled(stream, x, channels):
    """The channels of two branches in turns, as in ShuffleNet."""
    if channels % 2:
        return S.slice_axis(x, axis=1, begin=0, end=(channels + 1) // 2)
    left, right = S.split(x, num_outputs=2, axis=1)
    joined = S.concat(left, S.Convolution(right, kernel=(3, 3), pad=(1, 1), num_filter=channels // 2), dim=1)
    return S.reshape(S.swapaxes(S.reshape(joined, shape=(0, -4, 2, -1, -2)), 1, 2), shape=(0, -3, -2))


ONE_INPUT = (
    *(convolution, convolution, convolution, residual, shared, pooling, shuffled, deconvolution),
    lambda stream, x, channels: S.UpSampling(x, scale=2, sample_type="nearest"),
    lambda stream, x, channels: S.BatchNorm(x, fix_gamma=bool(stream.randint(2))),
    lambda stream, x, channels: S.Activation(x, act_type=str(stream.choice(["relu", "tanh", "sigmoid"]))),
    lambda stream, x, channels: S.Pooling(x, kernel=(1, 1), global_pool=True, pool_type="avg"),
    lambda stream, x, channels: S.clip(S.Dropout(x), 0, 6),
    lambda stream, x, channels: S.transpose(x * 2, axes=(0, 1, 3, 2)),
)


def network(stream):
    """Return a symbol, and the shapes of its data."""
    batch = int(stream.choice([1, 2, 5]))
    shapes = {f"data{n}": (batch, int(stream.choice([1, 3, 32])), *pair(stream, 1, 12)) for n in range(2)}
    found = [(S.Variable(name), shape) for name, shape in shapes.items()]
    for _ in range(LAYERS):
        x, shape = found[-1 - stream.randint(min(3, len(found)))]
        alike = [y for y, other in found if other[2:] == shape[2:]]
        if len(alike) > 1 and stream.randint(4) == 0:
            symbol = S.Concat(*alike[-3:], dim=1)
        else:
            symbol = ONE_INPUT[stream.randint(len(ONE_INPUT))](stream, x, shape[1])
        with suppress(mx.MXNetError):  # a window larger than the image
            given = {name: shape for name, shape in shapes.items() if name in symbol.list_arguments()}
            (shape,) = symbol.infer_shape(**given)[1]
            if np.prod(shape) <= MOST:
                found.append((symbol, shape))
    symbol = S.Group([S.FullyConnected(found[-1][0], num_hidden=7), found[-2][0]])
    return symbol, {name: shape for name, shape in shapes.items() if name in symbol.list_arguments()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(NETWORKS))
def test_random_networks(seed, way):
    require(way)
    symbol, shapes = network(np.random.RandomState(seed))
    args, aux = values(symbol, shapes, seed)
    for name in args:
        if name.endswith("weight"):
            args[name] /= np.sqrt(np.prod(args[name].shape[1:]))
    for got, expected in zip(ours(symbol, args, aux, data=tuple(shapes), way=way), mxnets(symbol, args, aux)):
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() <= 1e-4 * max(1e-3, np.abs(expected).max())
