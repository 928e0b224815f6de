"""im2col: write the windows of each image as the columns of a matrix, and multiply it by the filters.

    columns (C*K*K, OH*OW)      row (c, p, q) is the image's plane c shifted by p rows and q columns
    y[b] = w as (M, C*K*K)  times  columns        by BLAS

Arithmetic intensity: 2*M*C*K*K*OH*OW FLOP per image, all in the product by BLAS. Memory: each pixel is written K*K
times into the columns and read again by BLAS, which limits layers with few filters.
Source: K. Chellapilla, S. Puri, P. Simard, High Performance Convolutional Neural Networks for Document Processing,
2006.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.thread_pool import share


def _images(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    k = problem.kernel
    pixels = problem.output_height * problem.output_width
    filters = w.reshape(problem.filters, problem.products)
    columns = np.empty((problem.channels, k, k, problem.output_height, problem.output_width), np.float32)
    for image, y in zip(x, out):
        windows = sliding_window_view(image, (k, k), axis=(1, 2))  # type: ignore[call-overload]  # (C, OH, OW, K, K)
        columns[...] = windows.transpose(0, 3, 4, 1, 2)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity in an image are no error
            np.matmul(filters, columns.reshape(problem.products, pixels), out=y.reshape(problem.filters, pixels))


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): the threads share the images evenly."""
    edges = [problem.batch * part // threads for part in range(threads + 1)]

    def work(part: int) -> None:
        images = slice(edges[part], edges[part + 1])
        _images(problem, x[images], w, out[images])

    share(work, threads, threads)


KERNEL = CpuKernel("im2col", "unroll in NumPy, multiply in BLAS", run)
