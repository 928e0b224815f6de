"""The tile of a layer: the tuning table's entry, or the candidate with the least time predicted by a roofline.

Candidates are all tiles whose sums fit the registers and whose stages fit shared memory. ``ece408-bench sweep``
measures the most promising ones and writes the fastest into the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ece408_op.core import tuning
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div, even_shares, round_up

from ._shared_memory_layout import NO_TAP, Stage
from ._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, Tile, WarpgroupTile

#: The alignment in bytes of whole arrays; no kernel needs more.
ALIGNED = 16
#: For a long sum, the longest time of a tile with accumulator promotion, relative to one without it.
_PROMOTION_IS_WORTH = 1.09
#: ``mma_sync.cu`` with fp16x3 and filters in L2: the time of a tile with 8 math warps, relative to one with 12, which
#: hide more of the reads' latency; benchmarks/tile_order.py times both.
_TWELVE_WARPS_ARE_WORTH = 1.2
#: The most images of a tile, and the most positions of a tile of several images: larger ones would leave some
#: multiprocessors without a tile.
MOST_IMAGES, _MOST_POSITIONS = 16, 4096
#: Bytes of filters that ``mma.sync`` kernels keep in shared memory; larger ones are read from L2.
_MOST_FILTERS = 100 * 1024
#: The share of shared memory that wgmma's filters may take.
_MOST_SHARE = 0.7
#: Registers per thread for position words that stay in registers. Registers per thread for sums and filters, by the
#: block's number of math warps: with two registers per sum, and with the three that accumulator promotion needs.
_KEPT_REGISTERS = 64
_SUM_REGISTERS, _PROMOTED_SUM_REGISTERS = {8: 100, 12: 72}, {8: 104, 12: 72}
#: K-steps between promotions, a multiple of the two that the loop of ``mma_sync.cu`` takes at a time; sums of fewer
#: k-steps than LONG_SUM gain little from promotion.
_PROMOTION_INTERVAL, LONG_SUM = 6, 9
#: If filters stay in registers: the most registers for them, of 128 per thread, and the most column tiles.
_MOST_KEPT, _MOST_TILES = 88, 4
#: ``warpgroup_mma.cu``: warpgroups; {registers per thread: how many of them hold neither sums nor fragments}; the most
#: column tiles x output rows whose sums fit with promotion. With fewer free registers the compiler spills, or
#: serializes wgmmas.
_WARPGROUPS, _WARPGROUP_REGISTERS, _PROMOTED_TILES = 3, {144: 44, 152: 28}, 6
#: The same with fewer warpgroups, for sums that should be promoted but do not fit: the most output rows; warpgroups;
#: registers per thread; the most column tiles x output rows.
_FEW_ROWS, _FEW_WARPGROUPS, _FEW_REGISTERS, _FEW_TILES = 2, 2, 216, 9
#: ``implicit_gemm.cu``: warpgroups; {producer warps: registers of a math thread}; registers of a thread that hold
#: neither sums nor filters; the most positions per instruction.
_IMPLICIT_WARPGROUPS, _IMPLICIT_PRODUCERS, _IMPLICIT_OTHERS, _MOST_WGMMA_N = 2, {8: 200, 4: 216}, 32, 184
#: The most k-steps of implicit_gemm, which does not promote: on uniform positive data, sums of 14 err by up to twice as
#: much as cuDNN's on the same layer, sums of 21 by up to 2.8 times.
_MOST_UNPROMOTED = 14
#: ``warpgroup_mma.cu``: the fewest words of a filter row for which k-steps go row by row; the most k-steps where they
#: do not; the most k-steps that the compiler unrolls.
_LEAST_ROW, _MOST_STEPS, _MOST_WRITTEN = 7, 24, 104

#: A candidate's fields of Tile, without the layer and the components.
_Fields = dict[str, Any]


def _copy_floats(problem: ConvProblem, rows: int, aligned: int) -> int:
    """Return the floats per copy of input rows, such that every copy is aligned to its size."""
    starts = [problem.height * problem.width, rows * problem.width, problem.width, problem.pad[0] * problem.width]
    if rows >= problem.output_height:
        starts = [problem.channels * problem.height * problem.width]
    return math.gcd(aligned // ITEM_BYTES, *starts)


def _cuts(problem: ConvProblem, rows: int, aligned: int) -> Iterator[_Fields]:
    """Yield the images and lines of tiles: several images, one image, bands of an image.

    A position has ``rows`` output rows.
    """
    lines = ceil_div(problem.output_height, rows)
    cuts = [(n, lines) for n in (16, 12, 8, 6, 5, 4, 3, 2) if n * lines * problem.output_width <= _MOST_POSITIONS]
    bands = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
    cuts += dict.fromkeys((1, ceil_div(lines, n)) for n in bands if n <= lines)
    for images, own in cuts:
        if images <= max(1, problem.batch):
            floats = _copy_floats(problem, rows * own, aligned)
            yield {"tile_images": images, "tile_lines": own, "copy_floats": floats}


def _regions(problem: ConvProblem, chip: Chip, rows: int, aligned: int, components: int) -> Iterator[_Fields]:
    """Yield the cuts whose split input may fit shared memory, with and without staging it."""
    width = problem.width + 2 * problem.pad[1]
    for cut in _cuts(problem, rows, aligned):
        height = rows * cut["tile_lines"] + problem.kernel - 1
        if 4 * components * cut["tile_images"] * problem.channels * height * width <= chip.shared_bytes:
            for from_global in (False, True) if cut["tile_images"] == 1 else (False,):
                yield {**cut, "input_from_global": from_global}


def _words(problem: ConvProblem, cut: _Fields, step: int = 1, shifts: int = 1, by_row: int = 0) -> _Fields:
    """Return a tile's ``stage``, its smallest strides and empty taps; ``_laid_out`` replaces strides and taps."""
    columns, width = ceil_div(problem.output_width, step), ceil_div(problem.width + 2 * problem.pad[1], step)
    height = shifts * max(1, by_row) * cut["tile_lines"] + problem.kernel - 1
    stage = Stage(problem.channels, problem.kernel, columns, width, height, step, shifts, by_row)
    taps = (NO_TAP,) * 8 * stage.k_steps
    return {"stage": stage, "row_stride": width, "plane_stride": height * width, "taps": taps}


def _wanted_interval(k_steps: int, components: int) -> int:
    """Return the k-steps between promotions that sums of this length should have; 0: none."""
    return _PROMOTION_INTERVAL if components == 2 and k_steps >= LONG_SUM else 0


def _one_channel(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[_Fields]:
    width, pixels = problem.output_width, problem.output_height * problem.output_width
    if problem.channels != 1 or any(problem.pad) or width % 2 or pixels % 4:
        return
    sizes = [(images, problem.output_height) for images in (1, 2, 3, 4, 5, 6, 8, 12, 16) if images <= problem.batch]
    if width % 4 == 0:
        sizes += [(1, lines) for lines in even_shares(problem.output_height, problem.output_height - 1)[::-1]]
    tiles = ceil_div(2 * problem.filters, 8)
    for images, lines in sizes:
        height = lines + problem.kernel - 1
        if 4 * images * height * problem.width > chip.shared_bytes:
            continue
        cut = {"tile_images": images, "tile_lines": lines, "copy_floats": _copy_floats(problem, lines, aligned)}
        words = _words(problem, cut, step=2)
        k_steps = words["stage"].k_steps
        stays = tiles <= _MOST_TILES and 2 * components * k_steps * (tiles + 2) <= _MOST_KEPT
        m_tiles = 1 if stays else next((n for n in (2, 1) if k_steps * n * 4 * components <= _KEPT_REGISTERS), 0)
        if not m_tiles:
            return
        yield {
            **cut,
            **words,
            **{"group_tiles": tiles, "math_warps": 8, "m_tiles": m_tiles, "filter_shifts": 2},
            "producer_warps": 4 if stays and k_steps > 2 else 8,
            "filters_in_registers": stays,
            "filters_in_shared": not stays and k_steps * tiles * 256 * components <= _MOST_FILTERS,
            "store_floats": aligned // 4,
        }


def _even_groups(tiles: int, most: int) -> int:
    """Return the column tiles per group, for the fewest groups of at most ``most`` tiles; 0 if ``most`` is below 1."""
    return ceil_div(tiles, ceil_div(tiles, most)) if most > 0 else 0


def _mma_sync_shapes(k_steps: int, tiles: int, components: int) -> Iterator[_Fields]:
    """Yield m_tiles, group_tiles and math_warps that fit the registers."""
    interval = _wanted_interval(k_steps, components)
    for warps, registers in (_PROMOTED_SUM_REGISTERS if interval else _SUM_REGISTERS).items():
        for m_tiles in (4, 3, 2, 1):
            each = _even_groups(tiles, registers // (4 * ((components + (interval > 0)) * m_tiles + components)))
            if each:
                yield {"m_tiles": m_tiles, "group_tiles": each, "math_warps": warps, "promotion_interval": interval}


def _mma_sync(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[_Fields]:
    tiles = ceil_div(problem.filters, 8)
    for region in _regions(problem, chip, 1, aligned, components):
        words = _words(problem, region)
        k_steps = words["stage"].k_steps
        shared = k_steps * tiles * 256 * components <= _MOST_FILTERS
        for shape in _mma_sync_shapes(k_steps, tiles, components):
            yield {**region, **words, **shape, "filters_in_shared": shared}


def _group_tiles(tiles: int, rows: int, components: int, registers: int) -> int:
    """Return the column tiles per group, for the fewest groups whose sums fit the registers; 0 if no group's do."""
    free = registers - 8 * components - _WARPGROUP_REGISTERS[registers]
    return _even_groups(tiles, min(free // ((12 if components == 2 else 4) * rows), 32 // components))


def _promotion(interval: int, rows: int, each: int, registers: int) -> tuple[int, int, int] | None:
    """Return the promotion interval, warpgroups and registers for ``each`` column tiles of ``rows`` output rows.

    None if sums should be promoted but do not fit the registers with any number of warpgroups.
    """
    if interval == 0 or rows * each <= _PROMOTED_TILES:
        return interval, _WARPGROUPS, registers
    if rows > _FEW_ROWS:
        return 0, _WARPGROUPS, registers
    return (interval, _FEW_WARPGROUPS, _FEW_REGISTERS) if rows * each <= _FEW_TILES else None


def _warpgroup(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[_Fields]:
    """Yield every tile of ``warpgroup_mma.cu``, including tiles that do not quite fit shared memory."""
    row_words = problem.channels // 2 * problem.kernel + problem.channels % 2 * ceil_div(problem.kernel, 2)
    ways = [(1, rows) for rows in (1, 2, 3, 4) if row_words >= _LEAST_ROW]
    ways += [(shifts, 0) for shifts in ((1, 2, 4) if problem.channels <= 3 else (1,))]
    for shifts, by_row in ways:
        rows = max(1, by_row)
        tiles = ceil_div(shifts * problem.filters, 8)
        if shifts * rows > problem.output_height:
            continue
        for region in _regions(problem, chip, shifts * rows, aligned, components):
            words = _words(problem, region, 1, shifts, by_row)
            k_steps, row_k_steps = words["stage"].k_steps, words["stage"].row_k_steps if by_row else 0
            read = row_k_steps * (problem.kernel - 1 + rows) + rows * (k_steps - problem.kernel * row_k_steps)
            if not 1 < read <= _MOST_WRITTEN or (not by_row and k_steps > _MOST_STEPS):
                continue
            # Producers that copy rows need more registers.
            most = [r for r in _WARPGROUP_REGISTERS if region["input_from_global"] or r == min(_WARPGROUP_REGISTERS)]
            # The fewest filter blocks whose filters fit shared memory.
            most_tiles = int(chip.shared_bytes * _MOST_SHARE) // (k_steps * 256 * components)
            for blocks in range(ceil_div(tiles, most_tiles), tiles + 1) if most_tiles else ():
                own = ceil_div(tiles, blocks)
                each = _group_tiles(own, rows, components, most[-1])
                if each and round_up(own, each) <= most_tiles:
                    break
            else:
                continue
            registers = next(r for r in most if _group_tiles(own, rows, components, r) == each)
            promotion = _promotion(_wanted_interval(k_steps, components), rows, each, registers)
            if promotion is not None:
                interval, warpgroups, registers = promotion
                yield {
                    **region, **words, "group_tiles": each, "math_warps": 4 * warpgroups, "filter_shifts": shifts,
                    "row_accumulators": rows, "filter_blocks": blocks, "consumer_registers": registers,
                    "promotion_interval": interval,
                }  # fmt: skip


def _implicit_gemm(problem: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[_Fields]:
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
        for cut in _cuts(problem, rows, aligned):
            images, lines = cut["tile_images"], cut["tile_lines"]
            # At least two pieces per tile: with one, the warpgroups would hold both stages, and none could be filled.
            strips = ceil_div(columns, 8)
            pieces_down = max(ceil_div(8 * lines, min(most, _MOST_WGMMA_N)), 2 if images * strips == 1 else 1)
            wgmma_n = 8 * ceil_div(lines, pieces_down)
            if images * strips * ceil_div(8 * lines, wgmma_n) < 2:
                continue
            stride, copied = columns + reach - 1, rows * lines
            whole = copied >= problem.output_height or copied * problem.output_width % 4 == 0
            bulk = aligned == 16 and problem.output_width % 2 == 0 and out % 4 == 0 and whole
            for producers, registers in _IMPLICIT_PRODUCERS.items():
                yield {
                    **cut, "row_stride": stride, "plane_stride": 4 * (lines + height - 1) * stride,
                    "taps": (NO_TAP,) * 8 * k_steps, "group_tiles": tiles, "math_warps": 4 * _IMPLICIT_WARPGROUPS,
                    "row_accumulators": rows, "producer_warps": producers, "consumer_registers": registers,
                    "wgmma_n": wgmma_n, "bulk_store": bulk,
                    "filters_in_shared": components == 2,
                }  # fmt: skip


_CANDIDATES: dict[type[Tile], Callable[[ConvProblem, Chip, int, int], Iterator[_Fields]]] = {
    OneChannelTile: _one_channel,
    ImplicitGemmTile: _implicit_gemm,
    WarpgroupTile: _warpgroup,
    MmaSyncTile: _mma_sync,
}


def kernel_name(kind: type[Tile], components: int) -> str:
    """Return the kernel's name in the list of kernels and in the tuning table."""
    return f"fp16x{2 * components - 1}_{kind.name}"


def candidates(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> Iterator[Tile]:
    """Yield the tiles that fit shared memory, the most promising first, for arrays aligned to ``aligned`` bytes."""
    recorded = tuning.recorded_tile(kernel_name(kind, components), layer, chip)
    ranked: Callable[..., list[Tile]] = _ranked  # mypy takes the hash of the class for that of its instances
    tiles = ranked(kind, layer, chip, aligned, components, tuple(recorded.items()))
    yield from filter(None, (_laid_out(tile, chip) for tile in tiles))


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
        waits = kind is MmaSyncTile and components == 2 and not tile.filters_in_shared and tile.math_warps < 12
        factors = (_PROMOTION_IS_WORTH if truncates else 1.0) * (_TWELVE_WARPS_ARE_WORTH if waits else 1.0)
        return another, tile.milliseconds * factors

    tiles = (kind(layer, components, **fields) for fields in _CANDIDATES[kind](layer, chip, aligned, components))
    return sorted((each for each in tiles if each.shared_bytes <= chip.shared_bytes), key=rank)


def tile_for(kind: type[Tile], layer: ConvProblem, chip: Chip, aligned: int, components: int) -> Tile | None:
    """Return the tile of a call whose arrays are aligned to ``aligned`` bytes; None if no tile fits.

    The tile does not depend on the batch. Wide stores need other strides. If those do not fit, this is the tile for
    arrays that are aligned to 4 bytes.
    """
    layer = layer.with_batch(MOST_IMAGES)  # one tile, one binary, for every batch
    found = (next(candidates(kind, layer, chip, each, components), None) for each in (aligned, 4))
    return next(filter(None, found), None)


@lru_cache(maxsize=256)
def _laid_out(tile: Tile, chip: Chip) -> Tile | None:
    """Return the tile with the strides and taps that fit and cause the fewest bank conflicts; None if none fit."""
    if tile.stage is None:
        return tile
    layouts = tile.stage.layouts()
    found = (replace(tile, row_stride=row, plane_stride=plane, taps=taps) for row, plane, taps in layouts)
    return next((each for each in found if each.shared_bytes <= chip.shared_bytes), None)
