"""blocked_gemm: every convolution and both gradients as an implicit GEMM on the float32 lanes, for any GPU.

This file chooses the tile, and the splits of a weight gradient; ``blocked_gemm.cu`` says how a block computes a tile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ece408_op.core.kernel import CudaKernel, float32_bound, sum_bound
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, WEIGHT_GRADIENT, ConvProblem, DataGradient, WeightGradient
from ece408_op.runtime.launch import Chip, Plan, ceil_div, one_launch, round_up

from ..sources import sources
from . import partial_sums

#: The desired number of blocks of a weight gradient, about eight per multiprocessor of a large GPU; the fewest and the
#: most outputs that a block adds: fewer cost more partial sums, more cost accuracy.
_BLOCKS, _FEWEST_OUTPUTS, _MOST_OUTPUTS = 1056, 512, 8192


@dataclass(frozen=True)
class BlockedGemmTile:
    """What a block and a thread compute: Config of ``blocked_gemm.cu``."""

    tile_rows: int
    tile_columns: int
    thread_rows: int
    thread_columns: int
    depth: int
    blocks: int  # resident per multiprocessor

    @property
    def threads(self) -> int:
        """Return the threads per block."""
        return self.tile_rows // self.thread_rows * (self.tile_columns // self.thread_columns)

    @property
    def loads(self) -> float:
        """Return the floats read from shared memory per product."""
        return 1 / self.thread_rows + 1 / self.thread_columns


_TILES = (
    BlockedGemmTile(128, 128, 8, 8, 8, 2),
    BlockedGemmTile(64, 128, 8, 8, 8, 3),
    BlockedGemmTile(64, 64, 8, 4, 8, 5),
    BlockedGemmTile(32, 128, 4, 8, 8, 4),
    BlockedGemmTile(16, 128, 4, 4, 8, 6),
    BlockedGemmTile(8, 128, 4, 2, 16, 5),
)


def _gemm_sizes(problem: ConvProblem) -> tuple[int, int]:
    """Return the rows and columns of one group's product; 0 columns stand for those that grow with the batch."""
    filters, channels = problem.filters // problem.groups, problem.channels // problem.groups
    if isinstance(problem, DataGradient):
        return channels, 0
    return filters, channels * problem.kernel * problem.kernel_width if isinstance(problem, WeightGradient) else 0


def _tile(problem: ConvProblem) -> BlockedGemmTile:
    """Return the tile with the least work, including products beyond the edge and reads of shared memory."""
    rows, columns = _gemm_sizes(problem)

    def work(tile: BlockedGemmTile) -> float:
        covered = round_up(rows, tile.tile_rows) * (round_up(columns, tile.tile_columns) if columns else 1)
        return covered * (1 + 2 * tile.loads)

    return min(_TILES, key=work)


def _splits(problem: ConvProblem) -> tuple[int, int]:
    """Return the number of splits of a weight gradient, and the outputs per split.

    They depend only on the problem, so that the error bound holds on every chip.
    """
    (rows, columns), tile = _gemm_sizes(problem), _tile(problem)
    outputs = max(1, problem.products)
    tiles = ceil_div(rows, tile.tile_rows) * ceil_div(columns, tile.tile_columns) * problem.groups
    length = min(max(ceil_div(outputs, ceil_div(_BLOCKS, tiles)), _FEWEST_OUTPUTS), _MOST_OUTPUTS)
    length = max(length, ceil_div(outputs, partial_sums.most_partials(problem)))
    return ceil_div(outputs, length), length


def _bound(problem: ConvProblem) -> float:
    """Return the error bound: float32_bound or, for a sum in two levels, a bound with fewer roundings per product."""
    return sum_bound(sum(_splits(problem))) if isinstance(problem, WeightGradient) else float32_bound(problem)


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile, rows = _tile(problem), _gemm_sizes(problem)[0]
    config = {**asdict(tile), "data_gradient": isinstance(problem, DataGradient)}
    row_tiles = ceil_div(rows, tile.tile_rows) * problem.groups
    if isinstance(problem, WeightGradient):
        splits, length = _splits(problem)
        tiles = row_tiles * ceil_div(_gemm_sizes(problem)[1], tile.tile_columns)
        numbers = (np.int64(problem.products), np.int64(length))
        entry, blocks = "blocked_gemm_weights", tiles * splits
        return partial_sums.plan(problem, entry, blocks, tile.threads, numbers, splits, config)

    # A data gradient with a stride consists of several problems: pixels with equal remainders use the same taps.
    outputs, classes = problem.output_height * problem.output_width, 1
    if isinstance(problem, DataGradient):
        outputs = ceil_div(problem.height, problem.stride[0]) * ceil_div(problem.width, problem.stride[1])
        classes = problem.stride[0] * problem.stride[1]
    # Four neighbouring columns of a tile are neighbours in memory, too.
    config["store_vector"] = 4 if classes == 1 and outputs % 4 == 0 and aligned == 16 and tile.thread_columns > 2 else 1

    def blocks_of(images: int) -> int:
        return ceil_div(images * outputs, tile.tile_columns) * row_tiles * classes

    arguments = (problem.operands[0], "w", problem.operands[2], "first", "images")
    return one_launch(problem, "blocked_gemm", blocks_of, tile.threads, config, arguments)


KERNEL = CudaKernel(
    "blocked_gemm",
    "implicit GEMM with register blocking: every convolution and both gradients",
    sources("vectors.cuh", "float32/partial_sums.cuh", "float32/blocked_gemm.cu"),
    _plan,
    features=ATTRIBUTES | {DATA_GRADIENT, WEIGHT_GRADIENT},
    error_bound=_bound,
)
