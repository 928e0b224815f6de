"""expected: passed. A kernel in NumPy, which has two names."""

import sys

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ece408_op.core.kernel import CpuKernel

print("imported with the grader:", "pytest" in sys.modules or "ece408_op.grade.__main__" in sys.modules)


def run(problem, x, w, out, threads):
    windows = sliding_window_view(x, w.shape[2:], axis=(2, 3))
    out[...] = np.einsum("bcijpq,mcpq->bmij", windows, w, optimize=True)


mine = also_mine = CpuKernel("einsum", "NumPy's einsum over windows", run)
