"""The inner loops of ``direct``: one tile of outputs, and the rows that are shifted meanwhile."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I32,
    I64,
    Cpu,
    const,
    element,
    fma,
    for_range,
    new_function,
    offset,
    prefetch,
    store_nontemporal,
)

from ._direct_plan import LINE_FLOATS, Plan

#: Columns of a filter that are written out one after the other; in larger ones they are a loop.
UNROLL = 16

#: Vectors of a row, or of several, that are copied without a loop.
UNROLLED_COPIES = 8


def tile(module: ir.Module, plan: Plan, size: tuple[int, int], target: Cpu, streamed: bool) -> ir.Function:
    """A function for one tile in one pass.

    Its arguments are (x, x_last, w, y, y_last, y_next, source, later, to, channels, done, ahead). ``x`` and ``y``
    are at the tile's first pixel, ``x_last`` and ``y_last`` at its last vector, which may overlap the one before,
    ``y_next`` is at the next tile's first; ``w`` is at the pass's packed weights of the block. ``channels`` are in
    this pass and ``done`` in those before it, whose sums are in y. Of each of the next unit's first ``ahead``
    channels, plan.ahead rows are shifted from ``source`` to ``to``, by q while row q of the channel's filters is
    at work; ``later`` is at the same rows of the unit after that.
    """
    layer, lanes = plan.layer, plan.lanes
    filters, vectors = size
    vector = ir.VectorType(F32, lanes)
    pointers = dict.fromkeys(("x", "x_last", "w", "y", "y_last", "y_next", "source", "later", "to"), F32_PTR)
    b, (x, x_last, w, y, y_last, y_next, source, later, to, channels, done, ahead) = new_function(
        module,
        f"tile_{filters}_{vectors}",
        {**pointers, **dict.fromkeys(("channels", "done", "ahead"), I64)},
        internal=True,
    )

    def at(first: Any, last: Any, v: int, place: int) -> Any:
        start = element(b, last, place) if v == vectors - 1 else element(b, first, v * lanes + place)
        return b.bitcast(start, vector.as_pointer())

    def tap(sums: list[Any], here: Any, last: Any, weights: Any, q: int) -> list[Any]:
        pixels = [b.load(at(here, last, v, q * plan.shift_stride), align=4) for v in range(vectors)]
        result = []
        for f in range(filters):
            weight = all_lanes(b, b.load(element(b, weights, q * filters + f), align=4), lanes)
            result += [fma(b, target, pixels[v], weight, sums[f * vectors + v]) for v in range(vectors)]
        return result

    plane = layer.output_height * layer.output_width
    outputs = [at(y, y_last, v, f * plane) for f in range(filters) for v in range(vectors)]
    sums = [ir.Constant(vector, [0.0] * lanes)] * len(outputs)
    if not plan.single:
        sums = _sums_so_far(b, done, sums, outputs)
    with for_range(b, layer.channels if plan.single else channels, sums) as c:
        with for_range(b, layer.kernel, c.values) as p:
            with b.if_then(b.icmp_signed("<", c.index, ahead)):
                _rows_ahead(b, plan, (source, later, to), c.index, p.index)
            if not streamed:
                _ask_for_outputs(b, plan, size, y_next, b.add(offset(b, (c.index, layer.kernel)), p.index))
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
            store_nontemporal(b, value, place, 4 * lanes)
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


def all_lanes(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    """A vector with one number in all lanes."""
    vector = ir.VectorType(F32, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _store_first(b: ir.IRBuilder, value: Any, pointer: Any, count: int) -> None:
    """Store the first ``count`` lanes only."""
    scalar = b.bitcast(pointer, F32_PTR)
    for lane in range(count):
        b.store(b.extract_element(value, ir.Constant(I32, lane)), element(b, scalar, lane), align=4)


def _ask_for_outputs(b: ir.IRBuilder, plan: Plan, size: tuple[int, int], y_next: Any, turn: Any) -> None:
    """Ask for some of the lines that the next tile ends in: all are asked for in the rows of taps of this one."""
    filters, vectors = size
    plane = plan.layer.output_height * plan.layer.output_width
    lines = -(-vectors * plan.lanes // LINE_FLOATS) + 1
    count = -(-filters * lines // (plan.passes[-1][0] * plan.layer.kernel))
    for number in range(count):
        line = b.add(offset(b, (turn, count)), const(number))
        f, column = b.udiv(line, const(lines)), b.urem(line, const(lines))
        f = b.select(b.icmp_signed("<", f, const(filters)), f, const(filters - 1))
        prefetch(b, element(b, y_next, offset(b, (f, plane), (column, LINE_FLOATS))), write=True)


def _rows_ahead(b: ir.IRBuilder, plan: Plan, pointers: tuple[Any, Any, Any], c: Any, q: Any) -> None:
    """Shift plan.ahead rows of channel c by q, and ask for a share of the rows of the unit after that."""
    layer = plan.layer
    channel = offset(b, (c, layer.height * layer.width))
    source, later = (element(b, pointer, channel) for pointer in pointers[:2])
    count = -(-(-(-plan.ahead * layer.width // LINE_FLOATS) + 1) // layer.kernel)
    for number in range(count):
        place = b.add(offset(b, (q, count * LINE_FLOATS)), const(number * LINE_FLOATS))
        prefetch(b, element(b, later, place), write=False)
    to = element(b, pointers[2], offset(b, (c, plan.channel_stride), (q, plan.shift_stride)))
    shift_rows(b, plan, element(b, source, q), to, plan.ahead)


def shift_rows(b: ir.IRBuilder, plan: Plan, source: Any, to: Any, rows: Any) -> None:
    """Copy the columns of so many rows of one channel, from the image to the shifted copy."""
    width, columns = plan.layer.width, plan.layer.output_width
    # A row is copied in vectors of the largest power of two that fits; the last overlaps, so that none
    # reads beyond the row.
    lanes = 1 << (min(plan.lanes, columns).bit_length() - 1)
    vector = ir.VectorType(F32, lanes) if lanes > 1 else F32
    whole = columns // lanes

    def copy(r: Any, start: Any) -> None:
        place = element(b, source, b.add(offset(b, (r, width)), start))
        value = b.load(b.bitcast(place, vector.as_pointer()), align=4)
        place = element(b, to, b.add(offset(b, (r, columns)), start))
        b.store(value, b.bitcast(place, vector.as_pointer()), align=4)

    def copy_row(r: Any, unrolled: bool) -> None:
        if unrolled:
            for part in range(whole):
                copy(r, const(part * lanes))
        else:
            with for_range(b, whole) as parts:
                copy(r, offset(b, (parts.index, lanes)))
        if columns % lanes:
            copy(r, const(columns - lanes))

    if isinstance(rows, int) and rows * whole <= UNROLLED_COPIES:
        for r in range(rows):
            copy_row(const(r), True)
    else:
        with for_range(b, rows) as loop:
            copy_row(loop.index, whole <= UNROLLED_COPIES)
