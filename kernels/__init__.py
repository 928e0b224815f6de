"""The one list of kernels, in order of preference: dispatch, tests, benchmarks and tables read it.

A kernel is added by one file in this folder and one line in ``KERNELS``.
"""

from __future__ import annotations

from ece408_op.kernel import Kernel

from . import (
    direct,
    fused_gemm,
    im2col,
    im2col_gemm,
    loops,
    naive,
    register_tiled,
    shared,
    split,
    strip,
    tensor_core,
    window,
    winograd,
)

KERNELS: tuple[Kernel, ...] = (
    winograd.KERNEL,
    direct.KERNEL,
    im2col.KERNEL,
    loops.KERNEL,
    window.KERNEL,
    strip.KERNEL,
    strip.UNIFORM,
    register_tiled.REGISTER_TILED,
    shared.UNROLLED,
    shared.CONSTANT,
    shared.SHARED,
    fused_gemm.KERNEL,
    im2col_gemm.MANY,
    im2col_gemm.ONE,
    register_tiled.STREAMS,
    split.COLUMNS,
    split.ROWS,
    split.IMPLICIT,
    split.TEAMS,
    split.WARPS,
    naive.NAIVE,
    naive.BLOCK1024,
    naive.IMAGE_BLOCK,
    naive.GLOBAL_SUM,
    register_tiled.HALF,
    tensor_core.FP16,
    tensor_core.TF32,
    split.ROUNDED_COLUMNS,
    split.ROUNDED_ROWS,
    split.ROUNDED_IMPLICIT,
    split.ROUNDED_TEAMS,
    split.ROUNDED,
)
