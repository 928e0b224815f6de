"""The machine code of ``winograd``: what winograd.py says in words, as LLVM IR for one plan."""

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

from ._direct_code import each_piece
from ._direct_filters import transposed
from ._direct_images import Conv, at_most, taken_images
from ._direct_plan import LINE_FLOATS
from ._winograd_plan import Terms, WinogradPlan
from ._winograd_tile import Kind, step_tile

#: Rows of each channel of the image that are kept turned: as many as forms reach over.
RAW_ROWS = 4

#: Filters whose lines of y are asked for before they are written.
AHEAD = 2


def _vector(plan: WinogradPlan) -> ir.VectorType:
    return ir.VectorType(F32, plan.lanes)


def _load(b: ir.IRBuilder, plan: WinogradPlan, pointer: Any, align: int | None = None) -> Any:
    return b.load(b.bitcast(pointer, _vector(plan).as_pointer()), align=align or 4 * plan.lanes)


def _store(b: ir.IRBuilder, plan: WinogradPlan, value: Any, pointer: Any, align: int | None = None) -> None:
    b.store(value, b.bitcast(pointer, _vector(plan).as_pointer()), align=align or 4 * plan.lanes)


def _sum(b: ir.IRBuilder, terms: Terms, values: list[Any]) -> Any:
    """The sum of sign * value over a form's terms, the first of which has the sign +."""
    (first, _), *others = terms
    total = values[first]
    for place, sign in others:
        total = b.fadd(total, values[place]) if sign > 0 else b.fsub(total, values[place])
    return total


def _ask_for(b: ir.IRBuilder, plan: WinogradPlan, pointer: Any, image: int, floats: int, write: bool) -> None:
    """Ask for so many floats of all lanes' images, which lie ``image`` floats apart."""
    lines = -(-(floats + LINE_FLOATS - 1) // LINE_FLOATS)
    with for_range(b, plan.lanes) as lane, for_range(b, lines) as line:
        place = offset(b, (lane.index, image), (line.index, LINE_FLOATS))
        prefetch(b, element(b, pointer, place), write)


def _image_rows(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """A function (x, raw, zeros) that turns a row of one channel of all lanes' images: [column][image].

    ``x`` is at the row in the first image; ``zeros`` counts each image's zeros.
    """
    layer, lanes, vector = plan.layer, plan.lanes, _vector(plan)
    b, (x, raw, zeros) = new_function(module, "image_row", dict.fromkeys(("x", "raw", "zeros"), F32_PTR), internal=True)
    none, one = (ir.Constant(vector, [value] * lanes) for value in (0.0, 1.0))
    with for_range(b, -(-layer.width // lanes), [_load(b, plan, zeros)]) as loop:
        first = at_most(b, offset(b, (loop.index, lanes)), layer.width - lanes)
        places = [element(b, x, b.add(first, const(i * math.prod(layer.x_shape[1:])))) for i in range(lanes)]
        for i, column in enumerate(transposed(b, [_load(b, plan, place, 4) for place in places])):
            _store(b, plan, column, element(b, raw, offset(b, (b.add(first, const(i)), lanes))))
            is_zero = b.fcmp_ordered("==", column, none)
            loop.values = [b.fadd(loop.values[0], b.select(is_zero, one, none))]
    _store(b, plan, loop.values[0], zeros)
    b.ret_void()
    return b.function


def _input_row(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """A function (x, raw, row, zeros, number, new) that makes row ``number`` of the ring's inputs, at ``row``.

    The image's rows ``new`` to 2 number + reach are turned first; those before are in ``raw`` already.
    """
    layer, lanes, cut = plan.layer, plan.lanes, plan.cut
    image_row = _image_rows(module, plan)
    pointers = dict.fromkeys(("x", "raw", "row", "zeros"), F32_PTR)
    numbers = dict.fromkeys(("number", "new"), I64)
    b, (x, raw, row, zeros, number, new) = new_function(module, "input_row", {**pointers, **numbers}, internal=True)
    count = b.sub(b.add(offset(b, (number, 2)), const(cut.reach + 1)), new)
    lines = [b.and_(b.add(offset(b, (number, 2)), const(place)), const(RAW_ROWS - 1)) for place in range(cut.reach + 1)]
    with for_range(b, layer.channels) as c:
        channel = element(b, x, offset(b, (c.index, layer.height * layer.width)))
        here = element(b, raw, offset(b, (c.index, RAW_ROWS * plan.raw_width * lanes)))
        with for_range(b, count) as loop:
            line = b.add(new, loop.index)
            source = element(b, channel, offset(b, (at_most(b, line, layer.height - 1), layer.width)))
            to = element(b, here, offset(b, (b.and_(line, const(RAW_ROWS - 1)), plan.raw_width * lanes)))
            b.call(image_row, [source, to, zeros])
        starts = [element(b, here, offset(b, (line, plan.raw_width * lanes))) for line in lines]
        to = element(b, row, offset(b, (c.index, lanes)))
        with for_range(b, plan.wide) as pair:
            seen = [
                [element(b, start, offset(b, (pair.index, 2 * lanes), (const(column), lanes))) for start in starts]
                for column in range(cut.reach + 1)
            ]
            into = element(b, to, offset(b, (pair.index, plan.pair_stride)))
            for down, terms in enumerate(cut.forms):
                columns = [_sum(b, terms, [_load(b, plan, place) for place in places]) for places in seen]
                for across, others in enumerate(cut.forms):
                    place = element(b, into, (down * len(cut.forms) + across) * plan.form_stride)
                    _store(b, plan, _sum(b, others, columns), place)
    b.ret_void()
    return b.function


def _output_rows(module: ir.Module, plan: WinogradPlan) -> ir.Function:
    """A function (sums, y, found, floats) that turns ``floats`` outputs of each filter, and adds them to ``found``.

    They lie one after the other, from ``y`` on in the first image's first plane.
    """
    layer, lanes = plan.layer, plan.lanes
    plane = layer.output_height * layer.output_width
    arguments = {**dict.fromkeys(("sums", "y", "found"), F32_PTR), "floats": I64}
    b, (sums, y, found, floats) = new_function(module, "output_rows", arguments, internal=True)
    most = layer.output_width * (2 if plan.rows_together else 1)
    with for_range(b, layer.filters, [_load(b, plan, found)]) as m:
        later = at_most(b, b.add(m.index, const(AHEAD)), layer.filters - 1)
        _ask_for(b, plan, element(b, y, offset(b, (later, plane))), layer.filters * plane, most, True)
        with for_range(b, b.udiv(b.add(floats, const(lanes - 1)), const(lanes)), m.values) as loop:
            first = at_most(b, offset(b, (loop.index, lanes)), b.sub(floats, const(lanes)))
            source = element(b, sums, offset(b, (m.index, plan.output_stride), (first, lanes)))
            columns = [_load(b, plan, element(b, source, i * lanes)) for i in range(lanes)]
            for column in columns:
                loop.values = [b.fadd(loop.values[0], column)]
            to = element(b, y, b.add(offset(b, (m.index, plane)), first))
            for i, image in enumerate(transposed(b, columns)):
                _store(b, plan, image, element(b, to, i * layer.filters * plane), 4)
        m.values = loop.values
    _store(b, plan, m.values[0], found)
    b.ret_void()
    return b.function


def _input_addresses(b: ir.IRBuilder, plan: WinogradPlan, scratch: Any, number: Any) -> Any:
    """The table of where each product's inputs lie for a pair of output rows, in the order of the steps."""
    ring = []
    for shift in range(plan.ring):
        turn = b.urem(b.add(number, const(shift)), const(plan.ring))
        ring.append(element(b, scratch, b.add(offset(b, (turn, plan.row_stride)), const(plan.places["ring"]))))
    table = b.bitcast(element(b, scratch, plan.places["table"]), I64_PTR)
    pairs = [pair for step in plan.steps for pair in plan.products(step)]
    for entry, (down, across) in enumerate(pairs):
        form = down.form * len(plan.cut.forms) + across.form
        place = element(b, ring[down.shift], form * plan.form_stride + across.shift * plan.pair_stride)
        b.store(b.ptrtoint(place, I64), element(b, table, entry))
    return table


def _sums(b: ir.IRBuilder, plan: WinogradPlan, scratch: Any, name: str | None, above: Any, column: Any) -> Any:
    """Where a step finds or leaves sums, of the filters that ``above`` others come before."""
    if name is None:
        return scratch  # it is not asked for
    if not name.startswith("y"):
        return element(b, scratch, b.add(offset(b, (above, plan.sum_stride)), const(plan.places[name])))
    row, side = int(name[1]), int(name[2])
    first = plan.places["y"] + row * plan.output_row_stride + side * plan.lanes
    place = offset(b, (above, plan.output_stride), (column, 2 * plan.lanes))
    return element(b, scratch, b.add(place, const(first)))


def _rows(module: ir.Module, plan: WinogradPlan, target: Cpu) -> ir.Function:
    """A function (w, scratch, number) for the pair of output rows ``number``, whose inputs are in the ring."""
    channels = plan.layer.channels
    sizes = [(filters, pairs) for filters, _ in plan.blocks for pairs, _ in plan.tiles]
    kinds = dict.fromkeys(Kind.of(step, *size) for size in sizes for step in plan.steps)
    tiles = {kind: step_tile(module, plan, kind, target) for kind in kinds}
    arguments = {**dict.fromkeys(("w", "scratch"), F32_PTR), "number": I64}
    b, (w, scratch, number) = new_function(module, "rows", arguments, internal=True)
    table = _input_addresses(b, plan, scratch, number)
    for pairs, column, _ in each_piece(b, plan.tiles):
        entry = 0
        for step in plan.steps:
            count = len(plan.products(step))
            for filters, above, _ in each_piece(b, plan.blocks):
                weights = offset(b, (above, plan.product_count * channels), (const(entry), channels * filters))
                names = (step.begin, step.add, step.to, step.less)
                given = [
                    element(b, table, entry),
                    offset(b, (column, ITEM_BYTES * plan.pair_stride)),
                    element(b, w, weights),
                    *(_sums(b, plan, scratch, name, above, column) for name in names),
                    const(count),
                ]
                b.call(tiles[Kind.of(step, filters, pairs)], given)
            entry += count
    b.ret_void()
    return b.function


def _no_columns(b: ir.IRBuilder, plan: WinogradPlan, raw: Any) -> None:
    """Fill the columns that no image has: forms ask for them, of which nothing is used."""
    nothing = ir.Constant(_vector(plan), [0.0] * plan.lanes)
    missing = plan.raw_width - plan.layer.width
    with for_range(b, RAW_ROWS * plan.layer.channels) as line, for_range(b, missing) as column:
        at = offset(b, (line.index, plan.raw_width * plan.lanes), (column.index, plan.lanes))
        _store(b, plan, nothing, element(b, raw, b.add(at, const(plan.layer.width * plan.lanes))))


def _store_rows(
    b: ir.IRBuilder, plan: WinogradPlan, function: ir.Function, arrays: tuple[Any, Any, Any], row: Any
) -> None:
    """Turn the outputs of pair of rows number ``row`` into y: of the last, the second may not be there."""
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
    """The module of one layer, with a function ``conv``(x, w, y, scratch, counter, found, batch, groups, most, parts).

    As that of direct_images, but that as many images as there are lanes make a group, of which the last may overlap
    the one before. For each group, ``found`` gets of each of its images the sum of its outputs, which is not finite
    where one of them is not, and how many of its values were zero, some counted twice.
    """
    layer, lanes, places = plan.layer, plan.lanes, plan.places
    module = ir.Module("winograd")
    input_row, output_rows, rows = _input_row(module, plan), _output_rows(module, plan), _rows(module, plan, target)
    pointers = {**dict.fromkeys(("x", "w", "y", "scratch"), F32_PTR), "counter": I64_PTR, "found": F32_PTR}
    numbers = dict.fromkeys(("batch", "groups", "most", "parts"), I64)
    b, arguments = new_function(module, "conv", {**pointers, **numbers})
    x, w, y, scratch, counter, found, batch, groups, most, parts = arguments
    conv = Conv(b, x, w, y, scratch, counter, groups, most, parts)
    raw, sums = element(b, scratch, places["raw"]), element(b, scratch, places["y"])
    image_size = math.prod(layer.x_shape[1:])

    def first_image(group: Any) -> Any:
        return at_most(b, offset(b, (group, lanes)), b.sub(batch, const(lanes)))

    def before(first: Any) -> list[Any]:
        _no_columns(b, plan, raw)
        return []

    with taken_images(conv, before) as each:
        images, following = (
            element(b, x, offset(b, (first_image(group), image_size))) for group in (each.image, each.following)
        )
        outputs = element(b, y, offset(b, (first_image(each.image), math.prod(layer.y_shape[1:]))))
        about = element(b, found, offset(b, (each.image, 2 * lanes)))
        for part in range(2):
            _store(b, plan, ir.Constant(_vector(plan), [0.0] * lanes), element(b, about, part * lanes))

        def make_row(number: Any, new: Any) -> None:
            at = b.add(offset(b, (b.urem(number, const(plan.ring)), plan.row_stride)), const(places["ring"]))
            b.call(input_row, [images, raw, element(b, scratch, at), element(b, about, lanes), number, new])

        for number in range(plan.ring - 1):
            make_row(const(number), const(2 * number + plan.cut.reach - 1 if number else 0))
        with for_range(b, plan.rows) as row:
            number = b.add(row.index, const(plan.ring - 1))
            next_line = b.add(offset(b, (number, 2)), const(plan.cut.reach + 1))
            new = b.sub(next_line, const(2))
            if plan.ring == 1:
                new = b.select(b.icmp_signed("==", row.index, const(0)), const(0), new)
            make_row(number, new)
            goes_on = b.icmp_signed("<", b.add(row.index, const(1)), const(plan.rows))
            line = offset(b, (b.select(goes_on, next_line, const(0)), layer.width))
            later = element(b, b.select(goes_on, images, following), line)
            with for_range(b, layer.channels) as c:
                channel = element(b, later, offset(b, (c.index, layer.height * layer.width)))
                _ask_for(b, plan, channel, image_size, 2 * layer.width, write=False)
            b.call(rows, [w, scratch, row.index])
            _store_rows(b, plan, output_rows, (sums, outputs, about), row.index)
    b.ret_void()
    return module
