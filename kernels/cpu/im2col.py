"""im2col: write the windows of each image as the columns of a matrix, and multiply it by the filters.

    columns (C*K*L, OH*OW)      row (c, p, q) has the pixels of channel c that the filters' element (p, q) multiplies
    y[b] = w as (M, C*K*L)  times  columns        by BLAS

With groups, there is one product per group. The gradients are two other products with the same columns:

    data    columns = transposed w times y[b], and each column is added to the pixels of its window
    weight  w = sum over b of y[b] times transposed columns; float32 within an image or 64 pixels, else float64

Arithmetic intensity: 2*M*C*K*L*OH*OW FLOP per image, all in the product by BLAS. Memory: each pixel is written K*L
times into the columns and read again by BLAS, which limits layers with few filters.
Source: K. Chellapilla, S. Puri, P. Simard, High Performance Convolutional Neural Networks for Document Processing,
2006.
"""

from __future__ import annotations

import math

import numpy as np

from ece408_op.core.kernel import EPS32, CpuKernel, float32_bound, sum_bound
from ece408_op.core.reference import add_windows, windows
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, WEIGHT_GRADIENT, ConvProblem, DataGradient, WeightGradient
from ece408_op.runtime.thread_pool import parallel_for

#: The pixels of y, of several images if need be, per product of a weight gradient by BLAS. It then takes about as long
#: as adding its result to the float64 sums: per element of w, the product is 64 multiply-adds, up to 32 per cycle and
#: core, and the addition 24 bytes of memory.
PIXELS = 64


def _images(problem: ConvProblem, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Fill out from the first two operands."""
    groups, pixels = problem.groups, problem.output_height * problem.output_width
    filters, length = problem.filters // groups, int(np.prod(problem.w_shape[1:]))
    columns = np.empty((groups, length, pixels), np.float32)
    unrolled = columns.reshape(1, problem.channels, *problem.w_shape[2:], *problem.y_shape[2:])
    as_w, as_y = (groups, filters, length), (groups, filters, pixels)
    one = problem.with_batch(1)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity in an image are no error
        for image in range(len(a)):
            if isinstance(problem, DataGradient):
                np.matmul(b.reshape(as_w).transpose(0, 2, 1), a[image].reshape(as_y), out=columns)
                out[image] = add_windows(unrolled, one)[0]
                continue
            unrolled[...] = windows(a[image : image + 1], one)
            np.matmul(b.reshape(as_w), columns, out=out[image].reshape(as_y))


def _images_per_product(problem: ConvProblem) -> int:
    """Return the images whose columns a weight gradient multiplies at once: several if their outputs are small."""
    return max(1, min(problem.batch, PIXELS // (problem.output_height * problem.output_width)))


def _weights(problem: ConvProblem, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Add the weight gradient of some images to out, (M, C / G, K, L) in float64."""
    most, groups = max(1, min(len(x), _images_per_product(problem))), problem.groups
    size = problem.output_height * problem.output_width
    columns = np.empty(math.prod(problem.w_shape[1:]) * groups * most * size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(x), most):
            pixels = windows(x[first : first + most], problem).transpose(1, 2, 3, 0, 4, 5)
            count = pixels.shape[3] * size
            unrolled = columns[: pixels.size].reshape(pixels.shape)
            unrolled[...] = pixels
            rows = y[first : first + most].swapaxes(0, 1).reshape(groups, -1, count)
            out += np.matmul(rows, unrolled.reshape(groups, -1, count).transpose(0, 2, 1)).reshape(out.shape)


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill the third operand from the first two: the threads share the images evenly."""
    edges = [problem.batch * part // threads for part in range(threads + 1)]
    sums = np.zeros((threads, *out.shape)) if isinstance(problem, WeightGradient) else None

    def work(part: int) -> None:
        images = slice(edges[part], edges[part + 1])
        if sums is None:
            _images(problem, x[images], w, out[images])
        else:
            _weights(problem, x[images], w[images], sums[part])

    parallel_for(work, threads, threads)
    if sums is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            out[...] = sums.sum(axis=0)


def bound(problem: ConvProblem) -> float:
    """Return the error bound: a weight gradient rounds the sum of each product by BLAS, and the result."""
    if isinstance(problem, WeightGradient):
        return sum_bound(_images_per_product(problem) * problem.output_height * problem.output_width) + 2 * EPS32
    return float32_bound(problem)


KERNEL = CpuKernel(
    "im2col",
    "unroll in NumPy, multiply in BLAS",
    run,
    features=ATTRIBUTES | {DATA_GRADIENT, WEIGHT_GRADIENT},
    error_bound=bound,
)
