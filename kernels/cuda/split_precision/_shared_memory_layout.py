"""The order of ``fp16x3_mma_sync``'s products, and how its planes lie in shared memory.

A word holds two products of one input pixel: channels 2 p and 2 p + 1 of plane p, or, in the plane of an odd last
channel, two neighbouring rows or columns. A step of the tensor cores takes eight words for each output pixel, lane t
of four the words t and t + 4. Any order of the words will do, so they are put together such that the four lanes'
reads of eight pixels each fall on different banks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ece408_op.runtime.launch import ceil_div, round_up

#: Lanes that read neighbouring pixels at a time, and shared memory's banks.
_LANES, _BANKS = 8, 32
#: Words between planes that are far apart: whole turns of the banks, more than the lanes' reads of one word span.
_FAR = 128
#: Words looked through for one that lies in other banks than those chosen.
_LOOKED_AT = 160
#: With more words than this only one row length is tried: the search takes long.
_MANY = 800
#: A plane, its row and column: where a word lies, seen from an output pixel.
Tap = tuple[int, int, int]
NO_TAP: Tap = (-1, 0, 0)

#: Words modulo 32 from one plane to the next that are tried.
_OFFSETS = {1: (0, 4, 8, 12, 16, 20, 24, 28), 2: (16, 18, 19, 20, 21, 22, 24, 0), 4: (1, 2, 3, 6, 9)}


def taps_of(channels: int, kernel: int, rows: int) -> list[Tap]:
    """Every word that R output rows need, plane by plane; an odd last channel's hold two rows."""
    high = kernel + rows - 1
    taps = [(p, i, j) for p in range(channels // 2) for i in range(high) for j in range(kernel)]
    if channels % 2:
        taps += [(channels // 2, i, j) for i in range(0, high, 2) for j in range(kernel)]
    return taps


def row_taps(channels: int, kernel: int) -> list[Tap]:
    """Every word of one filter row; an odd last channel's hold two columns."""
    taps = [(p, 0, j) for p in range(channels // 2) for j in range(kernel)]
    if channels % 2:
        taps += [(channels // 2, 0, j) for j in range(0, kernel, 2)]
    return taps


def _apart(distance: int, step: int) -> bool:
    """Whether eight words, step apart, share no bank with the eight so far away, unless they are the same words."""
    if distance % step:
        return True
    if step == 4:
        return distance == 0
    return abs(distance) < step * _LANES or step * _LANES <= distance % _BANKS <= _BANKS - step * _LANES


def ordered(taps: list[Tap], stride: int, plane: int, step: int = 1) -> tuple[tuple[Tap, ...], int]:
    """The taps in steps of eight whose halves fall on different banks where possible; how many halves do not."""
    left = list(taps)
    order: list[Tap] = []
    clashes = 0
    while left:
        group = [left.pop(0)]
        places = [group[0][0] * plane + group[0][1] * stride + group[0][2]]
        for _ in range(min(3, len(left))):
            found = 0
            for number, (p, i, j) in enumerate(left[:_LOOKED_AT]):
                at = p * plane + i * stride + j
                if all(_apart(at - place, step) for place in places):
                    found = number
                    break
            else:
                clashes += 1
            group.append(left.pop(found))
            places.append(group[-1][0] * plane + group[-1][1] * stride + group[-1][2])
        order += group + [NO_TAP] * (4 - len(group))
    return tuple(order + [NO_TAP] * (-len(order) % 8)), clashes


@lru_cache(maxsize=1024)
def _row_order(channels: int, kernel: int, plane: int, step: int) -> tuple[tuple[Tap, ...], int]:
    return ordered(row_taps(channels, kernel), 0, plane, step)


def by_rows(
    channels: int, kernel: int, stride: int, plane: int, whole_rows: bool, step: int
) -> tuple[tuple[Tap, ...], int, int]:
    """The taps row by row, in whole steps; those left over of all rows behind them; steps of a row; clashes.

    ``whole_rows``: none is left over, a row's last step is filled up instead. ``step``: words from lane to lane.
    """
    taps = row_taps(channels, kernel)
    whole = len(taps) // 8
    rest = len(taps) - 8 * whole
    if rest and (whole_rows or kernel * (whole + 1) <= kernel * whole + ceil_div(kernel * rest, 8) + 1):
        whole, rest = whole + 1, 0
    # Banks repeat; only in planes closer together than lanes' reads are wide does more of the distance count.
    row, clashes = _row_order(channels, kernel, plane if plane < _FAR else _FAR + plane % _BANKS, step)
    kept = row[: 8 * whole]
    gone = [tap for tap in row[8 * whole :] if tap != NO_TAP]
    order = [(p, i, j) if p >= 0 else NO_TAP for i in range(kernel) for p, _, j in kept]
    last, more = ordered([(p, i, j) for i in range(kernel) for p, _, j in gone], stride, plane, step)
    return tuple(order) + last, whole, kernel * clashes + more


@lru_cache(maxsize=256)
def layout(
    channels: int,
    kernel: int,
    rows: int,
    sets: int,
    columns: int,
    width: int,
    high: int,
    step: int = 1,
    whole_rows: bool = False,
) -> tuple:
    """S, PL, the order of the taps and KR, so that the fewest reads wait for one another. sets 0: not by rows."""
    taps = row_taps(channels, kernel) * kernel if sets else taps_of(channels, kernel, rows)
    super_rows = rows * max(1, sets)
    # Where a row ends, eight neighbouring pixels go on in the next one: in the banks that follow, best of all.
    period = min(step * _LANES, _BANKS)
    fitting = [s for s in range(width, width + 2 * period) if (super_rows * s - columns) % period == 0] or [width]
    options = []
    for stride in fitting if len(taps) < _MANY else fitting[:1]:
        least = high * stride
        several = channels > 2 and len(taps) < _MANY
        for plane in sorted({round_up(least - o, _BANKS) + o for o in (_OFFSETS[step] if several else (9,))}):
            if sets:
                order, row_steps, clashes = by_rows(channels, kernel, stride, plane, whole_rows, step)
            else:
                (order, clashes), row_steps = ordered(taps, stride, plane, step), 0
            # A clash doubles the time of its read; longer rows cost room.
            options.append((4 * clashes / len(taps) + 0.2 * plane / (high * width), stride, plane, order, row_steps))
            if not clashes:
                return options[-1][1:]
    return min(options)[1:]


@lru_cache(maxsize=256)
def quiet_layouts(
    channels: int, kernel: int, columns: int, width: int, high: int, down: int, step: int, whole_rows: bool
) -> list[tuple[float, int, int, tuple[Tap, ...]]]:
    """Turns of shared memory for a read, PL, S and the taps by rows, for many S and PL: the fewest turns first."""
    found = []
    for stride in range(width, width + _BANKS + 1):
        least = high * stride
        for offset in range(0, _BANKS, 4) if channels > 2 else (9,):
            plane = round_up(least - offset, _BANKS) + offset
            order, _, _ = by_rows(channels, kernel, stride, plane, whole_rows, step)
            found.append((round(_wavefronts(order, stride, plane, columns, step, down), 2), plane, stride, order))
    return sorted(found)


def _wavefronts(order: tuple[Tap, ...], stride: int, plane: int, columns: int, step: int, down: int) -> float:
    """Cycles of shared memory for one read, the mean over some steps and places where the positions begin."""
    halves = [order[i : i + 4] for i in range(0, len(order), 4)]
    some = halves[:: ceil_div(len(halves), 8)]
    taps = [[0 if p < 0 else p * plane + i * stride + j for p, i, j in half] for half in some]
    starts = np.arange(0, columns, max(1, columns // 6)) // 4 * 4
    at = starts[:, None] + step * np.arange(_LANES)
    bases = at // columns * stride * down + at % columns
    # Of every half and place, the words that the lanes read; each different one costs its bank a cycle.
    words = np.sort((np.array(taps)[:, None, None, :] + bases[None, :, :, None]).reshape(len(taps) * len(starts), -1))
    first = np.ones(words.shape, bool)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    rows, _ = np.nonzero(first)
    reads = np.bincount(rows * _BANKS + words[first] % _BANKS, minlength=len(words) * _BANKS)
    return float(reads.reshape(-1, _BANKS).max(axis=1).mean())


@lru_cache(maxsize=256)
def folded_layout(kernel: int, positions: int, width: int, high: int) -> tuple:
    """S, PL and the order of the taps for words of two neighbouring columns."""
    taps = [(0, i, j) for i in range(kernel) for j in range((kernel + 2) // 2)]
    options = []
    for stride in range(width, width + 34):
        order, _ = ordered(taps, stride, 0, 2)
        options.append((_wavefronts(order, stride, 0, positions, 2, 1) + 0.2 * stride / width, stride, order))
    _, stride, order = min(options)
    return stride, high * stride, order
