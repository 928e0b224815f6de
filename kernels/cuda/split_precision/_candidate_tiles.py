"""The candidate tiles: every one whose sums fit the registers and whose planes fit shared memory.

Which of them is taken is for their prices to say (_cost_model.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div

from ._shared_memory_layout import NO_TAP, folded_layout, layout, row_taps
from ._tile import Tile, copied, cuts

#: A tile has no more images.
MOST_IMAGES = 16
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
#: Steps after which sums are parted, whole pairs and threes; of sums shorter than LONG_SUM there is little to win.
_CHUNK, LONG_SUM = 6, 9
#: Registers for filters, and pixels or sums, where filters stay: of 128 of a thread, of 168. Tiles of filters then.
_MOST_KEPT, _MOST_STATIONARY, _MOST_TILES = 88, 136, 4
#: Warps by four that multiply; registers of each of their threads, the fewer, the more for loaders, and how many to
#: leave beside sums and fragments, such that the compiler neither spilled nor let products wait for one another; column
#: tiles, of all rows of sums, that it did so for with sums that are parted. Of so few rows of sums long ones are always
#: parted: where three teams have no registers for that, two have, for so many tiles.
_TEAMS, _TEAM_REGISTERS, _CHUNKED_TILES = 3, {144: 44, 152: 28}, 6
_FEW_SETS, _FEW_TEAMS, _FEW_REGISTERS, _FEW_TILES = 2, 2, 216, 9
#: Of ``fp16x3_implicit_gemm``: teams; loading warps, with the registers of a team's thread beside so many; how many of these  # noqa: E501
#: to leave beside sums and filters; positions of one instruction at most.
_IMPLICIT_TEAMS, _IMPLICIT_LOADERS, _IMPLICIT_OTHERS, _MOST_ACROSS = 2, {8: 200, 4: 216}, 32, 184
#: Steps of its sums and of those of ``fp16x3_output_rows``, which are not parted, at most: of uniform positive data those of 14  # noqa: E501
#: err by up to twice as much as cuDNN's on the same layer, those of 21 by up to 2.8 times.
_MOST_UNPARTED = 14
#: Rows of filters with fewer words than this are not taken step by step.
_LEAST_ROW = 7
#: Steps that are worth doing one by one, where rows share nothing.
_MOST_STEPS = 24
#: Tiles so much larger than shared memory are looked at: rows and planes may lie closer together than at first.
_NEARLY = 1.1


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
    """Every tile for one channel, two outputs of a row a position (``one_channel.cu``)."""
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


def _copied_or_not(problem: ConvProblem, images: int, rows: int, columns: int) -> tuple[bool, ...]:
    """DIRECT: inputs are read twice from the cache only for a whole image, where all rows follow one another."""
    whole = images == 1 and rows >= problem.output_height and columns == problem.output_width
    return (False, True) if whole else (False,)


def by_rows(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for filters that stay in registers, inputs shared by rows of outputs (``output_rows.cu``)."""
    tiles, words = ceil_div(problem.filters, 8), len(row_taps(problem.channels, problem.kernel))
    row_steps = ceil_div(words, 8)
    if parts == 2 and problem.kernel * row_steps > _MOST_UNPARTED:
        return
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


def chunk_of(steps: int, parts: int) -> int:
    """CHUNK: steps after which sums are parted, 0 where they are not."""
    return _CHUNK if parts == 2 and steps >= LONG_SUM else 0


def _shapes(steps: int, tiles: int, parts: int) -> Iterator[tuple[int, int, bool, int]]:
    """MT, NT, KEEP_A and NC that fit the registers."""
    if steps * 4 * parts <= _KEPT:
        for pixels in (2, 1):
            if steps * pixels * 4 * parts <= _KEPT:
                yield pixels, tiles, True, 12
        return
    chunked = chunk_of(steps, parts) > 0
    for warps, room in (_CHUNKED_SUMS if chunked else _SUMS).items():
        for pixels in (4, 3, 2, 1):
            for groups in range(1, tiles + 1):
                each = ceil_div(tiles, groups)
                fits = 4 * ((parts + chunked) * pixels + parts) * each <= room
                if fits and (groups == 1 or ceil_div(tiles, each) == groups):
                    yield pixels, each, False, warps
                    break


def by_warps(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for warps by themselves (``mma_sync.cu``)."""
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
            vector = copied(problem, rows, lines, whole, aligned)
            for quads in (True, False) if straight and aligned == 16 else (False,):
                stride, plane, taps, _ = layout(
                    problem.channels, problem.kernel, rows, 0, columns, width, high, 4 if quads else 1
                )
                steps = len(taps) // 8
                shapes = [shape for shape in _shapes(steps, tiles, parts) if not (quads and shape[0] % 2)]
                ways = _copied_or_not(problem, images, rows * lines, columns)
                for (pixels, each, keep_a, warps), direct in product(shapes, ways):
                    tile = Tile(
                        parts, rows, 1, images, lines, columns, stride, plane, taps, 0, each, warps, vector,
                        pixels=pixels, keep_a=keep_a, direct=direct, quads=quads,
                        shared_weights=steps * tiles * 256 * parts <= _MOST_FILTERS,
                        chunk=0 if keep_a else chunk_of(steps, parts),
                    )  # fmt: skip
                    if tile.shared_bytes(problem) <= chip.shared_bytes:
                        yield tile


def _team_groups(tiles: int, sets: int, parts: int, registers: int) -> tuple[int, int] | None:
    """How many groups of how many column tiles a block has whose sums fit the registers."""
    others = 8 * parts + _TEAM_REGISTERS[registers]
    for groups in range(1, tiles + 1):
        each = ceil_div(tiles, groups)
        if (12 if parts == 2 else 4) * each * sets + others <= registers and each * parts <= 32:
            return groups, each
    return None


def _parting(chunk: int, sets: int, each: int, registers: int) -> tuple[int, int, int] | None:
    """CHUNK, teams and registers of their threads for rows of sums of so many column tiles, whose threads have so many
    registers where three teams multiply; None where sums are to be parted, and have no registers for it."""
    if chunk == 0 or sets * each <= _CHUNKED_TILES:
        return chunk, _TEAMS, registers
    if sets > _FEW_SETS:
        return 0, _TEAMS, registers
    return (chunk, _FEW_TEAMS, _FEW_REGISTERS) if sets * each <= _FEW_TILES else None


def by_teams(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for groups of four warps (``warpgroup_mma.cu``), those among them that nearly fit."""
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
                shared_out = _parting(chunk_of(len(taps) // 8, parts), sets, found[1], registers)
                if shared_out is None:
                    continue
                chunk, teams, registers = shared_out
                tile = Tile(
                    parts, rows, sets, images, lines, columns, stride, plane, taps, row_steps, found[1],
                    4 * teams, vector, teams=teams, registers=registers, direct=direct, filter_blocks=blocks,
                    chunk=chunk,
                )  # fmt: skip
                if tile.shared_bytes(problem) <= _NEARLY * chip.shared_bytes:
                    yield tile


def by_implicit(problem: ConvProblem, chip: Chip, aligned: int, parts: int) -> Iterator[Tile]:
    """Every tile for filters in registers, inputs as wgmma's B (``implicit_gemm.cu``)."""
    columns, out = ceil_div(problem.output_width, 2), problem.output_height * problem.output_width
    reach = ceil_div(problem.kernel + 1, 2)
    pairs = problem.output_width % 2 == 0 and aligned >= 8
    for down in (1, 2, 4):
        if down > problem.output_height:
            continue
        high = ceil_div(problem.kernel + down - 1, down)
        steps = ceil_div(ceil_div(down * problem.channels, 4) * reach * high, 2)
        most = (min(_IMPLICIT_LOADERS.values()) - _IMPLICIT_OTHERS - 4 * steps) * 2 // parts // 8 * 8
        if most < 8 or (parts == 2 and steps > _MOST_UNPARTED):
            continue
        tiles = 4 // down
        for images, lines, width in cuts(problem, down):
            if width != problem.output_width:
                continue
            # Two pieces at least: one tile for each team would leave none to load.
            strips = ceil_div(columns, 8)
            parts_of_lines = max(ceil_div(8 * lines, min(most, _MOST_ACROSS)), 2 if images * strips == 1 else 1)
            across = 8 * ceil_div(lines, parts_of_lines)
            if images * strips * ceil_div(8 * lines, across) < 2:
                continue
            stride = columns + reach - 1
            whole = down * lines >= problem.output_height
            bulk = aligned == 16 and pairs and out % 4 == 0
            bulk = bulk and (whole or down * lines * problem.output_width % 4 == 0)
            ways = product((2, 1, 0) if bulk else (0,), (True, False), _IMPLICIT_LOADERS.items())
            for outs, ahead, (loaders, registers) in ways:
                tile = Tile(
                    parts, 1, down, images, lines, columns, stride, 4 * (lines + high - 1) * stride,
                    (NO_TAP,) * 8 * steps, 0, tiles, 4 * _IMPLICIT_TEAMS, copied(problem, down, lines, True, aligned),
                    loaders, _IMPLICIT_TEAMS, registers, pairs=pairs, ahead=ahead,
                    bulk=outs > 0, outs=outs,
                    one_run=down * lines == problem.output_height and 8 * tiles >= problem.filters,
                    shared_weights=parts == 2, filter_blocks=ceil_div(ceil_div(problem.filters, 8), tiles),
                    across=across,
                )  # fmt: skip
                if tile.shared_bytes(problem) <= chip.shared_bytes:
                    yield tile
