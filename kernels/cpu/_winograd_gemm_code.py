"""The machine code of ``winograd_gemm`` for one plan, as LLVM IR; ``winograd_gemm`` describes the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir

from ece408_op.problem import ITEM_BYTES, Pair
from ece408_op.runtime.llvm import (
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
)

from ._direct_tile import copy_rows
from ._ir import (
    ConvFunction,
    broadcast,
    claimed_images,
    function,
    load,
    minimum,
    store,
    store_masked,
    transposed,
)
from ._winograd_gemm_plan import FORMS, PANEL, GemmPlan

#: Channels that are unrolled in the products.
UNROLL = 4


def _forms(b: ir.IRBuilder, x: list[Any]) -> list[Any]:
    """Return the four sums of inputs whose products give two outputs: see ``_winograd_plan``."""
    return [b.fsub(x[0], x[2]), b.fadd(x[1], x[2]), b.fsub(x[2], x[1]), b.fsub(x[3], x[1])]


def _outputs(b: ir.IRBuilder, products: list[Any]) -> list[Any]:
    """Return the two outputs of four products."""
    first, both, opposite, second = products
    return [b.fadd(first, b.fadd(both, opposite)), b.fadd(second, b.fsub(both, opposite))]


def weights_function(module: ir.Module, plan: GemmPlan, strides: Pair, turned: bool) -> None:
    """Build (w, to, found, first, last), which transforms the weights of these chunks of filters.

    The 9 weights of a filter and a channel are contiguous; ``strides`` are the floats of w from one filter and from one
    channel to the next. ``turned``: by half a turn. found[0 to plan.block - 1] get the least bits of an absolute value
    that is not zero, less one, if those are less.
    """
    channels, lanes = plan.layer.channels, plan.block
    arguments = {"w": F32_PTR, "to": F32_PTR, "found": F32_PTR, "first": I64, "last": I64}
    b, (w, to, found, first, last) = new_function(module, "weights", arguments)
    vector, whole = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    half, one = ir.Constant(vector, [0.5] * lanes), ir.Constant(whole, [1] * lanes)
    no_sign = ir.Constant(whole, [0x7FFFFFFF] * lanes)

    def transform(taps: list[Any]) -> list[Any]:
        outer, middle = b.fmul(b.fadd(taps[0], taps[2]), half), b.fmul(taps[1], half)
        return [taps[0], b.fadd(outer, middle), b.fsub(outer, middle), taps[2]]

    found = b.bitcast(found, whole.as_pointer())
    chunk_size, form_size = plan.chunk_weights, plan.chunk_weights // FORMS
    with for_range(b, b.sub(last, first), [b.load(found, align=4)]) as chunk:
        number = b.add(first, chunk.index)
        with for_range(b, plan.blocks, chunk.values) as block:
            above = offset(b, (number, plan.blocks * lanes), (block.index, lanes))
            filters = [minimum(b, b.add(above, const(lane)), plan.layer.filters - 1) for lane in range(lanes)]
            starts = [offset(b, (each, strides[0])) for each in filters]
            start = offset(b, (number, chunk_size), (block.index, channels * lanes))
            with for_range(b, channels, block.values) as c:
                source = element(b, w, offset(b, (c.index, strides[1])))
                rows = [element(b, source, each) for each in starts]
                taps: list[Any] = []
                for tap in range(0, 8, lanes):
                    taps += transposed(b, [load(b, element(b, row, tap), lanes) for row in rows])
                ninth: Any = ir.Constant(vector, ir.Undefined)
                for lane, row in enumerate(rows):
                    ninth = b.insert_element(ninth, b.load(element(b, row, 8), align=4), ir.Constant(I32, lane))
                taps.append(ninth)
                for value in taps:
                    bits = b.sub(b.and_(b.bitcast(value, whole), no_sign), one)
                    c.values = [b.select(b.icmp_unsigned("<", bits, c.values[0]), bits, c.values[0])]
                taps = taps[::-1] if turned else taps
                columns = [transform(taps[column::3]) for column in range(3)]
                here = element(b, to, b.add(start, offset(b, (c.index, lanes))))
                for down in range(4):
                    for across, value in enumerate(transform([column[down] for column in columns])):
                        store(b, value, element(b, here, (4 * down + across) * form_size))
            block.values = c.values
        chunk.values = block.values
    b.store(chunk.values[0], found, align=4)
    b.ret_void()


class _Segment(NamedTuple):
    """Tiles of a panel that are neighbours in a row of tiles of an image, from number ``start`` of the panel on."""

    start: Any
    image: Any
    row: Any
    column: Any
    tiles: Any


@contextmanager
def _segments(b: ir.IRBuilder, plan: GemmPlan, first: Any, count: Any) -> Iterator[_Segment]:
    """Emit a loop over the segments of the panel of ``count`` tiles from tile ``first`` on, the first tiles first."""
    before, body, after = b.block, b.append_basic_block("segment"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    start = b.phi(I64)
    start.add_incoming(const(0), before)
    number = b.add(first, start)
    in_image = b.urem(number, const(plan.tiles))
    column = b.urem(in_image, const(plan.tile_columns))
    tiles = minimum(b, b.sub(const(plan.tile_columns), column), b.sub(count, start))
    yield _Segment(start, b.udiv(number, const(plan.tiles)), b.udiv(in_image, const(plan.tile_columns)), column, tiles)
    following = b.add(start, tiles)
    start.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, after)
    b.position_at_end(after)


def _vectors(b: ir.IRBuilder, floats: Any, lanes: int) -> Any:
    """Return the number of vectors that cover ``floats``, at least one."""
    count = b.sdiv(b.add(floats, const(lanes - 1)), const(lanes))
    return b.select(b.icmp_signed("<", count, const(1)), const(1), count)


def _clamp(b: ir.IRBuilder, value: Any, most: int) -> Any:
    return b.select(b.icmp_signed("<", value, const(0)), const(0), minimum(b, value, most))


def _inputs(module: ir.Module, plan: GemmPlan) -> ir.Function:
    """Build (x, scratch, inputs, first, count), which fills the inputs of a panel of tiles."""
    layer, lanes = plan.layer, plan.lanes
    (top, left), height, width = layer.pad, layer.height, layer.width
    b, (x, scratch, inputs, first, count) = function(module, "inputs", "x scratch inputs", "first count")
    zeros = element(b, scratch, 4 * plan.row_stride)

    def every_second(one: Any, other: Any, start: int) -> Any:
        chosen = ir.Constant(ir.VectorType(I32, lanes), list(range(start, 2 * lanes, 2)))
        return b.shuffle_vector(one, other, chosen)

    with _segments(b, plan, first, count) as segment:
        image = element(b, x, offset(b, (segment.image, layer.channels * height * width)))
        above = b.sub(offset(b, (segment.row, 2)), const(top))
        lines = [b.add(above, const(r)) for r in range(4)]
        starts = [offset(b, (_clamp(b, line, height - 1), width)) for line in lines]
        inside = [b.icmp_unsigned("<", line, const(height)) for line in lines]
        copies = [element(b, scratch, r * plan.row_stride) for r in range(4)]
        rows = [b.select(each, copy, zeros) for each, copy in zip(inside, copies)]
        begin = b.sub(offset(b, (segment.column, 2)), const(left))
        end = minimum(b, b.add(begin, b.add(offset(b, (segment.tiles, 2)), const(2))), width)
        begin = _clamp(b, begin, max(width - lanes, 0))
        parts = _vectors(b, b.sub(end, begin), lanes)
        vectors = _vectors(b, segment.tiles, lanes)
        with for_range(b, layer.channels) as c:
            channel = element(b, image, offset(b, (c.index, height * width)))
            sources, targets = (
                [element(b, channel, each) for each in starts],
                [element(b, each, left) for each in copies],
            )
            if width < lanes:
                for source, to in zip(sources, targets):
                    copy_rows(b, lanes, width, (source, width), (to, width), 1)
            else:
                with for_range(b, parts) as part:
                    column = minimum(b, b.add(begin, offset(b, (part.index, lanes))), width - lanes)
                    for source, to in zip(sources, targets):
                        store(b, load(b, element(b, source, column), lanes), element(b, to, column))
            to = element(b, inputs, b.add(offset(b, (c.index, plan.input_stride)), segment.start))
            with for_range(b, vectors) as part:
                tile = offset(b, (part.index, lanes))
                column = offset(b, (b.add(segment.column, tile), 2))
                across = []
                for row in rows:
                    pairs = [
                        [load(b, element(b, row, b.add(column, const(start + more))), lanes) for more in (0, lanes)]
                        for start in (0, 2)
                    ]
                    across.append(
                        _forms(b, [every_second(pair[0], pair[1], start) for pair in pairs for start in (0, 1)])
                    )
                for number, column_forms in enumerate(zip(*across)):
                    for down, value in enumerate(_forms(b, list(column_forms))):
                        form = (4 * down + number) * plan.form_strides[0]
                        store(b, value, element(b, to, b.add(tile, const(form))))
    b.ret_void()
    return b.function


def _products(module: ir.Module, plan: GemmPlan, vectors: int, target: Cpu) -> ir.Function:
    """Build (inputs, weights, products), which multiplies one form of a panel's tiles by a block of filters."""
    lanes, filters, channels = plan.lanes, plan.block, plan.layer.channels
    b, (inputs, weights, products) = function(module, f"products_{vectors}", "inputs weights products")
    unroll = max(u for u in range(1, UNROLL + 1) if channels % u == 0)
    zero = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    with for_range(b, channels // unroll, [zero] * (filters * vectors)) as some:
        for u in range(unroll):
            here = element(
                b, inputs, b.add(offset(b, (some.index, unroll * plan.input_stride)), const(u * plan.input_stride))
            )
            values = [load(b, element(b, here, v * lanes), lanes, ITEM_BYTES * lanes) for v in range(vectors)]
            factors = element(b, weights, b.add(offset(b, (some.index, unroll * filters)), const(u * filters)))
            sums = []
            for f in range(filters):
                factor = broadcast(b, b.load(element(b, factors, f), align=4), lanes)
                sums += [fma(b, target, value, factor, some.values[f * vectors + v]) for v, value in enumerate(values)]
            some.values = sums
    for number, value in enumerate(some.values):
        f, v = divmod(number, vectors)
        store(b, value, element(b, products, f * plan.product_stride + v * lanes), ITEM_BYTES * lanes)
    b.ret_void()
    return b.function


def _outputs_of(module: ir.Module, plan: GemmPlan, target: Cpu) -> ir.Function:
    """Build (products, y, found, first, count, filters), which transforms a chunk's products to outputs.

    y is the plane of the chunk's first filter in the first image. ``found`` becomes NaN if an output is not finite.
    """
    layer, lanes = plan.layer, plan.lanes
    rows, columns = layer.output_height, layer.output_width
    b, values = function(module, "outputs", "products y found", "first count filters")
    products, y, found, first, count, filters = values
    vector = ir.VectorType(F32, lanes)
    zero = ir.Constant(vector, [0.0] * lanes)

    def put(to: Any, pair: list[Any], floats: Any) -> None:
        """Store the first ``floats`` of the interleaved vectors."""
        mixed = []
        for start in (0, lanes // 2):
            chosen = [start + lane // 2 + lanes * (lane % 2) for lane in range(lanes)]
            mixed.append(b.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, lanes), chosen)))
        with b.if_else(b.icmp_signed(">=", floats, const(2 * lanes))) as (whole, part):
            with whole:
                for number, value in enumerate(mixed):
                    store(b, value, element(b, to, number * lanes))
            with part:
                for number, value in enumerate(mixed):
                    left = b.trunc(b.sub(floats, const(number * lanes)), I32)
                    store_masked(b, value, element(b, to, number * lanes), left)

    with _segments(b, plan, first, count) as segment:
        image = element(b, y, offset(b, (segment.image, layer.filters * rows * columns), (segment.row, 2 * columns)))
        both = b.icmp_signed("<", offset(b, (segment.row, 2)), const(rows - 1))
        with for_range(b, filters, [zero]) as f:
            plane = element(b, image, offset(b, (f.index, rows * columns)))
            source = element(b, products, b.add(offset(b, (f.index, plan.product_stride)), segment.start))
            with for_range(b, _vectors(b, segment.tiles, lanes), f.values) as part:
                tile = offset(b, (part.index, lanes))
                here = element(b, source, tile)
                sums = [load(b, element(b, here, form * plan.form_strides[1]), lanes) for form in range(FORMS)]
                across = [_outputs(b, sums[4 * down : 4 * down + 4]) for down in range(4)]
                lines = list(zip(*(_outputs(b, list(column)) for column in zip(*across))))
                for value in (value for line in lines for value in line):
                    part.values = [fma(b, target, value, zero, part.values[0])]
                column = offset(b, (b.add(segment.column, tile), 2))
                floats = minimum(b, b.sub(const(columns), column), offset(b, (b.sub(segment.tiles, tile), 2)))
                to = element(b, plane, column)
                put(to, list(lines[0]), floats)
                with b.if_then(both):
                    put(element(b, to, columns), list(lines[1]), floats)
            f.values = part.values
        store(b, b.fadd(load(b, found, lanes), f.values[0]), found)
    b.ret_void()
    return b.function


def build(plan: GemmPlan, target: Cpu) -> ir.Module:
    """Build the module of one layer, with a function ``conv``.

    Its arguments are (x, w, y, scratch, counter, found, tiles, vectors, panels). Threads claim panels of the batch's
    ``tiles``, cut as evenly as possible from the ``vectors``. found[panel] gets a vector whose sum is finite if all
    outputs of the panel are.
    """
    layer, lanes = plan.layer, plan.lanes
    module = ir.Module("winograd_gemm")
    fill, finish = _inputs(module, plan), _outputs_of(module, plan, target)
    multiply = {vectors: _products(module, plan, vectors, target) for vectors in (PANEL - 1, PANEL)}
    pointers = {**dict.fromkeys(("x", "w", "y", "scratch"), F32_PTR), "counter": I64_PTR, "found": F32_PTR}
    b, values = new_function(module, "conv", {**pointers, **dict.fromkeys(("tiles", "vectors", "panels"), I64)})
    x, w, y, scratch, counter, found, tiles, vectors, panels = values
    inputs = element(b, scratch, 5 * plan.row_stride)
    products = element(b, inputs, FORMS * plan.form_strides[0])
    filters = plan.blocks * plan.block
    with claimed_images(
        ConvFunction(b, x, w, y, scratch, counter, panels, const(1), const(1)), lambda first: []
    ) as each:
        begin = b.udiv(b.mul(vectors, each.image), panels)
        size = b.sub(b.udiv(b.mul(vectors, b.add(each.image, const(1))), panels), begin)
        first = offset(b, (begin, lanes))
        count = minimum(b, offset(b, (size, lanes)), b.sub(tiles, first))
        flags = element(b, found, offset(b, (each.image, lanes)))
        store(b, ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes), flags)
        b.call(fill, [x, scratch, inputs, first, count])
        with for_range(b, plan.chunks) as chunk:
            weights = element(b, w, offset(b, (chunk.index, plan.chunk_weights)))
            with for_range(b, FORMS) as form, for_range(b, plan.blocks) as block:
                number = b.add(offset(b, (form.index, plan.blocks)), block.index)
                arguments = [
                    element(b, inputs, offset(b, (form.index, plan.form_strides[0]))),
                    element(b, weights, offset(b, (number, layer.channels * plan.block))),
                    element(
                        b,
                        products,
                        offset(b, (form.index, plan.form_strides[1]), (block.index, plan.block * plan.product_stride)),
                    ),
                ]
                with b.if_else(b.icmp_signed("==", size, const(PANEL))) as (whole, part):
                    with whole:
                        b.call(multiply[PANEL], arguments)
                    with part:
                        b.call(multiply[PANEL - 1], arguments)
            to = element(b, y, offset(b, (chunk.index, filters * layer.output_height * layer.output_width)))
            some = minimum(b, b.sub(const(layer.filters), offset(b, (chunk.index, filters))), filters)
            b.call(finish, [products, to, flags, first, count, some])
    b.ret_void()
    return module
