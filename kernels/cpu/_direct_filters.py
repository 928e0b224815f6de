"""The other way of ``direct``, for layers whose filters fill vectors: the lanes are filters, not pixels.

A tile of F filters x P pixels of one output row stays in registers, its vectors along the filters; each tap loads
its F weights, which lie side by side, and P pixels (one number to all lanes) straight from the image:

    sums[m][j] += w[c][p][q][m] * x[c][i + p][j + q]

Measured on one core of a Zen 5 (AVX-512) with 21 channels of 42 x 77, 32 filters of 8 x 8: 0.97 of the FMA peak,
where the other way reached 0.89; with 32 channels of 64 x 64, 64 filters of 3 x 3: 0.92 and 0.84.

Nothing is shifted and no load lies across cache lines. The sums are left [pixel][filter], and turned into planes for
some rows at a time, 16 x 16 (8 x 8, 4 x 4) of them in registers. The more products an output has, the less that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from ece408_op.problem import ConvProblem
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
)

from ._direct_code import each_piece
from ._direct_images import at_most, new_conv, taken_images
from ._direct_outputs import Outputs
from ._direct_plan import LINE_FLOATS, SPARE, Pieces, share_out
from ._direct_tile import all_lanes
from ._tanh_pool import Pooling

#: Bytes of sums that are kept [pixel][filter], to stay in the first-level cache or near it.
STAGE_BYTES = 64 * 1024

#: The least products of an output for which turning the sums costs little.
PRODUCTS = 128

#: Products from which this is the better way for rows of whole vectors too.
MANY_PRODUCTS = 1000


@dataclass(frozen=True)
class FilterPlan:
    """The cut of one layer: filters in a block and pixels in a tile as (size, count) pairs; rows at a time."""

    layer: ConvProblem
    lanes: int
    blocks: Pieces
    tiles: Pieces
    rows: int

    @property
    def pixels(self) -> int:
        """Output pixels in the rows at a time."""
        return self.rows * self.layer.output_width

    @property
    def scratch(self) -> int:
        """Floats of scratch for a thread: the sums of the rows at a time; whole cache lines."""
        return -(-self.pixels * self.layer.filters // LINE_FLOATS) * LINE_FLOATS


@cache
def make_filter_plan(layer: ConvProblem, lanes: int, registers: int) -> FilterPlan | None:
    """The cheapest cut for vectors of ``lanes`` floats and that many registers; None where this is no good way.

    That is where filters leave lanes empty or are one vector, where there are few products, and, unless there are
    many, where rows of whole vectors spare the other way its loads across cache lines.
    """
    pixels = layer.output_height * layer.output_width
    few = layer.filters < 2 * lanes or layer.products < PRODUCTS or pixels < lanes
    aligned = layer.output_width % lanes == 0 and layer.products < MANY_PRODUCTS
    if few or aligned or layer.filters % lanes:
        return None
    best: tuple[float, tuple[Pieces, Pieces]] | None = None
    for v in range(1, registers):
        for p in range(1, registers):
            if v * p + v + SPARE > registers:
                continue
            cut = share_out(layer.filters // lanes, v), share_out(layer.output_width, p)
            cost = sum(m * n * _tap_cycles(f, t) for f, m in cut[0] for t, n in cut[1])
            if best is None or cost < best[0]:
                best = cost, cut
    assert best is not None
    blocks, tiles = best[1]
    rows = max(1, STAGE_BYTES // (4 * layer.filters * layer.output_width), -(-lanes // layer.output_width))
    rows = -(-layer.output_height // -(-layer.output_height // min(layer.output_height, rows)))  # as even as can be
    return FilterPlan(layer, lanes, tuple((v * lanes, n) for v, n in blocks), tiles, rows)


def _tap_cycles(vectors: int, pixels: int) -> float:
    arithmetic, loads = vectors * pixels / 2, (vectors + pixels) / 2
    return max(arithmetic, loads, 4) + loads / 16 + vectors / 4  # weights come from the second-level cache


def _tile(module: ir.Module, plan: FilterPlan, size: tuple[int, int], target: Cpu) -> ir.Function:
    """A function (x, w, sums, y, later) for one tile.

    ``x`` is at the tile's first pixel, ``w`` at the block's packed weights, ``sums`` at the tile's place among the
    sums and ``y`` where they will go; ``later`` is at the share of the next image that is asked for meanwhile.
    """
    layer, lanes = plan.layer, plan.lanes
    filters, pixels = size
    vectors = filters // lanes
    vector = ir.VectorType(F32, lanes)
    arguments = dict.fromkeys(("x", "w", "sums", "y", "later"), F32_PTR)
    b, (x, w, sums, y, later) = new_function(module, f"tile_{filters}_{pixels}", arguments, internal=True)
    rounds = layer.channels * layer.kernel
    totals = [ir.Constant(vector, [0.0] * lanes)] * (vectors * pixels)

    def tap(totals: list[Any], weights: Any, row: Any) -> list[Any]:
        places = [b.bitcast(element(b, weights, v * lanes), vector.as_pointer()) for v in range(vectors)]
        factors = [b.load(place, align=4) for place in places]
        result = []
        for t in range(pixels):
            pixel = all_lanes(b, b.load(element(b, row, t), align=4), lanes)
            result += [fma(b, target, factors[v], pixel, totals[t * vectors + v]) for v in range(vectors)]
        return result

    with for_range(b, layer.channels, totals) as c:
        with for_range(b, layer.kernel, c.values) as p:
            turn = b.add(offset(b, (c.index, layer.kernel)), p.index)
            for number in range(-(-filters // rounds)):
                f = at_most(b, b.add(offset(b, (turn, -(-filters // rounds))), const(number)), filters - 1)
                prefetch(b, element(b, y, offset(b, (f, layer.output_height * layer.output_width))), write=True)
            lines = -(-_lines_ahead(plan) // rounds)
            for number in range(lines):
                place = b.add(offset(b, (turn, lines * LINE_FLOATS)), const(number * LINE_FLOATS))
                prefetch(b, element(b, later, place), write=False)
            row = element(b, x, offset(b, (c.index, layer.height * layer.width), (p.index, layer.width)))
            weights = element(b, w, offset(b, (turn, layer.kernel * filters)))
            # A loop, not copies of it: a tap's pixels are nearly those of the one before, and would all be kept.
            with for_range(b, layer.kernel, p.values) as q:
                here = element(b, weights, offset(b, (q.index, filters)))
                q.values = tap(q.values, here, element(b, row, q.index))
            p.values = q.values
        c.values = p.values
    for number, value in enumerate(c.values):
        t, v = divmod(number, vectors)
        place = element(b, sums, t * filters + v * lanes)
        b.store(value, b.bitcast(place, vector.as_pointer()), align=4 * lanes)
    b.ret_void()
    return b.function


def _lines_ahead(plan: FilterPlan) -> int:
    """Cache lines of the next image that are asked for during each tile."""
    layer = plan.layer
    tiles = layer.output_height * sum(n for _, n in plan.tiles) * sum(n for _, n in plan.blocks)
    return -(-math.prod(layer.x_shape[1:]) // (LINE_FLOATS * tiles))


def _turn(module: ir.Module, plan: FilterPlan, filters: int) -> ir.Function:
    """A function (sums, y) that turns a block's sums [pixel][filter] into rows of the planes of y."""
    lanes, plane = plan.lanes, plan.layer.output_height * plan.layer.output_width
    vector = ir.VectorType(F32, lanes)
    b, (sums, y) = new_function(module, f"turn_{filters}", {"sums": F32_PTR, "y": F32_PTR}, internal=True)
    with for_range(b, -(-plan.pixels // lanes)) as many, for_range(b, filters // lanes) as group:
        first = at_most(b, offset(b, (many.index, lanes)), plan.pixels - lanes)
        m = offset(b, (group.index, lanes))
        source = element(b, sums, b.add(offset(b, (first, filters)), m))
        to = element(b, y, b.add(offset(b, (m, plane)), first))
        rows = [
            b.load(b.bitcast(element(b, source, i * filters), vector.as_pointer()), align=4 * lanes)
            for i in range(lanes)
        ]
        for i, row in enumerate(transposed(b, rows)):
            b.store(row, b.bitcast(element(b, to, i * plane), vector.as_pointer()), align=4)
    b.ret_void()
    return b.function


def transposed(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of a square of vectors: halves are exchanged, then quarters, and so on."""
    lanes = len(rows)
    rows = list(rows)

    def pick(one: Any, other: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(I32, lanes), places)
        return b.shuffle_vector(one, other, mask)

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


def _rows(module: ir.Module, plan: FilterPlan, target: Cpu) -> ir.Function:
    """A function (x, w, y, sums, later, band) for some rows of an image: x and y are at the first of them."""
    layer, plane = plan.layer, plan.layer.output_height * plan.layer.output_width
    tiles = {(f, t): _tile(module, plan, (f, t), target) for f, _ in plan.blocks for t, _ in plan.tiles}
    turns = {f: _turn(module, plan, f) for f, _ in plan.blocks}
    tile_count, block_count = (sum(n for _, n in pieces) for pieces in (plan.tiles, plan.blocks))
    arguments = {**dict.fromkeys(("x", "w", "y", "sums", "later"), F32_PTR), "band": I64}
    b, (x, w, y, sums, later, band) = new_function(module, "rows", arguments, internal=True)
    for filters, above, block in each_piece(b, plan.blocks):
        weights = element(b, w, offset(b, (above, layer.products)))
        block_sums = element(b, sums, offset(b, (above, plan.pixels)))
        outputs = element(b, y, offset(b, (above, plane)))
        with for_range(b, plan.rows) as row:
            for pixels, column, number in each_piece(b, plan.tiles):
                pixel = b.add(offset(b, (row.index, layer.output_width)), column)
                turn = b.add(
                    offset(b, (b.add(offset(b, (band, block_count)), block), plan.rows * tile_count)),
                    b.add(offset(b, (row.index, tile_count)), number),
                )
                places = [
                    element(b, x, b.add(offset(b, (row.index, layer.width)), column)),
                    weights,
                    element(b, block_sums, offset(b, (pixel, filters))),
                    element(b, outputs, pixel),
                    element(b, later, offset(b, (turn, _lines_ahead(plan) * LINE_FLOATS))),
                ]
                b.call(tiles[filters, pixels], places)
        b.call(turns[filters], [block_sums, outputs])
    b.ret_void()
    return b.function


def build(plan: FilterPlan, target: Cpu, pooling: Pooling | None = None) -> ir.Module:
    """The module of one layer, with the function ``conv`` of direct_images; ``pooling`` as in direct_code."""
    layer = plan.layer
    module = ir.Module("direct")
    rows = _rows(module, plan, target)
    outputs = Outputs(module, layer, target, pooling, plan.scratch)
    conv = new_conv(module)
    b = conv.b
    x_size = math.prod(layer.x_shape[1:])
    with taken_images(conv, lambda first: []) as each:
        x, later = (element(b, conv.x, offset(b, (image, x_size))) for image in (each.image, each.following))
        y = outputs.of(conv, each.image)
        with for_range(b, -(-layer.output_height // plan.rows)) as band:
            row = at_most(b, offset(b, (band.index, plan.rows)), layer.output_height - plan.rows)
            x_row, y_row = (
                element(b, x, offset(b, (row, layer.width))),
                element(b, y, offset(b, (row, layer.output_width))),
            )
            b.call(rows, [x_row, conv.w, y_row, conv.scratch, later, band.index])
        outputs.done(conv, each.image)
    b.ret_void()
    return module
