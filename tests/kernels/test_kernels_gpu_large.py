"""Kernels on tensors of at least 2**31 elements: many images, one large image, many outputs of one image."""

from __future__ import annotations

from typing import Any

import pytest
from cuda_layers import CUDA_KERNELS
from gpu_case import assert_right, inputs, refused, require_gpu

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu

KERNEL = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)

MANY = ConvProblem(8200, 1, 34, 34, 256, 3)  # image 8192 begins at output 2**31
WIDE_INPUT = ConvProblem(1, 64, 5800, 5800, 1, 1)
WIDE_OUTPUT = ConvProblem(1, 1, 3000, 3000, 256, 1)


def _free_or_skip(cupy: Any, problem: ConvProblem) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 3 * problem.bytes:
        pytest.skip(f"needs {3 * problem.bytes / 1e9:.0f} GB of free GPU memory, has {free / 1e9:.0f}")


@KERNEL
def test_more_than_two_to_the_31_outputs(kernel):
    cupy = require_gpu()
    _free_or_skip(cupy, MANY)
    x, w, out = inputs(cupy, MANY)
    kernel.run(MANY, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert out.size > 2**31
    # Everything was written, and the images at both ends and around element 2**31 are right.
    assert not any(bool(cupy.isnan(out[first : first + 1000]).any()) for first in range(0, 8200, 1000))
    for first, last in [(0, 2), (4095, 4097), (8190, 8194), (8198, 8200)]:
        part = slice(first, last)
        assert_right(kernel, MANY.with_batch(last - first), x[part], w, out[part])


@KERNEL
@pytest.mark.parametrize("problem", [WIDE_INPUT, WIDE_OUTPUT], ids=["input", "output"])
def test_one_image_of_more_than_two_to_the_31_elements(kernel, problem):
    cupy = require_gpu()
    if refused(kernel, problem):
        return
    _free_or_skip(cupy, problem)
    x, w, out = inputs(cupy, problem)
    kernel.run(problem, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert max(x.size, out.size) > 2**31
    for m in sorted({0, problem.filters // 2, problem.filters - 1}):
        for rows in (slice(0, 50), slice(problem.height - 50, problem.height)):
            part = cupy.ascontiguousarray(out[:, m : m + 1, rows])
            small = ConvProblem(1, problem.channels, 50, problem.width, 1, 1)
            assert_right(kernel, small, x[:, :, rows], w[m : m + 1], part)
    assert not any(bool(cupy.isnan(out[:, m]).any()) for m in range(problem.filters))
