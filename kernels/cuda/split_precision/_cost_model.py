"""Which tile ``fp16x3_mma_sync`` takes: every one that fits the chip is priced in cycles, and the cheapest is taken.

Prices are of an H200, fitted to times of the layers in the tuning table; they err by about 18 %.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div, round_up

from ._candidate_tiles import MOST_IMAGES, by_columns, by_implicit, by_rows, by_teams, by_warps, chunk_of
from ._shared_memory_layout import quiet_layouts
from ._tile import Tile

#: Cycles of a multiprocessor for one instruction of 16 x 8 x 16 products: 624 TFLOP/s on an H200.
_MMA = 1.52
#: Cycles for a warp's read of 4 bytes a lane: one of shared memory, and nearly as much lost to the tensor cores, which
#: the registers that are written keep waiting.
_READ = 2
#: Cycles for a tile's barriers and for what waits at its ends.
_EACH_TILE = 900
#: Cycles of a millisecond, multiprocessors, and milliseconds of a call's three launches.
_CYCLES, _MULTIPROCESSORS, _LAUNCHES = 1.75e6, 132, 0.012
#: How much longer it takes where inputs are read twice from the cache.
_DIRECT = 1.03
#: And where outputs leave by the copy engine, and where inputs are copied a tile ahead.
_BULK, _AHEAD = 0.82, 0.97
#: And where ``fp16x3_mma_sync`` stores outputs one by one rather than four neighbours at a time.
_SINGLY = 1.09
#: Of ``fp16x3_implicit_gemm``, cycles of the loading warps: a round of theirs, and each unit of it, of one part and of two;  # noqa: E501
#: a tile's ends; a float that a thread copies. How much longer products and those take where eight warps load, not 4.
_ROUND, _UNIT, _LOADED, _COPIED, _CROWDED = 174, (230, 416), 680, 96, (1.1, 1.6)
#: And of its teams: an output stored without staging, by two and alone; a line of eight positions; a map that the copy
#: engine takes. Bytes of memory in a cycle, for each multiprocessor.
_PAIRS, _ALONE, _LINE, _MAP, _BYTES = 1.09, 1.29, 16, 148, 17.3
#: How much dearer a tile may be whose sums are parted than one that has no registers for it, before that is taken.
_WORTH = 1.09
#: How much longer ``fp16x3_warpgroup`` takes with two teams, whose sums are parted, than with three, whose are not.
_TWO_TEAMS = 1.15
#: How much longer ``fp16x3_output_rows`` takes where a tile is a part of its rows only, whose inputs are copied one by one.  # noqa: E501
_PART_OF_ROWS = 3.0
#: Of ``fp16x3_mma_sync`` and ``fp16x3_warpgroup``, cycles of the loading warps for 32 floats of input and for 32 words of planes, and  # noqa: E501
#: how much longer they take for a part of rows, and where they copy one float at a time. Their time and that of
#: products, which they share a multiprocessor with, make one: by a sum of such powers.
_LOAD_INPUTS, _LOAD_WORDS, _PART_LOADED, _ONE_BY_ONE, _POWER = (17, 31), (11, 0), (3.9, 8.0), (1.9, 1.3), 3
#: Bytes that whole arrays lie at a multiple of, as far as kernels ask.
ALIGNED = 16
#: Units of 32 positions that keep the warps of a block at work: of one image, of several.
_UNITS_ALONE, _UNITS = 64, 110
#: Tiles that nearly fit are looked at so often: it takes long.
_MOST_NEARLY = 2


def columns_price(problem: ConvProblem, tile: Tile) -> float:
    """No cycles: as few images as give the warps enough to do, their rows copied, in as few bands as fit."""
    units = ceil_div(tile.images * tile.super_rows * tile.columns, 32)
    enough = units >= (_UNITS if tile.images > 1 else _UNITS_ALONE)
    price = tile.images + 1.5 * (tile.tiles_an_image(problem) - 1) + (2.5 if tile.direct else 0)
    return price if enough else 10_000 - units


def _with_loading(problem: ConvProblem, tile: Tile, work: float) -> float:
    """Cycles of a tile whose products take so many, its loading warps being at work at the same time."""
    team = int(tile.teams > 0)
    words = tile.images * ceil_div(problem.channels, 2) * tile.plane
    loading = (_LOAD_INPUTS[team] * tile.inputs(problem) + _LOAD_WORDS[team] * words) / 32
    loading *= _ONE_BY_ONE[team] if tile.vector == 1 else 1.0
    loading *= 1.0 if tile.columns == problem.output_width else _PART_LOADED[team]
    return (work**_POWER + loading**_POWER) ** (1 / _POWER)


def rows_price(problem: ConvProblem, tile: Tile) -> float:
    """Cycles of a multiprocessor for one image."""
    parts, groups = tile.parts, tile.groups(problem)
    mma = (3 if parts == 2 else 1) * _MMA * tile.tiles * tile.sets * tile.steps
    if tile.filters_first:  # rows beyond the last one are left out, which takes a turn of its own
        high = tile.down * tile.super_rows
        real = problem.output_height / round_up(problem.output_height, high)
        mma *= real + 0.25 * (1 - real)
    reads = 4 * parts * tile.row_steps * (problem.kernel + tile.sets - 1)
    stored = tile.sets * tile.tiles * 8
    positions = tile.images * tile.super_rows * tile.columns
    units = (ceil_div(positions, 8) / 2 if tile.filters_first else ceil_div(positions, 16)) * groups
    words = tile.images * ceil_div(problem.channels, 2) * tile.plane
    work = units * (mma + 0.5 * reads + stored) + words / 32 * (3 + 2 * parts) * 1.3
    busy = min(1.0, units * 1.6 / tile.warps)
    ways = (_DIRECT if tile.direct else 1.0) * (_BULK if tile.bulk else 1.0) * (_AHEAD if tile.ahead else 1.0)
    total = (work / busy + _EACH_TILE) * ways
    total *= 1.0 if tile.columns == problem.output_width else _PART_OF_ROWS
    return total * tile.tiles_an_image(problem) / tile.images


def warps_price(problem: ConvProblem, tile: Tile) -> float:
    """Cycles of a multiprocessor for one image: of the tensor cores or of shared memory, whichever takes longer."""
    steps, tiles, parts = tile.steps, tile.column_tiles(problem), tile.parts
    groups = 1 if tile.keep_a else tile.groups(problem)
    mma = (3 if parts == 2 else 1) * _MMA * tile.pixels * tiles * steps
    reads = _READ * 4 * parts * tile.pixels * steps * groups
    filters = (2 * parts * tiles + groups) * steps
    stored = (0.5 if tile.quads else 2.0) * 8 * tiles * tile.pixels * 16 / 32
    units = ceil_div(tile.images * tile.super_rows * tile.columns, 16 * tile.pixels)
    shared = units * (reads + filters + stored)
    work = max(units * mma, shared) + 0.35 * min(units * mma, shared)
    # Few units leave warps idle: no more than two tiles are at hand at a time. Each tile costs its barriers.
    busy = min(1.0, units * groups * 1.6 / tile.warps)
    work *= 0.75 / busy * (1.12 if tile.warps == 8 else 1.0) * (1.0 if tile.shared_weights else 1.3)
    total = _with_loading(problem, tile, work) + 0.2 * _EACH_TILE
    total *= 1.0 if tile.quads else _SINGLY
    return total * (_DIRECT if tile.direct else 1.0) * tile.tiles_an_image(problem) / tile.images


def teams_price(problem: ConvProblem, tile: Tile) -> float:
    """Cycles of a multiprocessor for one image."""
    kernel, parts, each = problem.kernel, tile.parts, tile.tiles
    groups = tile.groups(problem)
    products = tile.sets * tile.steps
    loads = tile.row_steps * (kernel + tile.sets - 1) + tile.sets * (tile.steps - kernel * tile.row_steps)
    # A product of few columns takes as long as one of 24.
    tensor = products * (max(12, 8 * each) + max(12, 4 * each) if parts == 2 else max(12, 4 * each)) / 0.9
    shared = _READ * loads * 16 * parts + products * (6 if parts == 2 else 2) * each
    stored = tile.sets * each * 72 + 150 * tile.sets
    units = ceil_div(tile.images * tile.super_rows * tile.columns, 64) * groups
    work = units * (0.63 * (max(tensor, shared) + 0.3 * min(tensor, shared)) + 0.7 * stored)
    busy = min(1.0, units * 1.6 / tile.teams)
    total = (_with_loading(problem, tile, work / busy) + 0.7 * _EACH_TILE) * (_DIRECT if tile.direct else 1.0)
    total *= _WORTH if chunk_of(tile.steps, parts) > tile.chunk else 1.0
    total *= _TWO_TEAMS if tile.teams == 2 else 1.0
    return total * tile.filter_blocks * tile.tiles_an_image(problem) / tile.images


def implicit_price(problem: ConvProblem, tile: Tile) -> float:
    """Cycles of a multiprocessor for one image: of products, loaders, stores and memory, which go on at a time."""
    parts, pieces, tiles = tile.parts, tile.images * tile.pieces, tile.tiles_an_image(problem)
    tensor = pieces * tile.steps * (3 if parts == 2 else 1) * tile.across / 2
    rounds = ceil_div(tile.images * tile.plane // 4, 32 * tile.loaders)
    loading: float = rounds * (_ROUND + _UNIT[parts == 2] * tile.planes(problem))
    if tile.loaders > 4:
        tensor, loading = _CROWDED[0] * tensor, _CROWDED[1] * loading
    loading += _LOADED
    if tile.vector < 4:
        loading += _COPIED * tile.inputs(problem) / tile.vector / (32 * tile.loaders)
    filters = min(problem.filters, 8 * tile.tiles)
    outputs = tile.images * filters * problem.output_height * problem.output_width / tiles
    stored: float = _LINE * pieces * tile.across / 8
    if not tile.bulk:
        stored += outputs * (_PAIRS if tile.pairs else _ALONE)
    elif not tile.one_run:
        stored += _MAP * tile.images * filters
    memory = ITEM_BYTES * (tile.inputs(problem) + outputs) / _BYTES
    total = (tensor**4 + loading**4 + stored**4 + memory**4) ** (1 / 4) + 0.3 * _EACH_TILE
    total *= (1.0 if tile.ahead else 1.1) * (1.15 if tile.outs == 1 else 1.0)
    return total * tile.filter_blocks * tiles / tile.images


_WAYS = {
    "columns": (by_columns, columns_price),
    "rows": (by_rows, rows_price),
    "warps": (by_warps, warps_price),
    "teams": (by_teams, teams_price),
    "implicit": (by_implicit, implicit_price),
}


@lru_cache(maxsize=256)
def best_tile(way: str, problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Tile | None:
    """The cheapest tile of that way, a key of _WAYS; None where none fits shared memory."""
    tiles, price = _WAYS[way]
    nearly = 0
    for tile in sorted(tiles(problem, chip, aligned, parts), key=lambda tile: price(problem, tile)):
        fits = tile.shared_bytes(problem) <= chip.shared_bytes
        if not fits and (nearly == _MOST_NEARLY or not tile.row_steps):
            continue
        quiet = _quiet(problem, tile, chip)
        if quiet.shared_bytes(problem) <= chip.shared_bytes:
            return quiet
        nearly += 1
    return None


def tile_for(way: str, problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Tile | None:
    """The tile of a call whose arrays all lie at multiples of so many bytes, whatever its batch; None where none fits.

    Wide stores want other distances of planes, which may not fit: what fits any arrays then serves.
    """
    layer = problem.with_batch(MOST_IMAGES)  # one tile, one binary, for every batch
    return best_tile(way, layer, chip, aligned, parts) or best_tile(way, layer, chip, 4, parts)


def estimate(way: str, parts: int, problem: ConvProblem, chip: Chip) -> float:
    """Milliseconds that a call takes by the price of its tile, but for "columns"; infinite where no tile fits.

    As if the chip were as large as the one that prices are of: kernels are compared, not chips. And as if arrays were
    aligned as whole ones are.
    """
    tile = tile_for(way, problem, chip, ALIGNED, parts)
    if tile is None:
        return math.inf
    blocks = tile.tiles_an_image(problem) * tile.filter_blocks
    turns = ceil_div(ceil_div(problem.batch, tile.images) * blocks, chip.multiprocessors)
    each = _WAYS[way][1](problem, tile) / blocks * tile.images
    return turns * chip.multiprocessors / _MULTIPROCESSORS * each / _CYCLES + _LAUNCHES


def _quiet(problem: ConvProblem, tile: Tile, chip: Chip) -> Tile:
    """The tile with the rows' and planes' distance that leaves the fewest bank conflicts, of those that fit."""
    if not tile.row_steps:
        return tile
    whole = tile.columns == problem.output_width
    width = problem.width if whole else tile.columns + problem.kernel - 1
    high = tile.down * tile.super_rows + problem.kernel - 1
    step = 2 if tile.pairs and not tile.filters_first else 1
    layouts = quiet_layouts(
        problem.channels, problem.kernel, tile.columns, width, high, tile.down, step, tile.stationary
    )
    quieter = (replace(tile, stride=stride, plane=plane, taps=taps) for _, plane, stride, taps in layouts)
    fitting = (each for each in quieter if each.shared_bytes(problem) <= chip.shared_bytes and each.steps == tile.steps)
    return next(fitting, tile)
