"""weight_gradient_rows: the weight gradient of a layer with few channels and filters, all of its sums in registers.

This file chooses the tile; ``weight_gradient_rows.cu`` says what a thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel, sum_bound
from ece408_op.problem import ITEM_BYTES, PAD, RECTANGULAR, WEIGHT_GRADIENT, ConvProblem, WeightGradient
from ece408_op.runtime.launch import REGISTERS, Chip, Launch, Plan, ceil_div, layer_defines, round_up

from . import _partial_sums as partial_sums

_FOLDER = Path(__file__).parent
#: Blocks, whole waves of 132 multiprocessors with one, two, three or four blocks each: the problem alone decides, so
#: that the error bound holds on every chip.
_BLOCKS = 12 * 132
#: Sums of a thread, threads of a block, and its bytes of shared memory: two such blocks fit a multiprocessor of sm_90.
_MOST_SUMS, _MOST_THREADS, _MOST_SHARED = 88, 512, 112 * 1024
_MULTIPROCESSOR_SHARED = 227 * 1024


@dataclass(frozen=True)
class WeightGradientTile:
    """What a block and a thread compute: Config of ``weight_gradient_rows.cu``."""

    filters: int
    slices: int
    stage_rows: int
    x_pitch: int
    y_pitch: int
    x_vector: int  # floats of one copy
    y_vector: int

    def threads(self, problem: ConvProblem) -> int:
        """Return the threads per block."""
        groups = ceil_div(problem.filters, self.filters)
        return round_up(problem.channels * problem.kernel * groups * self.slices, 32)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Return the shared memory of two stages, or of the sums at the end."""
        filters = round_up(problem.filters, self.filters)
        x_floats = problem.channels * (self.stage_rows + problem.kernel - 1) * self.x_pitch
        return ITEM_BYTES * max(2 * (x_floats + filters * self.stage_rows * self.y_pitch), math.prod(problem.w_shape))

    def stages(self, problem: ConvProblem) -> int:
        """Return the stages of one image."""
        return ceil_div(problem.output_height, self.stage_rows)


def _odd_vectors(floats: int) -> int:
    """Return a pitch of an odd number of 16-byte vectors: rows then begin in different banks of shared memory."""
    return 4 * (ceil_div(floats, 4) | 1)


def _tiles(problem: ConvProblem, aligned: int) -> Iterator[WeightGradientTile]:
    width = problem.width + 2 * problem.pad[1]
    vectors = [v for v in (4, 2, 1) if 4 * v <= aligned]
    x_vector = next(v for v in vectors if problem.width % v == 0) if problem.pad == (0, 0) else 1
    y_vector = next(v for v in vectors if problem.output_width % v == 0)
    x_pitch = _odd_vectors(max(width, round_up(problem.output_width, 4) + round_up(problem.kernel_width + 3, 4) - 4))
    y_pitch = _odd_vectors(problem.output_width)
    groups = {ceil_div(problem.filters, n) for n in range(1, problem.filters + 1)}
    for filters in sorted({ceil_div(problem.filters, n) for n in groups}):
        unit = problem.channels * problem.kernel * ceil_div(problem.filters, filters)
        if filters * problem.kernel_width > _MOST_SUMS or unit > _MOST_THREADS:
            continue
        for rows in range(1, min(problem.output_height, 64) + 1):
            for slices in range(1, min(rows, _MOST_THREADS // unit) + 1):
                tile = WeightGradientTile(filters, slices, rows, x_pitch, y_pitch, x_vector, y_vector)
                if tile.shared_bytes(problem) <= _MOST_SHARED:
                    yield tile


def _cost(problem: ConvProblem, tile: WeightGradientTile) -> float:
    """Return the predicted issue slots per multiply-add."""
    sums, threads = tile.filters * problem.kernel_width, tile.threads(problem)
    registers = round_up(sums + problem.kernel_width + 44, 8)
    resident = min(_MULTIPROCESSOR_SHARED // tile.shared_bytes(problem), REGISTERS // (registers * threads))
    if not resident:
        return math.inf
    # Multiply-adds and the reads of shared memory for four outputs; a stage's copies.
    columns = ceil_div(problem.output_width, 4)
    step = 4 * sums + 3 * (tile.filters + 1) + 12
    x_copies = problem.channels * (tile.stage_rows + problem.kernel - 1) * problem.width / tile.x_vector
    y_copies = problem.filters * tile.stage_rows * problem.output_width / tile.y_vector
    stage = ceil_div(tile.stage_rows, tile.slices) * (columns * step + 20) + 10 * (x_copies + y_copies) / threads + 150
    useful = problem.filters * problem.channels * problem.kernel * problem.kernel_width
    useful *= problem.output_height * problem.output_width
    # A scheduler with one warp waits for each read, with four warps hardly ever.
    warps = resident * threads / 128
    return stage * tile.stages(problem) * threads / useful * (1 + 0.8 / warps)


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, aligned: int) -> WeightGradientTile | None:
    """Return the tile of the least cost for the layer; None if the sums fit no block."""
    return min(_tiles(problem, aligned), key=lambda tile: _cost(problem, tile), default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if not isinstance(problem, WeightGradient):
        return ["it computes the weight gradient only"]
    tile = best_tile(problem.with_batch(1), 4)
    if tile is None:
        return [f"sums: at most {_MOST_SUMS} for each of {_MOST_THREADS} threads, and two stages in shared memory"]
    needed = max(tile.shared_bytes(problem), best_tile(problem.with_batch(1), 16).shared_bytes(problem))  # type: ignore[union-attr]
    if chip is not None and needed > chip.shared_bytes:
        return [f"shared memory of a block: at least {needed} bytes, got {chip.shared_bytes}"]
    return []


def _blocks(problem: ConvProblem, tile: WeightGradientTile) -> int:
    return max(1, min(_BLOCKS, problem.batch * tile.stages(problem), partial_sums.most_partials(problem)))


def _bound(problem: ConvProblem) -> float:
    """Return the bound of a sum in three levels: a thread's rows, the slices of a block, the blocks."""

    def additions(aligned: int) -> int:
        tile = best_tile(problem.with_batch(1), aligned)
        if tile is None:
            return problem.products
        blocks = _blocks(problem, tile)
        stages = ceil_div(problem.batch * tile.stages(problem), blocks)
        return stages * ceil_div(tile.stage_rows, tile.slices) * problem.output_width + tile.slices + blocks

    return sum_bound(max(map(additions, (4, 8, 16))))


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = best_tile(problem.with_batch(1), aligned)
    assert tile is not None, "_limits refuses a problem without a tile"
    blocks = _blocks(problem, tile)
    arguments = ("x", "y", partial_sums.target(blocks), np.int64(problem.batch * tile.stages(problem)))
    grid, block = (blocks, 1, 1), (tile.threads(problem), 1, 1)
    launch = Launch("weight_gradient_rows", grid, block, arguments, tile.shared_bytes(problem))
    steps = (launch, *partial_sums.launches(problem, blocks))
    scratch = partial_sums.scratch(problem, blocks)
    images = max(1, problem.batch)
    return Plan(layer_defines(problem), images, lambda images: steps, scratch=scratch, config=asdict(tile))


KERNEL = CudaKernel(
    "weight_gradient_rows",
    "weight gradient along rows: all sums of the layer in a block's registers",
    tuple(_FOLDER / f for f in ("../layer.cuh", "copy_async.cuh", "partial_sums.cuh", "weight_gradient_rows.cu")),
    _plan,
    _limits,
    features=frozenset({PAD, RECTANGULAR, WEIGHT_GRADIENT}),
    error_bound=_bound,
)
