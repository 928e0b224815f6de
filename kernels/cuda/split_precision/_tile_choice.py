"""The tile of a layer: that which the tuning table has, or the candidate that takes the least time by a roofline.

``ece408-bench sweep`` measures the first candidates and writes the fastest one into the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ece408_op.core import tuning
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip

from ._candidate_tiles import (
    LONG_SUM,
    MOST_IMAGES,
    implicit_gemm_tiles,
    mma_sync_tiles,
    one_channel_tiles,
    warpgroup_tiles,
)
from ._shared_memory_layout import layouts_by_conflicts
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile

#: The alignment in bytes of whole arrays, as far as kernels ask.
ALIGNED = 16
#: The most shared memory of a tile that nearly fits, as a share of the chip's, and how many such tiles are examined.
_NEARLY, _MOST_NEARLY = 1.1, 2
#: How much longer a tile with accumulator promotion may take than one without it, for a long sum.
_PROMOTION_IS_WORTH = 1.09
#: Each kernel's name without its precision, and its candidates.
NAMES: dict[type[Tile], str] = {
    OneChannelTile: "one_channel",
    ImplicitGemmTile: "implicit_gemm",
    WarpgroupTile: "warpgroup",
    MmaSyncTile: "mma_sync",
}
_CANDIDATES: dict[type[Tile], Callable[[ConvProblem, Chip, int, int], Iterator[Any]]] = {
    OneChannelTile: one_channel_tiles,
    ImplicitGemmTile: implicit_gemm_tiles,
    WarpgroupTile: warpgroup_tiles,
    MmaSyncTile: mma_sync_tiles,
}


def kernel_name(kind: type[Tile], components: int) -> str:
    """Return the kernel's name in the list of kernels and in the tuning table."""
    return f"fp16x{2 * components - 1}_{NAMES[kind]}"


def candidates(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> list[Tile]:
    """Return the candidate tiles for arrays at multiples of ``aligned`` bytes, the most promising first.

    Those that nearly fit shared memory are among them.
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
        return another, tile.milliseconds * (_PROMOTION_IS_WORTH if truncates else 1.0)

    return sorted(_CANDIDATES[kind](layer, chip, aligned, components), key=rank)


def _best_tile(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    nearly = 0
    for tile in candidates(kind, layer, chip, aligned, components):
        over = tile.shared_bytes / chip.shared_bytes
        if over > 1 and (nearly == _MOST_NEARLY or over > _NEARLY or not tile.row_k_steps):
            continue
        improved = _with_fewest_conflicts(tile, chip)
        if improved.shared_bytes <= chip.shared_bytes:
            return improved
        nearly += 1
    return None


def tile_for(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    """Return the tile of a call whose arrays all lie at multiples of ``aligned`` bytes; None where none fits.

    It does not depend on the batch. Wide stores want other strides, which may not fit: then the tile for unaligned
    arrays serves.
    """
    layer = layer.with_batch(MOST_IMAGES)  # one tile, one binary, for every batch
    return _best_tile(kind, layer, chip, aligned, components) or _best_tile(kind, layer, chip, 4, components)


@lru_cache(maxsize=256)
def _with_fewest_conflicts(tile: Tile, chip: Chip) -> Tile:
    """Return the tile with the strides that cause the fewest bank conflicts, of those that fit."""
    if not tile.row_k_steps:
        return tile
    problem, rows = tile.layer, tile.position_rows
    width, height = problem.width + 2 * problem.pad[1], rows * tile.tile_lines + problem.kernel - 1
    layouts = layouts_by_conflicts(problem.channels, problem.kernel, tile.tile_columns, width, height, rows)
    improved = (replace(tile, row_stride=stride, plane_stride=plane, taps=taps) for _, plane, stride, taps in layouts)
    fitting = (each for each in improved if each.shared_bytes <= chip.shared_bytes and each.k_steps == tile.k_steps)
    return next(fitting, tile)
