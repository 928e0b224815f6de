"""Every CUDA kernel on the GPU against float64: plain, fused with pooling, with every attribute, both gradients."""

from typing import Any

import numpy as np
import pooled_case
import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD, PROBLEMS, random_layers, random_problems
from gpu_case import assert_right, check, check_refusal, inputs, reference, require_gpu, require_gpus, require_support
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core import dispatch
from ece408_op.core import reference as numpy_reference
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import TANH_POOL, ConvProblem, PooledProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu


def each(kernels):
    ids = [f"{kernel.name}{'-pooled' * pooled}" for kernel, pooled in kernels]
    return pytest.mark.parametrize(("kernel", "pooled"), kernels, ids=ids)


#: Every kernel, and those that fuse pooling once more for that.
KERNELS = [
    (kernel, pooled) for kernel in CUDA_KERNELS for pooled in (False, True)[: 1 + (TANH_POOL in kernel.features)]
]
KERNEL, KERNEL_OR_CUDNN = each(KERNELS), each([*KERNELS, (cudnn.KERNEL, False)])
POOLING = each([case for case in KERNELS if case[1]])

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
#: Every attribute, gradients of these layers, and layers of real networks with few images.
GENERAL = [
    *PROBLEMS,
    *[each for plain in PLAIN[: len(COURSE) + len(ODD)] for each in (plain.data_gradient, plain.weight_gradient)],
    *[
        each
        for plain in (
            ConvProblem(2, 3, 224, 224, 64, 7, stride=(2, 2), pad=(3, 3)),
            ConvProblem(3, 64, 56, 56, 64, 3, pad=(1, 1)),
            ConvProblem(2, 192, 17, 17, 192, 1, 7, pad=(0, 3)),
            ConvProblem(2, 256, 56, 56, 128, 1, stride=(2, 2)),
            ConvProblem(3, 32, 112, 112, 32, 3, pad=(1, 1), groups=32),
            ConvProblem(3, 96, 56, 56, 96, 3, stride=(2, 2), pad=(1, 1), groups=96),
        )
        for each in (plain, plain.data_gradient, plain.weight_gradient)
    ],
]
#: Both conventions of pooling; "valid" needs two rows and columns.
POOLED = [plain.pooled(full) for full in (False, True) for plain in PLAIN if full or min(plain.y_shape[2:]) > 1]
LAYERS = {False: [*PLAIN, *GENERAL], True: POOLED}
#: The least number of layers that a kernel must take, so that none passes by refusing all. Some kernels take only
#: layers with one channel, or only pointwise ones.
LEAST = 3
#: Every kernel takes one of these.
SMALL = [ConvProblem(9, 4, 20, 24, 16, 5), ConvProblem(9, 1, 20, 24, 16, 5), ConvProblem(9, 131, 20, 24, 64, 1)]
SMALL += [SMALL[0].data_gradient, SMALL[0].weight_gradient, SMALL[2].weight_gradient]

#: Some image begins at output 2**31.
MANY_IMAGES = {False: ConvProblem(8200, 1, 34, 34, 256, 3), True: ConvProblem(34_000, 1, 34, 34, 256, 3).pooled(False)}
LARGE_IMAGES = {
    False: [ConvProblem(1, 64, 5800, 5800, 1, 1), ConvProblem(1, 1, 3000, 3000, 256, 1)],
    True: [ConvProblem(1, 4, 24_000, 24_000, 2, 2).pooled(False)],
}


def test_the_reference_agrees_with_the_one_in_numpy():
    cupy = require_gpu()
    x, w, _ = inputs(cupy, ConvProblem(3, 5, 13, 9, 4, 3))
    exact, magnitude = reference(cupy, x, w)
    np.testing.assert_allclose(exact.get(), numpy_reference.convolve(x.get(), w.get()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(magnitude.get(), numpy_reference.magnitude(x.get(), w.get()), rtol=1e-13)


def require(kernel):
    """Return CuPy; skip the test where the kernel does not run at all."""
    cupy = require_gpu()
    if kernel is cudnn.KERNEL:
        pytest.importorskip("cudnn", exc_type=ImportError)
    if not kernel.runs_on(cuda.chip()):
        pytest.skip(f"{kernel.name} does not take the layer: it does not run on {cuda.chip().name}")
    return cupy


def takes(kernel, problem):
    return not kernel.not_supported_reasons(problem, cuda.chip())


def small(kernel, pooled, batch=9):
    """One of SMALL that the kernel takes."""
    require(kernel)
    problems = [problem.with_batch(batch) for problem in SMALL]
    return next(each for each in ([p.pooled(False) for p in problems] if pooled else problems) if takes(kernel, each))


@KERNEL_OR_CUDNN
def test_it_is_right_on_enough_layers_and_refuses_the_others_with_the_reasons(kernel, pooled):
    require(kernel)
    layers = LAYERS[pooled] if kernel.sources else GENERAL
    assert sum(takes(kernel, problem) for problem in layers) >= LEAST
    for problem in layers:
        if takes(kernel, problem):
            check(kernel, problem)
        else:
            check_refusal(kernel, problem)


@KERNEL_OR_CUDNN
def test_it_is_right_on_random_layers(kernel, pooled):
    require(kernel)
    checked = []
    plain = random_layers([1, 2, 7], 60)

    @settings(max_examples=12 if pooled else 40, suppress_health_check=list(HealthCheck))
    @given(
        problem=plain if pooled else st.one_of(plain, random_problems([1, 2, 7], 30)),
        full=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def each(problem, full, seed):
        if pooled:
            assume(full or min(problem.y_shape[2:]) > 1)
            problem = problem.pooled(full)
        assume(takes(kernel, problem))
        check(kernel, problem, seed)
        checked.append(problem)

    each()
    assert len(checked) >= 2


def test_auto_takes_every_problem_on_the_gpu():
    require_gpu()
    for problem in GENERAL:
        check(dispatch.select(problem, "gpu", chip=cuda.chip()), problem)


@KERNEL_OR_CUDNN
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
    if problem.operands != ConvProblem.operands:
        pytest.skip(f"{kernel.name} does not take the layer: it computes a gradient only")
    x, w, out = inputs(cupy, problem)
    # First and last elements too: a kernel that reads beyond its window would find them.
    for place in [(0, 0, 0, 0), (2, problem.channels // 2, 8, 7), (8, problem.channels - 1, 19, 23)]:
        x[place] = cupy.inf
    kernel.run(problem, x, w, out)
    exact, _ = reference(cupy, x, w)
    assert bool((cupy.isfinite(out) == cupy.isfinite(exact)).all())


@KERNEL_OR_CUDNN
def test_of_no_images_only_a_weight_gradient_has_elements_and_they_are_zero(kernel, pooled):
    problem = small(kernel, pooled, batch=0)
    a, b, out = inputs(cuda.cupy(), problem)
    kernel.run(problem, a, b, out)
    assert bool((out == 0).all())


@each([(kernel, pooled) for kernel, pooled in [*KERNELS, (cudnn.KERNEL, False)] if not pooled])
def test_arrays_of_another_gpu_than_the_current_one(kernel, pooled):
    require(kernel)
    cupy = require_gpus(2)
    problem = small(kernel, pooled)
    with cupy.cuda.Device(1):
        a, b, out = inputs(cupy, problem)
    kernel.run(problem, a, b, out)
    with cupy.cuda.Device(1):
        assert_right(kernel, problem, a, b, out)


def test_two_runs_of_a_weight_gradient_agree_in_every_bit():
    cupy = require_gpu()
    problem = COURSE[2].with_batch(100).weight_gradient
    a, b, _ = inputs(cupy, problem)
    for kernel in (kernel for kernel in CUDA_KERNELS if takes(kernel, problem)):
        results = [cupy.empty(problem.shapes[2], "f") for _ in range(2)]
        for out in results:
            kernel.run(problem, a, b, out)
        assert bool((results[0] == results[1]).all()), kernel.name


# ------------------------------------------------------------------------------------------- tanh of 2 x 2 maxima


@POOLING
def test_a_maximum_leaves_nan_out(kernel, pooled):
    cupy, problem = require(kernel), ConvProblem(3, 2, 18, 16, 5, 3).pooled(False)
    x, w, out = inputs(cupy, problem)
    x[0, 0, 5, 5], x[1, 1, 9, 7], x[2, 0, 4:12, 3:11] = cupy.nan, cupy.inf, cupy.nan
    kernel.run(problem, x, w, out)
    convolved, _ = reference(cupy, x, w)
    exact = pooled_case.maxima(convolved, False, cupy)
    assert bool((cupy.isnan(out) == cupy.isnan(exact)).all())
    assert bool(cupy.isnan(out).any())
    assert bool((abs(out)[cupy.isinf(exact)] == 1).all())


@POOLING
def test_tanh_keeps_to_its_error(kernel, pooled):
    """Every 997th float32 from 0 to 32 and the negative ones, each as the maximum of four."""
    cupy = require(kernel)
    bits = np.arange(np.float32(2.0**-126).view(np.uint32), np.float32(32).view(np.uint32), 997, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    values = values[: len(values) // 1000 * 1000].reshape(-1, 1, 10, 100)
    problem = ConvProblem(len(values), 1, 20, 200, 1, 1).pooled(False)
    x = cupy.asarray(values.repeat(2, axis=2).repeat(2, axis=3))
    out = cupy.full(problem.y_shape, cupy.nan, "f")
    kernel.run(problem, x, cupy.ones(problem.w_shape, "f"), out)
    exact = np.tanh(values.astype(np.float64))
    below = np.nextafter(np.abs(exact).astype(np.float32), np.float32(0))
    error = np.abs(out.get() - exact) / np.spacing(below).astype(np.float64)
    worst = f"{error.max()} units in the last place at {values.ravel()[error.argmax()]}"
    assert error.max() < pooled_case.TANH_ULPS, worst


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


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [pytest.param(k, p, id=f"{k.name}-{p}") for k, pooled in KERNELS for p in LARGE_IMAGES[pooled]],
)
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
