"""Building blocks of the CPU kernels' code: tiles of sums, transposition, loops over pieces and over claimed items."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from llvmlite import ir

from ece408_op.runtime.launch import ceil_div, round_up
from ece408_op.runtime.llvm import F64, I32, VOID, Function, Operand, Value

#: Floats in a cache line.
LINE_FLOATS = 16

#: Vectors of a row that are copied without a loop.
UNROLLED_COPIES = 8

#: A size in pieces: (size, count) pairs, larger sizes first.
Partition = tuple[tuple[int, int], ...]


def whole_lines(floats: int) -> int:
    """Return ``floats`` rounded up to whole cache lines."""
    return round_up(floats, LINE_FLOATS)


def partition(total: int, largest: int) -> Partition:
    """Divide ``total`` into the fewest pieces of at most ``largest``, as even as possible."""
    pieces = ceil_div(total, largest)
    size, larger = divmod(total, pieces)
    return ((size + 1, larger), (size, pieces - larger)) if larger else ((size, pieces),)


def windows_inside(size: int, windows: int, stride: int, start: int) -> tuple[int, int]:
    """Return (first, count) of the windows i for which i * stride + start is in range(size)."""
    first, last = max(0, -(start // stride)), min(windows - 1, (size - 1 - start) // stride)
    return first, max(0, last - first + 1)


def packed(blocks: Partition, w: np.ndarray) -> np.ndarray:
    """Return filters, shape (..., filters, products), as (...) x [block][product][filter of the block]."""
    parts, first = [], 0
    for filters, count in blocks:
        some = w[..., first : first + filters * count, :].reshape(*w.shape[:-2], count, filters, w.shape[-1])
        parts.append(np.moveaxis(some, -1, -2).reshape(*w.shape[:-2], -1))
        first += filters * count
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def add_products(sums: list[Value], vectors: list[Value], factors: Value, count: int, stride: int = 1) -> list[Value]:
    """Return the sums of a tile plus the outer product of ``count`` numbers, ``stride`` apart, and some vectors."""
    found, lanes = [], vectors[0].ir.type.count
    for n in range(count):
        factor = factors[n * stride].load().broadcast(lanes)
        found += [vector.fma(factor, sums[n * len(vectors) + v]) for v, vector in enumerate(vectors)]
    return found


def add_in_float64(to: Value, value: Value) -> None:
    """Add a vector of float32 to as many float64 in memory."""
    lanes = value.ir.type.count
    wide = Value(value.f, value.f.b.fpext(value.ir, ir.VectorType(F64, lanes)))
    to.store(to.load(lanes) + wide)


def store_first(value: Value, to: Value, count: Operand) -> None:
    """Store the first ``count`` lanes of a vector, none if that is below 1."""
    f, kind = value.f, value.ir.type
    if count == kind.count:
        to.store(value)
        return
    numbers = Value(f, ir.Constant(ir.VectorType(I32, kind.count), list(range(kind.count))))
    mask = numbers < (Value(f, f.b.trunc(count.ir, I32)).broadcast(kind.count) if isinstance(count, Value) else count)
    pointer = f.b.bitcast(to.ir, kind.as_pointer())
    name = f"llvm.masked.store.v{kind.count}f32.p0v{kind.count}f32"  # later versions of LLVM rename it
    declared = f.module.declared(name, VOID, [kind, pointer.type, I32, mask.ir.type])
    f.b.call(declared, [value.ir, pointer, ir.Constant(I32, 4), mask.ir])


def copy_rows(lanes: int, columns: int, source: tuple[Value, int], to: tuple[Value, int], rows: Operand) -> None:
    """Emit a copy of ``rows`` rows of ``columns`` floats; ``source`` and ``to`` are pointers and strides of rows."""
    # A row is copied in vectors of the largest power of two that fits. The last vector overlaps the vector before it,
    # so that no vector reads beyond the row.
    f, lanes = source[0].f, 1 << (min(lanes, columns).bit_length() - 1)

    def copy(r: Value, start: Operand) -> None:
        to[0][r * to[1] + start].store(source[0][r * source[1] + start].load(lanes))

    whole = columns // lanes
    with f.range(rows) as row:
        if whole <= UNROLLED_COPIES:
            for part in range(whole):
                copy(row, part * lanes)
        else:
            with f.range(whole) as part_number:
                copy(row, part_number * lanes)
        if columns % lanes:
            copy(row, columns - lanes)


def transposed(rows: list[Value]) -> list[Value]:
    """Return the transpose of a square of vectors, by exchanging halves, then quarters, and so on."""
    lanes = len(rows)
    rows = list(rows)
    distance = lanes // 2
    while distance:
        for i in range(lanes):
            if not i & distance:
                one, other = rows[i], rows[i + distance]
                rows[i] = one.shuffle(other, [lanes + j - distance if j & distance else j for j in range(lanes)])
                rows[i + distance] = one.shuffle(
                    other, [lanes + j if j & distance else j + distance for j in range(lanes)]
                )
        distance //= 2
    return rows


def lane_sums(rows: list[Value]) -> Value:
    """Return a vector with the sum of each row's lanes; there must be as many rows as lanes."""
    distance = lanes = len(rows)

    def pick(one: Value, other: Value, exchange: int) -> Value:
        return one.shuffle(other, [(lane ^ exchange) + (lanes if lane & distance else 0) for lane in range(lanes)])

    while len(rows) > 1:
        distance = len(rows) // 2
        pairs = zip(rows[:distance], rows[distance:])
        rows = [pick(one, other, 0) + pick(one, other, distance) for one, other in pairs]
    return rows[0]


def deinterleaved(one: Value, other: Value, first: int) -> Value:
    """Return a vector of every second float of two vectors, from index ``first`` on."""
    return one.shuffle(other, range(first, 2 * one.ir.type.count, 2))


def each_part(f: Function, pieces: Partition) -> Iterator[tuple[int, Value, Value]]:
    """Emit one loop per (size, count) pair; the caller builds each loop's body between two items.

    An item has the piece's size, the sum of the sizes of the pieces before it, and the number of these pieces.
    """
    covered = number = 0
    for size, count in pieces:
        with f.range(count) as index:
            yield size, index * size + covered, index + number
        covered += size * count
        number += count


@contextmanager
def claimed_ranges(counter: Value, items: Value, most: Operand, parts: Operand) -> Iterator[tuple[Value, Value]]:
    """Emit a loop over the ranges (first, count) of ``items`` items that this thread claims from the shared counter.

    A thread claims a ``parts``-th of the remaining items, at most ``most`` and at least one (guided self-scheduling).
    """
    f, b = counter.f, counter.f.b

    def claim() -> list[Value]:
        left = items - Value(f, b.load_atomic(counter.ir, "monotonic", align=8))
        some = Value(f, b.sdiv(left.ir, left._operand(parts))).min(most)
        some = (some < 1).select(1, some)
        first = Value(f, b.atomic_rmw("add", counter.ir, some.ir, "monotonic"))
        return [first, (items - first).min(some)]

    start = claim()
    with f.when(start[1] > 0), f.repeat(start) as loop:
        first, count = loop.values
        yield first, count
        loop.values = claim()
        loop.again = loop.values[1] > 0
