"""winograd and winograd_gemm: error bounds, sparse and special data, what is left to direct, when auto takes them."""

import cpu_kernels
import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process import printed

import ece408_op
from ece408_op.core import dispatch, reference
from ece408_op.core.check import compare
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cpu._winograd_plan import make_plan
from ece408_op.problem import ConvProblem
from ece408_op.runtime.host_cpu import cpu

LANES = cpu().lanes
#: (channels, filters) for which rows are cut in twos, and in threes, where both can be; tests share their code.
FEW, MANY = (2, 6), (24, 40)
DIRECT = dispatch.find("direct")
both = pytest.mark.parametrize("name", ["winograd", "winograd_gemm"])
#: A filter's size, and the kernels that take it.
SIZES = [("winograd", 3), ("winograd", 5), ("winograd", 7), ("winograd_gemm", 3)]
each_size = pytest.mark.parametrize(("name", "kernel"), SIZES)


def layer(kernel, channels, filters, images=LANES + 3):
    return ConvProblem(images, channels, kernel + LANES, kernel + LANES + 3, filters, kernel)


def arrays(problem, seed=0, positive=False):
    random = np.random.default_rng(seed)
    x, w = (random.random(shape, dtype=np.float32) for shape in problem.shapes[:2])
    return (x, w) if positive else (2 * x - 1, 2 * w - 1)


def run(x, w, name="winograd"):
    return cpu_kernels.run(dispatch.find(name), ConvProblem.from_shapes(x.shape, w.shape), x, w)


def check(x, w, name):
    cpu_kernels.check(dispatch.find(name), ConvProblem.from_shapes(x.shape, w.shape), x, w)


@pytest.mark.parametrize("kernel", [2, 3, 5, 7, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in (4, 6, 8))])
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_every_cut_is_right(kernel, sizes):
    check(*arrays(layer(kernel, *sizes)), "winograd")


@pytest.mark.parametrize(("kernel", "twos", "threes"), [(3, (2, 1), (3,)), (7, (2, 2, 2, 1), (3, 2, 2))])
def test_filters_are_cut_as_layers_ask_for(kernel, twos, threes):
    few, many = (make_plan(layer(kernel, *sizes, images=1), 8, 16).cut.groups for sizes in ((1, 6), MANY))
    assert (few, many) == (twos, threes)


@each_size
@settings(max_examples=5)
@given(data=st.data(), seed=st.integers(0, 99))
def test_an_output_depends_on_its_window_alone(name, kernel, data, seed):
    problem = layer(kernel, 2, 3)
    x, w = arrays(problem, seed)
    image, channel, row, column = (data.draw(st.integers(0, size - 1)) for size in problem.x_shape)
    other = x.copy()
    other[image, channel, row, column] = 3e30  # products of others would be lost beside it
    same = run(x, w, name) == run(other, w, name)
    sees = np.zeros(problem.y_shape, bool)
    rows, columns = (slice(max(0, place - kernel + 1), place + 1) for place in (row, column))
    sees[image, :, rows, columns] = True
    assert same[~sees].all()


@each_size
def test_a_window_of_zeros_has_the_sum_zero(name, kernel):
    x, w = arrays(layer(kernel, *MANY))
    x[:, :, : kernel + 1] = 0
    assert (run(x, w, name)[:, :, :2] == 0).all()


@pytest.mark.parametrize("positive", [False, True], ids=["random", "all positive"])
@each_size
def test_on_dense_data_errors_are_no_larger_than_twice_those_of_plain_sums(name, kernel, positive):
    x, w = arrays(layer(kernel, *MANY), positive=positive)
    ours, plain = (compare(run(x, w, which), x, w, DIRECT) for which in (name, "direct"))
    assert ours.passed
    assert ours.scaled <= 2 * plain.scaled


@both
@settings(max_examples=6)
@given(data=st.data(), kernel=st.integers(2, 16), seed=st.integers(0, 99))
def test_sums_of_integers_are_exact_on_any_shape(name, data, kernel, seed):
    kernel = kernel if name == "winograd" else 3
    random = np.random.default_rng(seed)
    channels, filters, height, columns = (data.draw(st.integers(1, most)) for most in (9, 13, 6, 20))
    images = data.draw(st.integers(LANES, 3 * LANES + 1))
    problem = ConvProblem(images, channels, kernel + height - 1, kernel + LANES + columns - 2, filters, kernel)
    x = random.integers(1, 17, problem.x_shape).astype(np.float32)
    w = random.integers(-8, 9, problem.w_shape).astype(np.float32)
    np.testing.assert_array_equal(run(x, w, name), reference.convolve(x, w))


@both
def test_sparse_images_are_left_to_the_plain_sums(name):
    x, w = arrays(layer(3, *MANY, images=63))
    x[7::20], x[7::20, :, 4] = 0, 1  # some
    some, plain = run(x, w, name), run(x, w, "direct")
    np.testing.assert_array_equal(some[7::20], plain[7::20])
    assert (some != plain).any()
    x[:-1, 1:] = 0  # nearly all
    np.testing.assert_array_equal(run(x, w, name), run(x, w, "direct"))


@pytest.mark.parametrize("zeros", [0.5, 0.8, 0.9, 0.95, 0.98])
@pytest.mark.parametrize("channels", [16, 64])
def test_winograd_gemm_keeps_the_bound_of_plain_sums_on_sparse_data(channels, zeros):
    problem = ConvProblem(4, channels, 16, 20, 24, 3)
    x, w = arrays(problem, positive=True)
    x *= np.random.default_rng(1).random(x.shape) >= zeros
    assert compare(run(x, w, "winograd_gemm"), x, w, DIRECT).passed


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 3e38])
@pytest.mark.parametrize("which", ["x", "w"])
@both
def test_any_scale_of_one_image_or_all_weights(name, scale, which):
    x, w = arrays(layer(3, *FEW))
    if which == "x":
        x[3] *= np.float32(scale)
    else:
        w *= np.float32(scale)
        x[3] *= np.float32(min(1 / scale, 1e38))
    check(x, w, name)


LARGE = ConvProblem(10000, 12, 33, 33, 24, 7)
WIDE = ConvProblem(4, 64, 56, 56, 64, 3, pad=(1, 1))
AUTO = [
    (LARGE, "winograd"),
    (ConvProblem(10000, 1, 28, 28, 50, 5), "direct"),
    (LARGE.with_batch(16), "direct"),
    (LARGE.pooled(False), "direct"),
    # Filters and scratch memory that were not measured.
    *((ConvProblem(10000, *sizes), "direct") for sizes in [(8, 80, 80, 16, 20), (16, 24, 2, 16, 2)]),
    (ConvProblem(10000, 512, 512, 4096, 64, 3), "winograd_gemm"),
    *((each, "winograd_gemm") for each in (WIDE, WIDE.data_gradient, ConvProblem(2, 128, 28, 28, 128, 3))),
    # Few products per output; few tiles.
    (ConvProblem(4, 8, 56, 56, 8, 3, pad=(1, 1)), "direct"),
    (ConvProblem(1, 512, 7, 7, 512, 3, pad=(1, 1)), "direct"),
    (ConvProblem(8, 64, 56, 56, 64, 5, pad=(2, 2)), "direct"),
]


@pytest.mark.skipif(cpu().level == "sse", reason="a CPU with AVX2 is asked for")
@pytest.mark.parametrize(("problem", "name"), AUTO, ids=str)
def test_auto_takes_them_where_they_were_measured_to_be_faster(problem, name, monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", "avx2")
    assert dispatch.select(problem).name == name


@pytest.mark.skipif(cpu().level != "avx512", reason="a CPU with AVX-512 is asked for")
@pytest.mark.parametrize(("sse4a", "taken"), [(True, "winograd"), (False, "direct")], ids=["AMD", "Intel"])
def test_with_avx512_auto_takes_it_on_cpus_that_it_is_faster_on(sse4a, taken):
    """Only AMD's CPUs have SSE4a; a new interpreter believes what LLVM reports of its CPU."""
    code = f"""
import llvmlite.binding as llvm
features = dict(llvm.get_host_cpu_features(), sse4a={sse4a})
llvm.get_host_cpu_features = lambda: features
from ece408_op.core import dispatch
from ece408_op.problem import ConvProblem
large, second = ConvProblem(10000, 12, 33, 33, 24, 7), ConvProblem(10000, 6, 30, 30, 16, 5)
print(*(dispatch.select(each).name for each in (large, second, large.with_batch(500))))
"""
    assert printed("-c", code).split() == [taken, "direct", "direct"]


def test_too_few_images_are_an_error_that_says_how_many_it_wants():
    x, w = arrays(layer(5, 3, 4, images=LANES - 1))
    with pytest.raises(UnsupportedError, match=rf"batch: at least {LANES} on this CPU, got {LANES - 1}"):
        run(x, w)
    call = {"kernel": (5, 5), "num_filter": 4, "impl": "winograd"}
    with pytest.raises(Exception, match=f"batch: at least {LANES}"):
        ece408_op.New(mx.nd.array(x), mx.nd.array(w), **call).wait_to_read()
