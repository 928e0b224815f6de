"""FullyConnected in split precision on a GPU: as accurate as float32's own sums, for any values."""

import numpy as np
import pytest
from gpu_case import require_gpu
from network_case import S, ours

from ece408_op.network import engine
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu
#: Rows, columns and length of the sums, not much more than split precision needs; x is padded for TMA.
SIZES = (521, 65, 1030)


@pytest.fixture(autouse=True)
def hopper():
    """Skip without a GPU that has these tensor cores."""
    require_gpu()
    if cuda.chip().capability != (9, 0):
        pytest.skip(f"expected a GPU of compute capability 9.0, got {cuda.chip().capability}")


def outputs(x, w, bias=None, activation=None, split=True):
    """Return x w^T + bias by gpu_network, in split precision or, for fewer rows, by cuBLAS."""
    symbol = S.FullyConnected(S.Variable("data"), num_hidden=len(w), no_bias=bias is None, name="fc")
    symbol = S.Activation(symbol, act_type=activation) if activation else symbol
    given = {"data": x, "fc_weight": w, **({} if bias is None else {"fc_bias": bias})}
    (got,) = ours(symbol, given, {}, way="auto")
    newest = list(engine.engines()[-1].batches.values())[-1].batches[-1]
    (used,) = newest.schedule.computations.values()
    assert used.name == ("split_fully_connected" if split else "cublas")
    return got


def values(kind, rows, columns, products):
    stream = np.random.RandomState(0)
    x, w = stream.uniform(-1, 1, (rows, products)), stream.normal(size=(columns, products))
    if kind == "positive":
        x, w = stream.randint(0, 256, (rows, products)), abs(w)
    return x.astype("f"), w.astype("f")


def error(got, x, w):
    """The largest |y - float64| as a share of the sum of |x||w|."""
    exact = x.astype("d") @ w.T.astype("d")
    return (abs(got - exact) / (abs(x).astype("d") @ abs(w).T.astype("d"))).max()


@pytest.mark.parametrize("kind", ["mixed", "positive"])
@pytest.mark.parametrize("sizes", [(2100, 500, 7200), (2100, 140, 10816), (2100, 160, 17496), SIZES])
def test_its_error_is_at_most_twice_cublas(kind, sizes):
    cupy = require_gpu()
    x, w = values(kind, *sizes)
    split = error(outputs(x, w), x, w)
    # Of the same shape: for fewer rows cuBLAS takes kernels whose sums are shorter.
    cublas = error(cupy.asnumpy(cupy.matmul(cupy.asarray(x), cupy.asarray(w).T)), x, w)
    print(f"{sizes} {kind}: split precision {split:.2g}, cuBLAS float32 {cublas:.2g}")
    assert split <= 2 * cublas


@pytest.mark.parametrize("activation", [None, "tanh", "relu"])
def test_bias_and_activation(activation):
    x, w = values("mixed", *SIZES)
    w /= 30
    bias = np.linspace(-1, 1, len(w)).astype("f")
    exact = x.astype("d") @ w.T + bias
    exact = {"tanh": np.tanh, "relu": lambda v: np.maximum(v, 0), None: lambda v: v}[activation](exact)
    assert np.abs(outputs(x, w, bias, activation) - exact).max() < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e17])
def test_any_scale_of_the_values(scale):
    x, w = values("mixed", *SIZES)
    x = (x * np.float32(scale)).astype("f")
    assert error(outputs(x, w), x, w) < 1e-6


def test_rows_of_too_wide_a_range_are_computed_in_float32():
    x, w = values("mixed", *SIZES)
    x[3, 5], x[4, 6] = 1e30, 1e-25
    x[5] = 0
    w[:, 5] = 0
    got = outputs(x, w)
    assert error(got[:5], x[:5], w) < 1e-6
    assert (got[5] == 0).all()


def test_nan_and_infinity_stay():
    x, w = values("mixed", *SIZES)
    w = abs(w)
    x[1, 1], x[2, 2] = np.nan, np.inf
    got = outputs(x, w)
    assert np.isnan(got[1]).all()
    assert (got[2] == np.inf).all()
    assert np.isfinite(np.delete(got, [1, 2], axis=0)).all()


def test_weights_of_too_wide_a_range_are_computed_in_float32():
    x, w = values("mixed", *SIZES)
    w[3, 5], x[:, 5] = 1e30, 0
    assert error(outputs(x, w), x, w) < 1e-6
