"""Every CUDA kernel against float64 on the GPU, on fixed and on random layers, its output poisoned first."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD
from gpu_case import assert_right, check, inputs, reference, refused, require_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ece408_op.core import reference as numpy_reference
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu

KERNEL = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)

#: Beside the odd ones: the course's layers with few images, one of an odd number of filter rows that are worth asking
#: for ahead (register_blocked_uniform), and many images of a small layer.
LAYERS = [
    *[problem.with_batch(67) for problem in COURSE],
    *ODD,
    ConvProblem(1, 64, 30, 41, 33, 11),
    ConvProblem(2, 3, 11, 200, 128, 3),
    ConvProblem(67, 3, 30, 30, 16, 5),
    ConvProblem(100_000, 1, 8, 7, 3, 3),
]

layers = st.builds(
    lambda b, c, h, w, m, k: ConvProblem(b, c, h + k - 1, w + k - 1, m, k),
    st.sampled_from([1, 2, 7]),
    st.integers(1, 64),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 256),
    st.integers(1, 11),
)


def test_the_reference_agrees_with_the_one_in_numpy():
    cupy = require_gpu()
    x, w, _ = inputs(cupy, ConvProblem(3, 5, 13, 9, 4, 3))
    exact, magnitude = reference(cupy, x, w)
    np.testing.assert_allclose(exact.get(), numpy_reference.convolve(x.get(), w.get()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(magnitude.get(), numpy_reference.magnitude(x.get(), w.get()), rtol=1e-13)


@KERNEL
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_it_is_right(kernel, problem):
    require_gpu()
    if refused(kernel, problem):
        return
    check(kernel, problem)


@KERNEL
def test_it_is_right_on_random_layers(kernel):
    require_gpu()

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problem=layers, seed=st.integers(0, 1000))
    def hold(problem, seed):
        if not kernel.not_supported_reasons(problem, cuda.chip()):
            check(kernel, problem, seed)

    hold()


@KERNEL
@pytest.mark.parametrize("moved", ["x", "w", "y"])
def test_it_takes_views_aligned_to_four_bytes_only(kernel, moved):
    cupy = require_gpu()
    problem = ConvProblem(9, 4, 20, 24, 16, 5)
    if refused(kernel, problem):
        return
    arrays = dict(zip("xwy", inputs(cupy, problem)))
    array = arrays[moved]
    view = cupy.full(array.size + 1, cupy.nan, "f")[1:].reshape(array.shape)
    view[...] = array
    assert view.data.ptr % 16 == 4
    arrays[moved] = view
    kernel.run(problem, *arrays.values())
    assert_right(kernel, problem, *arrays.values())


@KERNEL
def test_a_bad_pixel_reaches_only_the_windows_that_hold_it(kernel):
    cupy = require_gpu()
    problem = ConvProblem(5, 3, 17, 15, 11, 3)
    if refused(kernel, problem):
        return
    x, w, out = inputs(cupy, problem)
    # First and last elements too: that is where a kernel that reads beyond its window would look.
    for place in [(0, 0, 0, 0), (2, 1, 8, 7), (4, 2, 16, 14)]:
        x[place] = cupy.inf
    kernel.run(problem, x, w, out)
    exact, _ = reference(cupy, x, w)
    assert bool((cupy.isfinite(out) == cupy.isfinite(exact)).all())


@KERNEL
def test_an_empty_batch_is_nothing_to_do(kernel):
    cupy = require_gpu()
    problem = ConvProblem(0, 3, 9, 9, 4, 3)
    if refused(kernel, problem):
        return
    kernel.run(problem, *inputs(cupy, problem))
