"""The tiles of ``register_blocked``: their memory, the candidates for a layer, and the cost model that chooses one.

The model counts the instructions and the shared-memory cycles of each candidate and takes the candidate with the fewest
for a layer's products. Its constants were fitted to 524 tiles of 45 layers timed on an H200; they spread by 10 %. For
another value, compare ``ece408-bench sweep --impl register_blocked register_blocked_uniform --random 24`` before and
after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import CONSTANT_BYTES, REGISTERS, Chip, ceil_div, even_shares, round_up

#: The chip whose compiler moves weights from constant memory to uniform registers.
UNIFORM_CAPABILITY = (9, 0)
#: Bytes of constant memory that are left free; bytes of weights that surely fit the constant cache nearest to the
#: lanes.
RESERVED_BYTES, CACHED_BYTES = 512, 8192
#: The pixels per strip from which weights are read so seldom that constant-cache misses don't matter; the fewest pixels
#: per strip with which weights may come from constant memory at all.
LONG_STRIP, SHORT_STRIP = 20, 9

#: Shared memory that a multiprocessor reserves per block.
_BLOCK_BYTES = 1024
#: Candidates: filters of a thread, warps of strips per block, groups of filters per block.
_FILTERS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_WARPS = (1, 2, 3, 4, 8)
_GROUPS = (1, 2, 3, 4, 6, 8)
_MOST_BLOCK_WARPS = 16
#: Blocks and warps that every chip's multiprocessors can hold.
_MOST_BLOCKS, _MOST_WARPS = 16, 32
#: The most sums and pixels per thread: with more, the registers cannot hold the inputs and weights as well.
_MOST_SUMS, _MOST_PIXELS = 120, 28
#: Thread tiles, best first, for which every block is tried.
_TRIED = 8


@dataclass(frozen=True)
class RegisterBlockedTile:
    """What a thread, a warp and a block compute: Config of ``register_blocked.cu``."""

    strip_pixels: int  # outputs of a row per thread
    filters: int  # of a thread
    filter_groups: int  # groups of filters, computed side by side by the warps of a block
    passes: int  # groups per warp, one after another
    strips: int  # of a block
    channels: int  # in shared memory at a time
    blocks: int  # per multiprocessor
    rows: int  # input rows in shared memory
    row_pitch: int  # floats from one of them to the next
    input_vector: int  # floats of one read of inputs from shared memory
    copy_vector: int  # floats of one copy into it
    keep_weights: bool  # those of all channels stay in shared memory
    uniform: bool = False  # weights in constant memory

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.strips * self.filter_groups

    def strips_in_row(self, problem: ConvProblem) -> int:
        """Return the strips in a row."""
        return ceil_div(problem.output_width, self.strip_pixels)

    def exact(self, problem: ConvProblem) -> bool:
        """Return whether a row of y is a whole number of strips."""
        return problem.output_width % self.strip_pixels == 0

    def constant_bytes(self, problem: ConvProblem) -> int:
        """Return the constant memory of all weights."""
        groups = round_up(ceil_div(problem.filters, self.filters), self.filter_groups * self.passes)
        return ITEM_BYTES * groups * problem.channels * problem.kernel * round_up(problem.kernel * self.filters, 4)

    def input_slack(self, problem: ConvProblem) -> int:
        """Return the number of floats that the last strip of the last row may read beyond that row."""
        read = round_up(self.strip_pixels + problem.kernel - 1, self.input_vector)
        return max(0, (self.strips_in_row(problem) - 1) * self.strip_pixels + read - self.row_pitch)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Return the shared memory of a block: input rows, weights, and the sums that the epilogue stages."""
        k, chunks = problem.kernel, ceil_div(problem.channels, self.channels)
        x = round_up(self.channels * self.rows * self.row_pitch + self.input_slack(problem), 4)
        groups = 0 if self.uniform else self.passes * self.filter_groups
        weights = groups * self.channels * k * round_up(k * self.filters, 4)
        sums = self.threads * self.strip_pixels
        return ITEM_BYTES * (x + (chunks if self.keep_weights else 1) * weights + sums)


class _ThreadTile(NamedTuple):
    """A thread's tile; ``cost`` is in issue cycles per product and output."""

    cost: float
    pixels: int
    filters: int
    input_vector: int
    row_pitch: int
    uniform: bool


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, chip: Chip, aligned: int, uniform: bool = False) -> RegisterBlockedTile | None:
    """Return the tile with the least cost; None if no tile fits the chip's shared or constant memory."""
    copied = math.gcd(aligned // ITEM_BYTES, problem.width)
    thread_tiles = sorted(_thread_tiles(problem, copied, uniform))[:_TRIED]
    found = [each for tile in thread_tiles for each in _block_tiles(problem, tile, chip, copied)]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _thread_tiles(problem: ConvProblem, copied: int, uniform: bool) -> Iterator[_ThreadTile]:
    """Yield the thread tiles for copies of ``copied`` floats."""
    k, columns = problem.kernel, problem.output_width
    even = {p for p in even_shares(columns, _MOST_PIXELS) if columns < 64 or p >= LONG_STRIP}
    for pixels in sorted(p for p in even | {4, 6, 8, 10, 12, 20} if p <= min(_MOST_PIXELS, columns)):
        strips = ceil_div(columns, pixels)
        for filters, vector in product(_FILTERS, (1, 2, 4)):
            if pixels * filters > _MOST_SUMS or filters > problem.filters or (strips > 1 and pixels % vector):
                continue
            if uniform and not _fits_constant_cache(problem, pixels, filters):
                continue
            pitch = _row_pitch(round_up(problem.width, copied), strips, pixels, max(vector, copied))
            cycles = _read_cycles(pitch, strips, pixels, vector)
            waste = strips * pixels / columns * round_up(problem.filters, filters) / problem.filters
            cost = waste * _loop_cycles(problem, pixels, filters, vector, cycles, uniform) / (k * pixels * filters)
            yield _ThreadTile(cost, pixels, filters, vector, pitch, uniform)


def _block_tiles(
    problem: ConvProblem, thread: _ThreadTile, chip: Chip, copied: int
) -> Iterator[tuple[float, RegisterBlockedTile]]:
    """Yield the cost and the tile of every block of a thread's tiles that fits the chip."""
    k, channels, uniform = problem.kernel, problem.channels, thread.uniform
    all_groups = ceil_div(problem.filters, thread.filters)
    exact = problem.output_width % thread.pixels == 0
    # A multiprocessor has four schedulers, each with a quarter of the registers; threads get registers in steps of 8.
    per_thread = min(255, round_up(_registers(thread, k, exact, chip), 8))
    resident_warps = min(_MOST_WARPS, 4 * (REGISTERS // (4 * 32 * per_thread)))
    loop = thread.cost * k * thread.pixels * thread.filters  # of one filter row of one channel, with all waste
    chunks = sorted({channels, *(ceil_div(channels, n) for n in (2, 3, 4, 6, 8)), min(2, channels), 1})
    groups_tried = sorted({min(all_groups, g) for g in _GROUPS})
    keeps = (True,) if uniform else (True, False)
    for warps in _WARPS:
        rows = _rows(problem, ceil_div(problem.output_width, thread.pixels), 32 * warps)
        for chunk, groups, keep in product(chunks, groups_tried, keeps):
            if warps * groups > min(_MOST_BLOCK_WARPS, resident_warps):
                continue
            for passes in {1, ceil_div(all_groups, groups)} if chunk == channels and keep else {1}:
                tile = RegisterBlockedTile(
                    strip_pixels=thread.pixels,
                    filters=thread.filters,
                    filter_groups=groups,
                    passes=passes,
                    strips=32 * warps,
                    channels=chunk,
                    blocks=resident_warps // (warps * groups),
                    rows=rows,
                    row_pitch=thread.row_pitch,
                    input_vector=thread.input_vector,
                    copy_vector=copied,
                    keep_weights=keep,
                    uniform=uniform,
                )
                if uniform and tile.constant_bytes(problem) > CONSTANT_BYTES - RESERVED_BYTES:
                    continue
                fitting = (chip.shared_bytes + _BLOCK_BYTES) // (tile.shared_bytes(problem) + _BLOCK_BYTES)
                if fitting:
                    tile = replace(tile, blocks=min(tile.blocks, fitting, _MOST_BLOCKS))
                    yield _cost(problem, tile, loop, all_groups), tile


def _registers(thread: _ThreadTile, kernel: int, exact: bool, chip: Chip) -> int:
    """Return the approximate number of registers of a thread; ``exact``: strips do not reach beyond their row."""
    values = thread.pixels * thread.filters + thread.pixels + kernel - 1
    if thread.uniform and chip.capability == UNIFORM_CAPABILITY:  # with more, the compiler uses ordinary registers
        return values + 12
    # On sm_90, which the model was fitted on, the compiler needs fewer registers than on other chips.
    return values + (24 if chip.capability == (9, 0) else 40) + (0 if exact else 4)


def _rows(problem: ConvProblem, strips_in_row: int, strips: int) -> int:
    """Return the most input rows that ``strips`` neighbouring strips read, wherever the first one begins."""
    spanned = strips // strips_in_row if strips % strips_in_row == 0 else (strips - 2) // strips_in_row + 2
    images_begun = ceil_div(spanned - 1, problem.output_height)
    return spanned + (problem.kernel - 1) * (images_begun + 1)


@lru_cache(maxsize=4096)
def _read_cycles(pitch: int, strips: int, pixels: int, vector: int) -> float:
    """Return the shared-memory cycles of a warp's read of one vector per strip, averaged over where a warp begins."""
    starts = range(0, strips, ceil_div(strips, 4))
    cycles = 0
    for start in starts:
        offsets = [lane // strips * pitch + lane % strips * pixels for lane in range(start, start + 32)]
        for part in range(0, 32, 32 // vector):
            banks: dict[int, set[int]] = {}
            for offset in offsets[part : part + 32 // vector]:
                for word in range(offset, offset + vector):
                    banks.setdefault(word % 32, set()).add(word)
            cycles += max(len(words) for words in banks.values())
    return cycles / len(starts)


@lru_cache(maxsize=1024)
def _row_pitch(width: int, strips: int, pixels: int, vector: int) -> int:
    """Return the floats from one row to the next with which a warp's reads have few bank conflicts."""
    first = round_up(width, vector)
    options = range(first, first + 33, vector)
    return min(options, key=lambda s: (_read_cycles(s, strips, pixels, vector) * (1 + (s - first) / 100), s))


def _fits_constant_cache(problem: ConvProblem, pixels: int, filters: int) -> bool:
    """Return whether the weights fit constant memory, and warps either read them seldom or find them in the cache."""
    k = problem.kernel
    size = ITEM_BYTES * ceil_div(problem.filters, filters) * problem.channels * k * round_up(k * filters, 4)
    return pixels >= SHORT_STRIP and size <= (CONSTANT_BYTES - RESERVED_BYTES if pixels >= LONG_STRIP else CACHED_BYTES)


def _loop_cycles(problem: ConvProblem, pixels: int, filters: int, vector: int, cycles: float, uniform: bool) -> float:
    """Return a scheduler's cycles for a warp's filter row: the larger of issue cycles and shared-memory cycles."""
    k = problem.kernel
    products = k * pixels * filters
    reads, weights = ceil_div(pixels + k - 1, vector), round_up(k * filters, 4) // 4
    if uniform:
        # Fitted to 101 tiles of the course's layers on an H200: bank conflicts, odd filters; reads; the loop itself.
        conflicts = (1.02 if pixels >= LONG_STRIP else 1.07) * (1.05 if filters % 2 else 1.0)
        return max(products * conflicts + reads + 2 * weights + 8, 3.5 * cycles * reads)
    issue = 1.09 * products + 3 * (reads + weights) + 36 + 0.2 * k * filters
    return max(issue, 3.5 * (cycles * reads + 4 * weights))


def _cost(problem: ConvProblem, tile: RegisterBlockedTile, loop: float, all_groups: int) -> float:
    """Return the issue cycles per product and output, including all work outside the main loop."""
    k, channels = problem.kernel, problem.channels
    chunks = ceil_div(channels, tile.channels)
    warps = tile.threads // 32
    # The cycles of one warp for one group of filters: the loop, clearing the sums, storing them.
    aligned_maps = problem.output_height * problem.output_width % 4 == 0
    store = (1.5 if aligned_maps else 3.0) if tile.exact(problem) else 25.0
    group = channels * k * loop + store * tile.strip_pixels * tile.filters + 24
    copies = 2.8 * tile.rows * tile.row_pitch / tile.copy_vector / 32 * (channels + 20 * chunks) / warps
    weights = 0.0 if tile.keep_weights else 110 * tile.filter_groups * channels * k * k * tile.filters / tile.threads
    item = tile.passes * group + copies + weights + 260
    # Few warps hide little latency; a number of warps that is no multiple of four loads the schedulers unevenly.
    item *= 1 + 1.27 * math.exp(-tile.blocks * warps / 4)
    item *= 1 + (0.34 * (round_up(warps, 4) / warps - 1) if warps > 4 else 0.05 * (warps == 3))
    # A block's warps wait for its last warp, and for their input; only the other blocks work meanwhile.
    item += 80 * chunks * warps
    item += 270 * chunks * (1.37 if tile.blocks == 1 else 1.0) / tile.blocks
    useful = tile.passes * channels * k * k * tile.strip_pixels * tile.filters
    # A warp that computes several groups reads other constant memory for each group's weights.
    if tile.uniform and tile.passes > 1 and channels > 1:
        item *= 1.05 if tile.blocks > 1 else 1.15
    groups_per_block = tile.filter_groups * tile.passes
    padding = ceil_div(all_groups, groups_per_block) * groups_per_block / all_groups
    return item * padding / useful
