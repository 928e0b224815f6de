"""expected: passed. It prints more than the limit of a file's bytes."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    windows = sliding_window_view(x, w.shape[2:], axis=(2, 3))
    out[...] = np.einsum("bcijpq,mcpq->bmij", windows, w, optimize=True)
    print("\u211d" * (1 << 22))


KERNEL = CpuKernel("mine", "a kernel", run)
