"""The cost model: predicts how long each candidate tile takes, in cycles of a multiprocessor per image.

The constants are fitted to times of an H200, of the layers in the tuning table; predictions err by about 18 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div

from ._candidate_tiles import (
    MOST_IMAGES,
    implicit_gemm_tiles,
    mma_sync_tiles,
    one_channel_tiles,
    wanted_interval,
    warpgroup_tiles,
)
from ._shared_memory_layout import layouts_by_conflicts
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile

#: Cycles of a multiprocessor for one mma of 16 x 8 x 16 products: 624 TFLOP/s on an H200.
_MMA = 1.52
#: Cycles for a warp's read of 4 bytes per lane: one of shared memory, and nearly one more that the tensor cores lose
#: because the registers are being written.
_READ = 2
#: Cycles of a tile for barriers and for waits at its ends.
_EACH_TILE = 900
#: Cycles of a millisecond, multiprocessors, and milliseconds of a call's three launches.
_CYCLES, _MULTIPROCESSORS, _LAUNCHES = 1.75e6, 132, 0.012
#: Factors for input that is read twice from L2; for single stores, not of four neighbours at a time, of mma_sync.
_FROM_GLOBAL, _SINGLE_STORES = 1.03, 1.09
#: Of implicit_gemm's producers, in cycles: an iteration; each unit of it, by components; a tile's ends; a float that a
#: thread copies. Factors of products and of producers where eight warps produce, not 4.
_ITERATION, _UNIT, _LOADED, _COPIED, _CROWDED = 174, {1: 230, 2: 416}, 680, 96, (1.1, 1.6)
#: And of its epilogue, in cycles: an output stored without staging; a line of eight positions; a map that the copy
#: engine stores. Bytes of memory per cycle and multiprocessor.
_ALONE, _LINE, _MAP, _BYTES = 1.29, 16, 148, 17.3
#: Prefer a tile with accumulator promotion unless the model predicts that it is more than 9 % slower.
_WORTH = 1.09
#: Factor of warpgroup_mma with two warpgroups, which promote, instead of three, which do not.
_TWO_WARPGROUPS = 1.15
#: Of mma_sync and warpgroup_mma: producers' cycles for 32 floats of input, and for 32 words of a plane; factors for a
#: part of rows, and for copies of one float. Their time and that of products, which share a multiprocessor, combine as
#: a power mean.
_LOAD_INPUTS, _LOAD_WORDS, _PART_LOADED, _ONE_BY_ONE, _POWER = (17, 31), (11, 0), (3.9, 8.0), (1.9, 1.3), 3
#: The alignment in bytes of whole arrays, as far as kernels ask.
ALIGNED = 16
#: Units of 32 positions that keep the warps of a block busy: of one image, of several.
_UNITS_ALONE, _UNITS = 64, 110
#: How many tiles that nearly fit are examined: it takes long.
_MOST_NEARLY = 2


def _one_channel_cycles(tile: OneChannelTile) -> float:
    """Return no cycles but a rank: prefer few images that give the warps enough to do, staged input, few bands."""
    units = ceil_div(tile.positions, 32)
    enough = units >= (_UNITS if tile.tile_images > 1 else _UNITS_ALONE)
    rank = tile.tile_images + 1.5 * (tile.tiles_per_image - 1) + (2.5 if tile.input_from_global else 0)
    return rank if enough else 10_000 - units


def _with_producers(tile: Tile, work: float) -> float:
    """Return the cycles of a tile whose products take ``work``, while its producer warps run."""
    i = int(tile.wgmma)
    words = tile.tile_images * tile.planes * tile.plane_stride
    loading = (_LOAD_INPUTS[i] * tile.input_floats + _LOAD_WORDS[i] * words) / 32
    loading *= _ONE_BY_ONE[i] if tile.copy_floats == 1 else 1.0
    loading *= 1.0 if tile.tile_columns == tile.layer.output_width else _PART_LOADED[i]
    return (work**_POWER + loading**_POWER) ** (1 / _POWER)


def _mma_sync_cycles(tile: MmaSyncTile) -> float:
    """The tensor cores' time or shared memory's, whichever is longer."""
    k_steps, tiles, components = tile.k_steps, tile.column_tiles, tile.components
    groups = 1 if tile.inputs_in_registers else tile.column_groups
    mma = (3 if components == 2 else 1) * _MMA * tile.m_tiles * tiles * k_steps
    reads = _READ * 4 * components * tile.m_tiles * k_steps * groups
    filters = (2 * components * tiles + groups) * k_steps
    stored = (0.5 if tile.quad_stores else 2.0) * 8 * tiles * tile.m_tiles * 16 / 32
    units = ceil_div(tile.positions, 16 * tile.m_tiles)
    shared = units * (reads + filters + stored)
    work = max(units * mma, shared) + 0.35 * min(units * mma, shared)
    # Few units leave warps idle: at most two tiles are there at a time. Each tile costs its barriers.
    busy = min(1.0, units * groups * 1.6 / tile.math_warps)
    work *= 0.75 / busy * (1.12 if tile.math_warps == 8 else 1.0) * (1.0 if tile.filters_in_shared else 1.3)
    total = _with_producers(tile, work) + 0.2 * _EACH_TILE
    total *= 1.0 if tile.quad_stores else _SINGLE_STORES
    return total * (_FROM_GLOBAL if tile.input_from_global else 1.0) * tile.tiles_per_image / tile.tile_images


def _warpgroup_cycles(tile: WarpgroupTile) -> float:
    kernel, components, each, rows = tile.layer.kernel, tile.components, tile.group_tiles, tile.row_accumulators
    products = rows * tile.k_steps
    loads = tile.row_k_steps * (kernel + rows - 1) + rows * (tile.k_steps - kernel * tile.row_k_steps)
    # A wgmma of few columns takes as long as one of 24.
    columns = max(12, 8 * each) + max(12, 4 * each) if components == 2 else max(12, 4 * each)
    tensor = products * columns / 0.9
    shared = _READ * loads * 16 * components + products * (6 if components == 2 else 2) * each
    stored = rows * each * 72 + 150 * rows
    units = ceil_div(tile.positions, 64) * tile.column_groups
    work = units * (0.63 * (max(tensor, shared) + 0.3 * min(tensor, shared)) + 0.7 * stored)
    busy = min(1.0, units * 1.6 / tile.warpgroups)
    total = (_with_producers(tile, work / busy) + 0.7 * _EACH_TILE) * (_FROM_GLOBAL if tile.input_from_global else 1.0)
    total *= _WORTH if wanted_interval(tile.k_steps, components) > tile.promotion_interval else 1.0
    total *= _TWO_WARPGROUPS if tile.warpgroups == 2 else 1.0
    return total * tile.filter_blocks * tile.tiles_per_image / tile.tile_images


def _implicit_gemm_cycles(tile: ImplicitGemmTile) -> float:
    """Products, producers, stores and memory, which overlap."""
    problem, components, tiles = tile.layer, tile.components, tile.tiles_per_image
    pieces = tile.tile_images * tile.pieces
    tensor = pieces * tile.k_steps * (3 if components == 2 else 1) * tile.wgmma_n / 2
    iterations = ceil_div(tile.tile_images * tile.plane_stride // 4, 32 * tile.producer_warps)
    loading: float = iterations * (_ITERATION + _UNIT[components] * tile.planes)
    if tile.producer_warps > 4:
        tensor, loading = _CROWDED[0] * tensor, _CROWDED[1] * loading
    loading += _LOADED
    if tile.copy_floats < 4:
        loading += _COPIED * tile.input_floats / tile.copy_floats / (32 * tile.producer_warps)
    filters = min(problem.filters, 8 * tile.group_tiles)
    outputs = tile.tile_images * filters * problem.output_height * problem.output_width / tiles
    stored: float = _LINE * pieces * tile.wgmma_n / 8
    if not tile.bulk_store:
        stored += outputs * _ALONE
    elif tile.output_pitch != problem.output_height * problem.output_width:
        stored += _MAP * tile.tile_images * filters
    memory = ITEM_BYTES * (tile.input_floats + outputs) / _BYTES
    total = (tensor**4 + loading**4 + stored**4 + memory**4) ** (1 / 4) + 0.3 * _EACH_TILE
    return total * tiles / tile.tile_images


Candidates = Callable[[ConvProblem, Chip, int, int], Iterator[Any]]
#: Of each kernel's tile: the candidates, and their predicted cycles.
_MODELS: dict[type[Tile], tuple[Candidates, Callable[[Any], float]]] = {
    OneChannelTile: (one_channel_tiles, _one_channel_cycles),
    MmaSyncTile: (mma_sync_tiles, _mma_sync_cycles),
    WarpgroupTile: (warpgroup_tiles, _warpgroup_cycles),
    ImplicitGemmTile: (implicit_gemm_tiles, _implicit_gemm_cycles),
}


def candidates(kind: type[Tile], problem: ConvProblem, chip: Chip, aligned: int, components: int) -> list[Tile]:
    """Return every candidate tile for arrays at multiples of ``aligned`` bytes, those that nearly fit included."""
    return list(_MODELS[kind][0](problem, chip, aligned, components))


@lru_cache(maxsize=256)
def best_tile(kind: type[Tile], problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    """Return the tile with the fewest predicted cycles; None where none fits shared memory."""
    nearly = 0
    for tile in sorted(candidates(kind, problem, chip, aligned, components), key=_MODELS[kind][1]):
        fits = tile.shared_bytes <= chip.shared_bytes
        if not fits and (nearly == _MOST_NEARLY or not tile.row_k_steps):
            continue
        improved = _with_fewest_conflicts(tile, chip)
        if improved.shared_bytes <= chip.shared_bytes:
            return improved
        nearly += 1
    return None


def tile_for(kind: type[Tile], problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    """Return the tile of a call whose arrays all lie at multiples of ``aligned`` bytes; None where none fits.

    It does not depend on the batch. Wide stores want other strides, which may not fit: then the tile for unaligned
    arrays serves.
    """
    layer = problem.with_batch(MOST_IMAGES)  # one tile, one binary, for every batch
    best: Callable[..., Tile | None] = best_tile  # mypy takes the hash of the class for that of its instances
    return best(kind, layer, chip, aligned, components) or best(kind, layer, chip, 4, components)


def predicted_milliseconds(kind: type[Tile], components: int, problem: ConvProblem, chip: Chip) -> float:
    """Return the predicted time of a call on aligned arrays; infinite where no tile fits.

    All chips count as an H200, with more or fewer multiprocessors: the prediction compares kernels, not chips.
    """
    tile = tile_for(kind, problem, chip, ALIGNED, components)
    if tile is None:
        return math.inf
    blocks = tile.tiles_per_image * tile.filter_blocks
    waves = ceil_div(ceil_div(problem.batch, tile.tile_images) * blocks, chip.multiprocessors)
    each = _MODELS[kind][1](tile) / blocks * tile.tile_images
    return waves * chip.multiprocessors / _MULTIPROCESSORS * each / _CYCLES + _LAUNCHES


def _with_fewest_conflicts(tile: Tile, chip: Chip) -> Tile:
    """Return the tile with the strides that cause the fewest bank conflicts, of those that fit."""
    if not tile.row_k_steps:
        return tile
    problem, rows = tile.layer, tile.position_rows
    whole = tile.tile_columns == problem.output_width
    width = problem.width if whole else tile.tile_columns + problem.kernel - 1
    height = rows * tile.tile_lines + problem.kernel - 1
    layouts = layouts_by_conflicts(problem.channels, problem.kernel, tile.tile_columns, width, height, rows)
    improved = (replace(tile, row_stride=stride, plane_stride=plane, taps=taps) for _, plane, stride, taps in layouts)
    fitting = (each for each in improved if each.shared_bytes <= chip.shared_bytes and each.k_steps == tile.k_steps)
    return next(fitting, tile)
