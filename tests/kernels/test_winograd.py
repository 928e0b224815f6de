"""winograd: every cut of a filter, what its error bound promises, what is left to direct, and when auto takes it."""

from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ece408_op
from ece408_op.core import dispatch, reference
from ece408_op.core.check import compare
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cpu import direct, winograd
from ece408_op.kernels.cpu._winograd_plan import make_plan
from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import cpu

LANES = cpu().lanes
#: (channels, filters) for which rows are cut in twos, and in threes, where both can be.
FEW, MANY = (2, 6), (24, 40)


def layer(kernel, channels, filters, images=LANES + 3):
    return ConvProblem(images, channels, kernel + LANES, kernel + LANES + 3, filters, kernel)


def arrays(problem, seed=0, positive=False):
    random = np.random.default_rng(seed)
    x, w = (random.random(shape, dtype=np.float32) for shape in (problem.x_shape, problem.w_shape))
    return (x, w) if positive else (2 * x - 1, 2 * w - 1)


def run(x, w, kernel=winograd, threads=2):
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    out = np.full(problem.y_shape, np.nan, np.float32)
    kernel.run(problem, x, w, out, threads)
    return out


@pytest.mark.parametrize("kernel", range(2, 12))
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_every_cut_is_right(kernel, sizes):
    x, w = arrays(layer(kernel, *sizes))
    found = compare(run(x, w), x, w, winograd.KERNEL)
    assert found.passed, str(found)


@pytest.mark.parametrize(("kernel", "twos", "threes"), [(3, (2, 1), (3,)), (7, (2, 2, 2, 1), (3, 2, 2))])
def test_filters_are_cut_as_layers_ask_for(kernel, twos, threes):
    few, many = (make_plan(layer(kernel, *sizes, images=1), 8, 16).cut.groups for sizes in ((1, 6), MANY))
    assert (few, many) == (twos, threes)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), kernel=st.integers(2, 7), seed=st.integers(0, 99))
def test_an_output_depends_on_its_window_alone(data, kernel, seed):
    problem = layer(kernel, 2, 3)
    x, w = arrays(problem, seed)
    image, channel, row, column = (data.draw(st.integers(0, size - 1)) for size in problem.x_shape)
    other = x.copy()
    other[image, channel, row, column] = 3e30  # products of others would be lost beside it
    same = run(x, w) == run(other, w)
    sees = np.zeros(problem.y_shape, bool)
    rows, columns = (slice(max(0, place - kernel + 1), place + 1) for place in (row, column))
    sees[image, :, rows, columns] = True
    assert same[~sees].all()


def test_a_window_of_zeros_has_the_sum_zero():
    problem = layer(5, 8, 12)
    x, w = arrays(problem)
    x[:, :, :6] = 0
    assert (run(x, w)[:, :, :2] == 0).all()


@pytest.mark.parametrize("positive", [False, True], ids=["random", "all positive"])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_on_dense_data_errors_are_no_larger_than_twice_those_of_plain_sums(kernel, positive):
    x, w = arrays(layer(kernel, 16, 24), positive=positive)
    ours, plain = (compare(run(x, w, which), x, w, direct.KERNEL) for which in (winograd, direct))
    assert ours.passed
    assert ours.scaled <= 2 * plain.scaled


@settings(max_examples=10, deadline=None)
@given(data=st.data(), kernel=st.integers(2, 16), seed=st.integers(0, 99))
def test_sums_of_integers_are_exact_on_any_shape(data, kernel, seed):
    random = np.random.default_rng(seed)
    channels, filters, height, columns = (data.draw(st.integers(1, most)) for most in (9, 13, 6, 20))
    images = data.draw(st.integers(LANES, 3 * LANES + 1))
    problem = ConvProblem(images, channels, kernel + height - 1, kernel + LANES + columns - 2, filters, kernel)
    x = random.integers(1, 17, problem.x_shape).astype(np.float32)
    w = random.integers(-8, 9, problem.w_shape).astype(np.float32)
    np.testing.assert_array_equal(run(x, w), reference.convolve(x, w))


def test_an_image_of_one_pixel_gives_the_filter():
    problem = layer(5, 8, 12)
    x, w = arrays(problem)
    x[4], x[4, 3, 4, 5] = 0, 1
    out = run(x, w)
    np.testing.assert_array_equal(out[4, :, :5, 1:6], w[:, 3, ::-1, ::-1])
    assert compare(out, x, w, winograd.KERNEL).passed


def test_sparse_images_are_left_to_the_plain_sums():
    x, w = arrays(layer(5, 8, 12, images=63))
    x[7::20, :, 2:] = 0  # some
    some, plain = run(x, w), run(x, w, direct)
    np.testing.assert_array_equal(some[7::20], plain[7::20])
    assert (some != plain).any()
    x[:-1, 1:] = 0  # nearly all
    np.testing.assert_array_equal(run(x, w), run(x, w, direct))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 3e38])
@pytest.mark.parametrize("which", ["x", "w"])
def test_any_scale_of_one_image_or_all_weights(scale, which):
    x, w = arrays(layer(5, 3, 4))
    if which == "x":
        x[3] *= np.float32(scale)
    else:
        w *= np.float32(scale)
        x[3] *= np.float32(min(1 / scale, 1e38))
    found = compare(run(x, w), x, w, winograd.KERNEL)
    assert found.passed, str(found)


def test_a_few_images_that_are_not_finite_spoil_no_other():
    x, w = arrays(layer(5, 6, 8, images=2 * LANES + 1))
    x[1, 2, 3, 4], x[LANES, 0, 0, 0], x[-1, 5, 7, 8] = np.inf, np.nan, -np.inf
    found = compare(run(x, w), x, w, direct.KERNEL)
    assert found.passed, str(found)


@pytest.mark.skipif(cpu().level == "sse", reason="a CPU with AVX2 is asked for")
def test_auto_takes_it_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", "avx2")
    large, first = ConvProblem(10000, 12, 33, 33, 24, 7), ConvProblem(10000, 1, 28, 28, 50, 5)
    assert dispatch.select(large).name == "winograd"
    assert dispatch.select(first).name == "direct"
    assert dispatch.select(large.with_batch(16)).name == "direct"
    assert dispatch.select(large.pooled(False)).name == "direct"


@pytest.mark.skipif(cpu().level != "avx512", reason="a CPU with AVX-512 is asked for")
def test_with_avx512_auto_takes_it_on_cpus_that_it_is_faster_on(monkeypatch):
    large, second = ConvProblem(10000, 12, 33, 33, 24, 7), ConvProblem(10000, 6, 30, 30, 16, 5)
    for features, taken in [("+avx512f,+sse4a", True), ("+avx512f,-sse4a", False)]:
        monkeypatch.setattr(winograd, "cpu", lambda features=features: replace(cpu(), features=features))
        assert winograd.KERNEL.recommended(large) is taken
        assert not winograd.KERNEL.recommended(second)
        assert not winograd.KERNEL.recommended(large.with_batch(500))


def test_auto_leaves_what_was_not_measured_to_direct(monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", min(cpu().level, "avx2", key=["sse", "avx2", "avx512"].index))
    for sizes in [(512, 512, 4096, 64, 3), (8, 80, 80, 16, 20), (16, 24, 2, 16, 2)]:
        assert dispatch.select(ConvProblem(10000, *sizes)).name == "direct"


def test_too_few_images_are_an_error_that_says_how_many_it_wants():
    x, w = arrays(layer(5, 3, 4, images=LANES - 1))
    with pytest.raises(UnsupportedError, match=rf"batch: at least {LANES} on this CPU, got {LANES - 1}"):
        run(x, w)
    call = {"kernel": (5, 5), "num_filter": 4, "impl": "winograd"}
    with pytest.raises(Exception, match=f"batch: at least {LANES}"):
        ece408_op.New(mx.nd.array(x), mx.nd.array(w), **call).wait_to_read()


def test_the_operator_agrees_with_mxnet():
    x, w = arrays(layer(5, 6, 16, images=3 * LANES))
    size = {"kernel": (5, 5), "num_filter": 16}
    ours = ece408_op.New(mx.nd.array(x), mx.nd.array(w), impl="winograd", **size).asnumpy()
    own = mx.nd.Convolution(mx.nd.array(x), mx.nd.array(w), no_bias=True, **size).asnumpy()
    bound = direct.KERNEL.error_bound(ConvProblem.from_shapes(x.shape, w.shape))
    assert (np.abs(ours - own) <= 2 * bound * reference.magnitude(x, w)).all()
