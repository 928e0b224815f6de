"""The fully connected layer in split operands on a GPU: as accurate as float32's own sums, whatever the values."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_case import require_gpu

from ece408_op.network._dense import Connected
from ece408_op.network._layers import FullyConnected
from ece408_op.network._split_precision import Split
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    """Skip where there is no GPU with these tensor cores."""
    require_gpu()
    if cuda.chip().capability != (9, 0):
        pytest.skip(f"expected a GPU of compute capability 9.0, got {cuda.chip().capability}")


def outputs(cupy, way, x, w, bias=None, activation=None):
    settings = FullyConnected(len(w), bias is not None, True)
    step = way(settings, len(x), w.shape[1], activation, 0)
    inputs = [cupy.asarray(a) for a in (x, w, bias) if a is not None]
    step.prepare([None, *inputs[1:]])
    out = cupy.full((len(x), len(w)), cupy.nan, np.float32)
    scratch = cupy.full(step.scratch // 4, cupy.nan, np.float32)
    step.bind(inputs, out, scratch)()
    return cupy.asnumpy(out)


def values(kind, rows, columns, products, seed=0):
    stream = np.random.RandomState(seed)
    if kind == "mixed":
        return (
            stream.uniform(-1, 1, (rows, products)).astype("f"),
            stream.normal(size=(columns, products)).astype("f"),
        )
    return (
        stream.randint(0, 256, (rows, products)).astype("f"),
        abs(stream.normal(size=(columns, products))).astype("f"),
    )


def error(got, x, w):
    """The largest |y - float64| as a share of the sum of |x||w|."""
    exact = x.astype("d") @ w.T.astype("d")
    return (abs(got - exact) / (abs(x).astype("d") @ abs(w).T.astype("d"))).max()


@pytest.mark.parametrize("kind", ["mixed", "positive"])
@pytest.mark.parametrize("sizes", [(600, 500, 7200), (600, 140, 10816), (600, 160, 17496), (70, 65, 1030)])
def test_its_error_is_at_most_twice_cublas(kind, sizes):
    cupy = require_gpu()
    x, w = values(kind, *sizes)
    ours, cublas = (error(outputs(cupy, way, x, w), x, w) for way in (Split, Connected))
    print(f"{sizes} {kind}: split {ours:.2g}, cuBLAS float32 {cublas:.2g}")
    assert ours <= 2 * cublas


@pytest.mark.parametrize("activation", [None, "tanh", "relu"])
def test_bias_and_activation(activation):
    cupy = require_gpu()
    x, w = values("mixed", 70, 65, 1030)
    w /= 30
    bias = np.linspace(-1, 1, 65).astype("f")
    exact = x.astype("d") @ w.T + bias
    exact = {"tanh": np.tanh, "relu": lambda v: np.maximum(v, 0), None: lambda v: v}[activation](exact)
    assert np.abs(outputs(cupy, Split, x, w, bias, activation) - exact).max() < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e17])
def test_any_scale_of_the_values(scale):
    cupy = require_gpu()
    x, w = values("mixed", 70, 65, 1030)
    x = (x * np.float32(scale)).astype("f")
    assert error(outputs(cupy, Split, x, w), x, w) < 1e-6


def test_rows_of_too_wide_a_range_are_computed_in_float32():
    cupy = require_gpu()
    x, w = values("mixed", 70, 65, 1030)
    x[3, 5], x[4, 6] = 1e30, 1e-25
    x[5] = 0
    w[:, 5] = 0
    got = outputs(cupy, Split, x, w)
    assert error(got[:5], x[:5], w) < 1e-6
    assert (got[5] == 0).all()


def test_nan_and_infinity_arrive():
    cupy = require_gpu()
    x, w = values("mixed", 70, 65, 1030)
    w = abs(w)
    x[1, 1], x[2, 2] = np.nan, np.inf
    got = outputs(cupy, Split, x, w)
    assert np.isnan(got[1]).all()
    assert (got[2] == np.inf).all()
    assert np.isfinite(np.delete(got, [1, 2], axis=0)).all()


def test_weights_of_too_wide_a_range_are_taken_in_float32():
    cupy = require_gpu()
    x, w = values("mixed", 70, 65, 1030)
    w[3, 5], x[:, 5] = 1e30, 0
    assert error(outputs(cupy, Split, x, w), x, w) < 1e-6
