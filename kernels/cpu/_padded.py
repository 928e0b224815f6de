"""Padded convolutions and data gradients as plain convolutions of a padded copy of some images.

    y  of padding P               the plain convolution of x with margins of P zeros
    x  of a data gradient         the plain convolution of y with margins of K - 1 - P zeros, whose filters are w turned
                                  by half a turn, with channels and filters exchanged

A chunk of images stays in L2 between the copy and the convolution.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.problem import ConvProblem, DataGradient, Pair
from ece408_op.runtime.llvm import F32_PTR, I64, Cpu, compile_function, compiled_once, element, for_range, new_function
from ece408_op.runtime.llvm import offset as offset_of

from ._direct_tile import copy_rows


def margins(problem: ConvProblem) -> Pair:
    """Return the rows and columns of zeros around an image of the first operand; a data gradient's may be negative."""
    if isinstance(problem, DataGradient):
        return problem.kernel - 1 - problem.pad[0], problem.kernel_width - 1 - problem.pad[1]
    return problem.pad


def plain(problem: ConvProblem) -> ConvProblem:
    """Return the plain convolution of the images with their margins: stride, dilation and groups must be 1."""
    batch, channels, height, width = problem.shapes[0]
    top, left = margins(problem)
    filters = problem.shapes[2][1]
    return ConvProblem(
        batch, channels, height + 2 * top, width + 2 * left, filters, problem.kernel, problem.kernel_width
    )


def plain_weights(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """Return the filters of the plain convolution, C-contiguous."""
    if isinstance(problem, DataGradient):
        return np.ascontiguousarray(w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3))
    return w


@compiled_once
def copy_function(shape: tuple[int, int], margin: Pair, target: Cpu) -> Any:
    """Compile (from, to, planes): copy planes of that shape into planes with margins, which must be zeros already."""
    (height, width), (top, left) = shape, margin
    padded = width + 2 * left
    module = ir.Module("padding")
    b, (source, to, planes) = new_function(module, "copy", {"source": F32_PTR, "to": F32_PTR, "planes": I64})
    with for_range(b, planes) as plane:
        read = element(b, source, offset_of(b, (plane.index, height * width)))
        start = b.add(offset_of(b, (plane.index, (height + 2 * top) * padded)), ir.Constant(I64, top * padded + left))
        copy_rows(b, target.lanes, width, (read, width), (element(b, to, start), padded), height)
    b.ret_void()
    return compile_function(module, "copy", [ctypes.c_void_p] * 2 + [ctypes.c_int64], target)
