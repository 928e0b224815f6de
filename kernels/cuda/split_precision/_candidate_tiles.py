"""The candidate tiles of each kernel: all whose sums fit the registers and whose stages fit shared memory.

The cost model (_cost_model.py) chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div

from ._shared_memory_layout import NO_TAP, layout, one_channel_layout, row_taps
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
#: The fewest words of a filter row for which k-steps go row by row, and the most k-steps where they do not.
_LEAST_ROW, _MOST_STEPS = 7, 24
#: Tiles that exceed shared memory by this factor are candidates: the cost model may find a closer layout.
_NEARLY = 1.1


class _Region(NamedTuple):
    """Images, lines and columns of a tile, and the input that it needs."""

    images: int
    lines: int
    columns: int
    whole: bool  # whole rows
    width: int
    height: int
    copy_floats: int

    @property
    def sizes(self) -> dict[str, Any]:
        return {"tile_images": self.images, "tile_lines": self.lines, "tile_columns": self.columns,
                "copy_floats": self.copy_floats}  # fmt: skip


def _copy_floats(problem: ConvProblem, rows: int, aligned: int) -> int:
    """Return the floats per copy of whole input rows: all copies start at multiples of them."""
    starts = [problem.height * problem.width, rows * problem.width, problem.width]
    if rows >= problem.output_height:
        starts = [problem.channels * problem.height * problem.width]
    return next(v for v in (4, 2, 1) if 4 * v <= aligned and all(n % v == 0 for n in starts))


def _cuts(problem: ConvProblem, position_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield images, lines and columns of tiles: several images, one, bands of one, then parts of bands."""
    lines, width = ceil_div(problem.output_height, position_rows), problem.output_width
    for images in (16, 12, 8, 6, 5, 4, 3, 2):
        if images * lines * width <= _MOST_POSITIONS and images <= problem.batch:
            yield images, lines, width
    for bands in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64):
        if bands <= lines:
            yield 1, ceil_div(lines, bands), width
    for parts in (2, 3, 4, 6, 8, 12, 16):
        columns = ceil_div(width, parts)
        if 8 <= columns <= 256:
            for high in sorted({min(lines, n) for n in (4, 8, 16)}):
                yield 1, high, columns
    # Whole units of 64 positions.
    for columns, high in ((64, 1), (64, 2), (32, 2), (32, 4), (16, 4), (16, 8), (21, 3), (21, 6)):
        if columns < width and high <= lines:
            yield 1, high, columns


def _regions(problem: ConvProblem, chip: Chip, rows: int, aligned: int, components: int) -> Iterator[_Region]:
    """Yield every region whose split input may fit shared memory; a position is ``rows`` output rows of a column."""
    for images, lines, columns in _cuts(problem, rows):
        whole = columns == problem.output_width
        width = problem.width if whole else columns + problem.kernel - 1
        height = rows * lines + problem.kernel - 1
        if 4 * components * images * problem.channels * height * width <= chip.shared_bytes:
            floats = _copy_floats(problem, rows * lines, aligned) if whole else 1
            yield _Region(images, lines, columns, whole, width, height, floats)


def _input_sources(problem: ConvProblem, region: _Region, rows: int) -> tuple[bool, ...]:
    """Return the values of input_from_global to try: True only for a whole image, whose rows are contiguous."""
    whole = region.images == 1 and rows * region.lines >= problem.output_height and region.whole
    return (False, True) if whole else (False,)


def one_channel_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[OneChannelTile]:
    width, pixels = problem.output_width, problem.output_height * problem.output_width
    if problem.channels != 1 or width % 2 or pixels % 4:
        return
    sizes = [(images, problem.output_height) for images in (1, 2, 3, 4, 5, 6, 8, 12, 16) if images <= problem.batch]
    if width % 4 == 0:
        sizes += [(1, ceil_div(problem.output_height, n)) for n in range(2, problem.output_height + 1)]
    tiles = ceil_div(2 * problem.filters, 8)
    for images, lines in sizes:
        height = lines + problem.kernel - 1
        if 4 * images * height * problem.width > chip.shared_bytes:
            continue
        stride, plane, taps = one_channel_layout(problem.kernel, width // 2, ceil_div(problem.width, 2), height)
        k_steps = len(taps) // 8
        stays = tiles <= _MOST_TILES and 2 * components * k_steps * (tiles + 2) <= _MOST_KEPT
        m_tiles = 1 if stays else next((n for n in (2, 1) if k_steps * n * 4 * components <= _KEPT_REGISTERS), 0)
        if not m_tiles:
            return
        # As measured: 8 math warps store to fewer places at a time, but with few sums each they wait for products.
        few = tiles < 3 and k_steps > 2
        for from_global in (False, True):
            tile = OneChannelTile(
                problem, components, images, lines, width // 2, stride, plane, taps, tiles, 12 if few else 8,
                _copy_floats(problem, lines, aligned), producer_warps=4 if few or (stays and k_steps > 2) else 8,
                m_tiles=m_tiles, filters_in_registers=stays, input_from_global=from_global, store_floats=aligned // 4,
                filters_in_shared=not stays and k_steps * tiles * 256 * components <= _MOST_FILTERS,
            )  # fmt: skip
            prefetching = replace(tile, prefetch_input=not from_global and images >= _PREFETCHED_IMAGES)
            yield from [each for each in (prefetching, tile) if each.shared_bytes <= chip.shared_bytes][:1]


def wanted_interval(k_steps: int, components: int) -> int:
    """Return the k-steps between promotions that sums of this length should have; 0: none."""
    return _PROMOTION_INTERVAL if components == 2 and k_steps >= LONG_SUM else 0


def _mma_sync_shapes(k_steps: int, tiles: int, components: int) -> Iterator[dict[str, Any]]:
    """Yield m_tiles, group_tiles, inputs_in_registers and math_warps that fit the registers."""
    if k_steps * 4 * components <= _KEPT_REGISTERS:
        for m_tiles in (2, 1):
            if k_steps * m_tiles * 4 * components <= _KEPT_REGISTERS:
                yield {"m_tiles": m_tiles, "group_tiles": tiles, "inputs_in_registers": True, "math_warps": 12}
        return
    interval = wanted_interval(k_steps, components)
    for warps, registers in (_PROMOTED_SUM_REGISTERS if interval else _SUM_REGISTERS).items():
        for m_tiles in (4, 3, 2, 1):
            for groups in range(1, tiles + 1):
                each = ceil_div(tiles, groups)
                fits = 4 * ((components + (interval > 0)) * m_tiles + components) * each <= registers
                if fits and (groups == 1 or ceil_div(tiles, each) == groups):
                    yield {"m_tiles": m_tiles, "group_tiles": each, "math_warps": warps, "promotion_interval": interval}
                    break


def mma_sync_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[MmaSyncTile]:
    out = problem.output_height * problem.output_width
    for rows in (1, 2, 4) if problem.channels == 1 else (1,):
        if rows > problem.output_height:
            continue
        tiles = ceil_div(rows * problem.filters, 8)
        for region in _regions(problem, chip, rows, aligned, components):
            contiguous = region.whole and rows == 1 and out % 4 == 0
            contiguous = contiguous and (region.lines == problem.output_height or region.columns % 4 == 0)
            for quads in (True, False) if contiguous and aligned == 16 else (False,):
                stride, plane, taps, _ = layout(
                    problem.channels, problem.kernel, rows, 0, region.columns, region.width, region.height,
                    4 if quads else 1,
                )  # fmt: skip
                k_steps = len(taps) // 8
                shapes = list(_mma_sync_shapes(k_steps, tiles, components))
                for shape, from_global in product(shapes, _input_sources(problem, region, rows)):
                    if quads and shape["m_tiles"] % 2:
                        continue
                    tile = MmaSyncTile(
                        problem, components, **region.sizes, row_stride=stride, plane_stride=plane, taps=taps,
                        filter_shifts=rows, input_from_global=from_global, quad_stores=quads,
                        filters_in_shared=k_steps * tiles * 256 * components <= _MOST_FILTERS, **shape,
                    )  # fmt: skip
                    if tile.shared_bytes <= chip.shared_bytes:
                        yield tile


def _warpgroup_groups(tiles: int, rows: int, components: int, registers: int) -> tuple[int, int] | None:
    """Return groups per block, and column tiles per group, of as few groups as have registers for their sums."""
    others = 8 * components + _WARPGROUP_REGISTERS[registers]
    for groups in range(1, tiles + 1):
        each = ceil_div(tiles, groups)
        if (12 if components == 2 else 4) * each * rows + others <= registers and each * components <= 32:
            return groups, each
    return None


def _promotion(interval: int, rows: int, each: int, registers: int) -> tuple[int, int, int] | None:
    """Return the promotion interval, warpgroups and registers for ``each`` column tiles of ``rows`` output rows.

    None where sums should be promoted and no number of warpgroups has the registers.
    """
    if interval == 0 or rows * each <= _PROMOTED_TILES:
        return interval, _WARPGROUPS, registers
    if rows > _FEW_ROWS:
        return 0, _WARPGROUPS, registers
    return (interval, _FEW_WARPGROUPS, _FEW_REGISTERS) if rows * each <= _FEW_TILES else None


def warpgroup_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[WarpgroupTile]:
    """Yield every tile of ``warpgroup_mma.cu``, those included that nearly fit."""
    ways = [(1, rows) for rows in (1, 2, 3, 4) if len(row_taps(problem.channels, problem.kernel)) >= _LEAST_ROW]
    ways += [(shifts, 0) for shifts in ((1, 2, 4) if problem.channels <= 3 else (1,))]
    for shifts, by_row in ways:
        rows = max(1, by_row)
        down, tiles = shifts * rows, ceil_div(shifts * problem.filters, 8)
        if down > problem.output_height:
            continue
        for region in _regions(problem, chip, down, aligned, components):
            stride, plane, taps, row_k_steps = layout(
                problem.channels, problem.kernel, shifts, by_row, region.columns, region.width, region.height
            )
            k_steps = len(taps) // 8
            if not by_row and k_steps > _MOST_STEPS:
                continue
            for blocks, from_global in product(range(1, tiles + 1), _input_sources(problem, region, down)):
                # Producers that copy rows need more registers.
                most = [r for r in _WARPGROUP_REGISTERS if from_global or r == min(_WARPGROUP_REGISTERS)]
                groups = {r: _warpgroup_groups(ceil_div(tiles, blocks), rows, components, r) for r in most}
                found = groups[most[-1]]
                if found is None or ceil_div(ceil_div(tiles, found[1]), found[0]) != blocks:
                    continue
                if k_steps * found[0] * found[1] * 256 * components > chip.shared_bytes * _MOST_SHARE:
                    continue
                registers = next(r for r in most if groups[r] == found)
                promotion = _promotion(wanted_interval(k_steps, components), rows, found[1], registers)
                if promotion is None:
                    continue
                interval, warpgroups, registers = promotion
                tile = WarpgroupTile(
                    problem, components, **region.sizes, row_stride=stride, plane_stride=plane, taps=taps,
                    group_tiles=found[1], math_warps=4 * warpgroups, filter_shifts=shifts, row_accumulators=rows,
                    row_k_steps=row_k_steps, consumer_registers=registers, input_from_global=from_global,
                    filter_blocks=blocks, promotion_interval=interval,
                )  # fmt: skip
                if tile.shared_bytes <= _NEARLY * chip.shared_bytes:
                    yield tile


def implicit_gemm_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[ImplicitGemmTile]:
    columns, out = ceil_div(problem.output_width, 2), problem.output_height * problem.output_width
    reach = ceil_div(problem.kernel + 1, 2)
    for rows in (1, 2, 4):
        tiles = 4 // rows
        if rows > problem.output_height or 8 * tiles < problem.filters:
            continue
        height = ceil_div(problem.kernel + rows - 1, rows)
        k_steps = ceil_div(ceil_div(rows * problem.channels, 4) * reach * height, 2)
        most = (min(_IMPLICIT_PRODUCERS.values()) - _IMPLICIT_OTHERS - 4 * k_steps) * 2 // components // 8 * 8
        if most < 8 or (components == 2 and k_steps > _MOST_UNPROMOTED):
            continue
        for images, lines, width in _cuts(problem, rows):
            if width != problem.output_width:
                continue
            # At least two pieces: with one tile per warpgroup none would be left to load.
            strips = ceil_div(columns, 8)
            pieces_down = max(ceil_div(8 * lines, min(most, _MOST_WGMMA_N)), 2 if images * strips == 1 else 1)
            wgmma_n = 8 * ceil_div(lines, pieces_down)
            if images * strips * ceil_div(8 * lines, wgmma_n) < 2:
                continue
            stride = columns + reach - 1
            whole = rows * lines >= problem.output_height or rows * lines * problem.output_width % 4 == 0
            bulk = aligned == 16 and problem.output_width % 2 == 0 and out % 4 == 0 and whole
            for producers, registers in _IMPLICIT_PRODUCERS.items():
                tile = ImplicitGemmTile(
                    problem, components, images, lines, columns, stride, 4 * (lines + height - 1) * stride,
                    (NO_TAP,) * 8 * k_steps, tiles, 4 * _IMPLICIT_WARPGROUPS,
                    _copy_floats(problem, rows * lines, aligned),
                    row_accumulators=rows, producer_warps=producers, consumer_registers=registers, wgmma_n=wgmma_n,
                    bulk_store=bulk,
                )  # fmt: skip
                if tile.shared_bytes <= chip.shared_bytes:
                    yield tile
