"""Padded convolutions and data gradients, as convolutions of images with margins of zeros.

x  of a data gradient of stride 1     the convolution of y with the padding D (K - 1) - P, D dilation, P padding,
                                      whose filters are w rotated by 180 degrees, channels and filters exchanged
y  of padding P                       the plain convolution of x with margins of P zeros
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem, DataGradient, Pair
from ece408_op.runtime.host_cpu import Cpu
from ece408_op.runtime.llvm import Function, Module, compiled_once

from ._ir import copy_rows

#: The most pixels per pixel of y of a data gradient: the others are products with zeros, which ``im2col`` leaves out.
#: With 64 channels and 64 filters of 17 x 17, it and ``direct`` take the same time at 9 pixels (on two cores).
MOST_PIXELS = 16


def margins(problem: ConvProblem) -> Pair:
    """Return the rows and columns of zeros around an image of the first operand; a data gradient's may be negative."""
    if not isinstance(problem, DataGradient):
        return problem.pad
    top, left = (d * (size - 1) - p for d, size, p in zip(problem.dilate, problem.w_shape[2:], problem.pad))
    return top, left


def limits(problem: ConvProblem) -> list[str]:
    """Return why a problem cannot be computed so: a data gradient whose padding exceeds its filters' reach."""
    negative = min(margins(problem)) < 0
    return [f"padding of a data gradient: less than the kernel, got {problem.pad}"] if negative else []


def forward(problem: ConvProblem) -> ConvProblem:
    """Return the convolution, with a batch of one, that computes the problem; a data gradient has stride 1."""
    if not isinstance(problem, DataGradient):
        return problem.with_batch(1)
    _, channels, height, width = problem.y_shape
    size, (kernel, kernel_width) = (1, channels, height, width, problem.channels), problem.w_shape[2:]
    return ConvProblem(*size, kernel, kernel_width, pad=margins(problem), dilate=problem.dilate, groups=problem.groups)


def plain(problem: ConvProblem) -> ConvProblem:
    """Return the plain convolution of an image with its margins: stride, dilation and groups must be 1."""
    layer, (top, left) = forward(problem), margins(problem)
    size = (1, layer.channels, layer.height + 2 * top, layer.width + 2 * left, layer.filters)
    return ConvProblem(*size, layer.kernel, layer.kernel_width)


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether that convolution is probably faster than ``im2col``, which multiplies no padding zeros."""
    pixels = problem.output_height * problem.output_width
    return not isinstance(problem, DataGradient) or problem.height * problem.width <= MOST_PIXELS * pixels


def forward_weights(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """Return the filters of that convolution, C-contiguous."""
    if not isinstance(problem, DataGradient):
        return w
    turned = w.reshape(problem.groups, -1, *w.shape[1:])[..., ::-1, ::-1]
    return np.ascontiguousarray(turned.transpose(0, 2, 1, 3, 4)).reshape(problem.channels, -1, *w.shape[2:])


@compiled_once
def copy_function(shape: tuple[int, int], margin: Pair, target: Cpu) -> Any:
    """Compile (from, to, planes), which copies planes of ``shape`` into planes with margins that are zeros already."""
    (height, width), (top, left) = shape, margin
    padded = width + 2 * left
    with Function(Module("padding", target), "copy", "source to", "planes", exported=True) as f:
        source, to, planes = f.arguments
        with f.range(planes) as plane:
            start = plane * ((height + 2 * top) * padded) + (top * padded + left)
            copy_rows(target.lanes, width, (source[plane * (height * width)], width), (to[start], padded), height)
    return f.compiled()
