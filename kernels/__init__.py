"""The one list of kernels, in order of preference: dispatch, tests, benchmarks and tables read it.

A kernel is added by one file in cpu/ or cuda/ and one line in ``KERNELS``.
"""

from __future__ import annotations

from ece408_op.core.kernel import Kernel

from .cpu import (
    col2im,
    direct,
    im2col,
    loops,
    outer_products,
    pixel_reduction,
    tap_copies,
    winograd,
    winograd_gemm,
)
from .cuda import cudnn
from .cuda.float32 import (
    blocked_gemm,
    data_gradient_tiles,
    depthwise,
    register_blocked,
    sliding_window,
    weight_gradient_rows,
)
from .cuda.ladder import im2col_gemm, implicit_gemm, naive, register_tiled, shared, tensor_core
from .cuda.split_precision import split_precision, weight_gradient, wide, wide_weight_gradient

KERNELS: tuple[Kernel, ...] = (
    winograd.KERNEL,
    winograd_gemm.KERNEL,
    col2im.KERNEL,
    direct.KERNEL,
    tap_copies.KERNEL,
    outer_products.KERNEL,
    pixel_reduction.KERNEL,
    im2col.KERNEL,
    loops.KERNEL,
    sliding_window.KERNEL,
    register_blocked.KERNEL,
    register_blocked.UNIFORM,
    register_tiled.REGISTER_TILED,
    shared.UNROLLED,
    shared.CONSTANT,
    shared.SHARED,
    implicit_gemm.KERNEL,
    im2col_gemm.MANY,
    im2col_gemm.ONE,
    register_tiled.STREAMS,
    weight_gradient.KERNEL,
    weight_gradient_rows.KERNEL,
    *split_precision.FP16X3,
    data_gradient_tiles.KERNEL,
    depthwise.KERNEL,
    *wide.FP16X3,
    wide_weight_gradient.KERNEL,
    cudnn.KERNEL,
    blocked_gemm.KERNEL,
    naive.NAIVE,
    naive.BLOCK1024,
    naive.IMAGE_BLOCK,
    naive.GLOBAL_SUM,
    register_tiled.HALF,
    tensor_core.FP16,
    tensor_core.TF32,
    *wide.FP16X1,
    *split_precision.FP16X1,
)
