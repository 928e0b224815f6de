"""Strips of a row in registers: the fastest plain float32 kernel for layers of several channels.

Every thread has a strip of P pixels for F filters; ``register_blocked.cu`` says how. This file picks the tile: it
counts the instructions and the shared-memory cycles of each candidate, and takes the one that does a layer's products
in the fewest. The counts were fitted to 524 tiles of 45 layers timed on an H200. ``register_blocked_uniform`` is
the same kernel with its weights in constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import (
    CONSTANT_BYTES,
    REGISTERS,
    Chip,
    CopyToConstant,
    Launch,
    Plan,
    Step,
    blocks_in_waves,
    ceil_div,
    images_per_launch,
    layer_defines,
    round_up,
    waves_defines,
)

from ._register_blocked_tile import Tile

_FOLDER = Path(__file__).parent
#: A multiprocessor keeps 1 KB of shared memory for each block that it holds.
_BLOCK_BYTES = 1024
#: Filters of a thread, and warps of strips in a block, that are tried.
_FILTERS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_WARPS = (1, 2, 3, 4, 8)
_MOST_WARPS = 16
#: Blocks of a multiprocessor that every chip can hold, and warps.
_MOST_BLOCKS = 16
_MOST_HELD = 32
#: Sums of a thread beyond which they do not stay in registers with the inputs and weights.
_MOST_SUMS = 120
_MOST_PIXELS = 28
#: Of the shapes of a thread's tile, so many of the best are tried with every block around them.
_TRIED = 8

_GROUPS = (1, 2, 3, 4, 6, 8)
#: The first chips that copy into shared memory while they compute.
_ASYNCHRONOUS = (8, 0)

#: The chip whose compiler takes weights from constant memory to uniform registers.
_UNIFORM = (9, 0)
#: Bytes of constant memory that the nearest cache holds, with room to spare; and of the weights of a row, which the
#: kernel asks for beyond the last one too.
_CACHED_BYTES, _ROW_BYTES = 8192, 512
#: Operations of a call, 0.2 ms of an H200, from which it is worth the while to copy weights to constant memory, and
#: operations for each byte from which its lanes take longer than its memory.
_WORTH_COPYING, _RIDGE = 10**10, 15
#: Pixels of a thread from which on it asks for weights seldom enough to do without that cache, and that it must have.
_SELDOM, _FEWEST = 20, 9
#: Where a strip is a row, its inputs and sums leave registers for little else. A row of so many multiply-adds is then
#: worth asking for the next one's weights beforehand, as long as both rows' fit the uniform registers; inputs are read
#: by two (by four the compiler took 162 registers for 128, and 1.3 % longer).
_WORTH_ASKING, _TWO_ROWS, _ASKING_VECTOR = 400, 24, 2
#: How often the grid fills the chip: 5 times took 0.986 to 1.000 of what 7 times did, 4 times up to 1.008.
_WAVES = 5

#: Cost a product and output, P, F, XV, S, UNIFORM.
Shape = tuple[float, int, int, int, int, bool]


Priced = tuple[float, Tile]


def _registers(pixels: int, filters: int, kernel: int, exact: bool, uniform: bool, chip: Chip) -> int:
    """Registers that a thread needs, about: sums, inputs, addresses; more where strips reach beyond the row."""
    if uniform and chip.capability == _UNIFORM:  # with more to spare weights go to ordinary registers
        return pixels * filters + pixels + kernel - 1 + 12
    # For the chip that this was tuned on the compiler was seen to do with fewer than for others.
    other = 24 if chip.capability == (9, 0) else 40
    return pixels * filters + pixels + kernel - 1 + other + (0 if exact else 4)


def _rows(problem: ConvProblem, strips: int, lanes: int) -> int:
    """The most input rows that so many strips in a row read, wherever they begin."""
    spanned = lanes // strips if lanes % strips == 0 else (lanes - 2) // strips + 2
    images_begun = ceil_div(spanned - 1, problem.output_height)
    return spanned + (problem.kernel - 1) * (images_begun + 1)


@lru_cache(maxsize=4096)
def _read_cycles(stride: int, strips: int, pixels: int, vector: int) -> float:
    """Shared-memory cycles of a warp's read of one vector a strip, the mean over where a warp may begin."""
    starts = range(0, strips, ceil_div(strips, 4))
    cycles = 0
    for start in starts:
        places = [lane // strips * stride + lane % strips * pixels for lane in range(start, start + 32)]
        for part in range(0, 32, 32 // vector):
            banks: dict[int, set[int]] = {}
            for place in places[part : part + 32 // vector]:
                for word in range(place, place + vector):
                    banks.setdefault(word % 32, set()).add(word)
            cycles += max(len(words) for words in banks.values())
    return cycles / len(starts)


@lru_cache(maxsize=1024)
def _stride(width: int, strips: int, pixels: int, vector: int) -> int:
    """Floats from one row to the next such that a warp's reads meet in few banks."""
    first = round_up(width, vector)
    options = range(first, first + 33, vector)
    return min(options, key=lambda s: (_read_cycles(s, strips, pixels, vector) * (1 + (s - first) / 100), s))


def _copied(problem: ConvProblem, columns: int, aligned: int) -> int:
    """Floats of one copy from global to shared memory: XG."""
    whole = columns == problem.output_width
    return next(v for v in (4, 2, 1) if 4 * v <= aligned and problem.width % v == 0 and (whole or columns % v == 0))


def _stored(problem: ConvProblem, tile: Tile, aligned: int) -> int:
    """Floats of one store: OV."""
    exact = tile.columns == problem.output_width and problem.output_width % tile.pixels == 0
    pixels = problem.output_height * problem.output_width
    return 4 if exact and pixels % 4 == 0 and aligned == 16 else 1


def _loop(problem: ConvProblem, pixels: int, filters: int, vector: int, cycles: float, uniform: bool) -> float:
    """Cycles of a scheduler for a warp's K P F multiply-adds: of issue, or of shared memory if that is more."""
    k = problem.kernel
    products = k * pixels * filters
    reads, weights = ceil_div(pixels + k - 1, vector), round_up(k * filters, 4) // 4
    if uniform:
        # By 101 tiles of the course's layers timed on an H200: banks met twice, an odd F; reads; the loop itself.
        met_twice = (1.02 if pixels >= _SELDOM else 1.07) * (1.05 if filters % 2 else 1.0)
        return max(products * met_twice + reads + 2 * weights + 8, 3.5 * cycles * reads)
    issue = 1.09 * products + 3 * (reads + weights) + 36 + 0.2 * k * filters
    return max(issue, 3.5 * (cycles * reads + 4 * weights))


def _cached(problem: ConvProblem, pixels: int, filters: int) -> bool:
    """Whether all weights have room in constant memory, and warps ask for them seldom or find them in the cache."""
    k = problem.kernel
    size = ITEM_BYTES * ceil_div(problem.filters, filters) * problem.channels * k * round_up(k * filters, 4)
    return pixels >= _FEWEST and size <= (CONSTANT_BYTES - _ROW_BYTES if pixels >= _SELDOM else _CACHED_BYTES)


def _asks_ahead(problem: ConvProblem, pixels: int, filters: int, uniform: bool) -> bool:
    """Whether weights are worth asking for a row ahead."""
    k = problem.kernel
    fits = round_up(k * filters, 4) <= _TWO_ROWS and pixels % _ASKING_VECTOR == 0
    return uniform and fits and pixels == problem.output_width and k * pixels * filters >= _WORTH_ASKING


def _shapes(problem: ConvProblem, columns: int, copied: int, uniform: bool) -> Iterator[Shape]:
    """The thread's tiles for column tiles of that width, with what they cost."""
    k, width = problem.kernel, min(problem.width, columns + problem.kernel - 1)
    wanted = {ceil_div(columns, n) for n in range(1, columns + 1)}
    wanted = {p for p in wanted if columns < 64 or p >= _SELDOM}
    for pixels in sorted(p for p in wanted | {4, 6, 8, 10, 12, 20} if p <= min(_MOST_PIXELS, columns)):
        strips = ceil_div(columns, pixels)
        for filters in _FILTERS:
            if pixels * filters > _MOST_SUMS or filters > problem.filters:
                continue
            if uniform and not _cached(problem, pixels, filters):
                continue
            for vector in (_ASKING_VECTOR,) if _asks_ahead(problem, pixels, filters, uniform) else (1, 2, 4):
                if strips > 1 and pixels % vector:
                    continue
                stride = _stride(round_up(width, copied), strips, pixels, max(vector, copied))
                cycles = _read_cycles(stride, strips, pixels, vector)
                waste = strips * pixels / columns * round_up(problem.filters, filters) / problem.filters
                cost = waste * _loop(problem, pixels, filters, vector, cycles, uniform) / (k * pixels * filters)
                yield cost, pixels, filters, vector, stride, uniform


def _blocks_around(problem: ConvProblem, shape: Shape, columns: int, chip: Chip, copied: int) -> Iterator[Priced]:
    """Cost and tile of every block that fits the chip, for a thread's tile."""
    cost, pixels, filters, vector, stride, uniform = shape
    k, channels = problem.kernel, problem.channels
    all_groups = ceil_div(problem.filters, filters)
    exact = columns == problem.output_width and columns % pixels == 0
    per_thread = min(255, round_up(_registers(pixels, filters, k, exact, uniform, chip), 8))
    # A multiprocessor has four schedulers, each with a quarter of the registers; a thread has them in steps of 8.
    held = min(_MOST_HELD, 4 * (REGISTERS // (4 * 32 * per_thread)))
    ahead = _asks_ahead(problem, pixels, filters, uniform)
    loop = cost * k * pixels * filters  # of one row of one channel, waste and all
    chunks = sorted({channels, *(ceil_div(channels, n) for n in (2, 3, 4, 6, 8)), min(2, channels), 1})
    ways = [(1, True), (1, False)] + ([(2, True), (2, False)] if chip.capability >= _ASYNCHRONOUS else [])
    if uniform:  # no weights to keep or not
        ways = [way for way in ways if way[1]]
    if ahead:  # two tiles' inputs at a time took 1.05 times as long
        ways = ways[:1]
    for warps in _WARPS:
        rows = _rows(problem, ceil_div(columns, pixels), 32 * warps)
        for chunk, groups, (stages, keep) in product(chunks, sorted({min(all_groups, g) for g in _GROUPS}), ways):
            if warps * groups > min(_MOST_WARPS, held):
                continue
            for passes in {1, ceil_div(all_groups, groups)} if chunk == channels and keep else {1}:
                block = (columns, groups, passes, 32 * warps, chunk, stages)
                tile = Tile(
                    pixels,
                    filters,
                    *block,
                    held // (warps * groups),
                    rows,
                    stride,
                    vector,
                    copied,
                    keep,
                    uniform,
                    ahead,
                )
                if uniform and tile.constant_bytes(problem) > CONSTANT_BYTES - _ROW_BYTES:
                    continue
                room = (chip.shared_bytes + _BLOCK_BYTES) // (tile.shared_bytes(problem) + _BLOCK_BYTES)
                if room:
                    tile = replace(tile, blocks=min(tile.blocks, room, _MOST_BLOCKS))
                    yield _cost(problem, tile, loop, all_groups), tile


def _cost(problem: ConvProblem, tile: Tile, loop: float, all_groups: int) -> float:
    """Issue cycles a product and output, with all that the inner loop does not contain.

    The figures in it and in ``_loop`` were fitted to 524 tiles of 45 layers timed on an H200; they spread by 10 %.
    """
    k, channels = problem.kernel, problem.channels
    chunks = ceil_div(channels, tile.channels)
    warps = tile.threads // 32
    # Of one warp for one group of filters: the loop, clearing the sums, storing them.
    exact = tile.columns == problem.output_width and tile.columns % tile.pixels == 0
    store = (1.5 if problem.output_height * problem.output_width % 4 == 0 else 3.0) if exact else 25.0
    group = channels * k * loop + store * tile.pixels * tile.filters + 24
    copies = 2.8 * tile.rows * tile.stride / tile.copied / 32 * (channels + 20 * chunks) / warps
    weights = 0.0 if tile.keep_weights else 110 * tile.groups * channels * k * k * tile.filters / tile.threads
    item = tile.passes * group + copies + weights + 260
    # Few warps hide little; warps that are no multiple of four burden some schedulers more than others.
    item *= 1 + 1.27 * math.exp(-tile.blocks * warps / 4)
    item *= 1 + (0.34 * (round_up(warps, 4) / warps - 1) if warps > 4 else 0.05 * (warps == 3))
    # The warps of a block wait for the last one, and for their input; only the other blocks work meanwhile.
    item += 80 * chunks * warps
    item += 270 * chunks * (0.31 if tile.stages == 2 else 1.0) * (1.37 if tile.blocks == 1 else 1.0) / tile.blocks
    useful = tile.passes * channels * k * k * tile.pixels * tile.filters
    # Groups that a warp computes one after another find their weights elsewhere in constant memory each time.
    if tile.uniform and tile.passes > 1 and channels > 1:
        item *= 1.05 if tile.blocks > 1 else 1.15
    together = tile.groups * tile.passes
    padding = ceil_div(all_groups, together) * together / all_groups
    return item * padding / useful


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, chip: Chip, aligned: int, uniform: bool = False) -> Tile | None:
    """The tile of the least cost for the layer on the chip; None where none fits its shared or constant memory."""
    width = problem.output_width
    for columns in [width, *(c for c in (512, 256, 128, 64, 32, 16, 8, 4) if c < width)]:
        copied = _copied(problem, columns, aligned)
        shapes = sorted(_shapes(problem, columns, copied, uniform))[:_TRIED]
        found = [each for shape in shapes for each in _blocks_around(problem, shape, columns, chip, copied)]
        if found:
            return min(found, key=lambda pair: pair[0])[1]
    return None


def _layer(problem: ConvProblem) -> ConvProblem:
    """The problem without its batch, which tiles do not depend on."""
    return problem.with_batch(1)


def _reasons(uniform: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    known = chip or Chip("any", (5, 0), 1)
    if best_tile(_layer(problem), known, 4, uniform) is not None:
        return []
    if uniform and best_tile(_layer(problem), known, 4) is not None:
        return [
            f"weights: expected {CONSTANT_BYTES - _ROW_BYTES} bytes at most, and rows of {_SELDOM} outputs and more "
            f"for more than {_CACHED_BYTES} bytes, of {_FEWEST} for less; got {4 * math.prod(problem.w_shape)} bytes "
            f"before padding, rows of {problem.output_width}"
        ]
    return [f"shared memory of a block: a tile of K = {problem.kernel} does not fit {known.shared_bytes} bytes"]


def _worth(problem: ConvProblem, chip: Chip) -> bool:
    """Whether copying the weights first pays: for much work that memory does not bound, on the chip it was timed on."""
    return chip.capability == _UNIFORM and problem.flops >= max(_WORTH_COPYING, _RIDGE * problem.bytes)


def _defines(problem: ConvProblem, tile: Tile, aligned: int) -> dict[str, int | str]:
    span = ceil_div(tile.lanes, problem.output_height * tile.strips) + 1
    exact = tile.columns % tile.pixels == 0
    return {
        **layer_defines(problem, span),
        "P": tile.pixels,
        "F": tile.filters,
        "TW": tile.columns,
        "G": tile.groups,
        "GL": tile.passes,
        "LANES": tile.lanes,
        "CC": tile.channels,
        "STAGES": tile.stages,
        "BLOCKS": tile.blocks,
        "ROWS": tile.rows,
        "S": tile.stride,
        "SLACK": tile.slack(problem.kernel),
        "KEEP_W": int(tile.keep_weights),
        "UNIFORM": int(tile.uniform),
        "AHEAD": int(tile.ahead),
        "XV": tile.x_vector,
        "XG": tile.copied,
        "OV": _stored(problem, tile, aligned),
        "SV": next(v for v in (4, 2, 1) if tile.pixels % v == 0) if exact else 1,
    }


def _plan(uniform: bool, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    # What wide copies make of rows may not fit where single floats do.
    one = _layer(problem)
    tile = best_tile(one, chip, aligned, uniform) or best_tile(one, chip, 4, uniform)
    assert tile is not None, "a problem that _reasons takes"
    return plan_of(tile, problem, chip, aligned)


def plan_of(tile: Tile, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    """The plan of one tile."""
    strips = problem.output_height * tile.strips
    tiles = ceil_div(problem.output_width, tile.columns)
    blocks_m = ceil_div(problem.filters, tile.filters * tile.groups * tile.passes)
    held = max(1, chip.multiprocessors * tile.blocks // blocks_m)

    def steps(images: int) -> tuple[Launch, ...]:
        items = ceil_div(images * strips, tile.lanes) * tiles
        grid = (blocks_in_waves(items, held, _WAVES) * blocks_m, 1, 1)
        shared = tile.shared_bytes(problem)
        return (Launch("register_blocked", grid, (tile.threads, 1, 1), ("x", "w", "y", "first", "images"), shared),)

    before: tuple[Step, ...] = ()
    scratch = {}
    if tile.uniform:
        scratch["weights"] = size = tile.constant_bytes(problem)
        blocks = ceil_div(size // ITEM_BYTES, 256)
        before = (
            Launch("register_blocked_weights", (blocks, 1, 1), (256, 1, 1), ("w", "weights")),
            CopyToConstant("uniform_weights", "weights", size),
        )
    defines = {**_defines(problem, tile, aligned), **waves_defines(held, _WAVES)}
    return Plan(defines, images_per_launch(problem.batch, strips * tiles), steps, before, scratch=scratch)


_SOURCES = (_FOLDER / "../layer.cuh", _FOLDER / "../waves.cuh", _FOLDER / "register_blocked.cu")
KERNEL = CudaKernel(
    "register_blocked",
    "a strip of a row for several filters a thread, in registers",
    _SOURCES,
    partial(_plan, False),
    partial(_reasons, False),
)
UNIFORM = CudaKernel(
    "register_blocked_uniform",
    "register_blocked with weights from constant memory in uniform registers",
    _SOURCES,
    partial(_plan, True),
    partial(_reasons, True),
    recommended=_worth,
)
