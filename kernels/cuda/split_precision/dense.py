"""Products of float32 matrices in split precision, y = x w^T, on Hopper: ``dense.cu`` describes them.

The error, as a share of |x| |w|^T, is that of ``wide``, with a promotion after every 64 products; a value that is 2^28
times below the largest of those errs by up to 2^-50 of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import source_text
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import Chip, Launch, Plan, TensorMap, ceil_div, round_up

from ._wgmma import wgmma_macro
from .split_form import activation_define

_SOURCES = tuple(
    Path(__file__).parent / file
    for file in ("../denormals.cuh", "instructions.cuh", "tma.cuh", "range.cuh", "split_arrays.cuh", "dense.cu")
)
#: Rows of x per tile, elements per k-step, and the most columns of y per tile: the sums fill the registers.
_TILE_ROWS, _K_STEP, _MOST_COLUMNS = 128, 64, 168
_STAGES, _THREADS = 3, 256
#: The most slices of a sum's elements; the k-steps that a slice's first loads and its sums take as long as.
_MOST_SLICES, _SLICE_STEPS = 8, 6
#: x begins at a multiple of that many bytes, as TMA requires.
ALIGNMENT = 16
#: The exponent of a row that cannot be split: Range in range.cuh.
UNSPLITTABLE = 1 << 20


def _slices(tiles: int, k_steps: int, chip: Chip) -> int:
    """Return the number of slices of k-steps with which multiprocessors share the tiles best."""

    def time(slices: int) -> int:
        return ceil_div(tiles * slices, chip.multiprocessors) * (ceil_div(k_steps, slices) + _SLICE_STEPS)

    return min(range(1, _MOST_SLICES + 1), key=time)


def multiply(
    rows: int, columns: int, length: int, chip: Chip, bias: bool = False, activation: str | None = None
) -> tuple[Program, Program, Mapping[str, int]]:
    """Return the programs of y = activation(x w^T + bias), and of w's split, and the bytes of what that fills.

    The first reads x (rows, length), w (columns, length) and, if asked, bias (columns,), of float32, and w_tiles and
    w_exponents (columns,) of int32; it fills y (rows, columns). The second reads w and fills w_tiles, which is zero
    before, and w_exponents, with UNSPLITTABLE for rows of w for which the first program is wrong.

    Args:
        activation: CUDA's expression of a float v that is computed at last.
    """
    k_steps, pitch = ceil_div(length, _K_STEP), round_up(length, ALIGNMENT // ITEM_BYTES)
    row_tiles, column_tiles = ceil_div(rows, _TILE_ROWS), ceil_div(columns, _MOST_COLUMNS)
    width = round_up(ceil_div(columns, column_tiles), 8)
    slice_steps = ceil_div(k_steps, _slices(row_tiles * column_tiles, k_steps, chip))
    slices, slice_rows = ceil_div(k_steps, slice_steps), row_tiles * _TILE_ROWS
    config = {
        **{"components": 2, "length": length, "k_steps": k_steps, "columns": columns, "column_tiles": column_tiles},
        **{"tile_rows": _TILE_ROWS, "tile_columns": width, "pitch": pitch, "stages": _STAGES, "bias": bias},
    }
    macros = {**wgmma_macro("WGMMA", width), **wgmma_macro("WGMMA_OVERWRITE", width, overwrite=True)}
    row_bytes = ITEM_BYTES * column_tiles * width
    scratch = {"sums": slices * slice_rows * row_bytes, "marks": ITEM_BYTES * slices * slice_rows}
    filled = {"w_tiles": row_bytes * _K_STEP * k_steps, "w_exponents": ITEM_BYTES * columns}
    added = "bias" if bias else "x"  # which is not read
    x = TensorMap("x" if pitch == length else "padded", (2 * pitch, 1, rows), (_K_STEP, 1, _TILE_ROWS))
    blocks, shared = slices * row_tiles * column_tiles, ITEM_BYTES * _K_STEP * _STAGES * (_TILE_ROWS + width) + 1024
    multiplied = (x, "w_tiles", "sums", "marks", np.int32(row_tiles), np.int32(slice_steps))
    sizes = np.int32(rows), np.int32(slices), np.int32(slice_rows)
    finished = ("sums", "marks", "x", "w", "w_exponents", added, "y", *sizes)
    steps: tuple[Launch, ...] = (
        Launch("dense_gemm", (blocks, 1, 1), (3 * _TILE_ROWS, 1, 1), multiplied, shared),
        Launch("finish", (ceil_div(rows, _THREADS // 32), ceil_div(columns, 32), 1), (_THREADS, 1, 1), finished),
    )
    if pitch > length:
        steps = (Launch("pad_rows", (rows, 1, 1), (_THREADS, 1, 1), ("x", "padded")), *steps)
        scratch["padded"] = ITEM_BYTES * rows * pitch
    split = (Launch("split_w", (columns, 1, 1), (_THREADS, 1, 1), ("w", "w_tiles", "w_exponents")),)
    defines = {**activation_define(activation), **macros}
    plan = Plan(defines, rows, lambda images: steps, scratch=scratch, config=config)
    before = Plan(defines, rows, lambda images: split, config=config)
    text, options = source_text(_SOURCES, plan), ("--gpu-architecture=sm_90a",)
    return Program("dense", text, options, plan), Program("dense", text, options, before), filled
