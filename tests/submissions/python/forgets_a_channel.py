"""expected: wrong. It sums over the first channel alone."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ece408_op.core.kernel import CpuKernel


def run(problem, x, w, out, threads):
    windows = sliding_window_view(x, w.shape[2:], axis=(2, 3))
    out[...] = np.einsum("bijpq,mpq->bmij", windows[:, 0], w[:, 0])


KERNEL = CpuKernel("mine", "a kernel", run)
