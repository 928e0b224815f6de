"""The machine code of ``direct``: what direct.py says in words, as LLVM IR for one plan."""

from __future__ import annotations

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
    """A function for one tile: (x, x_last, w, y, y_last).

    ``x`` and ``y`` are at the tile's first pixel, ``x_last`` and ``y_last`` at its last vector, which may overlap the
    one before; ``w`` is at the block's packed weights.
    """
    layer, lanes = plan.layer, plan.lanes
    filters, vectors = size
    vector = ir.VectorType(F32, lanes)
    b, (x, x_last, w, y, y_last) = new_function(
        module,
        f"tile_{filters}_{vectors}",
        {"x": F32_PTR, "x_last": F32_PTR, "w": F32_PTR, "y": F32_PTR, "y_last": F32_PTR},
        internal=True,
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
    zero = ir.Constant(vector, [0.0] * lanes)
    with for_range(b, layer.channels, [zero] * (filters * vectors)) as c:
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
    for f in range(filters):
        for v in range(vectors):
            target_place = at(y, y_last, v, f * plane)
            value = c.values[f * vectors + v]
            if plan.pixels < lanes:
                _store_first(b, value, target_place, plan.pixels)
            elif streamed:
                store_past_caches(b, value, target_place, 4 * lanes)
            else:
                b.store(value, target_place, align=4)
    b.ret_void()
    return b.function


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
    """A function (x, shifted, first, last) that fills rows first to last - 1 of a band's shifted copies.

    x is at the band's first row in the first channel. Nothing is done where last is not above first.
    """
    layer = plan.layer
    width, columns = layer.width, layer.output_width
    b, (x, shifted, first, last) = new_function(
        module, "shift", {"x": F32_PTR, "shifted": F32_PTR, "first": I64, "last": I64}, internal=True
    )
    # A row is copied in vectors of the largest power of two that fits; the last overlaps, so that none
    # reads beyond the row.
    lanes = 1 << (min(plan.lanes, columns).bit_length() - 1)
    vector = ir.VectorType(F32, lanes) if lanes > 1 else F32
    count = b.sub(last, first)
    with b.if_then(b.icmp_signed(">", count, const(0))), for_range(b, count) as loop, for_range(b, layer.channels) as c:
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


def build(plan: Plan, target: Cpu, streamed: bool) -> ir.Module:
    """The module of one layer, with a function ``conv``(x, w, y, scratch, counter, images, chunk).

    It takes ``chunk`` images at a time from the counter that all threads share, until all are taken. ``streamed``
    writes y past the caches: y must begin at a cache line then, and plan.whole_lines hold.
    """
    layer, lanes = plan.layer, plan.lanes
    module = ir.Module("direct")
    shift = _shift(module, plan)
    tiles = {
        (filters, vectors): _tile(module, plan, (filters, vectors), target, streamed)
        for filters, _ in plan.blocks
        for vectors, _ in plan.tiles
    }
    b, (x, w, y, scratch, counter, images, chunk) = new_function(
        module,
        "conv",
        {"x": F32_PTR, "w": F32_PTR, "y": F32_PTR, "scratch": F32_PTR, "counter": I64_PTR, "images": I64, "chunk": I64},
    )
    plane = layer.output_height * layer.output_width

    def rows_for(pixels: Any) -> Any:
        """How many rows of the shifted image a band's first ``pixels`` need."""
        last = b.sub(_at_most(b, pixels, plan.pixels), const(1))
        return b.add(b.udiv(last, const(layer.output_width)), const(layer.kernel))

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
    with for_range(b, b.select(b.icmp_signed("<", chunk, left), chunk, left)) as loop, for_range(b, plan.bands) as band:
        image = b.add(first, loop.index)
        row = _at_most(b, offset(b, (band.index, plan.rows)), layer.output_height - plan.rows)
        corner = offset(b, (image, layer.channels * layer.height * layer.width), (row, layer.width))
        corner = element(b, x, corner)
        b.call(shift, [corner, scratch, const(0), rows_for(const(plan.tiles[0][0] * lanes))])
        start = element(b, y, offset(b, (image, layer.filters * plane), (row, layer.output_width)))
        done = 0
        for filters, blocks in plan.blocks:
            with for_range(b, blocks) as block:
                number = b.add(const(done), offset(b, (block.index, filters)))
                weights = element(b, w, offset(b, (number, layer.products)))
                planes = element(b, start, offset(b, (number, plane)))
                covered = 0
                for vectors, count in plan.tiles:
                    with for_range(b, count) as tile:
                        pixel = b.add(const(covered * lanes), offset(b, (tile.index, vectors * lanes)))
                        last = _at_most(b, b.add(pixel, const((vectors - 1) * lanes)), max(plan.pixels - lanes, 0))
                        with b.if_then(b.icmp_signed("==", number, const(0))):
                            ends = [b.add(pixel, const(times * vectors * lanes)) for times in (1, 2)]
                            b.call(shift, [corner, scratch, *(rows_for(end) for end in ends)])
                        b.call(
                            tiles[filters, vectors],
                            [
                                element(b, scratch, pixel),
                                element(b, scratch, last),
                                weights,
                                element(b, planes, pixel),
                                element(b, planes, last),
                            ],
                        )
                    covered += vectors * count
            done += filters * blocks
    b.branch(take)
    return module


def _at_most(b: ir.IRBuilder, value: Any, limit: int) -> Any:
    return b.select(b.icmp_signed("<", value, const(limit)), value, const(limit))
