"""fp16x3_weight_gradient: weight gradients of layers with few channels and filters on tensor cores, from sm_80 on.

This file chooses the tile; ``weight_gradient.cu`` says what a block computes.

The error, as a share of sum |x||y|, is that of ``wide``, except for the error of the sums. An accumulator is promoted
after at most 128 products, with two roundings; the sums of the low products are promoted after each step, of at most
2^13 products. A block adds at least one k-step per promotion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, PAD, RECTANGULAR, WEIGHT_GRADIENT, ConvProblem
from ece408_op.runtime.launch import REGISTERS, Chip, Plan, ceil_div, even_shares, round_up

from ..float32 import partial_sums
from ._wide_tiles import PROMOTED_PRODUCTS, fp16x3_bound

_FOLDER = Path(__file__).parent
#: The number of blocks is chosen for this many multiprocessors on every chip, because the error bound depends on it.
_MULTIPROCESSORS = 132
_MOST_WARPS, _MOST_SLICES, _MOST_BLOCKS, _MOST_STEP_PRODUCTS = 16, 8, 4, 1 << 13
#: The fewest channels for which the kernel is recommended: with fewer, a split value is in too few products.
_FEWEST_CHANNELS = 4
#: Bytes of shared memory per block that the GPU reserves, and that alignment may take.
_RESERVED = 1024 + 512
#: Of a multiprocessor: cycles for 16 x 8 x 16 products on tensor cores; instructions per word of x, per word of y, per
#: copy and per raw value; bytes of memory per cycle; cycles of a step's barriers and first reads.
_MMA_CYCLES, _X_WORD, _Y_WORD, _COPY, _VALUE, _BYTES, _LATENCY = 1.64, 24, 22, 12, 3, 17, 1500


@dataclass(frozen=True)
class _Tile:
    """What a block and a warp compute: Config of ``weight_gradient.cu``."""

    problem: ConvProblem
    m_tiles: int
    n_tiles: int
    slices: int
    step_rows: int
    x_pitch: int
    y_pitch: int
    x_vector: int  # floats of one copy
    y_vector: int
    blocks: int = 1  # resident per multiprocessor

    # Warps along the taps, and along the filters.
    tap_warps = property(lambda self: ceil_div(math.prod(self.problem.w_shape[1:]), 16 * self.m_tiles))
    filter_warps = property(lambda self: ceil_div(self.problem.filters, 8 * self.n_tiles))
    threads = property(lambda self: 32 * self.tap_warps * self.filter_warps * self.slices)
    # Of a step: rows of x of all channels, k-steps, floats of the rows of x and y.
    x_rows = property(lambda self: self.problem.channels * (self.step_rows + self.problem.kernel - 1))
    k_steps = property(lambda self: ceil_div(self.step_rows * ceil_div(self.problem.output_width, 2), 8))
    raw_floats = property(
        lambda self: (
            round_up(self.x_rows * self.problem.width, 4)
            + round_up(self.problem.filters * self.step_rows * self.problem.output_width, 4)
        )
    )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the raw rows and their words."""
        words = 2 * self.x_rows * self.x_pitch + 2 * 8 * self.n_tiles * self.filter_warps * self.y_pitch
        return int(ITEM_BYTES * (self.raw_floats + words + 8 * self.k_steps))

    @property
    def config(self) -> dict[str, bool | int | float]:
        """The sources' ``struct Config``."""
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "problem"}
        return {**numbers, "promotion": PROMOTED_PRODUCTS // 16}


def _tiles(problem: ConvProblem, aligned: int, most_shared: int) -> Iterator[_Tile]:
    x_vector, y_vector = (math.gcd(aligned // ITEM_BYTES, width) for width in (problem.width, problem.output_width))
    pairs = ceil_div(problem.output_width, 2)
    # The words of eight taps then lie in different banks of shared memory, where they belong to two rows.
    x_pitch = next(n for n in range(2 * pairs - 2 + problem.kernel_width, 10**9) if 13 <= n % 32 <= 19)
    rows = even_shares(problem.output_height, _MOST_STEP_PRODUCTS // problem.output_width)
    for step_rows, m_tiles, n_tiles in product(rows, (1, 2, 3, 4, 5), (1, 2, 3, 4)):
        y_pitch = round_up(8 * ceil_div(step_rows * pairs, 8) - 4, 32) + 4
        for slices in (1, 2, 4, 8):
            tile = _Tile(problem, m_tiles, n_tiles, slices, step_rows, x_pitch, y_pitch, x_vector, y_vector)
            shared, threads = tile.shared_bytes, tile.threads
            registers = round_up(m_tiles * n_tiles * 12 + 4 * n_tiles + 2 * m_tiles + 52, 8)
            if threads > 32 * _MOST_WARPS or shared + _RESERVED > most_shared or registers > 256:
                continue
            blocks = min(most_shared // (shared + _RESERVED), REGISTERS // (threads * registers), _MOST_BLOCKS)
            if blocks:
                yield replace(tile, blocks=blocks)


def _cost(tile: _Tile) -> float:
    """Return the predicted cycles of a multiprocessor per image."""
    problem, warps, threads = tile.problem, tile.tap_warps * tile.filter_warps, tile.threads
    shared, products = 8 * tile.m_tiles + 4 * tile.n_tiles + 2, 3 * _MMA_CYCLES * tile.m_tiles * tile.n_tiles
    multiply = tile.k_steps * warps * (max(shared, products) + 0.3 * min(shared, products))
    resident = tile.blocks * threads / 128  # warps of a scheduler
    multiply *= math.ceil(resident) / resident * (1 + 0.5 / resident)
    x_words = tile.x_rows * (problem.output_width + problem.kernel_width)
    y_words = problem.filters * tile.step_rows * ceil_div(problem.output_width, 2)
    raw = tile.raw_floats
    copies = raw / min(tile.x_vector, tile.y_vector)
    split = (_X_WORD * x_words + _Y_WORD * y_words + _COPY * copies + _VALUE * raw) / 128
    cycles = multiply + split + _LATENCY
    if tile.blocks > 1:  # other blocks multiply while one splits
        cycles = max(multiply, split) + 0.5 * min(multiply, split) + _LATENCY / tile.blocks
    return max(cycles, ITEM_BYTES * raw / _BYTES) * ceil_div(problem.output_height, tile.step_rows)


@lru_cache(maxsize=256)
def _best_tile(problem: ConvProblem, aligned: int, most_shared: int) -> _Tile | None:
    return min(_tiles(problem, aligned, most_shared), key=_cost, default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    shared = chip.shared_bytes if chip else 227 * 1024
    if _best_tile(problem.with_batch(1), 4, shared) is None:
        return [f"tile: the sums and a step of one row do not fit {_MOST_WARPS} warps and {shared} bytes"]
    return []


def _bound(problem: ConvProblem) -> float:
    n, images = problem.products, ceil_div(problem.batch, min(max(1, problem.batch), _MULTIPROCESSORS))
    of_block = (images + 1) * problem.output_height * round_up(problem.output_width, 2)
    additions = 2 * ceil_div(of_block, 16) + _MULTIPROCESSORS * _MOST_BLOCKS * _MOST_SLICES
    return fp16x3_bound(n, additions, min(n, _MOST_STEP_PRODUCTS))


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = _best_tile(problem.with_batch(1), aligned, chip.shared_bytes)
    assert tile is not None, "_limits refuses a problem without a tile"
    count = problem.batch * ceil_div(problem.output_height, tile.step_rows)
    most = partial_sums.most_partials(problem) // tile.slices
    blocks = max(1, min(count, _MULTIPROCESSORS * tile.blocks, most))
    sums, numbers, shared = blocks * tile.slices, (np.int64(count),), tile.shared_bytes
    return partial_sums.plan(problem, "weight_gradient", blocks, tile.threads, numbers, sums, tile.config, shared)


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    return problem.channels >= _FEWEST_CHANNELS and 2 * problem.batch >= chip.multiprocessors


KERNEL = CudaKernel(
    "fp16x3_weight_gradient",
    "weight gradient by mma.sync, all sums of the layer in a block's registers",
    (
        *(_FOLDER / f"../{file}.cuh" for file in ("layer", "denormals", "vectors", "float32/partial_sums")),
        *(_FOLDER / file for file in ("instructions.cuh", "range.cuh", "weight_gradient.cu")),
    ),
    _plan,
    _limits,
    _bound,
    capability=(8, 0),
    compiler=(11, 8),
    arithmetic="fp16x3",
    recommended=_recommended,
    features=frozenset({PAD, RECTANGULAR, WEIGHT_GRADIENT}),
    required=WEIGHT_GRADIENT,
)
