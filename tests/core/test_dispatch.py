"""What "auto" chooses on the CPU follows the environment of the call."""

import os

import pytest
from cpu_kernels import CPU_KERNELS, LEVELS

from ece408_op.core import dispatch
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem

#: Profitable for Winograd on many cores and vectors, or on few of both.
PROBLEMS = [ConvProblem(batch, 64, 34, 34, 64, 3) for batch in (8, 16, 64, 256, 1024)]


def first(problem):
    """The first kernel of the list that supports the problem and is recommended for it, as of now."""
    kernels = [kernel for kernel in CPU_KERNELS if not kernel.not_supported_reasons(problem)]
    return next(kernel for kernel in kernels if kernel.recommended(problem))


def assert_first():
    assert [dispatch.select(problem) for problem in PROBLEMS] == [first(problem) for problem in PROBLEMS]


def test_it_follows_the_instruction_set(monkeypatch):
    for level in [*LEVELS, *reversed(LEVELS)]:
        monkeypatch.setenv("ECE408_SIMD", level)
        assert_first()


def test_a_kernel_that_no_longer_supports_a_problem_is_not_chosen(monkeypatch):
    problem = ConvProblem(5, 3, 12, 12, 8, 3)  # too few images and columns for more than four lanes
    if len(LEVELS) == 1:
        pytest.skip("needs a CPU with AVX2")
    monkeypatch.setenv("ECE408_SIMD", "sse")
    assert dispatch.select(problem, impl="winograd").name == "winograd"
    monkeypatch.setenv("ECE408_SIMD", "avx2")
    with pytest.raises(UnsupportedError, match="batch: at least 8 on this CPU, got 5"):
        dispatch.select(problem, impl="winograd")


def test_it_follows_the_cores_of_the_process():
    cores = os.sched_getaffinity(0)
    try:
        for some in (cores, {min(cores)}, cores):
            os.sched_setaffinity(0, some)
            assert_first()
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(("kernel", "padding", "computes"), [(63, 0, "im2col"), (17, 8, "direct")])
def test_a_data_gradient_of_filters_as_large_as_the_image_multiplies_no_padding_zeros(kernel, padding, computes):
    layer = ConvProblem(4, 3, 64, 64, 16, kernel, pad=(padding, padding))
    assert dispatch.select(layer.data_gradient).name == computes
