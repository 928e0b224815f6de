"""Pieces of LLVM IR that the CPU kernels share: functions, vectors, loops over a cut, and the loop over images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable

from llvmlite import ir

from ece408_op.runtime.llvm import F32, F32_PTR, I32, I64, I64_PTR, const, for_range, new_function, offset

#: Floats in a cache line.
LINE_FLOATS = 16

#: How something is cut: (size, count) pairs, larger sizes first.
Pieces = tuple[tuple[int, int], ...]


def whole_lines(floats: int) -> int:
    """Return ``floats`` rounded up to whole cache lines."""
    return -(-floats // LINE_FLOATS) * LINE_FLOATS


def share_out(total: int, largest: int) -> Pieces:
    """Cut ``total`` into the fewest pieces of at most ``largest``, as even as possible."""
    pieces = -(-total // largest)
    size, larger = divmod(total, pieces)
    return ((size + 1, larger), (size, pieces - larger)) if larger else ((size, pieces),)


def function(module: ir.Module, name: str, pointers: str, integers: str = "") -> tuple[ir.IRBuilder, list[Any]]:
    """Begin an internal function of pointers to floats and of 64-bit integers; return a builder and the arguments."""
    arguments = {**dict.fromkeys(pointers.split(), F32_PTR), **dict.fromkeys(integers.split(), I64)}
    return new_function(module, name, arguments, internal=True)


def load(b: ir.IRBuilder, pointer: Any, lanes: int, align: int = 4) -> Any:
    """Load a vector; ``align`` in bytes."""
    return b.load(b.bitcast(pointer, ir.VectorType(F32, lanes).as_pointer()), align=align)


def store(b: ir.IRBuilder, value: Any, pointer: Any, align: int = 4) -> None:
    """Store a vector; ``align`` in bytes."""
    b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=align)


def store_masked(b: ir.IRBuilder, value: Any, pointer: Any, lanes: Any) -> None:
    """Store the first ``lanes`` (a 32-bit value, at least 0 or not) lanes of a vector of floats."""
    count = value.type.count
    numbers = ir.Constant(ir.VectorType(I32, count), list(range(count)))
    scalar = ir.Constant(numbers.type, ir.Undefined)
    limit = b.insert_element(scalar, lanes, ir.Constant(I32, 0))
    limit = b.shuffle_vector(limit, scalar, ir.Constant(numbers.type, [0] * count))
    mask = b.icmp_signed("<", numbers, limit)
    to = b.bitcast(pointer, value.type.as_pointer())
    name = f"llvm.masked.store.v{count}f32.p0v{count}f32"  # later versions of LLVM rename it when they read it
    arguments = [value.type, to.type, I32, mask.type]
    known = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(ir.VoidType(), arguments), name)
    b.call(known, [value, to, ir.Constant(I32, 4), mask])


def broadcast(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    """Return a vector with one number in all lanes."""
    vector = ir.VectorType(F32, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def transposed(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Return the columns of a square of vectors: exchange halves, then quarters, and so on."""
    lanes = len(rows)
    rows = list(rows)

    def pick(one: Any, other: Any, lanes_of_both: list[int]) -> Any:
        return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, lanes), lanes_of_both))

    distance = lanes // 2
    while distance:
        for i in range(lanes):
            if not i & distance:
                one, other = rows[i], rows[i + distance]
                rows[i] = pick(one, other, [lanes + j - distance if j & distance else j for j in range(lanes)])
                rows[i + distance] = pick(
                    one, other, [lanes + j if j & distance else j + distance for j in range(lanes)]
                )
        distance //= 2
    return rows


def lane_sums(b: ir.IRBuilder, rows: list[Any]) -> Any:
    """Return a vector with the sum of all lanes of each of as many vectors as there are lanes."""
    distance = lanes = len(rows)

    def pick(one: Any, other: Any, exchange: int) -> Any:
        chosen = [(lane ^ exchange) + (lanes if lane & distance else 0) for lane in range(lanes)]
        return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, lanes), chosen))

    while len(rows) > 1:
        distance = len(rows) // 2
        pairs = zip(rows[:distance], rows[distance:])
        rows = [b.fadd(pick(one, other, 0), pick(one, other, distance)) for one, other in pairs]
    return rows[0]


def minimum(b: ir.IRBuilder, value: Any, limit: Any) -> Any:
    """Return the smaller of a value and a limit (an int or a value)."""
    limit = const(limit) if isinstance(limit, int) else limit
    return b.select(b.icmp_signed("<", value, limit), value, limit)


def each_piece(b: ir.IRBuilder, pieces: Pieces) -> Iterator[tuple[int, Any, Any]]:
    """Emit a loop per (size, count) pair around the code that is built for each item.

    An item is a piece's size, the sum of the sizes of the pieces before it, and their number.
    """
    covered = number = 0
    for size, count in pieces:
        with for_range(b, count) as loop:
            yield size, b.add(const(covered), offset(b, (loop.index, size))), b.add(const(number), loop.index)
        covered += size * count
        number += count


@dataclass
class ConvFunction:
    """The function ``conv``(x, w, y, scratch, counter, images, most, parts) under construction: builder, arguments."""

    b: ir.IRBuilder
    x: Any
    w: Any
    y: Any
    scratch: Any
    counter: Any
    images: Any
    most: Any
    parts: Any

    @classmethod
    def begin(cls, module: ir.Module) -> ConvFunction:
        """Add an empty ``conv`` to the module."""
        pointers, numbers = ("x", "w", "y", "scratch"), ("images", "most", "parts")
        arguments = {**dict.fromkeys(pointers, F32_PTR), "counter": I64_PTR, **dict.fromkeys(numbers, I64)}
        b, values = new_function(module, "conv", arguments)
        return cls(b, *values)


@dataclass
class ClaimedImage:
    """One iteration: the image's number, that of the thread's next image, whether there is one, and carried values."""

    image: Any
    following: Any
    has_next: Any
    values: Sequence[Any]


@contextmanager
def claimed_images(conv: ConvFunction, before: Callable[[Any], Sequence[Any]]) -> Iterator[ClaimedImage]:
    """Emit a loop over the images that this thread claims from the shared counter.

    A thread claims a ``parts``-th of the images that are left, at most ``most`` and at least one (guided
    self-scheduling). ``before`` emits what precedes the first image, whose number it gets, and returns the values that
    iterations carry in ``values``. On exit the builder is positioned after the loop.
    """
    b = conv.b
    begin, each, claim, ready, finish = (
        b.append_basic_block(word) for word in ("begin", "each", "claim", "ready", "finish")
    )

    def claim_some() -> tuple[Any, Any]:
        left = b.sub(conv.images, b.load_atomic(conv.counter, "monotonic", align=8))
        some = minimum(b, b.sdiv(left, conv.parts), conv.most)
        some = b.select(b.icmp_signed("<", some, const(1)), const(1), some)
        first = b.atomic_rmw("add", conv.counter, some, "monotonic")
        return first, minimum(b, b.add(first, some), conv.images)

    first, first_end = claim_some()
    b.cbranch(b.icmp_signed("<", first, conv.images), begin, finish)

    b.position_at_end(begin)
    start = [first, first_end, *before(first)]
    started = b.block
    b.branch(each)

    b.position_at_end(each)
    phis = [b.phi(value.type) for value in start]
    for phi, value in zip(phis, start):
        phi.add_incoming(value, started)
    image, end = phis[:2]
    following = b.add(image, const(1))
    b.cbranch(b.icmp_signed("<", following, end), ready, claim)

    b.position_at_end(claim)
    claimed, claimed_end = claim_some()
    b.branch(ready)

    b.position_at_end(ready)
    next_image, next_end = b.phi(I64), b.phi(I64)
    for phi, values in ((next_image, (following, claimed)), (next_end, (end, claimed_end))):
        for value, block in zip(values, (each, claim)):
            phi.add_incoming(value, block)
    has_next = b.icmp_signed("<", next_image, conv.images)
    loop = ClaimedImage(image, next_image, has_next, phis[2:])
    yield loop
    for phi, value in zip(phis, (next_image, next_end, *loop.values)):
        phi.add_incoming(value, b.block)
    b.cbranch(has_next, each, finish)
    b.position_at_end(finish)
