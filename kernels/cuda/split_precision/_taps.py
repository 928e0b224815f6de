"""Which words of a stage a k-step reads, and how many bank conflicts that has.

A word holds two products of one input pixel: channels 2 p and 2 p + 1 of plane p, or, in the plane of an odd last
channel, two neighbouring rows or columns. A k-step takes eight words per position, lane t of four the words t and
t + 4. In the order of the filter's columns, the four lanes of eight neighbouring positions read neighbouring words, so
that only the strides of rows and planes decide about conflicts.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ece408_op.runtime.launch import ceil_div

#: Lanes that read neighbouring positions at a time, and the banks of shared memory.
_LANES, BANKS = 8, 32
#: The fewest words of a filter row for which k-steps go row by row.
_LEAST_ROW = 7
#: A plane, row and column: the place of a word, seen from a position.
Tap = tuple[int, int, int]
NO_TAP: Tap = (-1, 0, 0)
#: A k-step's eight words after another.
Taps = tuple[Tap, ...]


def _whole(taps: list[Tap]) -> Taps:
    """Return the taps in whole k-steps."""
    return tuple(taps + [NO_TAP] * (-len(taps) % 8))


@lru_cache(maxsize=256)
def window_taps(channels: int, kernel: int, shifts: int) -> Taps:
    """Return every word that ``shifts`` output rows need, plane by plane; an odd last channel's hold two rows."""
    high = kernel + shifts - 1
    taps = [(p, i, j) for p in range(channels // 2) for i in range(high) for j in range(kernel)]
    if channels % 2:
        taps += [(channels // 2, i, j) for i in range(0, high, 2) for j in range(kernel)]
    return _whole(taps)


@lru_cache(maxsize=256)
def one_channel_taps(kernel: int) -> Taps:
    """Return every word that two neighbouring outputs need, where words hold two columns."""
    return _whole([(0, i, j) for i in range(kernel) for j in range((kernel + 2) // 2)])


@lru_cache(maxsize=256)
def warpgroup_taps(channels: int, kernel: int, shifts: int) -> tuple[Taps, int]:
    """Return the words row by row in whole k-steps, then the remaining ones of all rows, and the k-steps per row.

    Words of an odd last channel hold two columns. Short rows, and those of several shifts, are window_taps instead.
    """
    row = [(p, j) for p in range(channels // 2) for j in range(kernel)]
    row += [(channels // 2, j) for j in range(0, kernel, 2)] * (channels % 2)
    if shifts > 1 or len(row) < _LEAST_ROW:
        return window_taps(channels, kernel, shifts), 0
    whole, rest = divmod(len(row), 8)
    if rest and kernel * (whole + 1) <= kernel * whole + ceil_div(kernel * rest, 8) + 1:
        whole += 1
    taps: Taps = ()
    for i in range(kernel):
        taps += _whole([(p, i, j) for p, j in row[: 8 * whole]])
    return taps + _whole([(p, i, j) for i in range(kernel) for p, j in row[8 * whole :]]), whole


def half_steps(taps: Taps, row_stride: int, plane_stride: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the halves of the k-steps, and an example of each pattern.

    A half has its first word's offset in bytes and its pattern: how its four words lie.
    """
    offsets = [plane * plane_stride + row * row_stride + column for plane, row, column in taps]
    halves, patterns = [], dict[tuple[int, ...], int]()
    for i in range(0, len(taps), 4):
        pattern = tuple(offset - offsets[i] for offset in offsets[i : i + 4])
        patterns.setdefault(pattern, i // 4)
        halves.append((4 * offsets[i], list(patterns).index(pattern)))
    return halves, list(patterns.values())


@lru_cache(maxsize=4096)
def wavefronts(taps: Taps, row_stride: int, plane_stride: int, columns: int, step: int, position_rows: int) -> float:
    """Return the cycles of shared memory per read: the mean over some k-steps and first positions."""
    halves = [taps[i : i + 4] for i in range(0, len(taps), 4)]
    some = halves[:: ceil_div(len(halves), 8)]
    offsets = [[0 if p < 0 else p * plane_stride + i * row_stride + j for p, i, j in half] for half in some]
    starts = np.arange(0, columns, max(1, columns // 6)) // 4 * 4
    at = starts[:, None] + step * np.arange(_LANES)
    bases = at // columns * row_stride * position_rows + at % columns
    # The words that the lanes read, by half and start; each different one costs its bank a cycle.
    reads = np.array(offsets)[:, None, None, :] + bases[None, :, :, None]
    words = np.sort(reads.reshape(len(offsets) * len(starts), -1))
    first = np.ones(words.shape, bool)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    rows, _ = np.nonzero(first)
    cycles = np.bincount(rows * BANKS + words[first] % BANKS, minlength=len(words) * BANKS)
    return float(cycles.reshape(-1, BANKS).max(axis=1).mean())
