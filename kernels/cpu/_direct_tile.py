"""The inner loops of ``direct``: one tile of outputs, and the rows that it shifts for the next unit meanwhile."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I32,
    Cpu,
    const,
    element,
    fma,
    for_range,
    offset,
    prefetch,
    store_nontemporal,
)

from ._direct_plan import DirectPlan
from ._ir import LINE_FLOATS, broadcast, function, load, minimum, store

#: Columns of a filter that are unrolled; the columns of a larger filter are a loop.
UNROLL = 16

#: Vectors of a row, or of several, that are copied without a loop.
UNROLLED_COPIES = 8


def tile(module: ir.Module, plan: DirectPlan, size: tuple[int, int], target: Cpu, nontemporal: bool) -> ir.Function:
    """Build the function that computes one tile, of (filters, vectors), in one pass.

    x, y         the tile's first pixel in the shifted copies, and in y
    x_last, y_last
                 its last vector there, which may overlap the one before
    y_next       the next tile's first pixel in y, whose lines are prefetched
    w            the pass's packed weights of the block
    channels     in this pass; ``done`` channels came before it, and their sums are in y
    source, to   the next unit's rows, in the image and in its shifted copies. Of each of the first ``ahead`` channels,
                 plan.rows_ahead rows are shifted; each row of the channel's filters has its share of the shifts
    later        the same rows of the unit after that, which are prefetched
    """
    layer, lanes = plan.layer, plan.lanes
    filters, vectors = size
    pointers, integers = "x x_last w y y_last y_next source later to", "channels done ahead"
    b, arguments = function(module, f"tile_{filters}_{vectors}", pointers, integers)
    x, x_last, w, y, y_last, y_next, source, later, to, channels, done, ahead = arguments

    def pointer(first: Any, last: Any, v: int, start: int) -> Any:
        return element(b, last, start) if v == vectors - 1 else element(b, first, v * lanes + start)

    def tap(sums: list[Any], here: Any, last: Any, weights: Any, q: int) -> list[Any]:
        pixels = [load(b, pointer(here, last, v, q * plan.shift_stride), lanes) for v in range(vectors)]
        result = []
        for f in range(filters):
            weight = broadcast(b, b.load(element(b, weights, q * filters + f), align=4), lanes)
            result += [fma(b, target, pixels[v], weight, sums[f * vectors + v]) for v in range(vectors)]
        return result

    plane = layer.output_height * layer.output_width
    vector = ir.VectorType(F32, lanes)
    outputs = [
        b.bitcast(pointer(y, y_last, v, f * plane), vector.as_pointer()) for f in range(filters) for v in range(vectors)
    ]
    sums = [ir.Constant(vector, [0.0] * lanes)] * len(outputs)
    if not plan.single:
        sums = _sums_so_far(b, done, sums, outputs)
    with for_range(b, layer.channels if plan.single else channels, sums) as c:
        with for_range(b, layer.kernel, c.values) as p:
            with b.if_then(b.icmp_signed("<", c.index, ahead)):
                _shift_ahead(b, plan, (source, later, to), c.index, p.index)
            if not nontemporal:
                _prefetch_outputs(b, plan, size, y_next, b.add(offset(b, (c.index, layer.kernel)), p.index))
            start = offset(b, (c.index, plan.channel_stride), (p.index, layer.output_width))
            here, last = element(b, x, start), element(b, x_last, start)
            row = b.add(offset(b, (c.index, layer.kernel)), p.index)
            weights = element(b, w, offset(b, (row, layer.kernel_width * filters)))
            if layer.kernel_width <= UNROLL:
                for q in range(layer.kernel_width):
                    p.values = tap(p.values, here, last, weights, q)
            else:
                with for_range(b, layer.kernel_width, p.values) as each:
                    shift = offset(b, (each.index, plan.shift_stride))
                    step = element(b, weights, offset(b, (each.index, filters)))
                    each.values = tap(each.values, element(b, here, shift), element(b, last, shift), step, 0)
                p.values = each.values
        c.values = p.values
    for value, output in zip(c.values, outputs):
        if plan.pixels < lanes:
            store_first(b, value, output, plan.pixels)
        elif nontemporal:
            store_nontemporal(b, value, output, 4 * lanes)
        else:
            b.store(value, output, align=4)
    b.ret_void()
    return b.function


def _sums_so_far(b: ir.IRBuilder, done: Any, zeros: list[Any], outputs: list[Any]) -> list[Any]:
    """Return zeros in the first pass, and the sums that earlier passes left in y in the later ones."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", done, const(0))):
        found = [b.load(output, align=4) for output in outputs]
        loaded = b.block
    sums = [b.phi(zero.type) for zero in zeros]
    for total, zero, value in zip(sums, zeros, found):
        total.add_incoming(zero, before)
        total.add_incoming(value, loaded)
    return sums


def store_first(b: ir.IRBuilder, value: Any, pointer: Any, count: int) -> None:
    """Store the first ``count`` lanes."""
    if count == value.type.count:
        b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=4)
        return
    scalar = b.bitcast(pointer, F32_PTR)
    for lane in range(count):
        b.store(b.extract_element(value, ir.Constant(I32, lane)), element(b, scalar, lane), align=4)


def _prefetch_outputs(b: ir.IRBuilder, plan: DirectPlan, size: tuple[int, int], y_next: Any, tap_row: Any) -> None:
    """Prefetch a share of the lines of y where the next tile ends: the tap rows of this tile prefetch all of them."""
    filters, vectors = size
    plane = plan.layer.output_height * plan.layer.output_width
    lines = -(-vectors * plan.lanes // LINE_FLOATS) + 1
    count = -(-filters * lines // (plan.passes[-1][0] * plan.layer.kernel))
    for number in range(count):
        line = b.add(offset(b, (tap_row, count)), const(number))
        f, column = b.udiv(line, const(lines)), b.urem(line, const(lines))
        f = b.select(b.icmp_signed("<", f, const(filters)), f, const(filters - 1))
        prefetch(b, element(b, y_next, offset(b, (f, plane), (column, LINE_FLOATS))), write=True)


def _shift_ahead(b: ir.IRBuilder, plan: DirectPlan, pointers: tuple[Any, Any, Any], c: Any, p: Any) -> None:
    """Shift plan.rows_ahead rows of channel c: the p-th of K shares of the L shifts.

    Also prefetch a share of the rows of the unit after that; without copies, of the next unit.
    """
    layer = plan.layer
    channel = offset(b, (c, layer.height * layer.width))
    source, later = (element(b, pointer, channel) for pointer in pointers[:2])
    if plan.in_place:
        later = source
    count = -(-(-(-plan.rows_ahead * layer.width // LINE_FLOATS) + 1) // layer.kernel)
    for number in range(count):
        start = b.add(offset(b, (p, count * LINE_FLOATS)), const(number * LINE_FLOATS))
        prefetch(b, element(b, later, start), write=False)
    if plan.in_place:
        return
    shifts = -(-layer.kernel_width // layer.kernel)
    for number in range(shifts):
        q = minimum(b, b.add(offset(b, (p, shifts)), const(number)), layer.kernel_width - 1)
        to = element(b, pointers[2], offset(b, (c, plan.channel_stride), (q, plan.shift_stride)))
        shift_rows(b, plan, element(b, source, q), to, plan.rows_ahead)


def shift_rows(b: ir.IRBuilder, plan: DirectPlan, source: Any, to: Any, rows: Any) -> None:
    """Emit a copy of ``rows`` rows of one channel, output_width columns each, from the image to a shifted copy."""
    columns = plan.layer.output_width
    copy_rows(b, plan.lanes, columns, (source, plan.layer.width), (to, columns), rows)


def copy_rows(
    b: ir.IRBuilder, lanes: int, columns: int, source: tuple[Any, int], to: tuple[Any, int], rows: Any
) -> None:
    """Emit a copy of ``rows`` rows of ``columns`` floats; ``source`` and ``to`` are pointers and strides of rows."""
    # A row is copied in vectors of the largest power of two that fits; the last one overlaps, so that none reads
    # beyond the row.
    lanes = 1 << (min(lanes, columns).bit_length() - 1)
    whole = columns // lanes

    def copy(r: Any, start: Any) -> None:
        read = element(b, source[0], b.add(offset(b, (r, source[1])), start))
        value = load(b, read, lanes) if lanes > 1 else b.load(read, align=4)
        store(b, value, element(b, to[0], b.add(offset(b, (r, to[1])), start)))

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
