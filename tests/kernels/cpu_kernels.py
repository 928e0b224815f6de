"""The CPU kernels of the list, and problems that they take."""

from __future__ import annotations

from ece408_op.kernels import KERNELS

CPU_KERNELS = [kernel for kernel in KERNELS if kernel.device == "cpu"]

#: A kernel may want as many images as a vector has lanes.
MORE_IMAGES = 16


def fitting(kernel, problem):
    """The problem, with more images if the kernel wants them; None where it does not take the layer."""
    for some in (problem, problem.with_batch(problem.batch + MORE_IMAGES)):
        if not kernel.not_supported_reasons(some):
            return some
    return None
