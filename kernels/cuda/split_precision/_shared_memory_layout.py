"""The order of a sum's products and the strides of a stage, chosen so that shared-memory reads have few bank conflicts.

A word holds two inputs: channels 2 p and 2 p + 1 of a pixel in plane p or, in the plane of an odd last channel, two
neighbouring columns (two neighbouring rows where k-steps span rows). A k-step takes eight words per position: lane t of
four reads the words t and t + 4. The order of the words is free. This module chooses one in which the reads of four
lanes, for eight positions each, fall on different banks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ece408_op.runtime.launch import ceil_div, round_up

#: Lanes that read neighbouring positions at a time, and the banks of shared memory.
_LANES, _BANKS = 8, 32
#: A number of words above any stage's size, and a multiple of the banks.
_MOST_WORDS = 1 << 20
#: A plane stride, in words, at which planes are far apart: a multiple of the banks, and more than one read spans.
_FAR = 128
#: Candidate plane strides modulo the banks; with a single plane, where the stride separates only images, one candidate.
_OFFSETS, _ONE_PLANE = (0, 4, 8, 12, 16, 20, 24, 28), (9,)
#: The cycles per read that must be saved to make a stage twice as large worth it.
_PADDING_COSTS = 0.1
#: The plane, row and column of a word, relative to a position.
Tap = tuple[int, int, int]
NO_TAP: Tap = (-1, 0, 0)


def _no_conflict(distance: int, step: int) -> bool:
    """Return whether the reads of two words at this distance, by lanes ``step`` words apart, share no bank."""
    if distance % step:
        return True
    # Reads of the same words are one read.
    return abs(distance) < step * _LANES or step * _LANES <= distance % _BANKS <= _BANKS - step * _LANES


@lru_cache(maxsize=1024)
def _ordered(taps: tuple[Tap, ...], row_stride: int, plane_stride: int, step: int) -> tuple[Tap, ...]:
    """Return the taps in whole k-steps, whose halves have no bank conflicts where possible."""

    def offset(tap: Tap) -> int:
        return tap[0] * plane_stride + tap[1] * row_stride + tap[2]

    left = list(taps)
    order: list[Tap] = []
    while left:
        half = [left.pop(0)]
        for _ in range(min(3, len(left))):
            offsets = [offset(tap) for tap in half]
            free = (n for n, tap in enumerate(left) if all(_no_conflict(offset(tap) - o, step) for o in offsets))
            half.append(left.pop(next(free, 0)))
        order += half + [NO_TAP] * (4 - len(half))
    return tuple(order + [NO_TAP] * (-len(order) % 8))


def _cycles(
    order: tuple[Tap, ...], row_stride: int, plane_stride: int, columns: int, step: int, position_rows: int
) -> float:
    """Return the shared-memory cycles per read, averaged over some k-steps and first positions."""
    halves = [order[i : i + 4] for i in range(0, len(order), 4)]
    some = halves[:: ceil_div(len(halves), 8)]
    taps = [[0 if p < 0 else p * plane_stride + i * row_stride + j for p, i, j in half] for half in some]
    starts = np.arange(0, columns, max(1, columns // 6)) // 4 * 4
    at = starts[:, None] + step * np.arange(_LANES)
    bases = at // columns * row_stride * position_rows + at % columns
    # The words that the lanes read, per half k-step and start. Each distinct word takes its bank one cycle.
    words = (np.array(taps)[:, None, None, :] + bases[None, :, :, None]).reshape(len(taps) * len(starts), -1)
    different = np.unique(words + _MOST_WORDS * np.arange(len(words))[:, None])
    reads = np.bincount(different // _MOST_WORDS * _BANKS + different % _BANKS, minlength=len(words) * _BANKS)
    return float(reads.reshape(-1, _BANKS).max(axis=1).mean())


class Stage(NamedTuple):
    """The sizes that determine the layout of a pipeline stage."""

    channels: int
    kernel: int
    columns: int  # positions per line
    width: int  # words of an input row
    height: int  # input rows of an image
    step: int = 1  # columns of a position; with two, a word holds two columns of the one channel
    shifts: int = 1  # output rows of a position, each with separate GEMM columns
    by_row: int = 0  # output rows of a position that share the words of an input row; if not 0, k-steps go row by row

    @property
    def spans_rows(self) -> bool:
        """Whether k-steps mix the words of all filter rows, because a row has few words."""
        return self.step == 1 and not self.by_row and (self.shifts > 1 or self.channels == 1)

    @property
    def _taps(self) -> tuple[Tap, ...]:
        """The words of a window's first row or, if k-steps span rows, of all its rows; plane by plane."""
        rows, kernel = self.kernel + self.shifts - 1 if self.spans_rows else 1, self.kernel
        if self.step == 2:
            return tuple((0, 0, j) for j in range((kernel + 2) // 2))
        taps = [(p, i, j) for p in range(self.channels // 2) for i in range(rows) for j in range(kernel)]
        down, across = (2, 1) if self.spans_rows else (1, 2)
        odd = [(self.channels // 2, i, j) for i in range(0, rows, down) for j in range(0, kernel, across)]
        return tuple(taps + odd * (self.channels % 2))

    @property
    def row_k_steps(self) -> int:
        """The k-steps of a filter row, without the words that fill no whole k-step.

        With ``by_row``, rows are rounded up to whole k-steps instead if that adds at most one k-step to the sum.
        """
        whole, rest = divmod(len(self._taps), 8)
        return whole + (self.by_row > 0 and rest > 0 and self.kernel <= ceil_div(self.kernel * rest, 8) + 1)

    @property
    def k_steps(self) -> int:
        """The k-steps per output, over all filter rows."""
        if self.spans_rows:
            return ceil_div(len(self._taps), 8)
        rest = max(0, len(self._taps) - 8 * self.row_k_steps)
        return self.kernel * self.row_k_steps + ceil_div(self.kernel * rest, 8)

    def _order(self, row_stride: int, plane_stride: int) -> tuple[Tap, ...]:
        """Return the taps: first the whole k-steps of each row, then the remaining words of all rows."""
        if self.spans_rows:
            return _ordered(self._taps, row_stride, plane_stride, self.step)
        # Only the distance modulo the banks matters, unless planes are closer together than the span of one read.
        distance = plane_stride if plane_stride < _FAR else _FAR + plane_stride % _BANKS
        row = _ordered(self._taps, 0, distance, self.step)
        words, rest = row[: 8 * self.row_k_steps], [tap for tap in row[8 * self.row_k_steps :] if tap != NO_TAP]
        in_rows = [(p, i, j) if p >= 0 else NO_TAP for i in range(self.kernel) for p, _, j in words]
        others = tuple((p, i, j) for i in range(self.kernel) for p, _, j in rest)
        return (*in_rows, *_ordered(others, row_stride, plane_stride, self.step))

    def layouts(self) -> list[tuple[int, int, tuple[Tap, ...]]]:
        """Return row strides, plane strides and taps, in order of cycles per read plus a cost of padding."""
        found: list[tuple[float, int, int, tuple[Tap, ...]]] = []
        rows = self.shifts * max(1, self.by_row)
        strides = list(range(self.width, self.width + _BANKS + 2))
        if self.spans_rows:
            # Eight neighbouring positions may continue in the next line, which best begins in the next banks.
            strides = [s for s in strides if (rows * s - self.columns) % _LANES == 0] or strides[:1]
        for row_stride in strides:
            least = self.height * row_stride
            if found and min(found)[0] <= 1 + _PADDING_COSTS * row_stride / self.width:
                break  # a read takes at least one cycle
            offsets = _OFFSETS if self.channels > 2 else _ONE_PLANE
            planes = {round_up(least - offset, _BANKS) + offset for offset in offsets} if self.step == 1 else {least}
            for plane_stride in planes:
                order = self._order(row_stride, plane_stride)
                cycles = _cycles(order, row_stride, plane_stride, self.columns, self.step, rows)
                cost = cycles + _PADDING_COSTS * plane_stride / (self.height * self.width)
                found.append((cost, row_stride, plane_stride, order))
        return [(row, plane, taps) for _, row, plane, taps in sorted(found)]
