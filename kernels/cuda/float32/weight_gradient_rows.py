"""weight_gradient_rows: the weight gradient of a layer with few channels and filters, all of its sums in registers.

This file chooses the tile; ``weight_gradient_rows.cu`` says what a thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from ece408_op.core.kernel import CudaKernel, sum_bound
from ece408_op.problem import ITEM_BYTES, PAD, RECTANGULAR, WEIGHT_GRADIENT, ConvProblem
from ece408_op.runtime.launch import Chip, Plan, ceil_div, even_shares, round_up

from ..sources import sources
from . import partial_sums
from ._pipeline import odd_vectors, resident_blocks, step_cycles

#: Blocks: whole waves on 132 multiprocessors with one, two, three or four blocks each. The number does not depend on
#: the chip, so that the error bound holds on every chip.
_BLOCKS = 12 * 132
#: The most sums per thread, threads per block (``ece408-bench layers --context gpu --gradient weight --impl
#: weight_gradient_rows`` times them), bytes of shared memory per block: two blocks fit an sm_90 multiprocessor.
_MOST_SUMS, _MOST_THREADS, _MOST_SHARED = 88, 512, 112 * 1024


@dataclass(frozen=True)
class WeightGradientTile:
    """What a block and a thread compute: Config of ``weight_gradient_rows.cu``."""

    filters: int
    slices: int
    step_rows: int
    stages: int  # of the pipeline
    x_pitch: int
    y_pitch: int
    x_vector: int  # floats of one copy
    y_vector: int

    def threads(self, problem: ConvProblem) -> int:
        """Return the threads per block."""
        groups = ceil_div(problem.filters, self.filters)
        return round_up(problem.channels * problem.kernel * groups * self.slices, 32)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Return the shared memory of all stages, or of the sums at the end."""
        filters = round_up(problem.filters, self.filters)
        x_floats = problem.channels * (self.step_rows + problem.kernel - 1) * self.x_pitch
        stage = x_floats + filters * self.step_rows * self.y_pitch
        return ITEM_BYTES * max(self.stages * stage, math.prod(problem.w_shape))

    def steps(self, problem: ConvProblem) -> int:
        """Return the steps of one image."""
        return ceil_div(problem.output_height, self.step_rows)


def _tiles(problem: ConvProblem, aligned: int) -> Iterator[WeightGradientTile]:
    width = problem.width + 2 * problem.pad[1]
    x_vector = math.gcd(aligned // ITEM_BYTES, problem.width) if problem.pad == (0, 0) else 1
    y_vector = math.gcd(aligned // ITEM_BYTES, problem.output_width)
    x_pitch = odd_vectors(max(width, round_up(problem.output_width, 4) + round_up(problem.kernel_width + 3, 4) - 4))
    y_pitch = odd_vectors(problem.output_width)
    for filters in even_shares(problem.filters, _MOST_SUMS // problem.kernel_width):
        unit = problem.channels * problem.kernel * ceil_div(problem.filters, filters)
        if unit > _MOST_THREADS:
            continue
        for rows in range(1, min(problem.output_height, 64) + 1):
            for slices in range(1, min(rows, _MOST_THREADS // unit) + 1):
                for stages in (2, 3, 4):
                    tile = WeightGradientTile(filters, slices, rows, stages, x_pitch, y_pitch, x_vector, y_vector)
                    if tile.shared_bytes(problem) <= _MOST_SHARED:
                        yield tile


def _cost(problem: ConvProblem, tile: WeightGradientTile) -> float:
    """Return the predicted cycles of a multiprocessor per multiply-add."""
    sums, threads = tile.filters * problem.kernel_width, tile.threads(problem)
    registers = round_up(sums + problem.kernel_width + 44, 8)
    resident = resident_blocks(threads, registers, tile.shared_bytes(problem))
    if not resident:
        return math.inf
    # Issue slots: multiply-adds and the reads of shared memory for four outputs; a step's copies.
    vector = 4 * sums + 3 * (tile.filters + 1) + 12
    x_floats = problem.channels * (tile.step_rows + problem.kernel - 1) * problem.width
    y_floats = problem.filters * tile.step_rows * problem.output_width
    rows, columns = ceil_div(tile.step_rows, tile.slices), ceil_div(problem.output_width, 4)
    copies = 10 * (x_floats / tile.x_vector + y_floats / tile.y_vector) / threads
    issued = rows * (columns * vector + 20) + copies + 80 + threads / 8
    copied = ITEM_BYTES * resident * (x_floats + y_floats)
    cycles = step_cycles(issued, resident * threads, copied, tile.stages)
    useful = problem.filters * problem.products * problem.channels * problem.kernel * problem.kernel_width
    return cycles * tile.steps(problem) / resident / useful


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, aligned: int) -> WeightGradientTile | None:
    """Return the tile with the least cost for the layer; None if the sums fit no block."""
    return min(_tiles(problem, aligned), key=lambda tile: _cost(problem, tile), default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    tile = best_tile(problem.with_batch(1), 4)
    if tile is None:
        return [f"sums: at most {_MOST_SUMS} for each of {_MOST_THREADS} threads, and two stages in shared memory"]
    needed = max(tile.shared_bytes(problem), best_tile(problem.with_batch(1), 16).shared_bytes(problem))  # type: ignore[union-attr]
    if chip is not None and needed > chip.shared_bytes:
        return [f"shared memory of a block: at least {needed} bytes, got {chip.shared_bytes}"]
    return []


def _blocks(problem: ConvProblem, tile: WeightGradientTile) -> int:
    return max(1, min(_BLOCKS, problem.batch * tile.steps(problem), partial_sums.most_partials(problem)))


def _bound(problem: ConvProblem) -> float:
    """Return the error bound of a sum in three levels: a thread's rows, the slices of a block, the blocks."""

    def additions(aligned: int) -> int:
        tile = best_tile(problem.with_batch(1), aligned)
        if tile is None:
            return problem.products
        blocks = _blocks(problem, tile)
        steps = ceil_div(problem.batch * tile.steps(problem), blocks)
        return steps * ceil_div(tile.step_rows, tile.slices) * problem.output_width + tile.slices + blocks

    return sum_bound(max(map(additions, (4, 8, 16))))


def plan_of(tile: WeightGradientTile, problem: ConvProblem, blocks: int = 0) -> Plan:
    """Return the plan for one tile and number of blocks; 0 takes the number that the error bound assumes."""
    blocks = blocks or _blocks(problem, tile)
    numbers, shared = (np.int64(problem.batch * tile.steps(problem)),), tile.shared_bytes(problem)
    threads, config = tile.threads(problem), asdict(tile)
    return partial_sums.plan(problem, "weight_gradient_rows", blocks, threads, numbers, blocks, config, shared)


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = best_tile(problem.with_batch(1), aligned)
    assert tile is not None, "_limits refuses a problem without a tile"
    return plan_of(tile, problem)


KERNEL = CudaKernel(
    "weight_gradient_rows",
    "weight gradient along rows: all sums of the layer in a block's registers",
    sources("vectors.cuh", "float32/partial_sums.cuh", "float32/weight_gradient_rows.cu"),
    _plan,
    _limits,
    features=frozenset({PAD, RECTANGULAR, WEIGHT_GRADIENT}),
    required=WEIGHT_GRADIENT,
    error_bound=_bound,
)
