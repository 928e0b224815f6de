"""Every CUDA kernel against float64 on the GPU, plain and fused with pooling: fixed, random and large layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD, random_layers
from gpu_case import assert_right, check, check_refusal, inputs, reference, require_gpu, require_support, supported
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core import reference as numpy_reference
from ece408_op.problem import TANH_POOL, ConvProblem, PooledProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu

#: Every kernel, and those that fuse pooling once more for that.
KERNELS = [
    (kernel, pooled) for kernel in CUDA_KERNELS for pooled in (False, True)[: 1 + (TANH_POOL in kernel.features)]
]
KERNEL = pytest.mark.parametrize(
    ("kernel", "pooled"), KERNELS, ids=[f"{kernel.name}{'-pooled' * pooled}" for kernel, pooled in KERNELS]
)

#: The course's layers with few images, odd ones, and many images of a small layer.
PLAIN = [
    *[problem.with_batch(67) for problem in COURSE],
    *ODD,
    ConvProblem(1, 64, 30, 41, 33, 11),
    ConvProblem(2, 3, 11, 200, 128, 3),
    ConvProblem(67, 3, 30, 30, 16, 5),
    ConvProblem(100_000, 1, 8, 7, 3, 3),
    ConvProblem(3, 2, 5, 14, 3, 4),
]
#: The same with both conventions of pooling; "valid" needs two rows and columns.
POOLED = [plain.pooled(full) for full in (False, True) for plain in PLAIN if full or min(plain.y_shape[2:]) > 1]
LAYERS = {False: PLAIN, True: POOLED}
#: The least number of layers that a kernel must take, so that none passes by refusing all. Some kernels take only
#: layers with one channel, or only pointwise ones.
LEAST = 3
#: Every kernel takes one of these.
SMALL = [ConvProblem(9, 4, 20, 24, 16, 5), ConvProblem(9, 1, 20, 24, 16, 5), ConvProblem(9, 131, 20, 24, 64, 1)]

#: Some image begins at output 2**31.
MANY_IMAGES = {False: ConvProblem(8200, 1, 34, 34, 256, 3), True: ConvProblem(34_000, 1, 34, 34, 256, 3).pooled(False)}
LARGE_IMAGES = {
    False: [ConvProblem(1, 64, 5800, 5800, 1, 1), ConvProblem(1, 1, 3000, 3000, 256, 1)],
    True: [ConvProblem(1, 4, 24_000, 24_000, 2, 2).pooled(False)],
}


def _cases(cases):
    return pytest.mark.parametrize(("kernel", "problem"), cases, ids=[f"{kernel.name}-{p}" for kernel, p in cases])


def small(kernel, pooled, batch=9):
    """One of SMALL that the kernel takes."""
    problems = [problem.with_batch(batch) for problem in SMALL]
    return supported(kernel, [problem.pooled(False) for problem in problems] if pooled else problems)[0]


def test_the_reference_agrees_with_the_one_in_numpy():
    cupy = require_gpu()
    x, w, _ = inputs(cupy, ConvProblem(3, 5, 13, 9, 4, 3))
    exact, magnitude = reference(cupy, x, w)
    np.testing.assert_allclose(exact.get(), numpy_reference.convolve(x.get(), w.get()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(magnitude.get(), numpy_reference.magnitude(x.get(), w.get()), rtol=1e-13)


@KERNEL
def test_it_is_right_on_enough_layers_and_refuses_the_others_with_the_reasons(kernel, pooled):
    taken = supported(kernel, LAYERS[pooled], LEAST)
    for problem in LAYERS[pooled]:
        if problem in taken:
            check(kernel, problem)
        else:
            check_refusal(kernel, problem)


@KERNEL
def test_it_is_right_on_random_layers(kernel, pooled):
    small(kernel, pooled)
    checked = []

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problem=random_layers([1, 2, 7], 60), full=st.booleans(), seed=st.integers(0, 1000))
    def each(problem, full, seed):
        if pooled:
            assume(full or min(problem.y_shape[2:]) > 1)
            problem = problem.pooled(full)
        assume(not kernel.not_supported_reasons(problem, cuda.chip()))
        check(kernel, problem, seed)
        checked.append(problem)

    each()
    assert len(checked) >= LEAST


@KERNEL
def test_it_takes_views_aligned_to_four_bytes_only(kernel, pooled):
    problem, cupy = small(kernel, pooled), cuda.cupy()
    for moved in range(3):
        arrays = list(inputs(cupy, problem))
        array = arrays[moved]
        view = cupy.full(array.size + 1, cupy.nan, "f")[1:].reshape(array.shape)
        view[...] = array
        assert view.data.ptr % 16 == 4
        arrays[moved] = view
        kernel.run(problem, *arrays)
        assert_right(kernel, problem, *arrays)


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_a_bad_pixel_reaches_only_the_windows_that_hold_it(kernel):
    problem, cupy = small(kernel, False), cuda.cupy()
    x, w, out = inputs(cupy, problem)
    # First and last elements too: a kernel that reads beyond its window would find them.
    for place in [(0, 0, 0, 0), (2, problem.channels // 2, 8, 7), (8, problem.channels - 1, 19, 23)]:
        x[place] = cupy.inf
    kernel.run(problem, x, w, out)
    exact, _ = reference(cupy, x, w)
    assert bool((cupy.isfinite(out) == cupy.isfinite(exact)).all())


@KERNEL
def test_an_empty_batch_is_nothing_to_do(kernel, pooled):
    problem = small(kernel, pooled, batch=0)
    kernel.run(problem, *inputs(cuda.cupy(), problem))


# ------------------------------------------------------------------------------ tensors of 2**31 elements and more


def _large(kernel: Any, problem: ConvProblem) -> tuple[Any, Any, Any]:
    """Run the kernel, if the GPU's memory allows; return x, w and the output, which is of more than 2**31 elements."""
    cupy = require_support(kernel, problem)
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 3 * problem.bytes:
        pytest.skip(f"needs {3 * problem.bytes / 1e9:.0f} GB of free GPU memory, has {free / 1e9:.0f}")
    x, w, out = inputs(cupy, problem)
    kernel.run(problem, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert max(x.size, out.size) > 2**31
    assert not any(bool(cupy.isnan(part).any()) for part in cupy.array_split(out.ravel(), 16))
    return x, w, out


@KERNEL
def test_more_than_two_to_the_31_outputs(kernel, pooled):
    problem = MANY_IMAGES[pooled]
    x, w, out = _large(kernel, problem)
    boundary = 2**31 // out[0].size
    for first in (0, boundary // 2 - 1, boundary - 2, boundary, problem.batch - 2):
        part = slice(first, first + 2)
        assert_right(kernel, problem.with_batch(2), x[part], w, out[part])


@_cases([(kernel, problem) for kernel, pooled in KERNELS for problem in LARGE_IMAGES[pooled]])
def test_one_image_of_more_than_two_to_the_31_elements(kernel, problem):
    x, w, out = _large(kernel, problem)
    pooled, cupy = isinstance(problem, PooledProblem), cuda.cupy()
    step = 2 if pooled else 1  # rows of the convolution per row of y
    for m in sorted({0, problem.filters // 2, problem.filters - 1}):
        for first in (0, out.shape[2] - 40):
            rows = x[:, :, step * first : step * (first + 40) + problem.kernel - 1]
            part = ConvProblem(1, problem.channels, rows.shape[2], problem.width, 1, problem.kernel)
            got = cupy.ascontiguousarray(out[:, m : m + 1, first : first + 40])
            assert_right(kernel, part.pooled(False) if pooled else part, rows, w[m : m + 1], got)
