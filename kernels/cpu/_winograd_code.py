"""The machine code of ``winograd`` for one plan, as LLVM IR; ``winograd`` describes the algorithm."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I64,
    I64_PTR,
    Cpu,
    const,
    element,
    for_range,
    new_function,
    offset,
    prefetch,
)

from ._ir import LINE_FLOATS, ConvFunction, claimed_images, each_piece, function, load, minimum, store, transposed
from ._winograd_plan import RAW_ROWS, Terms, WinogradPlan
from ._winograd_tile import Kind, step_tile

#: Prefetch distance of y's lines, in filters.
PREFETCH_FILTERS = 2


def _constant(plan: WinogradPlan, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(F32, plan.lanes), [value] * plan.lanes)


def _load(b: ir.IRBuilder, plan: WinogradPlan, pointer: Any) -> Any:
    """Load an aligned vector."""
    return load(b, pointer, plan.lanes, ITEM_BYTES * plan.lanes)


def _store(b: ir.IRBuilder, plan: WinogradPlan, value: Any, pointer: Any) -> None:
    """Store an aligned vector."""
    store(b, value, pointer, ITEM_BYTES * plan.lanes)


def _sum(b: ir.IRBuilder, terms: Terms, values: list[Any]) -> Any:
    """Return the sum of sign * value over a form's terms; the first one's sign is +."""
    (first, _), *others = terms
    total = values[first]
    for number, sign in others:
        total = b.fadd(total, values[number]) if sign > 0 else b.fsub(total, values[number])
    return total


def _prefetch(b: ir.IRBuilder, plan: WinogradPlan, pointer: Any, image: int, floats: int, write: bool) -> None:
    """Prefetch ``floats`` floats of the images of all lanes; the images are ``image`` floats apart."""
    lines = -(-(floats + LINE_FLOATS - 1) // LINE_FLOATS)
    with for_range(b, plan.lanes) as lane, for_range(b, lines) as line:
        start = offset(b, (lane.index, image), (line.index, LINE_FLOATS))
        prefetch(b, element(b, pointer, start), write)


def _image_row(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """Build (x, raw, zeros), which transposes a row of one channel of all lanes' images to [column][image].

    ``x`` is the row in the first image; ``zeros`` counts each image's zeros.
    """
    layer, lanes = plan.layer, plan.lanes
    b, (x, raw, zeros) = function(module, "image_row", "x raw zeros")
    none, one = _constant(plan, 0.0), _constant(plan, 1.0)
    with for_range(b, -(-layer.width // lanes), [_load(b, plan, zeros)]) as loop:
        first = minimum(b, offset(b, (loop.index, lanes)), layer.width - lanes)
        rows = [element(b, x, b.add(first, const(i * math.prod(layer.x_shape[1:])))) for i in range(lanes)]
        for i, column in enumerate(transposed(b, [load(b, row, lanes) for row in rows])):
            _store(b, plan, column, element(b, raw, offset(b, (b.add(first, const(i)), lanes))))
            is_zero = b.fcmp_ordered("==", column, none)
            loop.values = [b.fadd(loop.values[0], b.select(is_zero, one, none))]
    _store(b, plan, loop.values[0], zeros)
    b.ret_void()
    return b.function


def _input_row(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """Build (x, raw, row, zeros, number, new), which computes row ``number`` of the ring's inputs, at ``row``.

    It transposes the image's rows ``new`` to 2 number + reach first; ``raw`` already has those before.
    """
    layer, lanes, cut = plan.layer, plan.lanes, plan.cut
    image_row = _image_row(module, plan)
    b, (x, raw, row, zeros, number, new) = function(module, "input_row", "x raw row zeros", "number new")
    count = b.sub(b.add(offset(b, (number, 2)), const(cut.reach + 1)), new)
    lines = [b.and_(b.add(offset(b, (number, 2)), const(line)), const(RAW_ROWS - 1)) for line in range(cut.reach + 1)]
    with for_range(b, layer.channels) as c:
        channel = element(b, x, offset(b, (c.index, layer.height * layer.width)))
        here = element(b, raw, offset(b, (c.index, RAW_ROWS * plan.raw_width * lanes)))
        with for_range(b, count) as loop:
            line = b.add(new, loop.index)
            source = element(b, channel, offset(b, (minimum(b, line, layer.height - 1), layer.width)))
            to = element(b, here, offset(b, (b.and_(line, const(RAW_ROWS - 1)), plan.raw_width * lanes)))
            b.call(image_row, [source, to, zeros])
        starts = [element(b, here, offset(b, (line, plan.raw_width * lanes))) for line in lines]
        to = element(b, row, offset(b, (c.index, lanes)))
        with for_range(b, plan.wide) as pair:
            columns_read = [
                [element(b, start, offset(b, (pair.index, 2 * lanes), (const(column), lanes))) for start in starts]
                for column in range(cut.reach + 1)
            ]
            into = element(b, to, offset(b, (pair.index, plan.pair_stride)))
            for down, terms in enumerate(cut.forms):
                columns = [_sum(b, terms, [_load(b, plan, each) for each in column]) for column in columns_read]
                for across, others in enumerate(cut.forms):
                    output = element(b, into, (down * len(cut.forms) + across) * plan.form_stride)
                    _store(b, plan, _sum(b, others, columns), output)
    b.ret_void()
    return b.function


def _output_rows(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """Build (sums, y, found, floats), which transposes ``floats`` outputs of each filter and adds them to ``found``.

    They are contiguous, from ``y`` on in the first image's first plane.
    """
    layer, lanes = plan.layer, plan.lanes
    plane = layer.output_height * layer.output_width
    b, (sums, y, found, floats) = function(module, "output_rows", "sums y found", "floats")
    most = layer.output_width * (2 if plan.rows_together else 1)
    with for_range(b, layer.filters, [_load(b, plan, found)]) as m:
        later = minimum(b, b.add(m.index, const(PREFETCH_FILTERS)), layer.filters - 1)
        _prefetch(b, plan, element(b, y, offset(b, (later, plane))), layer.filters * plane, most, True)
        with for_range(b, b.udiv(b.add(floats, const(lanes - 1)), const(lanes)), m.values) as loop:
            first = minimum(b, offset(b, (loop.index, lanes)), b.sub(floats, const(lanes)))
            source = element(b, sums, offset(b, (m.index, plan.output_stride), (first, lanes)))
            columns = [_load(b, plan, element(b, source, i * lanes)) for i in range(lanes)]
            for column in columns:
                loop.values = [b.fadd(loop.values[0], column)]
            to = element(b, y, b.add(offset(b, (m.index, plane)), first))
            for i, image in enumerate(transposed(b, columns)):
                store(b, image, element(b, to, i * layer.filters * plane))
        m.values = loop.values
    _store(b, plan, m.values[0], found)
    b.ret_void()
    return b.function


def _input_addresses(b: ir.IRBuilder, plan: WinogradPlan, scratch: Any, number: Any) -> Any:
    """Fill the table of the products' input addresses for pair of output rows ``number``, in the order of the steps."""
    ring = []
    for shift in range(plan.ring):
        slot = b.urem(b.add(number, const(shift)), const(plan.ring))
        ring.append(element(b, scratch, b.add(offset(b, (slot, plan.row_stride)), const(plan.offsets["ring"]))))
    table = b.bitcast(element(b, scratch, plan.offsets["table"]), I64_PTR)
    pairs = [pair for step in plan.steps for pair in plan.products(step)]
    for entry, (down, across) in enumerate(pairs):
        form = down.form * len(plan.cut.forms) + across.form
        address = element(b, ring[down.shift], form * plan.form_stride + across.shift * plan.pair_stride)
        b.store(b.ptrtoint(address, I64), element(b, table, entry))
    return table


def _sums(b: ir.IRBuilder, plan: WinogradPlan, scratch: Any, name: str | None, above: Any, column: Any) -> Any:
    """Return the pointer to the sums ``name`` of a step, for the filter with ``above`` filters before it."""
    if name is None:
        return scratch  # unused
    if not name.startswith("y"):
        return element(b, scratch, b.add(offset(b, (above, plan.sum_stride)), const(plan.offsets[name])))
    row, side = int(name[1]), int(name[2])
    first = plan.offsets["y"] + row * plan.output_row_stride + side * plan.lanes
    start = offset(b, (above, plan.output_stride), (column, 2 * plan.lanes))
    return element(b, scratch, b.add(start, const(first)))


def _rows(module: ir.Module, plan: WinogradPlan, target: Cpu) -> ir.Function:
    """Build (w, scratch, number), which computes pair of output rows ``number`` from the inputs in the ring."""
    channels = plan.layer.channels
    sizes = [(filters, pairs) for filters, _ in plan.blocks for pairs, _ in plan.tiles]
    kinds = dict.fromkeys(Kind.of(step, *size) for size in sizes for step in plan.steps)
    tiles = {kind: step_tile(module, plan, kind, target) for kind in kinds}
    b, (w, scratch, number) = function(module, "rows", "w scratch", "number")
    table = _input_addresses(b, plan, scratch, number)
    for pairs, column, _ in each_piece(b, plan.tiles):
        entry = 0
        for step in plan.steps:
            count = len(plan.products(step))
            for filters, above, _ in each_piece(b, plan.blocks):
                weights = offset(b, (above, plan.product_count * channels), (const(entry), channels * filters))
                names = (step.begin, step.add, step.to, step.less)
                arguments = [
                    element(b, table, entry),
                    offset(b, (column, ITEM_BYTES * plan.pair_stride)),
                    element(b, w, weights),
                    *(_sums(b, plan, scratch, name, above, column) for name in names),
                    const(count),
                ]
                b.call(tiles[Kind.of(step, filters, pairs)], arguments)
            entry += count
    b.ret_void()
    return b.function


def _clear_padding(b: ir.IRBuilder, plan: WinogradPlan, raw: Any) -> None:
    """Fill the columns beyond the image's width with zeros: forms read them, and no output uses the result."""
    missing = plan.raw_width - plan.layer.width
    with for_range(b, RAW_ROWS * plan.layer.channels) as line, for_range(b, missing) as column:
        start = offset(b, (line.index, plan.raw_width * plan.lanes), (column.index, plan.lanes))
        padding = element(b, raw, b.add(start, const(plan.layer.width * plan.lanes)))
        _store(b, plan, _constant(plan, 0.0), padding)


def _store_rows(
    b: ir.IRBuilder, plan: WinogradPlan, function: ir.Function, arrays: tuple[Any, Any, Any], row: Any
) -> None:
    """Transpose the outputs of pair of rows number ``row`` into y; the last pair's second row may not exist."""
    sums, y, found = arrays
    width = plan.layer.output_width
    to = element(b, y, offset(b, (row, 2 * width)))
    both = b.icmp_signed("<", offset(b, (row, 2)), const(plan.layer.output_height - 1))
    if plan.rows_together:
        b.call(function, [sums, to, found, b.select(both, const(2 * width), const(width))])
        return
    b.call(function, [sums, to, found, const(width)])
    with b.if_then(both):
        b.call(function, [element(b, sums, plan.output_row_stride), element(b, to, width), found, const(width)])


def build(plan: WinogradPlan, target: Cpu) -> ir.Module:
    """Build the module of one layer, with a function ``conv``.

    Its arguments are (x, w, y, scratch, counter, found, batch, groups, most, parts). Threads claim groups of as many
    images as there are lanes, as ``_ir.claimed_images`` does; the last group may overlap the one before. Of each image
    of a group, ``found`` gets the sum of its outputs, which is not finite if one of them is not, and the number of its
    zeros, some counted twice.
    """
    layer, lanes, offsets = plan.layer, plan.lanes, plan.offsets
    module = ir.Module("winograd")
    input_row, output_rows, rows = _input_row(module, plan), _output_rows(module, plan), _rows(module, plan, target)
    pointers = {**dict.fromkeys(("x", "w", "y", "scratch"), F32_PTR), "counter": I64_PTR, "found": F32_PTR}
    numbers = dict.fromkeys(("batch", "groups", "most", "parts"), I64)
    b, arguments = new_function(module, "conv", {**pointers, **numbers})
    x, w, y, scratch, counter, found, batch, groups, most, parts = arguments
    conv = ConvFunction(b, x, w, y, scratch, counter, groups, most, parts)
    raw, sums = element(b, scratch, offsets["raw"]), element(b, scratch, offsets["y"])
    image_size = math.prod(layer.x_shape[1:])

    def first_image(group: Any) -> Any:
        return minimum(b, offset(b, (group, lanes)), b.sub(batch, const(lanes)))

    def before(first: Any) -> list[Any]:
        _clear_padding(b, plan, raw)
        return []

    with claimed_images(conv, before) as each:
        images, following = (
            element(b, x, offset(b, (first_image(group), image_size))) for group in (each.image, each.following)
        )
        outputs = element(b, y, offset(b, (first_image(each.image), math.prod(layer.y_shape[1:]))))
        about = element(b, found, offset(b, (each.image, 2 * lanes)))
        for part in range(2):
            _store(b, plan, _constant(plan, 0.0), element(b, about, part * lanes))

        def make_row(number: Any, new: Any) -> None:
            start = b.add(offset(b, (b.urem(number, const(plan.ring)), plan.row_stride)), const(offsets["ring"]))
            b.call(input_row, [images, raw, element(b, scratch, start), element(b, about, lanes), number, new])

        for number in range(plan.ring - 1):
            make_row(const(number), const(2 * number + plan.cut.reach - 1 if number else 0))
        with for_range(b, plan.rows) as row:
            number = b.add(row.index, const(plan.ring - 1))
            next_line = b.add(offset(b, (number, 2)), const(plan.cut.reach + 1))
            new = b.sub(next_line, const(2))
            if plan.ring == 1:
                new = b.select(b.icmp_signed("==", row.index, const(0)), const(0), new)
            make_row(number, new)
            more_rows = b.icmp_signed("<", b.add(row.index, const(1)), const(plan.rows))
            line = offset(b, (b.select(more_rows, next_line, const(0)), layer.width))
            later = element(b, b.select(more_rows, images, following), line)
            with for_range(b, layer.channels) as c:
                channel = element(b, later, offset(b, (c.index, layer.height * layer.width)))
                _prefetch(b, plan, channel, image_size, 2 * layer.width, write=False)
            b.call(rows, [w, scratch, row.index])
            _store_rows(b, plan, output_rows, (sums, outputs, about), row.index)
    b.ret_void()
    return module
