"""The machine code of ``direct``: what direct.py says in words, as LLVM IR for one plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from ece408_op.llvm import (
    F32,
    F32_PTR,
    I32,
    I64,
    I64_PTR,
    Cpu,
    const,
    element,
    fma,
    for_range,
    new_function,
    offset,
    prefetch_for_write,
    store_past_caches,
    streamed_stores_done,
)

from .direct_plan import LINE_FLOATS, Plan

#: Columns of a filter that are written out one after the other; in larger ones they are a loop.
UNROLL = 16


def _tile(module: ir.Module, plan: Plan, size: tuple[int, int], target: Cpu, streamed: bool) -> ir.Function:
    """A function for one tile in one pass: (x, x_last, w, y, y_last, channels, done).

    ``x`` and ``y`` are at the tile's first pixel, ``x_last`` and ``y_last`` at its last vector, which may overlap the
    one before; ``w`` is at the pass's packed weights of the block. ``channels`` are in this pass and ``done``
    in those before it, whose sums are in y.
    """
    layer, lanes = plan.layer, plan.lanes
    filters, vectors = size
    vector = ir.VectorType(F32, lanes)
    pointers = dict.fromkeys(("x", "x_last", "w", "y", "y_last"), F32_PTR)
    b, (x, x_last, w, y, y_last, channels, done) = new_function(
        module, f"tile_{filters}_{vectors}", {**pointers, "channels": I64, "done": I64}, internal=True
    )

    def at(first: Any, last: Any, v: int, place: int) -> Any:
        start = element(b, last, place) if v == vectors - 1 else element(b, first, v * lanes + place)
        return b.bitcast(start, vector.as_pointer())

    def tap(sums: list[Any], here: Any, last: Any, weights: Any, q: int) -> list[Any]:
        pixels = [b.load(at(here, last, v, q * plan.shift_stride), align=4) for v in range(vectors)]
        result = []
        for f in range(filters):
            weight = _all_lanes(b, b.load(element(b, weights, q * filters + f), align=4), lanes)
            result += [fma(b, target, pixels[v], weight, sums[f * vectors + v]) for v in range(vectors)]
        return result

    plane = layer.output_height * layer.output_width
    if not streamed:  # the lines that the tile ends in arrive while it computes
        for f in range(filters):
            for place in range(0, vectors * lanes, LINE_FLOATS):
                prefetch_for_write(b, element(b, y, f * plane + place))
    outputs = [at(y, y_last, v, f * plane) for f in range(filters) for v in range(vectors)]
    sums = [ir.Constant(vector, [0.0] * lanes)] * len(outputs)
    if not plan.single:
        sums = _sums_so_far(b, done, sums, outputs)
    with for_range(b, layer.channels if plan.single else channels, sums) as c:
        with for_range(b, layer.kernel, c.values) as p:
            place = offset(b, (c.index, plan.channel_stride), (p.index, layer.output_width))
            here, last = element(b, x, place), element(b, x_last, place)
            row = offset(b, (c.index, layer.kernel**2 * filters), (p.index, layer.kernel * filters))
            weights = element(b, w, row)
            if layer.kernel <= UNROLL:
                for q in range(layer.kernel):
                    p.values = tap(p.values, here, last, weights, q)
            else:
                with for_range(b, layer.kernel, p.values) as many:
                    shift = offset(b, (many.index, plan.shift_stride))
                    step = element(b, weights, offset(b, (many.index, filters)))
                    many.values = tap(many.values, element(b, here, shift), element(b, last, shift), step, 0)
                p.values = many.values
        c.values = p.values
    for value, place in zip(c.values, outputs):
        if plan.pixels < lanes:
            _store_first(b, value, place, plan.pixels)
        elif streamed:
            store_past_caches(b, value, place, 4 * lanes)
        else:
            b.store(value, place, align=4)
    b.ret_void()
    return b.function


def _sums_so_far(b: ir.IRBuilder, done: Any, zeros: list[Any], outputs: list[Any]) -> list[Any]:
    """Zeros in the first pass, later what the passes before it left."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", done, const(0))):
        found = [b.load(place, align=4) for place in outputs]
        loaded = b.block
    sums = [b.phi(zero.type) for zero in zeros]
    for total, zero, value in zip(sums, zeros, found):
        total.add_incoming(zero, before)
        total.add_incoming(value, loaded)
    return sums


def _all_lanes(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(F32, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _store_first(b: ir.IRBuilder, value: Any, pointer: Any, count: int) -> None:
    """Store the first ``count`` lanes only."""
    scalar = b.bitcast(pointer, F32_PTR)
    for lane in range(count):
        b.store(b.extract_element(value, ir.Constant(I32, lane)), element(b, scalar, lane), align=4)


def _shift(module: ir.Module, plan: Plan) -> ir.Function:
    """A function (x, shifted, first, last, channels) that fills rows first to last - 1 of a band's shifted copies.

    x is at the band's first row in the pass's first channel. Nothing is done where last is not above first.
    """
    layer = plan.layer
    width, columns = layer.width, layer.output_width
    pointers, numbers = ("x", "shifted"), ("first", "last", "channels")
    b, (x, shifted, first, last, channels) = new_function(
        module, "shift", {**dict.fromkeys(pointers, F32_PTR), **dict.fromkeys(numbers, I64)}, internal=True
    )
    # A row is copied in vectors of the largest power of two that fits; the last overlaps, so that none
    # reads beyond the row.
    lanes = 1 << (min(plan.lanes, columns).bit_length() - 1)
    vector = ir.VectorType(F32, lanes) if lanes > 1 else F32
    count = b.sub(last, first)
    with b.if_then(b.icmp_signed(">", count, const(0))), for_range(b, count) as loop, for_range(b, channels) as c:
        r = b.add(first, loop.index)
        source = element(b, x, offset(b, (c.index, layer.height * width), (r, width)))
        to = element(b, shifted, offset(b, (c.index, plan.channel_stride), (r, columns)))

        def copy(q: Any, start: Any) -> None:
            value = b.load(b.bitcast(element(b, source, b.add(q, start)), vector.as_pointer()), align=4)
            place = b.add(offset(b, (q, plan.shift_stride)), start)
            b.store(value, b.bitcast(element(b, to, place), vector.as_pointer()), align=4)

        with for_range(b, layer.kernel) as q:
            if columns // lanes <= UNROLL:
                for part in range(columns // lanes):
                    copy(q.index, const(part * lanes))
            else:
                with for_range(b, columns // lanes) as parts:
                    copy(q.index, offset(b, (parts.index, lanes)))
            if columns % lanes:
                copy(q.index, const(columns - lanes))
    b.ret_void()
    return b.function


def _band(module: ir.Module, plan: Plan, target: Cpu, streamed: bool) -> ir.Function:
    """A function (x, w, y, scratch) for one band of one image: x and y are at the band's first row."""
    layer, lanes, plane = plan.layer, plan.lanes, plan.layer.output_height * plan.layer.output_width
    shift = _shift(module, plan)
    tiles = {
        (filters, vectors): _tile(module, plan, (filters, vectors), target, streamed)
        for filters, _ in plan.blocks
        for vectors, _ in plan.tiles
    }
    b, (x, w, y, scratch) = new_function(
        module, "band", dict.fromkeys(("x", "w", "y", "scratch"), F32_PTR), internal=True
    )

    def rows_for(pixels: Any) -> Any:
        """How many rows of the shifted image a band's first ``pixels`` need."""
        last = b.sub(_at_most(b, pixels, plan.pixels), const(1))
        return b.add(b.udiv(last, const(layer.output_width)), const(layer.kernel))

    for channels, before, c in _each(b, plan.passes):
        done = b.add(const(before), c)
        planes = element(b, x, offset(b, (done, layer.height * layer.width)))
        b.call(shift, [planes, scratch, const(0), rows_for(const(plan.tiles[0][0] * lanes)), const(channels)])
        for filters, above, m in _each(b, plan.blocks):
            number = b.add(const(above), m)
            weights = element(b, w, offset(b, (number, layer.products), (done, layer.kernel**2 * filters)))
            outputs = element(b, y, offset(b, (number, plane)))
            for vectors, covered, v in _each(b, plan.tiles):
                pixel = b.mul(b.add(const(covered), v), const(lanes))
                last = _at_most(b, b.add(pixel, const((vectors - 1) * lanes)), max(plan.pixels - lanes, 0))
                with b.if_then(b.icmp_signed("==", number, const(0))):  # the next tile's rows, if not there yet
                    ends = [rows_for(b.add(pixel, const(times * vectors * lanes))) for times in (1, 2)]
                    b.call(shift, [planes, scratch, *ends, const(channels)])
                places = [element(b, array, place) for array in (scratch, outputs) for place in (pixel, last)]
                b.call(tiles[filters, vectors], [*places[:2], weights, *places[2:], const(channels), done])
    b.ret_void()
    return b.function


def _each(b: ir.IRBuilder, pieces: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, Any]]:
    """Each (size, count) pair as a loop: the size, what the pairs before it cover, and what its rounds so far cover."""
    covered = 0
    for size, count in pieces:
        with for_range(b, count) as loop:
            yield size, covered, offset(b, (loop.index, size))
        covered += size * count


def build(plan: Plan, target: Cpu, streamed: bool) -> ir.Module:
    """The module of one layer, with a function ``conv``(x, w, y, scratch, counter, images, chunk).

    It takes ``chunk`` images at a time from the counter that all threads share, until all are taken. ``streamed``
    writes y past the caches: y must begin at a cache line then, and plan.whole_lines hold.
    """
    layer = plan.layer
    module = ir.Module("direct")
    band = _band(module, plan, target, streamed)
    pointers, numbers = ("x", "w", "y", "scratch"), ("images", "chunk")
    arguments = {**dict.fromkeys(pointers, F32_PTR), "counter": I64_PTR, **dict.fromkeys(numbers, I64)}
    b, (x, w, y, scratch, counter, images, chunk) = new_function(module, "conv", arguments)
    take, some, finish = (b.append_basic_block(word) for word in ("take", "some", "finish"))
    b.branch(take)
    b.position_at_end(take)
    first = b.atomic_rmw("add", counter, chunk, "monotonic")
    b.cbranch(b.icmp_signed("<", first, images), some, finish)
    b.position_at_end(finish)
    if streamed:
        streamed_stores_done(b)
    b.ret_void()
    b.position_at_end(some)
    left = b.sub(images, first)
    count = b.select(b.icmp_signed("<", chunk, left), chunk, left)
    with for_range(b, count) as loop, for_range(b, plan.bands) as part:
        image = b.add(first, loop.index)
        row = _at_most(b, offset(b, (part.index, plan.rows)), layer.output_height - plan.rows)
        pixels = offset(b, (image, math.prod(layer.x_shape[1:])), (row, layer.width))
        outputs = offset(b, (image, math.prod(layer.y_shape[1:])), (row, layer.output_width))
        b.call(band, [element(b, x, pixels), w, element(b, y, outputs), scratch])
    b.branch(take)
    return module


def _at_most(b: ir.IRBuilder, value: Any, limit: int) -> Any:
    return b.select(b.icmp_signed("<", value, const(limit)), value, const(limit))
