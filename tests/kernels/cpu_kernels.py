"""Shared by the tests of CPU kernels: the kernels, this CPU's instruction sets, problems, and the check of a run."""

import numpy as np
import pooled_case

from ece408_op.core import reference
from ece408_op.core.check import compare
from ece408_op.kernels import KERNELS
from ece408_op.problem import PooledProblem
from ece408_op.runtime.host_cpu import cpu

CPU_KERNELS = [kernel for kernel in KERNELS if kernel.device == "cpu"]
LEVELS = ["sse", "avx2", "avx512"][: ["sse", "avx2", "avx512"].index(cpu().level) + 1]

#: A kernel may want as many images as a vector has lanes.
MORE_IMAGES = 16


def fitting(kernel, problem):
    """The problem, with more images if the kernel wants them; None where it does not take the layer."""
    for some in (problem, problem.with_batch(problem.batch + MORE_IMAGES)):
        if not kernel.not_supported_reasons(some):
            return some
    return None


def arrays(problem, seed=0):
    """Normal operands; with pooling, filters so small that tanh is not 1."""
    random = np.random.RandomState(seed)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2])
    return a, b / np.float32(np.sqrt(problem.products)) if isinstance(problem, PooledProblem) else b


def run(kernel, problem, a, b, threads=2):
    out = np.full(problem.shapes[2], np.nan, np.float32)
    kernel.run(problem, a, b, out, threads)
    return out


def assert_right(kernel, problem, a, b, out):
    if isinstance(problem, PooledProblem):
        plain = problem.convolution
        pooled_case.assert_right(out, problem, reference.convolve(a, b, plain), reference.magnitude(a, b, plain))
        return
    found = compare(out, a, b, kernel, problem=problem)
    assert found.passed, f"{problem}: {found}"


def check(kernel, problem, a, b):
    assert_right(kernel, problem, a, b, run(kernel, problem, a, b))
