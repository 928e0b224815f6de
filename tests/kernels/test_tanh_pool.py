"""tanh of 2 x 2 maxima on the CPU: its error, special values, and NaN. test_kernels_cpu.py has layers and shapes."""

import numpy as np
import pytest
from cpu_kernels import LEVELS, arrays, run
from pooled_case import TANH_ULPS

from ece408_op.kernels.cpu import direct
from ece408_op.problem import ConvProblem

each_level = pytest.mark.parametrize("level", LEVELS)


def tanh_of(values):
    """tanh of a multiple of 16 values, each as the maximum of four equal outputs of a 1 x 1 filter."""
    images = values.reshape(-1, 1, 2, 8).repeat(2, axis=2).repeat(2, axis=3)
    problem = ConvProblem(*images.shape, 1, 1).pooled(False)
    return run(direct.KERNEL, problem, images, np.ones(problem.w_shape, np.float32)).reshape(values.shape)


@each_level
def test_tanh_keeps_to_its_error(level, monkeypatch):
    """Every 997th float32 from 0 to 32, and the negative ones."""
    monkeypatch.setenv("ECE408_SIMD", level)
    bits = np.arange(0, np.float32(32).view(np.uint32), 997, dtype=np.uint32)
    bits = bits[: len(bits) // 16 * 16]
    x = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    y = tanh_of(x)
    exact = np.tanh(x.astype(np.float64))
    below = np.nextafter(np.abs(exact).astype(np.float32), np.float32(0))
    ulp = np.spacing(np.maximum(below, np.finfo(np.float32).tiny)).astype(np.float64)
    assert (np.abs(y - exact) / ulp).max() < TANH_ULPS
    assert ((np.signbit(y) == np.signbit(x)) | (x == 0)).all()  # the sum that begins with 0 makes 0 of -0


@each_level
def test_special_values(level, monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", level)
    x = np.tile(np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0, -1e-40, 1e-40], np.float32), 2)
    np.testing.assert_array_equal(tanh_of(x)[:6], [np.nan, 1, -1, 1, -1, 0])


def test_a_maximum_leaves_nan_out_as_mxnets_pooling_does():
    mx = pytest.importorskip("mxnet")
    problem = ConvProblem(1, 1, 6, 6, 3, 1).pooled(False)
    x, w = arrays(problem)
    x[0, 0, [0, 1, 2, 3], [0, 3, 4, 1]] = np.nan
    x[0, 0, 4, 4] = np.inf
    own = mx.nd.Convolution(mx.nd.array(x), mx.nd.array(w), kernel=(1, 1), num_filter=3, no_bias=True)
    own = mx.nd.Pooling(mx.nd.tanh(own), kernel=(2, 2), stride=(2, 2), pool_type="max").asnumpy()
    np.testing.assert_allclose(run(direct.KERNEL, problem, x, w), own, rtol=1e-6)
