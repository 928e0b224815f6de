"""The tiling of a layer for ``winograd_gemm``, which describes the algorithm, and its machine code as LLVM IR."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir

from ece408_op.problem import ConvProblem, Pair
from ece408_op.runtime.host_cpu import Cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import I32, I64, Function, Module, Value

from ._ir import (
    LINE_FLOATS,
    add_products,
    claimed_ranges,
    copy_rows,
    deinterleaved,
    store_first,
    transposed,
    whole_lines,
)
from ._winograd_code import outputs

#: Forms of a tile's 4 x 4 inputs.
FORMS = 16

#: The most vectors of tiles per panel; the filters whose products are transformed to outputs together.
PANEL, CHUNK = 3, 16

#: Filters per block, by the floats of a vector: 3 x 8 sums in 32 registers, 3 x 4 in 16.
BLOCKS = {4: 4, 8: 4, 16: 8}


class GemmPlan:
    """The tiling of one layer, a batch of one, for vectors of ``lanes`` tiles.

    A tile is 2 x 2 outputs. Tiles are numbered over rows, columns and images; a panel has up to PANEL vectors of them.

        inputs    [form][channel][tile of the panel]
        weights   [chunk][form][block][channel][filter of the block]
        products  [form][filter of the chunk][tile of the panel]

    block          filters per block
    tile_columns   tiles in a row of tiles
    tiles          tiles of an image
    blocks         blocks of filters per chunk, a divisor of their total; the last block may exceed the layer's filters
    chunks         chunks of filters
    chunk_weights  floats of the transformed weights of a chunk
    stride         floats from the inputs of a channel, or the products of a filter, to the next: a panel, and a vector
                   that may be written beyond it
    form_strides   floats between forms, of inputs and of products: an odd number of lines, to use all sets of L1
    row_stride     floats of one of the four rows of the padded image that a row of tiles reads
    scratch        floats of scratch per thread, all zero at first: four rows, a row of zeros, inputs, products
    """

    def __init__(self, layer: ConvProblem, lanes: int) -> None:
        self.layer, self.lanes, self.block = layer, lanes, (block := BLOCKS[lanes])
        self.tile_columns = ceil_div(layer.output_width, 2)
        self.tiles = ceil_div(layer.output_height, 2) * self.tile_columns
        total = ceil_div(layer.filters, block)
        self.blocks = max(n for n in range(1, min(total, CHUNK // block) + 1) if total % n == 0)
        self.chunks = ceil_div(layer.filters, self.blocks * block)
        self.chunk_weights = FORMS * self.blocks * layer.channels * block
        self.stride = (PANEL + 1) * lanes
        self.form_strides: Pair = (
            layer.channels * self.stride + LINE_FLOATS,
            self.blocks * block * self.stride + LINE_FLOATS,
        )
        self.row_stride = whole_lines(layer.width + 2 * layer.pad[1] + 4 * lanes + 4)
        self.scratch = 5 * self.row_stride + FORMS * sum(self.form_strides)


def _forms(x: list[Value]) -> list[Value]:
    """Return the four sums of inputs whose products give two outputs: see ``_winograd_plan``."""
    return [x[0] - x[2], x[3] - x[1], x[1] + x[2], x[2] - x[1]]


def _weight_forms(taps: list[Value]) -> list[Value]:
    """Return the four sums of three taps."""
    outer, middle = (taps[0] + taps[2]) * 0.5, taps[1] * 0.5
    return [taps[0], taps[2], outer + middle, outer - middle]


def weights_function(plan: GemmPlan, turned: bool, target: Cpu) -> Function:
    """Build (w, to, found, first, last), which transforms the weights of chunks ``first`` to ``last`` - 1 of filters.

    ``turned``: w is a data gradient's, so that its first axis has the channels, and is rotated by 180 degrees. On exit
    the least of found[0] to found[plan.block - 1] is at most the bits, minus one, of the smallest absolute value other
    than zero.
    """
    channels, lanes = plan.layer.channels, plan.block
    strides = (9, 9 * plan.layer.filters) if turned else (9 * channels, 9)  # of a filter and of a channel, in w
    form_size = plan.chunk_weights // FORMS
    with Function(Module("weights", target), "weights", "w to found", "first last", exported=True) as f:
        w, to, found, first, last = f.arguments
        with f.loop(last - first, [found.load(lanes).bits()]) as chunk:
            number = first + chunk.index
            with f.loop(plan.blocks, chunk.values) as block:
                above = number * (plan.blocks * lanes) + block.index * lanes
                filters = [(above + lane).min(plan.layer.filters - 1) for lane in range(lanes)]
                starts = [each * strides[0] for each in filters]
                start = number * plan.chunk_weights + block.index * (channels * lanes)
                with f.loop(channels, block.values) as c:
                    rows = [w[c.index * strides[1]][each] for each in starts]
                    taps: list[Value] = []
                    for tap in range(0, 8, lanes):
                        taps += transposed([row[tap].load(lanes) for row in rows])
                    ninth = ir.Constant(taps[0].ir.type, ir.Undefined)
                    for lane, row in enumerate(rows):
                        ninth = f.b.insert_element(ninth, row[8].load().ir, ir.Constant(I32, lane))
                    taps.append(Value(f, ninth))
                    for value in taps:
                        bits = (value.bits() & 0x7FFFFFFF) - 1
                        c.values = [bits.below(c.values[0]).select(bits, c.values[0])]
                    taps = taps[::-1] if turned else taps
                    columns = [_weight_forms(taps[column::3]) for column in range(3)]
                    here = to[start + c.index * lanes]
                    for down in range(4):
                        for across, value in enumerate(_weight_forms([column[down] for column in columns])):
                            here[(4 * down + across) * form_size].store(value)
                block.values = c.values
            chunk.values = block.values
        found.store(chunk.values[0].bits())
    return f


class _Segment(NamedTuple):
    """Tiles of a panel that are neighbours in an image's row of tiles; ``start`` is the first's index in the panel."""

    start: Value
    image: Value
    row: Value
    column: Value
    tiles: Value


@contextmanager
def _segments(f: Function, plan: GemmPlan, first: Value, count: Value) -> Iterator[_Segment]:
    """Emit a loop over the segments, in order, of the panel of ``count`` tiles from tile ``first`` on."""
    with f.repeat([f.const(0)]) as loop:
        (start,) = loop.values
        number = first + start
        in_image = number % plan.tiles
        column = in_image % plan.tile_columns
        tiles = (plan.tile_columns - column).min(count - start)
        yield _Segment(start, number // plan.tiles, in_image // plan.tile_columns, column, tiles)
        loop.values = [start + tiles]
        loop.again = loop.values[0] < count


def _vectors(floats: Value, lanes: int) -> Value:
    """Return the number of vectors that cover ``floats``, at least one."""
    count = Value(floats.f, floats.f.b.sdiv((floats + (lanes - 1)).ir, ir.Constant(I64, lanes)))
    return (count < 1).select(1, count)


def _clamp(value: Value, most: int) -> Value:
    return (value < 0).select(0, value.min(most))


def _transform_inputs(module: Module, plan: GemmPlan) -> Function:
    """Build (x, scratch, inputs, first, count), which fills the inputs of a panel of tiles."""
    layer, lanes = plan.layer, plan.lanes
    (top, left), height, width = layer.pad, layer.height, layer.width
    with Function(module, "inputs", "x scratch inputs", "first count") as f:
        x, scratch, inputs, first, count = f.arguments
        zeros = scratch[4 * plan.row_stride]
        with _segments(f, plan, first, count) as segment:
            image = x[segment.image * (layer.channels * height * width)]
            lines = [segment.row * 2 - top + r for r in range(4)]
            starts = [_clamp(line, height - 1) * width for line in lines]
            copies = [scratch[r * plan.row_stride] for r in range(4)]
            rows = [line.below(height).select(copy, zeros) for line, copy in zip(lines, copies)]
            begin = segment.column * 2 - left
            end = (begin + (segment.tiles * 2 + 2)).min(width)
            begin = _clamp(begin, max(width - lanes, 0))
            parts, vectors = _vectors(end - begin, lanes), _vectors(segment.tiles, lanes)
            with f.range(layer.channels) as c:
                channel = image[c * (height * width)]
                sources, targets = [channel[each] for each in starts], [each[left] for each in copies]
                if width < lanes:
                    for source, to in zip(sources, targets):
                        copy_rows(lanes, width, (source, width), (to, width), 1)
                else:
                    with f.range(parts) as part:
                        column = (begin + part * lanes).min(width - lanes)
                        for source, to in zip(sources, targets):
                            to[column].store(source[column].load(lanes))
                to = inputs[c * plan.stride + segment.start]
                with f.range(vectors) as part:
                    tile = part * lanes
                    column = (segment.column + tile) * 2
                    across = []
                    for row in rows:
                        pairs = [[row[column + (n + more)].load(lanes) for more in (0, lanes)] for n in (0, 2)]
                        across.append(
                            _forms([deinterleaved(pair[0], pair[1], start) for pair in pairs for start in (0, 1)])
                        )
                    for number, column_forms in enumerate(zip(*across)):
                        for down, value in enumerate(_forms(list(column_forms))):
                            to[tile + (4 * down + number) * plan.form_strides[0]].store(value)
    return f


def _products(module: Module, plan: GemmPlan, vectors: int) -> Function:
    """Build (inputs, weights, products), which multiplies one form of a panel's tiles by a block of filters."""
    lanes, filters, stride = plan.lanes, plan.block, plan.stride
    with Function(module, f"products_{vectors}", "inputs weights products") as f:
        inputs, weights, products = f.arguments
        with f.loop(plan.layer.channels, [f.vector(0.0)] * (filters * vectors)) as c:
            here = inputs[c.index * stride]
            values = [here[v * lanes].load(lanes, aligned=True) for v in range(vectors)]
            c.values = add_products(c.values, values, weights[c.index * filters], filters)
        for number, value in enumerate(c.values):
            m, v = divmod(number, vectors)
            products[m * stride + v * lanes].store(value, aligned=True)
    return f


def _store_outputs(to: Value, pair: list[Value], floats: Value) -> None:
    """Store the first ``floats`` of two vectors, interleaved."""
    f, lanes = to.f, pair[0].ir.type.count
    numbers = [[start + lane // 2 + lanes * (lane % 2) for lane in range(lanes)] for start in (0, lanes // 2)]
    mixed = [pair[0].shuffle(pair[1], chosen) for chosen in numbers]
    with f.b.if_else((floats >= 2 * lanes).ir) as (whole, part):
        with whole:
            for number, value in enumerate(mixed):
                to[number * lanes].store(value)
        with part:
            for number, value in enumerate(mixed):
                store_first(value, to[number * lanes], floats - number * lanes)


def _transform_outputs(module: Module, plan: GemmPlan) -> Function:
    """Build (products, y, found, first, count, filters), which transforms a chunk's products to outputs.

    y is the plane of the chunk's first filter in the first image. ``found`` becomes NaN if any output is not finite.
    """
    layer, lanes = plan.layer, plan.lanes
    rows, columns = layer.output_height, layer.output_width
    with Function(module, "outputs", "products y found", "first count filters") as f:
        products, y, found, first, count, filters = f.arguments
        zero = f.vector(0.0)
        with _segments(f, plan, first, count) as segment:
            image = y[segment.image * (layer.filters * rows * columns) + segment.row * (2 * columns)]
            both = segment.row * 2 < rows - 1
            with f.loop(filters, [zero]) as m:
                plane, source = image[m.index * (rows * columns)], products[m.index * plan.stride + segment.start]
                with f.loop(_vectors(segment.tiles, lanes), m.values) as part:
                    tile = part.index * lanes
                    sums = [source[tile][form * plan.form_strides[1]].load(lanes) for form in range(FORMS)]
                    across = [outputs(*sums[4 * down : 4 * down + 4]) for down in range(4)]
                    lines = list(zip(*(outputs(*column) for column in zip(*across))))
                    for value in (value for line in lines for value in line):
                        part.values = [value.fma(zero, part.values[0])]
                    column = (segment.column + tile) * 2
                    floats = (columns - column).min((segment.tiles - tile) * 2)
                    _store_outputs(plane[column], list(lines[0]), floats)
                    with f.when(both):
                        _store_outputs(plane[column][columns], list(lines[1]), floats)
                m.values = part.values
            found.store(found.load(lanes) + m.values[0])
    return f


def build(plan: GemmPlan, target: Cpu) -> Function:
    """Build the function ``conv``(x, w, y, scratch, counter, found, tiles, vectors, panels) of one layer.

    Threads claim panels of the batch's ``tiles``, cut as evenly as possible from the ``vectors``. found[panel] gets a
    vector whose sum is finite if all outputs of the panel are.
    """
    layer, lanes, module = plan.layer, plan.lanes, Module("winograd_gemm", target)
    fill, finish = _transform_inputs(module, plan), _transform_outputs(module, plan)
    multiply = {vectors: _products(module, plan, vectors) for vectors in (PANEL - 1, PANEL)}
    filters, plane = plan.blocks * plan.block, layer.output_height * layer.output_width
    with Function(module, "conv", "x w y scratch counter:i64 found", "tiles vectors panels", exported=True) as f:
        x, w, y, scratch, counter, found, tiles, vectors, panels = f.arguments
        inputs = scratch[5 * plan.row_stride]
        products = inputs[FORMS * plan.form_strides[0]]
        with claimed_ranges(counter, panels, 1, 1) as (panel, _):
            begin = vectors * panel // panels
            size = vectors * (panel + 1) // panels - begin
            first, flags = begin * lanes, found[panel * lanes]
            count = (size * lanes).min(tiles - first)
            flags.store(f.vector(0.0))
            fill(x, scratch, inputs, first, count)
            with f.range(plan.chunks) as chunk:
                weights = w[chunk * plan.chunk_weights]
                with f.range(FORMS) as form, f.range(plan.blocks) as block:
                    number = form * plan.blocks + block
                    to = products[form * plan.form_strides[1] + block * (plan.block * plan.stride)]
                    factors = weights[number * (layer.channels * plan.block)]
                    arguments = [inputs[form * plan.form_strides[0]], factors, to]
                    with f.b.if_else(size.equals(PANEL).ir) as (whole, part):
                        with whole:
                            multiply[PANEL](*arguments)
                        with part:
                            multiply[PANEL - 1](*arguments)
                some = (layer.filters - chunk * filters).min(filters)
                finish(products, y[chunk * (filters * plane)], flags, first, count, some)
    return f
