"""The machine code of ``winograd`` for one plan, as LLVM IR; ``winograd`` describes the algorithm."""

from __future__ import annotations

import math

from ece408_op.runtime.host_cpu import Cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module, Value

from ._ir import LINE_FLOATS, add_products, claimed_ranges, each_part, transposed
from ._winograd_plan import RAW_ROWS, Terms, WinogradPlan

#: Prefetch distance of y's lines, in filters.
PREFETCH_FILTERS = 2


def outputs(first: Value, second: Value, both: Value, opposite: Value | None = None) -> list[Value]:
    """Return two neighbouring outputs, computed from the sums of their classes of products."""
    if opposite is None:
        return [first + both, second + both]
    return [first + (both + opposite), second + (both - opposite)]


def _class_tile(module: Module, plan: WinogradPlan, filters: int, pairs: int) -> Function:
    """Build (table, inputs, w, to, count), which adds up the ``count`` products of one class, over all channels.

    A tile has ``filters`` filters x ``pairs`` neighbouring pairs of columns. ``table`` has the products' offsets in
    ``inputs``, and ``w`` the block's packed weights of the class.
    """
    lanes, channels = plan.lanes, plan.layer.channels
    with Function(module, f"tile_{filters}_{pairs}", "table:i64 inputs w to", "count") as f:
        table, inputs, w, to, count = f.arguments
        with f.loop(count, [f.vector(0.0)] * (filters * pairs)) as each:
            first, weights = inputs[table[each.index].load()], w[each.index * (channels * filters)]
            with f.loop(channels, each.values) as c:
                here = first[c.index * lanes]
                values = [here[p * plan.pair_stride].load(lanes, aligned=True) for p in range(pairs)]
                c.values = add_products(c.values, values, weights[c.index * filters], filters)
            each.values = c.values
        for number, total in enumerate(each.values):
            m, p = divmod(number, pairs)
            to[m * plan.sum_stride + p * lanes].store(total, aligned=True)
    return f


def _add_classes(module: Module, plan: WinogradPlan, filters: int, pairs: int) -> Function:
    """Build (sums, to), which fills a tile's outputs, 2 x 2 per filter and pair of columns, from the classes' sums."""
    lanes = plan.lanes
    with Function(module, f"add_classes_{filters}_{pairs}", "sums to") as f:
        sums, to = f.arguments
        with f.range(filters) as m:
            for p in range(pairs):
                rows: dict[str, dict[str, Value]] = {}
                for number, (down, across) in enumerate(plan.classes):
                    of_class = sums[m * plan.sum_stride + (number * plan.class_stride + p * lanes)]
                    rows.setdefault(down, {})[across] = of_class.load(lanes, aligned=True)
                halves = {down: outputs(**row) for down, row in rows.items()}
                for side in range(2):
                    for row, value in enumerate(outputs(**{down: half[side] for down, half in halves.items()})):
                        start = row * plan.output_row_stride + (2 * p + side) * lanes
                        to[m * plan.output_stride + start].store(value, aligned=True)
    return f


def _sum(terms: Terms, values: list[Value]) -> Value:
    """Return the sum of sign * value over a form's terms; the first term's sign is +."""
    (first, _), *others = terms
    total = values[first]
    for number, sign in others:
        total = total + values[number] if sign > 0 else total - values[number]
    return total


def _prefetch(plan: WinogradPlan, pointer: Value, image: int, floats: int, write: bool) -> None:
    """Prefetch ``floats`` floats of the images of all lanes; the images are ``image`` floats apart."""
    f, lines = pointer.f, ceil_div(floats + LINE_FLOATS - 1, LINE_FLOATS)
    with f.range(plan.lanes) as lane, f.range(lines) as line:
        pointer[lane * image + line * LINE_FLOATS].prefetch(write)


def _image_row(module: Module, plan: WinogradPlan) -> Function:
    """Build (x, raw, zeros), which transposes a row of one channel, ``x`` in the first image, to [column][image].

    ``zeros`` counts each image's zeros.
    """
    layer, lanes = plan.layer, plan.lanes
    with Function(module, "image_row", "x raw zeros") as f:
        x, raw, zeros = f.arguments
        with f.loop(ceil_div(layer.width, lanes), [zeros.load(lanes, aligned=True)]) as loop:
            first = (loop.index * lanes).min(layer.width - lanes)
            rows = [x[first + i * math.prod(layer.x_shape[1:])] for i in range(lanes)]
            for i, column in enumerate(transposed([row.load(lanes) for row in rows])):
                raw[(first + i) * lanes].store(column, aligned=True)
                loop.values = [loop.values[0] + column.equals(0.0).select(f.vector(1.0), f.vector(0.0))]
        zeros.store(loop.values[0], aligned=True)
    return f


def _input_row(module: Module, plan: WinogradPlan) -> Function:
    """Build (x, raw, row, zeros, number, new), which computes row ``number`` of the ring's inputs, at ``row``.

    It first transposes the image's rows ``new`` to 2 number + reach; ``raw`` already has the rows before these.
    """
    layer, lanes, cut = plan.layer, plan.lanes, plan.cut
    image_row, raw_row = _image_row(module, plan), plan.raw_width * plan.lanes
    with Function(module, "input_row", "x raw row zeros", "number new") as f:
        x, raw, row, zeros, number, new = f.arguments
        lines = [number * 2 + line & RAW_ROWS - 1 for line in range(cut.reach + 1)]
        with f.range(layer.channels) as c:
            channel, here = x[c * (layer.height * layer.width)], raw[c * (RAW_ROWS * raw_row)]
            with f.range(number * 2 + (cut.reach + 1) - new) as more:
                line = new + more
                source = channel[line.min(layer.height - 1) * layer.width]
                image_row(source, here[(line & RAW_ROWS - 1) * raw_row], zeros)
            starts, to = [here[line * raw_row] for line in lines], row[c * lanes]
            with f.range(plan.wide) as pair:
                columns_read = [
                    [start[pair * (2 * lanes) + column * lanes] for start in starts] for column in range(cut.reach + 1)
                ]
                into = to[pair * plan.pair_stride]
                for down, terms in enumerate(cut.forms):
                    columns = [_sum(terms, [each.load(lanes, aligned=True) for each in read]) for read in columns_read]
                    for across, others in enumerate(cut.forms):
                        form = (down * len(cut.forms) + across) * plan.form_stride
                        into[form].store(_sum(others, columns), aligned=True)
    return f


def _output_rows(module: Module, plan: WinogradPlan) -> Function:
    """Build (sums, y, found, floats), which transposes ``floats`` outputs of each filter and adds them to ``found``.

    The outputs are contiguous, from ``y`` on in the first image's first plane.
    """
    layer, lanes = plan.layer, plan.lanes
    plane = layer.output_height * layer.output_width
    most = layer.output_width * (2 if plan.rows_together else 1)
    with Function(module, "output_rows", "sums y found", "floats") as f:
        sums, y, found, floats = f.arguments
        with f.loop(layer.filters, [found.load(lanes, aligned=True)]) as m:
            later = (m.index + PREFETCH_FILTERS).min(layer.filters - 1)
            _prefetch(plan, y[later * plane], layer.filters * plane, most, write=True)
            with f.loop((floats + (lanes - 1)) // lanes, m.values) as loop:
                first = (loop.index * lanes).min(floats - lanes)
                source, to = sums[m.index * plan.output_stride + first * lanes], y[m.index * plane + first]
                columns = [source[i * lanes].load(lanes, aligned=True) for i in range(lanes)]
                for column in columns:
                    loop.values = [loop.values[0] + column]
                for i, image in enumerate(transposed(columns)):
                    to[i * layer.filters * plane].store(image)
            m.values = loop.values
        found.store(m.values[0], aligned=True)
    return f


def _input_offsets(plan: WinogradPlan, table: Value, number: Value) -> None:
    """Fill the table with the offset of each product's input in the ring, for the pair of output rows ``number``."""
    rows = [(number + shift) % plan.ring * plan.row_stride for shift in range(plan.ring)]
    numbers = [pair for families in plan.classes for pair in plan.products(*families)]
    for entry, (down, across) in enumerate((plan.cut.slots[i], plan.cut.slots[j]) for i, j in numbers):
        form = down.form * len(plan.cut.forms) + across.form
        table[entry].store(rows[down.shift] + (form * plan.form_stride + across.shift * plan.pair_stride))


def _rows(module: Module, plan: WinogradPlan) -> Function:
    """Build (w, scratch, number), which computes the pair of output rows ``number`` from the inputs in the ring."""
    channels = plan.layer.channels
    tiles = {(m, p): _class_tile(module, plan, m, p) for m, _ in plan.blocks for p, _ in plan.tiles}
    finish = {(m, p): _add_classes(module, plan, m, p) for m, p in tiles}
    with Function(module, "rows", "w scratch", "number") as f:
        w, scratch, number = f.arguments
        table, ring, sums, to = (scratch[plan.offsets[part]] for part in ("table", "ring", "sums", "y"))
        table = table.to("i64")
        _input_offsets(plan, table, number)
        for pairs, column, _ in each_part(f, plan.tiles):
            inputs = ring[column * plan.pair_stride]
            for filters, above, _ in each_part(f, plan.blocks):
                entry = 0
                for place, families in enumerate(plan.classes):
                    count = len(plan.products(*families))
                    weights = w[above * (plan.product_count * channels) + entry * channels * filters]
                    tiles[filters, pairs](table[entry], inputs, weights, sums[place * plan.class_stride], count)
                    entry += count
                finish[filters, pairs](sums, to[column * (2 * plan.lanes) + above * plan.output_stride])
    return f


def _store_rows(plan: WinogradPlan, output_rows: Function, arrays: tuple[Value, Value, Value], row: Value) -> None:
    """Transpose the outputs of the pair of rows ``row`` into y; the last pair's second row may not exist."""
    (sums, y, found), width = arrays, plan.layer.output_width
    to = y[row * (2 * width)]
    both = row * 2 < plan.layer.output_height - 1
    if plan.rows_together:
        output_rows(sums, to, found, both.select(2 * width, width))
        return
    output_rows(sums, to, found, width)
    with row.f.when(both):
        output_rows(sums[plan.output_row_stride], to[width], found, width)


def build(plan: WinogradPlan, target: Cpu) -> Function:
    """Build the function ``conv``(x, w, y, scratch, counter, found, batch, groups, most, parts) of one layer.

    Threads claim groups of as many images as there are lanes, as ``_ir.claimed_ranges`` does; the last group may
    overlap the group before it. For each image of a group, ``found`` gets the sum of its outputs, which is not finite
    if an output is not, and the number of its zeros, some counted twice.
    """
    layer, lanes, offsets, module = plan.layer, plan.lanes, plan.offsets, Module("winograd", target)
    input_row, output_rows, rows = _input_row(module, plan), _output_rows(module, plan), _rows(module, plan)
    image_size, plane = math.prod(layer.x_shape[1:]), layer.height * layer.width
    with Function(module, "conv", "x w y scratch counter:i64 found", "batch groups most parts", exported=True) as f:
        x, w, y, scratch, counter, found, batch, groups, most, parts = f.arguments
        raw, sums = scratch[offsets["raw"]], scratch[offsets["y"]]

        def first_image(group: Value) -> Value:
            return (group * lanes).min(batch - lanes)

        # Zero the columns beyond the image's width: forms read them, but no output uses the result.
        with f.range(RAW_ROWS * layer.channels) as line, f.range(plan.raw_width - layer.width) as column:
            padding = raw[line * (plan.raw_width * lanes) + column * lanes + layer.width * lanes]
            padding.store(f.vector(0.0), aligned=True)
        with claimed_ranges(counter, groups, most, parts) as (first, count), f.range(count) as n:
            group = first + n
            images, following = (x[first_image(each) * image_size] for each in (group, group + 1))
            y_images, total = y[first_image(group) * math.prod(layer.y_shape[1:])], found[group * (2 * lanes)]
            zeros = total[lanes]
            for each in (total, zeros):
                each.store(f.vector(0.0), aligned=True)

            def make_row(number: Value, new: Value) -> None:
                to = scratch[number % plan.ring * plan.row_stride + offsets["ring"]]
                input_row(images, raw, to, zeros, number, new)

            for early in range(plan.ring - 1):
                make_row(f.const(early), f.const(2 * early + plan.cut.reach - 1 if early else 0))
            with f.range(plan.rows) as row:
                number = row + (plan.ring - 1)
                next_line = number * 2 + (plan.cut.reach + 1)
                make_row(number, row.equals(0).select(0, next_line - 2) if plan.ring == 1 else next_line - 2)
                more_rows = row + 1 < plan.rows
                later = more_rows.select(images, following)[more_rows.select(next_line, 0) * layer.width]
                with f.range(layer.channels) as c:
                    _prefetch(plan, later[c * plane], image_size, 2 * layer.width, write=False)
                rows(w, scratch, row)
                _store_rows(plan, output_rows, (sums, y_images, total), row)
    return f
