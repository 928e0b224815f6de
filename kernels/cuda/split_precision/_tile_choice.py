"""The tile of a layer: that which the tuning table has, or the candidate that takes the least time by a roofline.

``ece408-bench sweep`` measures the first candidates and writes the fastest one into the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ece408_op.core import tuning
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import Chip

from ._candidate_tiles import (
    LONG_SUM,
    MOST_IMAGES,
    implicit_gemm_tiles,
    mma_sync_tiles,
    one_channel_tiles,
    warpgroup_tiles,
)
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile

#: The alignment in bytes of whole arrays, as far as kernels ask.
ALIGNED = 16
#: How much longer a tile with accumulator promotion may take than one without it, for a long sum.
_PROMOTION_IS_WORTH = 1.09
#: Per millisecond of an H200, fitted to the times of core/tuning.json: FLOP of tensor cores, reads of shared memory,
#: bytes that producers load and that they split; milliseconds of a tile, whatever its size.
_FLOPS, _READS, _LOADS, _SPLITS, _TILE = 510e9, 3e8, 0.9e9, 2.3e9, 1e-5
#: How much longer loads take without staging where a tile has a part of an image: its runs are short.
_SHORT_RUNS = 5
#: Each kernel's name without its precision, and its candidates.
_KERNELS: dict[type[Tile], tuple[str, Callable[..., Any]]] = {
    OneChannelTile: ("one_channel", one_channel_tiles),
    ImplicitGemmTile: ("implicit_gemm", implicit_gemm_tiles),
    WarpgroupTile: ("warpgroup", warpgroup_tiles),
    MmaSyncTile: ("mma_sync", mma_sync_tiles),
}


def kernel_name(kind: type[Tile], components: int) -> str:
    """Return the kernel's name in the list of kernels and in the tuning table."""
    return f"fp16x{2 * components - 1}_{_KERNELS[kind][0]}"


def milliseconds(tile: Tile) -> float:
    """Return the time per image on an H200: of math warps or of producers, whichever take longer.

    It knows neither latencies nor bank conflicts. Only ratios matter: ``core.tuning`` scales it.
    """
    columns = 64 if tile.implicit_gemm else 8 * tile.column_groups * tile.group_tiles * tile.row_accumulators
    flops = 2 * 16 * tile.k_steps * columns * tile.row_blocks * tile.unit_positions * (2 * tile.components - 1)
    # Math warps have units of two tiles at a time.
    workers = tile.math_warps // 4 if tile.wgmma else tile.math_warps
    multiplying = (flops / _FLOPS + tile.shared_reads / _READS) / min(1.0, 2 * tile.units / workers)
    slowly = _SHORT_RUNS if tile.input_from_global and tile.tiles_per_image > 1 else 1
    producing = ITEM_BYTES * (slowly * tile.input_floats / _LOADS + tile.stage_words / _SPLITS)
    # A norm between the sum and the maximum: they overlap, but not wholly.
    of_tile = (multiplying**5 + producing**5) ** 0.2 + _TILE
    return float(of_tile * tile.filter_blocks * tile.tiles_per_image / tile.tile_images)


def candidates(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> list[Tile]:
    """Return the candidate tiles for arrays at multiples of ``aligned`` bytes, the most promising first.

    Their strides are the smallest ones, with which they fit shared memory.
    """
    recorded = tuning.recorded_tile(kernel_name(kind, components), layer, chip)
    ranked: Callable[..., list[Tile]] = _ranked  # mypy takes the hash of the class for that of its instances
    return ranked(kind, layer, chip, aligned, components, tuple(recorded.items()))


@lru_cache(maxsize=256)
def _ranked(
    kind: type[Tile],
    layer: ConvProblem,
    chip: Chip,
    aligned: int,
    components: int,
    recorded: tuple[tuple[str, int], ...],
) -> list[Tile]:
    def rank(tile: Tile) -> tuple[bool, float]:
        another = any(getattr(tile, name) != value for name, value in recorded)
        truncates = tile.k_steps >= LONG_SUM and not tile.promotion_interval
        return another, milliseconds(tile) * (_PROMOTION_IS_WORTH if truncates else 1.0)

    tiles = (tile.with_smallest_strides() for tile in _KERNELS[kind][1](layer, aligned, components, chip))
    return sorted((tile for tile in tiles if tile.shared_bytes <= chip.shared_bytes), key=rank)


def tile_for(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    """Return the tile of a call whose arrays all lie at multiples of ``aligned`` bytes; None where none fits.

    It does not depend on the batch. Wide stores want other strides, which may not fit: then the tile for unaligned
    arrays serves.
    """
    layer = layer.with_batch(MOST_IMAGES)  # one tile, one binary, for every batch
    every = (tile for each in (aligned, 4) for tile in candidates(kind, layer, chip, each, components))
    return next(filter(None, (tile.laid_out(chip.shared_bytes) for tile in every)), None)
