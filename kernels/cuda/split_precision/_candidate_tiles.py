"""The candidate tiles of each kernel: all whose sums fit the registers and whose stages fit shared memory.

``_tile_choice.py`` chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div, round_up

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
#: ``warpgroup_mma.cu``: the fewest words of a filter row for which k-steps go row by row; the most k-steps where they
#: do not; the most k-steps that the compiler writes out.
_LEAST_ROW, _MOST_STEPS, _MOST_WRITTEN = 7, 24, 104


class _Region(NamedTuple):
    """Images and lines of a tile, and the input that it needs, with padding."""

    images: int
    lines: int
    width: int
    height: int
    copy_floats: int
    from_global: tuple[bool, ...]  # values of input_from_global to try


def _copy_floats(problem: ConvProblem, rows: int, aligned: int) -> int:
    """Return the floats per copy of input rows: all copies start at multiples of them."""
    starts = [problem.height * problem.width, rows * problem.width, problem.width, problem.pad[0] * problem.width]
    if rows >= problem.output_height:
        starts = [problem.channels * problem.height * problem.width]
    return next(v for v in (4, 2, 1) if 4 * v <= aligned and all(n % v == 0 for n in starts))


def _cuts(problem: ConvProblem, position_rows: int) -> Iterator[tuple[int, int]]:
    """Yield images and lines of tiles: several images, one, then bands of one."""
    lines = ceil_div(problem.output_height, position_rows)
    for images in (16, 12, 8, 6, 5, 4, 3, 2):
        if images * lines * problem.output_width <= _MOST_POSITIONS and images <= problem.batch:
            yield images, lines
    for bands in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64):
        if bands <= lines:
            yield 1, ceil_div(lines, bands)


def _regions(problem: ConvProblem, chip: Chip, rows: int, aligned: int, components: int) -> Iterator[_Region]:
    """Yield every region whose split input may fit shared memory; a position is ``rows`` output rows of a column."""
    width = problem.width + 2 * problem.pad[1]
    for images, lines in _cuts(problem, rows):
        height = rows * lines + problem.kernel - 1
        if 4 * components * images * problem.channels * height * width <= chip.shared_bytes:
            floats = _copy_floats(problem, rows * lines, aligned)
            yield _Region(images, lines, width, height, floats, (False, True) if images == 1 else (False,))


def one_channel_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[OneChannelTile]:
    width, pixels = problem.output_width, problem.output_height * problem.output_width
    if problem.channels != 1 or any(problem.pad) or width % 2 or pixels % 4:
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
        for prefetch in (True, False) if images >= _PREFETCHED_IMAGES else (False,):
            tile = OneChannelTile(
                problem, components, images, lines, stride, plane, taps, tiles, 12 if few else 8,
                _copy_floats(problem, lines, aligned), producer_warps=4 if few or (stays and k_steps > 2) else 8,
                m_tiles=m_tiles, filters_in_registers=stays, store_floats=aligned // 4, prefetch_input=prefetch,
                filters_in_shared=not stays and k_steps * tiles * 256 * components <= _MOST_FILTERS,
            )  # fmt: skip
            if tile.shared_bytes <= chip.shared_bytes:
                yield tile
                break


def _wanted_interval(k_steps: int, components: int) -> int:
    """Return the k-steps between promotions that sums of this length should have; 0: none."""
    return _PROMOTION_INTERVAL if components == 2 and k_steps >= LONG_SUM else 0


def _mma_sync_shapes(k_steps: int, tiles: int, components: int) -> Iterator[dict[str, Any]]:
    """Yield m_tiles, group_tiles and math_warps that fit the registers."""
    interval = _wanted_interval(k_steps, components)
    for warps, registers in (_PROMOTED_SUM_REGISTERS if interval else _SUM_REGISTERS).items():
        for m_tiles in (4, 3, 2, 1):
            for groups in range(1, tiles + 1):
                each = ceil_div(tiles, groups)
                fits = 4 * ((components + (interval > 0)) * m_tiles + components) * each <= registers
                if fits and (groups == 1 or ceil_div(tiles, each) == groups):
                    yield {"m_tiles": m_tiles, "group_tiles": each, "math_warps": warps, "promotion_interval": interval}
                    break


def mma_sync_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[MmaSyncTile]:
    tiles = ceil_div(problem.filters, 8)
    for region in _regions(problem, chip, 1, aligned, components):
        stride, plane, taps, _ = layout(
            problem.channels, problem.kernel, 1, 0, problem.output_width, region.width, region.height
        )
        k_steps = len(taps) // 8
        for shape, from_global in product(_mma_sync_shapes(k_steps, tiles, components), region.from_global):
            tile = MmaSyncTile(
                problem, components, region.images, region.lines, stride, plane, taps, copy_floats=region.copy_floats,
                input_from_global=from_global, filters_in_shared=k_steps * tiles * 256 * components <= _MOST_FILTERS,
                **shape,
            )  # fmt: skip
            if tile.shared_bytes <= chip.shared_bytes:
                yield tile


def _group_tiles(tiles: int, rows: int, components: int, registers: int) -> int:
    """Return the column tiles per group, of as few groups as have registers for their sums; 0 if none."""
    others = 8 * components + _WARPGROUP_REGISTERS[registers]
    for groups in range(1, tiles + 1):
        each = ceil_div(tiles, groups)
        if (12 if components == 2 else 4) * each * rows + others <= registers and each * components <= 32:
            return each
    return 0


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
        tiles = ceil_div(shifts * problem.filters, 8)
        if shifts * rows > problem.output_height:
            continue
        for region in _regions(problem, chip, shifts * rows, aligned, components):
            stride, plane, taps, row_k_steps = layout(
                problem.channels, problem.kernel, shifts, by_row, problem.output_width, region.width, region.height
            )
            k_steps = len(taps) // 8
            if not by_row and k_steps > _MOST_STEPS:
                continue
            for from_global in region.from_global:
                # Producers that copy rows need more registers.
                most = [r for r in _WARPGROUP_REGISTERS if from_global or r == min(_WARPGROUP_REGISTERS)]
                # As few blocks as have shared memory for their filters.
                for blocks in range(1, tiles + 1):
                    own = ceil_div(tiles, blocks)
                    each = _group_tiles(own, rows, components, most[-1])
                    if each and k_steps * round_up(own, each) * 256 * components <= chip.shared_bytes * _MOST_SHARE:
                        break
                else:
                    continue
                registers = next(r for r in most if _group_tiles(own, rows, components, r) == each)
                promotion = _promotion(_wanted_interval(k_steps, components), rows, each, registers)
                if promotion is None:
                    continue
                interval, warpgroups, registers = promotion
                tile = WarpgroupTile(
                    problem, components, region.images, region.lines, stride, plane, taps, each, 4 * warpgroups,
                    region.copy_floats, filter_shifts=shifts, row_accumulators=rows, row_k_steps=row_k_steps,
                    filter_blocks=blocks, consumer_registers=registers, input_from_global=from_global,
                    promotion_interval=interval,
                )  # fmt: skip
                if 1 < tile.read_k_steps <= _MOST_WRITTEN:
                    yield tile


def implicit_gemm_tiles(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[ImplicitGemmTile]:
    columns, out = ceil_div(problem.output_width, 2), problem.output_height * problem.output_width
    reach = ceil_div(problem.kernel + 1, 2)
    for rows in (1, 2, 4):
        tiles = 4 // rows
        if rows > problem.output_height or 8 * tiles < problem.filters or any(problem.pad):
            continue
        height = ceil_div(problem.kernel + rows - 1, rows)
        k_steps = ceil_div(ceil_div(rows * problem.channels, 4) * reach * height, 2)
        most = (min(_IMPLICIT_PRODUCERS.values()) - _IMPLICIT_OTHERS - 4 * k_steps) * 2 // components // 8 * 8
        if most < 8 or (components == 2 and k_steps > _MOST_UNPROMOTED):
            continue
        for images, lines in _cuts(problem, rows):
            # At least two pieces: with one tile per warpgroup none would be left to load.
            strips = ceil_div(columns, 8)
            pieces_down = max(ceil_div(8 * lines, min(most, _MOST_WGMMA_N)), 2 if images * strips == 1 else 1)
            wgmma_n = 8 * ceil_div(lines, pieces_down)
            if images * strips * ceil_div(8 * lines, wgmma_n) < 2:
                continue
            stride, copied = columns + reach - 1, rows * lines
            whole = copied >= problem.output_height or copied * problem.output_width % 4 == 0
            bulk = aligned == 16 and problem.output_width % 2 == 0 and out % 4 == 0 and whole
            for producers, registers in _IMPLICIT_PRODUCERS.items():
                tile = ImplicitGemmTile(
                    problem, components, images, lines, stride, 4 * (lines + height - 1) * stride,
                    (NO_TAP,) * 8 * k_steps, tiles, 4 * _IMPLICIT_WARPGROUPS, _copy_floats(problem, copied, aligned),
                    row_accumulators=rows, producer_warps=producers, consumer_registers=registers, wgmma_n=wgmma_n,
                    bulk_store=bulk,
                )  # fmt: skip
                if tile.shared_bytes <= chip.shared_bytes:
                    yield tile
