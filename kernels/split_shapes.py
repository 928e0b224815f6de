"""Which tile ``split`` takes: every one that fits the chip is priced in cycles, and the cheapest is taken.

Prices are of an H200, roughly: docs/gpu/split.md tells how they compare with what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ece408_op.launch import Chip, ceil_div, round_up
from ece408_op.problem import ConvProblem

from .split_taps import folded_layout, layout, quiet_layouts, row_taps
from .split_tile import Tile, copied, cuts

#: Cycles of a multiprocessor for one instruction of 16 x 8 x 16 products: 624 TFLOP/s on an H200.
_MMA = 1.52
#: Cycles for a warp's read of 4 bytes a lane: one of shared memory, and nearly as much lost to the tensor cores, which
#: the registers that are written keep waiting.
_READ = 2
#: Cycles for a tile's barriers and for what waits at its ends.
_EACH_TILE = 900
#: Cycles of a millisecond, multiprocessors, and milliseconds of a call's three launches.
_CYCLES, _MULTIPROCESSORS, _LAUNCHES = 1.75e6, 132, 0.012
#: A tile has no more images.
MOST_IMAGES = 16
#: How much longer it takes where inputs are read twice from the cache.
_DIRECT = 1.03
#: And where outputs leave by the copy engine, and where inputs are copied a tile ahead.
_BULK, _AHEAD = 0.82, 0.97
#: Images of a tile of one channel whose inputs are worth copying a tile ahead: of two it took longer.
_MANY_IMAGES = 8
#: Bytes of filters that mma.sync has in shared memory; more are read from the cache.
_MOST_FILTERS = 100 * 1024
#: Share of the shared memory that wgmma's filters may take.
_MOST_SHARE = 0.7
#: Registers of a thread for the pixels that stay with it, and, by warps of a block, for sums and filters; where sums
#: are parted every few steps, for three registers of a sum instead of two.
_KEPT = 64
_SUMS, _CHUNKED_SUMS = {8: 100, 12: 72}, {8: 104, 12: 72}
#: Steps after which sums are parted, whole pairs and threes; of sums shorter than _LONG_SUM there is little to win.
_CHUNK, _LONG_SUM = 6, 9
#: How much dearer a tile may be whose sums are parted than one that has no registers for it, before that is taken.
_WORTH = 1.09
#: Registers for filters, and pixels or sums, where filters stay: of 128 of a thread, of 168. Tiles of filters then.
_MOST_KEPT, _MOST_STATIONARY, _MOST_TILES = 88, 136, 4
#: How much longer it takes where a tile is a part of its rows only, whose inputs are copied and split one by one; how
#: much longer the loading warps alone take, of split and of teams, and where they copy one float at a time.
_PART_OF_ROWS, _PART_LOADED, _ONE_BY_ONE = 3.0, (3.9, 8.0), (1.9, 1.3)
#: Cycles of the loading warps for 32 floats of input and for 32 words of planes; how their time and that of products,
#: which they share a multiprocessor with, make one: by a sum of such powers. Fitted to 79 layers' times (split.md).
_LOAD_INPUTS, _LOAD_WORDS, _POWER = (17, 31), (11, 0), 3
#: Warps by four that multiply; registers of each of their threads, the fewer, the more for loaders, and how many to
#: leave beside sums and fragments, such that the compiler neither spilled nor let products wait for one another; column
#: tiles, of all rows of sums, that it did so for with sums that are parted.
_TEAMS, _TEAM_REGISTERS, _CHUNKED_TILES = 3, {144: 44, 152: 28}, 6
#: Rows of filters with fewer words than this are not taken step by step.
_LEAST_ROW = 7
#: Steps that are worth doing one by one, where rows share nothing.
_MOST_STEPS = 24
#: Tiles so much larger than shared memory are looked at: rows and planes may lie closer together than at first. So many
#: of them at most, for it takes long.
_NEARLY, _MOST_NEARLY = 1.1, 2
#: Units of 32 positions that keep the warps of a block at work: of one image, of several.
_UNITS_ALONE, _UNITS = 64, 110


def _stationary(tiles: int, warps: int, a_tile: int, others: int, most: int) -> int | None:
    """How many tiles a warp keeps where so many registers for each, and some others, fit; None where one does not."""
    for groups in range(1, warps + 1):
        each = ceil_div(tiles, groups)
        if warps % groups == 0 and ceil_div(tiles, each) == groups and a_tile * each + others <= most:
            return each
    return None


def _columns_warps(steps: int, tiles: int, stays: bool) -> tuple[int, int]:
    """NC and NP, as timed: 8 warps store in fewer places at a time, but with few sums each they wait for products."""
    if tiles < 3 and steps > 2:
        return 12, 4
    return 8, 4 if stays and steps > 2 else 8


def by_columns(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for one channel, two outputs of a row a position (``split_columns.cu``)."""
    width, pixels = problem.output_width, problem.output_height * problem.output_width
    if problem.channels != 1 or width % 2 or pixels % 4:
        return
    ways = [(images, problem.output_height) for images in (1, 2, 3, 4, 5, 6, 8, 12, 16) if images <= problem.batch]
    if width % 4 == 0:
        ways += [(1, ceil_div(problem.output_height, n)) for n in range(2, problem.output_height + 1)]
    tiles = ceil_div(2 * problem.filters, 8)
    for images, lines in ways:
        high = lines + problem.kernel - 1
        if 4 * images * high * problem.width > chip.shared_bytes:
            continue
        stride, plane, taps = folded_layout(problem.kernel, width // 2, ceil_div(problem.width, 2), high)
        steps = len(taps) // 8
        stays = tiles <= _MOST_TILES and 2 * parts * steps * (tiles + 2) <= _MOST_KEPT
        kept = 1 if stays else next((n for n in (2, 1) if steps * n * 4 * parts <= _KEPT), 0)
        if not kept:
            return
        warps, loaders = _columns_warps(steps, tiles, stays)
        for direct in (False, True):
            tile = Tile(
                parts, 2, 1, images, lines, width // 2, stride, plane, taps, 0, tiles, warps,
                copied(problem, 1, lines, True, aligned), loaders, pixels=kept, stationary=stays, folded=True,
                direct=direct, shared_weights=not stays and steps * tiles * 256 * parts <= _MOST_FILTERS,
                y_vector=aligned // 4,
            )  # fmt: skip
            further = replace(tile, ahead=not direct and images >= _MANY_IMAGES)
            yield from [each for each in (further, tile) if each.shared_bytes(problem) <= chip.shared_bytes][:1]


def columns_price(problem: ConvProblem, tile: Tile) -> float:
    """No cycles: as few images as give the warps enough to do, their rows copied, in as few bands as fit."""
    units = ceil_div(tile.images * tile.super_rows * tile.columns, 32)
    enough = units >= (_UNITS if tile.images > 1 else _UNITS_ALONE)
    price = tile.images + 1.5 * (tile.tiles_an_image(problem) - 1) + (2.5 if tile.direct else 0)
    return price if enough else 10_000 - units


def _copied_or_not(problem: ConvProblem, images: int, rows: int, columns: int) -> tuple[bool, ...]:
    """DIRECT: inputs are read twice from the cache only for a whole image, where all rows follow one another."""
    whole = images == 1 and rows >= problem.output_height and columns == problem.output_width
    return (False, True) if whole else (False,)


def _part(problem: ConvProblem, tile: Tile) -> float:
    return 1.0 if tile.columns == problem.output_width else _PART_OF_ROWS


def _with_loading(problem: ConvProblem, tile: Tile, work: float) -> float:
    """Cycles of a tile whose products take so many, its loading warps being at work at the same time."""
    team = int(tile.teams > 0)
    words = tile.images * ceil_div(problem.channels, 2) * tile.plane
    loading = (_LOAD_INPUTS[team] * tile.inputs(problem) + _LOAD_WORDS[team] * words) / 32
    loading *= _ONE_BY_ONE[team] if tile.vector == 1 else 1.0
    loading *= 1.0 if tile.columns == problem.output_width else _PART_LOADED[team]
    return (work**_POWER + loading**_POWER) ** (1 / _POWER)


def by_rows(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for filters that stay in registers, inputs shared by rows of outputs (``split_rows.cu``)."""
    tiles, words = ceil_div(problem.filters, 8), len(row_taps(problem.channels, problem.kernel))
    row_steps = ceil_div(words, 8)
    for sets, first in product((1, 2, 3, 4), (False, True)):
        # Of two tiles' filters as A the sums of eight positions are as many as those of one tile's for 16.
        filters, sums = 2 * parts * problem.kernel * row_steps, (2 if first else 4) * parts * sets
        each = _stationary(tiles, 8, filters + sums, 8 * parts, _MOST_STATIONARY)
        if each is None or sets > problem.output_height or (first and each % 2):
            continue
        for images, lines, columns in cuts(problem, sets):
            whole = columns == problem.output_width
            width = problem.width if whole else columns + problem.kernel - 1
            high = sets * lines + problem.kernel - 1
            if 4 * parts * images * problem.channels * high * width > chip.shared_bytes:
                continue
            pairs = columns % 2 == 0 and problem.output_width % 2 == 0 and aligned >= 8
            if first and not pairs:
                continue
            step = 2 if pairs and not first else 1
            stride, plane, taps, _ = layout(
                problem.channels, problem.kernel, 1, sets, columns, width, high, step, whole_rows=True
            )
            vector = copied(problem, sets, lines, whole, aligned)
            for direct in _copied_or_not(problem, images, sets * lines, columns):
                tile = Tile(
                    parts, 1, sets, images, lines, columns, stride, plane, taps, row_steps, each, 8, vector,
                    direct=direct, stationary=True, shared_weights=False, pairs=pairs, filters_first=first,
                )  # fmt: skip
                runs = whole and problem.output_height * columns % 4 == 0
                runs = runs and (sets * lines >= problem.output_height or sets * lines * columns % 4 == 0)
                knows_bulk = chip.capability >= (9, 0) and chip.compiler >= (12, 0)
                bulk = knows_bulk and aligned == 16 and pairs and runs
                for way, ahead in product((True, False) if bulk else (False,), (False,) if direct else (True, False)):
                    found = replace(tile, bulk=way, ahead=ahead)
                    if found.shared_bytes(problem) <= chip.shared_bytes:
                        yield found


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
    total = (work / busy + _EACH_TILE) * ways * _part(problem, tile)
    return total * tile.tiles_an_image(problem) / tile.images


def _chunk(steps: int, parts: int) -> int:
    """CHUNK: steps after which sums are parted, 0 where they are not."""
    return _CHUNK if parts == 2 and steps >= _LONG_SUM else 0


def _shapes(steps: int, tiles: int, parts: int) -> Iterator[tuple[int, int, bool, int]]:
    """MT, NT, KEEP_A and NC that fit the registers."""
    if steps * 4 * parts <= _KEPT:
        for pixels in (2, 1):
            if steps * pixels * 4 * parts <= _KEPT:
                yield pixels, tiles, True, 12
        return
    chunked = _chunk(steps, parts) > 0
    for warps, room in (_CHUNKED_SUMS if chunked else _SUMS).items():
        for pixels in (4, 3, 2, 1):
            for groups in range(1, tiles + 1):
                each = ceil_div(tiles, groups)
                fits = 4 * ((parts + chunked) * pixels + parts) * each <= room
                if fits and (groups == 1 or ceil_div(tiles, each) == groups):
                    yield pixels, each, False, warps
                    break


def by_warps(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for warps by themselves (``split.cu``)."""
    out = problem.output_height * problem.output_width
    for rows in (1, 2, 4) if problem.channels == 1 else (1,):
        if rows > problem.output_height:
            continue
        tiles = ceil_div(rows * problem.filters, 8)
        for images, lines, columns in cuts(problem, rows):
            whole = columns == problem.output_width
            width = problem.width if whole else columns + problem.kernel - 1
            high = rows * lines + problem.kernel - 1
            if 4 * parts * images * problem.channels * high * width > chip.shared_bytes:
                continue
            straight = whole and rows == 1 and out % 4 == 0 and (lines == problem.output_height or columns % 4 == 0)
            quads = straight and aligned == 16
            step = 4 if quads else 1
            stride, plane, taps, _ = layout(problem.channels, problem.kernel, rows, 0, columns, width, high, step)
            steps = len(taps) // 8
            vector = copied(problem, rows, lines, whole, aligned)
            for pixels, each, keep_a, warps in _shapes(steps, tiles, parts):
                if quads and pixels % 2:
                    continue
                for direct in _copied_or_not(problem, images, rows * lines, columns):
                    tile = Tile(
                        parts, rows, 1, images, lines, columns, stride, plane, taps, 0, each, warps, vector,
                        pixels=pixels, keep_a=keep_a, direct=direct, quads=quads,
                        shared_weights=steps * tiles * 256 * parts <= _MOST_FILTERS,
                        chunk=0 if keep_a else _chunk(steps, parts),
                    )  # fmt: skip
                    if tile.shared_bytes(problem) <= chip.shared_bytes:
                        yield tile


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
    return total * (_DIRECT if tile.direct else 1.0) * tile.tiles_an_image(problem) / tile.images


def _team_groups(tiles: int, sets: int, parts: int, registers: int) -> tuple[int, int] | None:
    """How many groups of how many column tiles a block has whose sums fit the registers."""
    others = 8 * parts + _TEAM_REGISTERS[registers]
    for groups in range(1, tiles + 1):
        each = ceil_div(tiles, groups)
        if (12 if parts == 2 else 4) * each * sets + others <= registers and each * parts <= 32:
            return groups, each
    return None


def by_teams(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for groups of four warps (``split_wgmma.cu``), those among them that nearly fit."""
    ways = [(1, sets) for sets in (1, 2, 3, 4) if len(row_taps(problem.channels, problem.kernel)) >= _LEAST_ROW]
    ways += [(rows, 0) for rows in ((1, 2, 4) if problem.channels <= 3 else (1,))]
    for rows, by_row in ways:
        sets = max(1, by_row)
        down, tiles = rows * sets, ceil_div(rows * problem.filters, 8)
        if down > problem.output_height:
            continue
        for images, lines, columns in cuts(problem, down):
            whole = columns == problem.output_width
            width = problem.width if whole else columns + problem.kernel - 1
            high = down * lines + problem.kernel - 1
            if 4 * parts * images * problem.channels * high * width > chip.shared_bytes:
                continue
            stride, plane, taps, row_steps = layout(
                problem.channels, problem.kernel, rows, by_row, columns, width, high
            )
            if not by_row and len(taps) > 8 * _MOST_STEPS:
                continue
            vector = copied(problem, down, lines, whole, aligned)
            for blocks, direct in product(range(1, tiles + 1), _copied_or_not(problem, images, down * lines, columns)):
                # Loaders that copy rows do not do with the fewer registers.
                most = [r for r in _TEAM_REGISTERS if direct or r == min(_TEAM_REGISTERS)]
                groups = {r: _team_groups(ceil_div(tiles, blocks), sets, parts, r) for r in most}
                found = groups[most[-1]]
                if found is None or ceil_div(ceil_div(tiles, found[1]), found[0]) != blocks:
                    continue
                if len(taps) // 8 * found[0] * found[1] * 256 * parts > chip.shared_bytes * _MOST_SHARE:
                    continue
                registers = next(r for r in most if groups[r] == found)
                tile = Tile(
                    parts, rows, sets, images, lines, columns, stride, plane, taps, row_steps, found[1],
                    4 * _TEAMS, vector, teams=_TEAMS, registers=registers, direct=direct, filter_blocks=blocks,
                    chunk=_chunk(len(taps) // 8, parts) if sets * found[1] <= _CHUNKED_TILES else 0,
                )  # fmt: skip
                if tile.shared_bytes(problem) <= _NEARLY * chip.shared_bytes:
                    yield tile


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
    total *= _WORTH if _chunk(tile.steps, parts) > tile.chunk else 1.0
    return total * tile.filter_blocks * tile.tiles_an_image(problem) / tile.images


_WAYS = {
    "columns": (by_columns, columns_price),
    "rows": (by_rows, rows_price),
    "warps": (by_warps, warps_price),
    "teams": (by_teams, teams_price),
}


@lru_cache(maxsize=256)
def best_tile(way: str, problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Tile | None:
    """The cheapest tile of that way, "columns", "rows", "warps" or "teams"; None where none fits shared memory."""
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


def estimate(way: str, parts: int, problem: ConvProblem, chip: Chip) -> float:
    """Milliseconds that a call takes by the price of its tile, but for "columns"; infinite where no tile fits.

    As if the chip were as large as the one that prices are of: kernels are compared, not chips.
    """
    tile = best_tile(way, problem.with_batch(MOST_IMAGES), chip, 4, parts)
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
