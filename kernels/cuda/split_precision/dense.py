"""Products of float32 matrices in split precision, y = x w^T, on Hopper: ``dense.cu`` describes them.

They serve FullyConnected layers whose inputs are float32. With ``fp16x3_general``, which needs x in split form, the
course's networks take 1.7 to 2.1 times as long (benchmarks/results/verification-h200.txt, 19).

The error, as a share of |x| |w|^T, is that of ``wide``, with a promotion after every 64 products. A value below 2^-28
of the largest value with the same scale errs by up to 2^-50 of that one.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import source_text
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import Argument, Chip, Launch, Plan, TensorMap, ceil_div, round_up

from . import wide
from ._convolution import Convolution
from ._wgmma import WGMMA_KERNEL, wgmma_macro
from ._wide_tiles import THREADS, WideTile, split_filters
from .split_form import activation_define

_SOURCES = (*wide.SHARED_SOURCES, Path(__file__).with_name("dense.cu"))
#: Rows of x per tile, elements per stage, and the most columns of y per tile: the sums fill the registers.
_TILE_ROWS, _CHANNELS, _MOST_COLUMNS = 128, 64, 168
#: Stages of the pipeline.
_STAGES = 3
#: The most slices of the reduction; a slice's fixed cost (first loads, storing sums), in units of stages.
_MOST_SLICES, _SLICE_STEPS = 8, 6
#: TMA requires that x is aligned to this many bytes.
ALIGNMENT = 16
#: The exponent of a row that cannot be split: Range in range.cuh.
UNSPLITTABLE = 1 << 20


def _slices(tiles: int, k_steps: int, chip: Chip) -> int:
    """Return the number of slices of the reduction with the least predicted time."""

    def time(slices: int) -> int:
        return ceil_div(tiles * slices, chip.multiprocessors) * (ceil_div(k_steps, slices) + _SLICE_STEPS)

    return min(range(1, _MOST_SLICES + 1), key=time)


def multiply(
    rows: int, columns: int, length: int, chip: Chip, bias: bool = False, activation: str | None = None
) -> tuple[Program, Program, dict[str, int]]:
    """Return the program of y = activation(x w^T + bias), the program that splits w, and its outputs' sizes in bytes.

    The first program reads x (rows, length), w (columns, length) and, with ``bias``, bias (columns,), all float32, and
    split_w and w_exponents (columns,) of int32; it fills y (rows, columns). The second reads w and fills split_w and
    w_exponents. Where an exponent is UNSPLITTABLE, the first program's results in that column of y are wrong.

    Args:
        activation: a CUDA expression of a float v, which is applied last.
    """
    own = Convolution.of(ConvProblem(rows, length, 1, 1, columns, 1))
    k_steps, pitch = ceil_div(length, _CHANNELS), round_up(length, ALIGNMENT // ITEM_BYTES)
    row_tiles, column_tiles = ceil_div(rows, _TILE_ROWS), ceil_div(columns, _MOST_COLUMNS)
    width = round_up(ceil_div(columns, column_tiles), 8)
    slice_steps = ceil_div(k_steps, _slices(row_tiles * column_tiles, k_steps, chip))
    slices, slice_rows = ceil_div(k_steps, slice_steps), row_tiles * _TILE_ROWS
    tile = WideTile(2, width, _CHANNELS, _TILE_ROWS, 2, stages=_STAGES)
    config = tile.config(own, dense=True, padded_channels=k_steps * _CHANNELS, pitch=pitch, bias=bias)
    defines = {**activation_define(activation), **tile.defines, **wgmma_macro("WGMMA", width)}

    added = "bias" if bias else "x"  # which is not read
    x = TensorMap("x" if pitch == length else "padded", (2 * pitch, 1, rows), (_CHANNELS, 1, _TILE_ROWS))
    sizes, box = (_CHANNELS, 1, columns * k_steps), (_CHANNELS, 1, width)
    w = [TensorMap("split_w", sizes, box, offset=offset) for offset in (0, 2 * math.prod(sizes))]
    multiplied: tuple[Argument, ...] = (x, *w, "sums", "marks", np.int32(row_tiles), np.int32(slice_steps))
    counts = np.int32(rows), np.int32(slices), np.int32(slice_rows)
    finished = ("sums", "marks", "x", "w", "w_exponents", added, "y", *counts)
    blocks, grid = slices * row_tiles * column_tiles, (ceil_div(rows, THREADS // 32), ceil_div(columns, 32), 1)
    steps: tuple[Launch, ...] = (
        Launch("dense_gemm", (blocks, 1, 1), (tile.threads, 1, 1), multiplied, tile.pipeline_bytes),
        Launch("finish", grid, (THREADS, 1, 1), finished),
    )
    marks = ITEM_BYTES * slices * slice_rows
    scratch = {"sums": marks * column_tiles * width, "marks": marks}
    if pitch > length:
        steps = (Launch("pad_rows", (rows, 1, 1), (THREADS, 1, 1), ("x", "padded")), *steps)
        scratch["padded"] = ITEM_BYTES * rows * pitch
    plan = Plan(defines, rows, lambda images: steps, scratch=scratch, config=config)
    split = split_filters(own, np.int32(0))
    before = Plan(defines, rows, lambda images: (split,), scratch={"listed": ITEM_BYTES}, config=config)
    text, options = source_text(_SOURCES, plan), WGMMA_KERNEL["options"]
    filled = {"split_w": 2 * 2 * math.prod(sizes), "w_exponents": ITEM_BYTES * columns}
    return Program("dense", text, options, plan), Program("dense", text, options, before), filled
