"""Products of float32 matrices in split precision, y = x w^T, on Hopper: ``dense.cu`` describes them.

The error, as a share of |x| |w|^T, is that of ``wide``, with a promotion after every 64 products; a value that is 2^28
times below its row's largest errs by up to 2^-50 of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import source_text
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import Launch, Plan, ceil_div, round_up

from . import wide
from ._wgmma import wgmma_macro
from .split_form import activation_define

_SOURCES = tuple(
    Path(__file__).parent / file
    for file in ("../denormals.cuh", "instructions.cuh", "tma.cuh", "range.cuh", "split_arrays.cuh", "dense.cu")
)
#: Rows of x per tile, elements per k-step, and the most columns of y per tile: the sums fill the registers.
_TILE_ROWS, _K_STEP, _MOST_COLUMNS = 128, 64, 168
_STAGES, _THREADS = 3, 256
#: The exponent of a row that cannot be split: Range in range.cuh.
UNSPLITTABLE = 1 << 20


def error_bound(length: int) -> float:
    """Return the largest |x w^T - exact| as a share of |x| |w|^T."""
    return wide.bound(2, ConvProblem(1, length, 1, 1, 1, 1))


def multiply(
    rows: int, columns: int, length: int, bias: bool = False, activation: str | None = None
) -> tuple[Program, Program, Mapping[str, int]]:
    """Return the programs of y = activation(x w^T + bias), and of w's split, and the bytes of what that fills.

    The first reads x (rows, length), w (columns, length) and, if asked, bias (columns,), of float32, and w_tiles and
    w_exponents (columns,) of int32; it fills y (rows, columns). The second reads w and fills w_tiles, which is zero
    before, and w_exponents, with UNSPLITTABLE for rows of w for which the first program is wrong.

    Args:
        activation: CUDA's expression of a float v that is computed at last.
    """
    k_steps, column_tiles = ceil_div(length, _K_STEP), ceil_div(columns, _MOST_COLUMNS)
    width = round_up(ceil_div(columns, column_tiles), 8)
    config = {
        **{"components": 2, "length": length, "k_steps": k_steps, "columns": columns, "column_tiles": column_tiles},
        **{"tile_rows": _TILE_ROWS, "tile_columns": width, "stages": _STAGES, "bias": bias},
    }
    defines = {
        **activation_define(activation),
        **wgmma_macro("WGMMA", width, shared=True),
        **wgmma_macro("WGMMA_OVERWRITE", width, shared=True, overwrite=True),
    }
    row_bytes = 2 * 2 * _K_STEP * k_steps
    scratch = {"x_tiles": round_up(rows, _TILE_ROWS) * row_bytes, "x_exponents": ITEM_BYTES * rows}
    filled = {"w_tiles": column_tiles * width * row_bytes, "w_exponents": ITEM_BYTES * columns}
    added = "bias" if bias else "x"  # which is not read
    arguments = ("x_tiles", "w_tiles", "x_exponents", "w_exponents", added, "y", np.int32(rows))
    grid, shared = ceil_div(rows, _TILE_ROWS) * column_tiles, 4 * _K_STEP * _STAGES * (_TILE_ROWS + width) + 1024
    steps = (
        Launch("split_x", (rows, 1, 1), (_THREADS, 1, 1), ("x", "x_tiles", "x_exponents")),
        Launch("dense_gemm", (grid, 1, 1), (3 * _TILE_ROWS, 1, 1), arguments, shared),
        Launch("recompute_rows", (rows, 1, 1), (_THREADS, 1, 1), ("x_exponents", "x", "w", added, "y")),
    )
    split = (Launch("split_w", (columns, 1, 1), (_THREADS, 1, 1), ("w", "w_tiles", "w_exponents")),)
    options = ("--gpu-architecture=sm_90a",)
    plan, before = (
        Plan(defines, rows, lambda images: steps, scratch=scratch, config=config),
        Plan(defines, rows, lambda images: split, config=config),
    )
    text = source_text(_SOURCES, plan)
    return Program("dense", text, options, plan), Program("dense", text, options, before), filled
