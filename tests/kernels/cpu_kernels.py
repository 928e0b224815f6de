"""The CPU kernels of the list, and problems that they take."""

from __future__ import annotations

import pytest

from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem

CPU_KERNELS = [kernel for kernel in KERNELS if kernel.device == "cpu"]

#: A kernel may want as many images as a vector has lanes.
MORE_IMAGES = 16

#: Those that compute a convolution; the others compute gradients only.
FORWARD = [
    kernel for kernel in CPU_KERNELS if not kernel.not_supported_reasons(ConvProblem(MORE_IMAGES, 1, 19, 19, 1, 3))
]

each_kernel = pytest.mark.parametrize("kernel", FORWARD, ids=lambda kernel: kernel.name)


def fitting(kernel, problem):
    """The problem, with more images if the kernel wants them; None where it does not take the layer."""
    for some in (problem, problem.with_batch(problem.batch + MORE_IMAGES)):
        if not kernel.not_supported_reasons(some):
            return some
    return None


def fitting_or_skip(kernel, problem):
    """The same; skips the test instead of None."""
    found = fitting(kernel, problem)
    if found is None:
        pytest.skip(f"{kernel.name} does not take the layer: {'; '.join(kernel.not_supported_reasons(problem))}")
    return found
