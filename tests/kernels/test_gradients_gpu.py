"""Convolutions with every attribute and both gradients on the GPU, against float64 with each kernel's bound."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD, PROBLEMS, random_problems
from gpu_case import poisoned_run, require_gpu, require_gpus
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.kernels.cuda import cudnn
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in CUDA_KERNELS if kernel.features & {"data gradient", "weight gradient", "a stride"}]
KERNEL = pytest.mark.parametrize("kernel", [*KERNELS, cudnn.KERNEL], ids=lambda kernel: kernel.name)
#: Besides PROBLEMS: gradients of larger layers, and layers of real networks with few images.
LARGE = [
    *[each for plain in COURSE for each in (plain.with_batch(67).data_gradient, plain.with_batch(67).weight_gradient)],
    *[each for plain in ODD for each in (plain.data_gradient, plain.weight_gradient)],
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


def check(kernel, problem: ConvProblem, seed: int = 0) -> None:
    """Run the kernel into poisoned memory, and compare with float64."""
    cupy = require_gpu()
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in problem.shapes[:2])
    out = poisoned_run(kernel, problem, cupy.asarray(a), cupy.asarray(b))
    found = compare(out.get(), a, b, kernel, problem=problem)
    assert found.passed, f"{kernel.name}, {problem}: {found}"


def require(kernel):
    """Skip the test where the kernel does not run at all."""
    require_gpu()
    if kernel is cudnn.KERNEL:
        pytest.importorskip("cudnn", exc_type=ImportError)
    if not kernel.runs_on(cuda.chip()):
        pytest.skip(f"{kernel.name} does not take the layer: it does not run on {cuda.chip().name}")


@KERNEL
def test_it_is_right(kernel):
    require(kernel)
    taken = [problem for problem in [*PROBLEMS, *LARGE] if not kernel.not_supported_reasons(problem, cuda.chip())]
    assert len(taken) >= 3
    for problem in taken:
        check(kernel, problem)


@KERNEL
def test_it_is_right_on_random_problems(kernel):
    require(kernel)
    checked = []

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problem=random_problems([1, 2, 7], 30), seed=st.integers(0, 1000))
    def each(problem, seed):
        assume(not kernel.not_supported_reasons(problem, cuda.chip()))
        check(kernel, problem, seed)
        checked.append(problem)

    each()
    assert len(checked) >= 2


def test_auto_takes_every_problem_on_the_gpu():
    require_gpu()
    for problem in [*PROBLEMS, *LARGE]:
        check(dispatch.select(problem, "gpu", chip=cuda.chip()), problem)


@KERNEL
def test_arrays_of_another_gpu_than_the_current_one(kernel):
    require(kernel)
    cupy = require_gpus(2)
    problem = next(one for one in PROBLEMS if not kernel.not_supported_reasons(one, cuda.chip(1)))
    with cupy.cuda.Device(1):
        a, b = (cupy.ones(shape, "f") for shape in problem.shapes[:2])
        out = cupy.full(problem.shapes[2], cupy.nan, "f")
    kernel.run(problem, a, b, out)
    assert compare(out.get(), a.get(), b.get(), kernel, problem=problem).passed


def test_gradients_of_no_images():
    cupy = require_gpu()
    for problem in (PROBLEMS[0].with_batch(0).weight_gradient, PROBLEMS[0].with_batch(0).data_gradient):
        kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
        a, b = (cupy.zeros(shape, "f") for shape in problem.shapes[:2])
        out = cupy.full(problem.shapes[2], cupy.nan, "f")
        kernel.run(problem, a, b, out)
        assert bool((out == 0).all())


def test_two_runs_of_a_weight_gradient_agree_in_every_bit():
    cupy = require_gpu()
    problem = COURSE[2].with_batch(100).weight_gradient
    a, b = (cupy.random.default_rng(1).standard_normal(shape, dtype="f") for shape in problem.shapes[:2])
    for kernel in (kernel for kernel in KERNELS if not kernel.not_supported_reasons(problem, cuda.chip())):
        results = [cupy.empty(problem.shapes[2], "f") for _ in range(2)]
        for out in results:
            kernel.run(problem, a, b, out)
        assert bool((results[0] == results[1]).all()), kernel.name
