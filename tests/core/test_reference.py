"""The float64 reference and the problem's sizes, against MXNet-independent definitions: loops, and finite sums."""

import ctypes
import math
import shutil
import subprocess

import numpy as np
import nvrtc
import pytest
from general_problems import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.core import reference
from ece408_op.errors import ProblemError
from ece408_op.problem import ATTRIBUTES, ConvProblem, PooledProblem

#: CUDA's words in C++: a grid of one thread.
SHIM = """
#include <cmath>
using std::fabs; using std::sqrt;
#define __global__
struct { unsigned x; } blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
"""


def by_loops(x, w, problem):
    """The definition, one output at a time."""
    y = np.zeros(problem.y_shape)
    (sh, sw), (top, left), (dh, dw) = problem.stride, problem.pad, problem.dilate
    each = problem.filters // problem.groups
    for b, m, i, j in np.ndindex(*y.shape):
        for c, p, q in np.ndindex(*w.shape[1:]):
            row, column = i * sh + p * dh - top, j * sw + q * dw - left
            if 0 <= row < problem.height and 0 <= column < problem.width:
                y[b, m, i, j] += x[b, m // each * w.shape[1] + c, row, column] * w[m, c, p, q]
    return y


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**32))
def test_the_reference_is_the_definition_and_its_gradients_are_the_adjoints(problem, seed):
    rng = np.random.default_rng(seed)
    x, w, dy = (rng.standard_normal(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    y = reference.convolve(x, w, problem)
    np.testing.assert_allclose(y, by_loops(x, w, problem), atol=1e-12)
    # The result is linear in x and in w: <dy, y(x)> = <gradient, x>, and alike for w.
    whole = np.vdot(dy, y)
    dx = reference.convolve(dy, w, problem.data_gradient)
    dw = reference.convolve(x, dy, problem.weight_gradient)
    assert (dx.shape, dw.shape) == (problem.x_shape, problem.w_shape)
    np.testing.assert_allclose([np.vdot(dx, x), np.vdot(dw, w)], whole, atol=1e-10)
    size = reference.magnitude(x, w, problem)
    assert (size >= abs(y) - 1e-12).all()


def test_needs_are_the_attributes_that_are_not_plain():
    plain = ConvProblem(2, 4, 9, 9, 6, 3)
    assert not plain.needs
    every = ConvProblem(2, 4, 9, 9, 6, 3, 2, (1, 2), (0, 1), (2, 1), 2)
    assert every.needs == ATTRIBUTES
    assert every.data_gradient.needs == ATTRIBUTES | {"data gradient"}
    assert every.weight_gradient.convolution == every
    assert isinstance(plain.pooled(True), PooledProblem)
    assert plain.sizes == {"batch": 2, "channels": 4, "height": 9, "width": 9, "filters": 6, "kernel": 3}
    assert ConvProblem(**every.sizes) == every
    shapes = ConvProblem.from_shapes(every.x_shape, every.w_shape, every.stride, every.pad, every.dilate, every.groups)
    assert shapes == every


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stride": (0, 1)}, "stride: expected at least 1, got 0"),
        ({"stride": 2}, "stride: expected two integers"),
        ({"pad": (0, -1)}, "pad: expected at least 0, got -1"),
        ({"groups": 3}, "groups: expected a divisor of 4 channels and 6 filters, got 3"),
        ({"dilate": (5, 1)}, r"at most the image's 9 rows and 9 columns, got \(3, 3\), dilated by \(5, 1\)"),
        ({"kernel_width": 12, "pad": (0, 1)}, r"with padding \(0, 1\), got \(3, 12\)"),
    ],
)
def test_wrong_attributes_are_named(changed, message):
    with pytest.raises(ProblemError, match=message):
        ConvProblem(2, 4, 9, 9, 6, 3, **changed)


PROBLEM = ConvProblem(3, 4, 9, 8, 5, 3)
X, W = (np.random.default_rng(4).standard_normal(shape).astype(np.float32) for shape in PROBLEM.shapes[:2])


def test_sums_are_the_convolution_its_magnitude_and_the_root_of_the_squares():
    exact, size, root = reference.sums(X, W, roots=True)
    x, w = X.astype(float), W.astype(float)
    np.testing.assert_allclose(exact, by_loops(x, w, PROBLEM), atol=1e-12)
    np.testing.assert_allclose(size, by_loops(abs(x), abs(w), PROBLEM))
    np.testing.assert_allclose(root**2, by_loops(x**2, w**2, PROBLEM))
    assert reference.sums(x, w)[2].shape == PROBLEM.y_shape


@nvrtc.needs_nvrtc
@pytest.mark.parametrize("architecture", [60, 90])
def test_the_gpus_kernel_compiles(architecture):
    kernels = nvrtc.compile_text(reference.SOURCE, architecture)
    assert kernels["sums"].spill_bytes == 0


def test_the_gpus_kernel_computes_the_same_sums(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "side.cpp").write_text(SHIM + reference.SOURCE)
    command = ["g++", "-O2", "-shared", "-fPIC", "-o", str(tmp_path / "side.so"), str(tmp_path / "side.cpp")]
    subprocess.run(command, check=True)
    found = np.full((3, *PROBLEM.y_shape), math.nan)
    places = [ctypes.c_void_p(array.ctypes.data) for array in (X, W, *found)]
    count = ctypes.c_ulonglong(found[0].size)
    ctypes.CDLL(str(tmp_path / "side.so")).sums(*places[:2], count, 4, 9, 8, 5, 3, *places[2:])
    for got, expected in zip(found, reference.sums(X, W, roots=True)):
        np.testing.assert_allclose(got, expected, atol=1e-12)
