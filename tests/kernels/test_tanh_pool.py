"""Convolution fused with tanh and 2 x 2 max-pooling on the CPU, compared with float64; also through the operator."""

import numpy as np
import pooled_case
import pytest
from cpu_kernels import LEVELS
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.core import reference
from ece408_op.kernels.cpu import direct
from ece408_op.kernels.cpu.direct import TANH_ULPS
from ece408_op.problem import ConvProblem

each_level = pytest.mark.parametrize("level", LEVELS)


def assert_right(out, x, w, full, pad=(0, 0)):
    problem = ConvProblem.from_shapes(x.shape, w.shape, pad=pad)
    convolved, size = reference.convolve(x, w, problem), reference.magnitude(x, w, problem)
    pooled_case.assert_right(out, problem.pooled(full), convolved, size)


def arrays(problem, seed=0):
    stream = np.random.RandomState(seed)
    x = stream.uniform(-1, 1, problem.x_shape).astype(np.float32)
    return x, (stream.normal(size=problem.w_shape) / np.sqrt(problem.products)).astype(np.float32)


def computed(problem, x, w, full, threads=2):
    pooled = problem.pooled(full)
    around = np.full(np.prod(pooled.y_shape) + 64, 7.0, np.float32)
    out = around[32:-32].reshape(pooled.y_shape)
    out[...] = np.nan
    direct.KERNEL.run(pooled, x, w, out, threads)
    assert (around[:32] == 7).all()
    assert (around[-32:] == 7).all()
    return out


SHAPES = [
    (3, 1, 28, 28, 50, 5),
    (2, 6, 31, 30, 16, 5),
    (2, 1, 2, 2, 1, 1),
    (2, 3, 9, 8, 5, 2),
    (2, 2, 40, 4, 3, 3),
    (1, 2, 4, 70, 3, 3),
    (2, 16, 40, 61, 32, 8),
    (1, 25, 56, 46, 22, 3),
    (2, 3, 13, 16, 5, 3, 5, (1, 1), (1, 2)),
    (2, 16, 39, 60, 32, 3, 3, (1, 1), (2, 1)),
]


@each_level
def test_chosen_shapes(level, monkeypatch):
    """All with this CPU's best instruction set; some of them, and one convention of pooling, with the others."""
    monkeypatch.setenv("ECE408_SIMD", level)
    best = level == LEVELS[-1]
    for problem in [ConvProblem(*shape) for shape in SHAPES][:: 1 if best else 3]:
        x, w = arrays(problem)
        for full in (False, True)[: 1 + best]:
            assert_right(computed(problem, x, w, full), x, w, full, problem.pad)


@st.composite
def problems(draw):
    kernel = draw(st.integers(1, 6))
    height, width = (draw(st.integers(kernel + 1, kernel + 24)) for _ in "hw")
    return ConvProblem(
        draw(st.integers(1, 4)), draw(st.integers(1, 4)), height, width, draw(st.integers(1, 20)), kernel
    )


@settings(max_examples=20, deadline=None)
@given(problem=problems(), full=st.booleans(), seed=st.integers(0, 99))
def test_random_shapes(problem, full, seed):
    x, w = arrays(problem, seed)
    assert_right(computed(problem, x, w, full, problem.batch), x, w, full)


def tanh_of(values):
    """tanh of a multiple of 16 values, each as the maximum of four equal outputs of a 1 x 1 filter."""
    images = values.reshape(-1, 1, 2, 8).repeat(2, axis=2).repeat(2, axis=3)
    problem = ConvProblem(*images.shape, 1, 1)
    return computed(problem, images, np.ones(problem.w_shape, np.float32), False).reshape(values.shape)


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
    problem = ConvProblem(1, 1, 6, 6, 3, 1)
    x, w = arrays(problem)
    x[0, 0, [0, 1, 2, 3], [0, 3, 4, 1]] = np.nan
    x[0, 0, 4, 4] = np.inf
    own = mx.nd.Convolution(mx.nd.array(x), mx.nd.array(w), kernel=(1, 1), num_filter=3, no_bias=True)
    own = mx.nd.Pooling(mx.nd.tanh(own), kernel=(2, 2), stride=(2, 2), pool_type="max").asnumpy()
    np.testing.assert_allclose(computed(problem, x, w, False), own, rtol=1e-6)
