"""The order of a sum's products, and the strides of a stage, such that reads of shared memory have few bank conflicts.

A word holds two products of one input pixel: channels 2 p and 2 p + 1 of plane p, or, in the plane of an odd last
channel, two neighbouring rows or columns. A k-step takes eight words per position, lane t of four the words t and
t + 4. The order of the words is free; here they are put together such that the reads of four lanes for eight positions
each fall on different banks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ece408_op.runtime.launch import ceil_div, round_up

#: Lanes that read neighbouring positions at a time, and the banks of shared memory.
_LANES, _BANKS = 8, 32
#: A plane stride, in words, at which planes are far apart: a multiple of the banks, and more than one read spans.
_FAR = 128
#: How many words are searched for one that lies in other banks than those chosen.
_SEARCHED = 160
#: With more words than this only one row stride is tried: the search takes long.
_MANY = 800
#: A plane, row and column: the place of a word, seen from a position.
Tap = tuple[int, int, int]
NO_TAP: Tap = (-1, 0, 0)

#: Plane strides modulo the banks that are tried.
_OFFSETS = (0, 4, 8, 12, 16, 20, 24, 28)


def _taps(channels: int, rows: int, kernel: int, pairs_rows: bool = False) -> list[Tap]:
    """Return every word of the rows of a window, plane by plane; an odd last channel's hold two rows or columns."""
    taps = [(p, i, j) for p in range(channels // 2) for i in range(rows) for j in range(kernel)]
    down, across = (2, 1) if pairs_rows else (1, 2)
    odd = [(channels // 2, i, j) for i in range(0, rows, down) for j in range(0, kernel, across)]
    return taps + odd * (channels % 2)


def _no_conflict(distance: int, step: int) -> bool:
    """Return whether the reads of two words at this distance, by lanes ``step`` words apart, share no bank."""
    if distance % step:
        return True
    # Reads of the same words are one read.
    return abs(distance) < step * _LANES or step * _LANES <= distance % _BANKS <= _BANKS - step * _LANES


def _ordered(taps: list[Tap], row_stride: int, plane_stride: int, step: int = 1) -> tuple[tuple[Tap, ...], int]:
    """Return the taps in whole k-steps whose halves have no conflicts where possible, and how many words have one."""

    def offset(tap: Tap) -> int:
        return tap[0] * plane_stride + tap[1] * row_stride + tap[2]

    left, conflicts = list(taps), 0
    order: list[Tap] = []
    while left:
        half = [left.pop(0)]
        offsets = [offset(half[0])]
        for _ in range(min(3, len(left))):
            found = 0
            for number, tap in enumerate(left[:_SEARCHED]):
                at = offset(tap)
                if all(_no_conflict(at - other, step) for other in offsets):
                    found = number
                    break
            else:
                conflicts += 1
            half.append(left.pop(found))
            offsets.append(offset(half[-1]))
        order += half + [NO_TAP] * (4 - len(half))
    return tuple(order + [NO_TAP] * (-len(order) % 8)), conflicts


@lru_cache(maxsize=1024)
def _ordered_row(channels: int, kernel: int, plane_stride: int) -> tuple[tuple[Tap, ...], int]:
    return _ordered(_taps(channels, 1, kernel), 0, plane_stride)


def _ordered_by_rows(
    channels: int, kernel: int, row_stride: int, plane_stride: int
) -> tuple[tuple[Tap, ...], int, int]:
    """Return the taps row by row in whole k-steps, then the remaining ones of all rows; k-steps per row; conflicts."""
    whole, rest = divmod(len(_taps(channels, 1, kernel)), 8)
    if rest and kernel * (whole + 1) <= kernel * whole + ceil_div(kernel * rest, 8) + 1:
        whole, rest = whole + 1, 0
    # Banks repeat; only where planes lie closer together than one read spans does more of the distance count.
    distance = plane_stride if plane_stride < _FAR else _FAR + plane_stride % _BANKS
    row, conflicts = _ordered_row(channels, kernel, distance)
    in_rows, remaining = row[: 8 * whole], [tap for tap in row[8 * whole :] if tap != NO_TAP]
    order = [(p, i, j) if p >= 0 else NO_TAP for i in range(kernel) for p, _, j in in_rows]
    last, more = _ordered([(p, i, j) for i in range(kernel) for p, _, j in remaining], row_stride, plane_stride)
    return tuple(order) + last, whole, kernel * conflicts + more


@lru_cache(maxsize=256)
def layout(
    channels: int, kernel: int, shifts: int, by_row: int, columns: int, width: int, high: int
) -> tuple[int, int, tuple[Tap, ...], int]:
    """Return row stride, plane stride, taps and k-steps per filter row with few conflicts and little padding.

    by_row: output rows that share the words of a row, or 0 for k-steps that span rows. columns: positions per line.
    width and high: columns and rows of the input.
    """
    taps = _taps(channels, kernel if by_row else kernel + shifts - 1, kernel, not by_row)
    position_rows = shifts * max(1, by_row)
    # Where a line ends, eight neighbouring positions continue in the next line: best in the banks that follow.
    strides = range(width, width + 2 * _LANES)
    fitting = [s for s in strides if (position_rows * s - columns) % _LANES == 0] or [width]
    options = []
    for row_stride in fitting if len(taps) < _MANY else fitting[:1]:
        least = high * row_stride
        several = channels > 2 and len(taps) < _MANY
        for plane_stride in sorted({round_up(least - o, _BANKS) + o for o in (_OFFSETS if several else (9,))}):
            if by_row:
                order, row_k_steps, conflicts = _ordered_by_rows(channels, kernel, row_stride, plane_stride)
            else:
                (order, conflicts), row_k_steps = _ordered(taps, row_stride, plane_stride), 0
            # A conflict doubles the time of its read; longer rows cost shared memory.
            cost = 4 * conflicts / len(taps) + 0.2 * plane_stride / (high * width)
            options.append((cost, row_stride, plane_stride, order, row_k_steps))
            if not conflicts:
                return options[-1][1:]
    return min(options)[1:]


@lru_cache(maxsize=256)
def layouts_by_conflicts(
    channels: int, kernel: int, columns: int, width: int, high: int, position_rows: int
) -> list[tuple[float, int, int, tuple[Tap, ...]]]:
    """Return wavefronts per read, plane stride, row stride and taps by rows, of many strides: fewest first."""
    found = []
    for row_stride in range(width, width + _BANKS + 1):
        least = high * row_stride
        for offset in _OFFSETS if channels > 2 else (9,):
            plane_stride = round_up(least - offset, _BANKS) + offset
            order, _, _ = _ordered_by_rows(channels, kernel, row_stride, plane_stride)
            wavefronts = _wavefronts(order, row_stride, plane_stride, columns, 1, position_rows)
            found.append((round(wavefronts, 2), plane_stride, row_stride, order))
    return sorted(found)


def _wavefronts(
    order: tuple[Tap, ...], row_stride: int, plane_stride: int, columns: int, step: int, position_rows: int
) -> float:
    """Return the cycles of shared memory per read: the mean over some k-steps and first positions."""
    halves = [order[i : i + 4] for i in range(0, len(order), 4)]
    some = halves[:: ceil_div(len(halves), 8)]
    taps = [[0 if p < 0 else p * plane_stride + i * row_stride + j for p, i, j in half] for half in some]
    starts = np.arange(0, columns, max(1, columns // 6)) // 4 * 4
    at = starts[:, None] + step * np.arange(_LANES)
    bases = at // columns * row_stride * position_rows + at % columns
    # The words that the lanes read, by half and start; each different one costs its bank a cycle.
    words = np.sort((np.array(taps)[:, None, None, :] + bases[None, :, :, None]).reshape(len(taps) * len(starts), -1))
    first = np.ones(words.shape, bool)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    rows, _ = np.nonzero(first)
    reads = np.bincount(rows * _BANKS + words[first] % _BANKS, minlength=len(words) * _BANKS)
    return float(reads.reshape(-1, _BANKS).max(axis=1).mean())


@lru_cache(maxsize=256)
def one_channel_layout(kernel: int, positions: int, width: int, high: int) -> tuple[int, int, tuple[Tap, ...]]:
    """Return row stride, plane stride and taps for words of two neighbouring columns of one channel."""
    taps = [(0, i, j) for i in range(kernel) for j in range((kernel + 2) // 2)]
    options = []
    for row_stride in range(width, width + 34):
        order, _ = _ordered(taps, row_stride, 0, 2)
        wavefronts = _wavefronts(order, row_stride, 0, positions, 2, 1)
        options.append((wavefronts + 0.2 * row_stride / width, row_stride, order))
    _, row_stride, order = min(options)
    return row_stride, high * row_stride, order
