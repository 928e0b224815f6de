"""The convolution and its gradients in float64, the reference of every kernel. Dispatch never selects it.

Rounding in float64 is some 2**29 times finer than in float32, so its own error does not count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem, DataGradient, WeightGradient
from ece408_op.runtime import cuda

#: The CUDA source of ``sums``: a thread computes outputs in a grid-stride loop.
SOURCE = r"""
typedef unsigned long long u64;
extern "C" __global__ void sums(const float* x, const float* w, u64 n, int C, int H, int W, int M, int K, double* exact,
                                double* size, double* root) {
  int OH = H - K + 1, OW = W - K + 1;
  for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < n; at += (u64)gridDim.x * blockDim.x) {
    int j = at % OW, i = at / OW % OH, m = at / ((u64)OW * OH) % M;
    u64 b = at / ((u64)OW * OH * M);
    double sum = 0, magnitude = 0, squares = 0;
    for (int c = 0; c < C; ++c)
      for (int p = 0; p < K; ++p)
        for (int q = 0; q < K; ++q) {
          double product = (double)x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
          sum += product;
          magnitude += fabs(product);
          squares += product * product;
        }
    exact[at] = sum;
    size[at] = magnitude;
    root[at] = sqrt(squares);
  }
}
"""


def convolve(a: np.ndarray, b: np.ndarray, problem: ConvProblem | None = None) -> np.ndarray:
    """Return the result of a problem in float64, from the two arrays that it reads.

    By default the plain convolution y, shape (B, M, OH, OW), of x (B, C, H, W) and w (M, C, K, L).
    """
    problem = problem or ConvProblem.from_shapes(a.shape, b.shape)
    if not problem.batch:
        return np.zeros(problem.shapes[2])
    # One matrix product per group and image: (M, C K L) times (C K L, OH OW), where C and M are those of a group.
    groups, shape = problem.groups, (problem.batch, problem.groups, -1, problem.output_height * problem.output_width)
    if isinstance(problem, WeightGradient):
        # An image at a time, since all of them take part in each element.
        total = np.zeros((groups, problem.filters // groups, math.prod(problem.w_shape[1:])))
        for y, image in zip(b.reshape(shape), windows(a, problem)):
            total += y.astype(np.float64) @ image.astype(np.float64).reshape(shape[1:]).transpose(0, 2, 1)
        return total.reshape(problem.w_shape)
    a, b = a.astype(np.float64), b.astype(np.float64)
    if isinstance(problem, DataGradient):
        columns = b.reshape(groups, problem.filters // groups, -1).transpose(0, 2, 1) @ a.reshape(shape)
        taps = problem.channels, problem.kernel, problem.kernel_width
        return add_windows(columns.reshape(problem.batch, *taps, *problem.y_shape[2:]), problem)
    filters = b.reshape(groups, problem.filters // groups, -1)
    return np.stack([filters @ image.reshape(shape[1:]) for image in windows(a, problem)]).reshape(problem.y_shape)


def magnitude(a: np.ndarray, b: np.ndarray, problem: ConvProblem | None = None) -> np.ndarray:
    """The sum of the products' absolute values at each element: the scale of the rounding errors there."""
    return convolve(np.abs(a), np.abs(b), problem)


def sums(x: Any, w: Any, roots: bool = False) -> tuple[Any, Any, Any]:
    """Return the plain convolution, and of its products the sum of absolute values and the root of the sum of squares.

    x (B, C, H, W) and w (M, C, K, K) are float32 arrays of NumPy, or of CuPy on the current GPU; the results
    (B, M, OH, OW) are float64. NumPy's root takes a third convolution; without ``roots`` it is the second result.
    """
    if isinstance(x, np.ndarray):
        x, w = x.astype(np.float64), w.astype(np.float64)
        size = magnitude(x, w)
        return convolve(x, w), size, np.sqrt(convolve(x * x, w * w)) if roots else size
    cp, p = cuda.cupy(), ConvProblem.from_shapes(x.shape, w.shape)
    exact, size, root = (cp.empty(p.y_shape, np.float64) for _ in range(3))
    sizes = (np.int32(one) for one in (p.channels, p.height, p.width, p.filters, p.kernel))
    kernel = cp.RawKernel(SOURCE, "sums", ("--std=c++17",))
    kernel((2048,), (256,), (x, w, np.uint64(exact.size), *sizes, exact, size, root))
    return exact, size, root


def windows(x: Any, problem: ConvProblem) -> Any:
    """Return the view (B, C, K, L, OH, OW) of the pixels that each element of a filter multiplies, of padded x."""
    (top, left), (dh, dw), (sh, sw) = problem.pad, problem.dilate, problem.stride
    if problem.pad != (0, 0):
        x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    shape = (*x.shape[:2], problem.kernel, problem.kernel_width, problem.output_height, problem.output_width)
    b, c, h, w = x.strides
    return np.lib.stride_tricks.as_strided(x, shape, (b, c, h * dh, w * dw, h * sh, w * sw), writeable=False)


def add_windows(columns: Any, problem: ConvProblem) -> Any:
    """Return the images (B, C, H, W) to whose pixels all elements of (B, C, K, L, OH, OW) are added."""
    (top, left), (height, width) = problem.pad, (problem.height, problem.width)
    padded = np.zeros((*columns.shape[:2], height + 2 * top, width + 2 * left), columns.dtype)
    counts, steps, strides = columns.shape[2:4], problem.dilate, problem.stride
    if np.prod(counts) > np.prod(columns.shape[4:]):  # Add whole windows, which are fewer.
        columns, steps, strides = columns.transpose(0, 1, 4, 5, 2, 3), strides, steps
    for place in np.ndindex(*columns.shape[2:4]):
        rows, positions = (
            slice(at * step, at * step + (size - 1) * stride + 1, stride)
            for at, step, size, stride in zip(place, steps, columns.shape[4:], strides)
        )
        padded[:, :, rows, positions] += columns[:, :, place[0], place[1]]
    return padded[:, :, top : top + problem.height, left : left + problem.width]
