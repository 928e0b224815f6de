"""The candidate tiles of each kernel: all whose sums fit the registers.

``_tile_choice.py`` chooses among those whose stages fit shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div, round_up

from ._taps import warpgroup_taps, window_taps
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, WarpgroupTile

#: The most images of a tile, and the most positions of a tile of several images: larger ones would leave some
#: multiprocessors without a tile.
MOST_IMAGES, _MOST_POSITIONS = 16, 4096
#: Images of a one-channel tile from which on prefetching the input is worth it: with two it took longer.
_PREFETCHED_IMAGES = 8
#: Bytes of filters that ``mma.sync`` kernels keep in shared memory; larger ones are read from L2.
_MOST_FILTERS = 100 * 1024
#: The share of shared memory that wgmma's filters may take.
_MOST_SHARE = 0.7
#: Registers of a thread for words of positions that stay there; by math warps of a block, those for sums and filters,
#: with two registers per sum, and with the three that accumulator promotion needs.
_KEPT_REGISTERS = 64
_SUM_REGISTERS, _PROMOTED_SUM_REGISTERS = {8: 100, 12: 72}, {8: 104, 12: 72}
#: K-steps between promotions, a multiple of the two and of the three that loops take at a time; sums of fewer k-steps
#: than LONG_SUM gain little from promotion.
_PROMOTION_INTERVAL, LONG_SUM = 6, 9
#: Where filters stay in registers: registers for them, of 128 per thread, and the most column tiles.
_MOST_KEPT, _MOST_TILES = 88, 4
#: ``warpgroup_mma.cu``: warpgroups; {registers per thread: of those, kept free of sums and fragments}; the most column
#: tiles x output rows whose sums fit with promotion. With fewer free registers the compiler spills, or serializes
#: wgmmas.
_WARPGROUPS, _WARPGROUP_REGISTERS, _PROMOTED_TILES = 3, {144: 44, 152: 28}, 6
#: The same with fewer warpgroups, for sums that should be promoted but do not fit: the most output rows; warpgroups;
#: registers per thread; the most column tiles x output rows.
_FEW_ROWS, _FEW_WARPGROUPS, _FEW_REGISTERS, _FEW_TILES = 2, 2, 216, 9
#: Of ``implicit_gemm.cu``: warpgroups; producer warps, with the registers of a math thread; registers to leave besides
#: sums and filters; the most positions per instruction.
_IMPLICIT_WARPGROUPS, _IMPLICIT_PRODUCERS, _IMPLICIT_OTHERS, _MOST_WGMMA_N = 2, {8: 200, 4: 216}, 32, 184
#: The most k-steps of implicit_gemm, which does not promote: on uniform positive data, sums of 14 err by up to twice as
#: much as cuDNN's on the same layer, sums of 21 by up to 2.8 times.
_MOST_UNPROMOTED = 14
#: ``warpgroup_mma.cu``: the most k-steps where they do not go row by row; the most that the compiler writes out.
_MOST_STEPS, _MOST_WRITTEN = 24, 104


#: A tile's fields by name.
Fields = dict[str, Any]


def _copy_floats(problem: ConvProblem, rows: int, aligned: int) -> int:
    """Return the floats per copy of input rows: all copies start at multiples of them."""
    starts = [problem.height * problem.width, rows * problem.width, problem.width, problem.pad[0] * problem.width]
    if rows >= problem.output_height:
        starts = [problem.channels * problem.height * problem.width]
    return next(v for v in (4, 2, 1) if 4 * v <= aligned and all(n % v == 0 for n in starts))


def _regions(problem: ConvProblem, aligned: int, components: int, rows: int) -> Iterator[Fields]:
    """Yield several images, one, then bands of one; a position is ``rows`` output rows of a column."""
    lines = ceil_div(problem.output_height, rows)
    several = (16, 12, 8, 6, 5, 4, 3, 2)
    sizes = [(n, lines) for n in several if n * lines * problem.output_width <= _MOST_POSITIONS and n <= problem.batch]
    sizes += [(1, ceil_div(lines, n)) for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64) if n <= lines]
    for images, each in sizes:
        floats = _copy_floats(problem, rows * each, aligned)
        fields = {"layer": problem, "components": components, "copy_floats": floats}
        yield {**fields, "tile_images": images, "tile_lines": each}


def _with_sources(regions: Iterator[Fields]) -> Iterator[Fields]:
    """Yield the regions with each way to read the input; several images are staged."""
    for region in regions:
        for from_global in (False, True) if region["tile_images"] == 1 else (False,):
            yield {**region, "input_from_global": from_global}


def one_channel_tiles(problem: ConvProblem, aligned: int, components: int, chip: Chip) -> Iterator[OneChannelTile]:
    height, width = problem.output_height, problem.output_width
    if problem.channels != 1 or any(problem.pad) or width % 2 or height * width % 4:
        return
    sizes = [(images, height) for images in (1, 2, 3, 4, 5, 6, 8, 12, 16) if images <= problem.batch]
    if width % 4 == 0:
        sizes += [(1, ceil_div(height, n)) for n in range(2, height + 1)]
    tiles = ceil_div(2 * problem.filters, 8)
    k_steps = ceil_div(problem.kernel * ((problem.kernel + 2) // 2), 8)
    stays = tiles <= _MOST_TILES and 2 * components * k_steps * (tiles + 2) <= _MOST_KEPT
    m_tiles = 1 if stays else next((n for n in (2, 1) if k_steps * n * 4 * components <= _KEPT_REGISTERS), 0)
    # As measured: 8 math warps store to fewer places at a time, but with few sums each they wait for products.
    few = tiles < 3 and k_steps > 2
    for images, lines in sizes if m_tiles else ():
        for prefetch in (True, False) if images >= _PREFETCHED_IMAGES else (False,):
            yield OneChannelTile(
                problem, components, images, lines, tiles, 12 if few else 8, _copy_floats(problem, lines, aligned),
                filter_shifts=2, producer_warps=4 if few or (stays and k_steps > 2) else 8, m_tiles=m_tiles,
                filters_in_registers=stays, store_floats=aligned // 4, prefetch_input=prefetch,
                filters_in_shared=not stays and k_steps * tiles * 256 * components <= _MOST_FILTERS,
            )  # fmt: skip


def _wanted_interval(k_steps: int, components: int) -> int:
    """Return the k-steps between promotions that sums of this length should have; 0: none."""
    return _PROMOTION_INTERVAL if components == 2 and k_steps >= LONG_SUM else 0


def _mma_sync_shapes(interval: int, tiles: int, components: int) -> Iterator[Fields]:
    """Yield m_tiles, group_tiles and math_warps that fit the registers."""
    for warps, registers in (_PROMOTED_SUM_REGISTERS if interval else _SUM_REGISTERS).items():
        for m_tiles in (4, 3, 2, 1):
            for groups in range(1, tiles + 1):
                each = ceil_div(tiles, groups)
                fits = 4 * ((components + (interval > 0)) * m_tiles + components) * each <= registers
                if fits and (groups == 1 or ceil_div(tiles, each) == groups):
                    yield {"m_tiles": m_tiles, "group_tiles": each, "math_warps": warps, "promotion_interval": interval}
                    break


def mma_sync_tiles(problem: ConvProblem, aligned: int, components: int, chip: Chip) -> Iterator[MmaSyncTile]:
    tiles, k_steps = ceil_div(problem.filters, 8), len(window_taps(problem.channels, problem.kernel, 1)) // 8
    shapes = list(_mma_sync_shapes(_wanted_interval(k_steps, components), tiles, components))
    in_shared = k_steps * tiles * 256 * components <= _MOST_FILTERS
    for region in _with_sources(_regions(problem, aligned, components, 1)):
        for shape in shapes:
            yield MmaSyncTile(**region, **shape, filters_in_shared=in_shared)


def _group_tiles(tiles: int, rows: int, components: int, registers: int) -> int:
    """Return the column tiles per group, of as few groups as have registers for their sums; 0 if none."""
    others = 8 * components + _WARPGROUP_REGISTERS[registers]
    for groups in range(1, tiles + 1):
        each = ceil_div(tiles, groups)
        if (12 if components == 2 else 4) * each * rows + others <= registers and each * components <= 32:
            return each
    return 0


def _warpgroup_shape(
    k_steps: int, tiles: int, rows: int, components: int, from_global: bool, most_filters: float
) -> Fields | None:
    """Return the blocks, registers and column tiles per group of as few blocks as have shared memory for filters.

    None where no number has it, or sums should be promoted and no number of warpgroups has the registers.
    """
    # Producers that copy rows need more registers.
    most = [r for r in _WARPGROUP_REGISTERS if from_global or r == min(_WARPGROUP_REGISTERS)]
    for blocks in range(1, tiles + 1):
        own = ceil_div(tiles, blocks)
        each = _group_tiles(own, rows, components, most[-1])
        if each and k_steps * round_up(own, each) * 256 * components <= most_filters:
            break
    else:
        return None
    registers = next(r for r in most if _group_tiles(own, rows, components, r) == each)
    interval, warpgroups = _wanted_interval(k_steps, components), _WARPGROUPS
    if interval and rows * each > _PROMOTED_TILES:
        if rows > _FEW_ROWS:
            interval = 0
        elif rows * each <= _FEW_TILES:
            warpgroups, registers = _FEW_WARPGROUPS, _FEW_REGISTERS
        else:
            return None
    sizes = {"math_warps": 4 * warpgroups, "consumer_registers": registers, "promotion_interval": interval}
    return {**sizes, "group_tiles": each, "filter_blocks": blocks, "row_accumulators": rows}


def warpgroup_tiles(problem: ConvProblem, aligned: int, components: int, chip: Chip) -> Iterator[WarpgroupTile]:
    most_filters = chip.shared_bytes * _MOST_SHARE
    for shifts, rows in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (4, 1)):
        if shifts * rows > problem.output_height or (shifts > 1 and problem.channels > 3):
            continue
        taps, by_rows = warpgroup_taps(problem.channels, problem.kernel, shifts)
        k_steps, tiles = len(taps) // 8, ceil_div(shifts * problem.filters, 8)
        if not by_rows and (rows > 1 or k_steps > _MOST_STEPS):
            continue
        for region in _with_sources(_regions(problem, aligned, components, shifts * rows)):
            shape = _warpgroup_shape(k_steps, tiles, rows, components, region["input_from_global"], most_filters)
            if shape is None:
                continue
            tile = WarpgroupTile(**region, **shape, filter_shifts=shifts)
            if 1 < tile.read_k_steps <= _MOST_WRITTEN:
                yield tile


def implicit_gemm_tiles(problem: ConvProblem, aligned: int, components: int, chip: Chip) -> Iterator[ImplicitGemmTile]:
    out, strips = problem.output_height * problem.output_width, ceil_div(problem.output_width, 16)
    for rows in (1, 2, 4):
        if rows > problem.output_height or 32 // rows < problem.filters or any(problem.pad):
            continue
        for region in _regions(problem, aligned, components, rows):
            fields = {**region, "group_tiles": 4 // rows, "math_warps": 4 * _IMPLICIT_WARPGROUPS}
            tile = ImplicitGemmTile(**fields, row_accumulators=rows, prefetch_input=True)
            registers = min(_IMPLICIT_PRODUCERS.values()) - _IMPLICIT_OTHERS - 4 * tile.k_steps
            most = registers * 2 // components // 8 * 8
            if most < 8 or (components == 2 and tile.k_steps > _MOST_UNPROMOTED):
                break
            # At least two pieces: with one tile per warpgroup none would be left to load.
            images, lines = tile.tile_images, tile.tile_lines
            pieces_down = max(ceil_div(8 * lines, min(most, _MOST_WGMMA_N)), 2 if images * strips == 1 else 1)
            wgmma_n = 8 * ceil_div(lines, pieces_down)
            if images * strips * ceil_div(8 * lines, wgmma_n) < 2:
                continue
            whole = rows * lines >= problem.output_height or rows * lines * problem.output_width % 4 == 0
            bulk = aligned == 16 and problem.output_width % 2 == 0 and out % 4 == 0 and whole
            for producers, registers in _IMPLICIT_PRODUCERS.items():
                yield replace(
                    tile, producer_warps=producers, consumer_registers=registers, wgmma_n=wgmma_n, bulk_store=bulk,
                    filters_in_shared=components == 2,  # the low components alone
                )  # fmt: skip
