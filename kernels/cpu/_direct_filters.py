"""A second way of ``direct``, for layers whose filters fill vectors: a vector holds filters, not pixels.

A tile of F filters x P pixels of one output row stays in registers, its vectors along the filters. Each tap loads its F
weights, which are neighbours, and broadcasts P pixels straight from the image:

    sums[m][j] += w[c][p][q][m] * x[c][i + p][j + q]

Nothing is shifted, and no load crosses a cache line. The sums of some rows at a time are stored [pixel][filter] and
then transposed into planes, 16 x 16 (8 x 8, 4 x 4) of them in registers. The more products an output has, the less that
costs.

No layer of the course takes this way. Most 3 x 3 layers of image classifiers do, if their images take several units
(``DirectPlan.units``) and the batch is too small for ``winograd``. On one core of a Zen 5, pixels in the vectors took
1.02 to 1.28 times as long on 11 such layers with AVX-512, and 1.11 to 1.45 times with AVX2.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I64,
    Cpu,
    compile_function,
    compiled_once,
    const,
    element,
    fma,
    for_range,
    new_function,
    offset,
    prefetch,
)

from ._direct_code import Outputs
from ._direct_plan import SPARE, cheapest_cut, step_cycles, tile_sizes
from ._ir import (
    LINE_FLOATS,
    ConvFunction,
    Pieces,
    broadcast,
    claimed_images,
    each_piece,
    function,
    load,
    minimum,
    store,
    transposed,
    whole_lines,
)
from ._tanh_pool import Pooling

#: Bytes of sums that are stored [pixel][filter], so that they stay in L1 or near it.
STAGE_BYTES = 64 * 1024

#: The least products per output for which the transposition costs little, and the number from which this way is better
#: for rows of whole vectors too.
PRODUCTS, MANY_PRODUCTS = 128, 1000


@dataclass(frozen=True)
class FilterPlan:
    """The cut of one layer: filters per block, pixels per tile, and the rows whose sums are stored at a time."""

    layer: ConvProblem
    lanes: int
    blocks: Pieces
    tiles: Pieces
    rows: int

    @property
    def pixels(self) -> int:
        """Output pixels of the rows whose sums are stored at a time."""
        return self.rows * self.layer.output_width

    @property
    def scratch(self) -> int:
        """Floats of scratch per thread: those sums of one block; whole cache lines."""
        return whole_lines(self.pixels * self.blocks[0][0])

    @property
    def lines_ahead(self) -> int:
        """Cache lines of the next image that each tile prefetches."""
        tiles = self.layer.output_height * sum(n for _, n in self.tiles) * sum(n for _, n in self.blocks)
        return -(-math.prod(self.layer.x_shape[1:]) // (LINE_FLOATS * tiles))


@cache
def make_filter_plan(layer: ConvProblem, lanes: int, registers: int) -> FilterPlan | None:
    """Return the cheapest cut for vectors of ``lanes`` floats and that many registers; None where it does not pay.

    It does not where filters leave lanes empty or fill one vector only, where there are few products, and, unless there
    are many, where rows of whole vectors spare the other way its loads across cache lines.
    """
    pixels = layer.output_height * layer.output_width
    few = layer.filters < 2 * lanes or layer.products < PRODUCTS or pixels < lanes
    whole_rows = layer.output_width % lanes == 0 and layer.products < MANY_PRODUCTS
    if few or whole_rows or layer.filters % lanes:
        return None
    sizes = sorted((v, p) for p, v in tile_sizes(registers, SPARE))
    blocks, tiles = cheapest_cut(layer.filters // lanes, layer.output_width, sizes, _tap_cycles)
    rows = max(1, STAGE_BYTES // (4 * blocks[0][0] * lanes * layer.output_width), -(-lanes // layer.output_width))
    rows = -(-layer.output_height // -(-layer.output_height // min(layer.output_height, rows)))  # as even as possible
    return FilterPlan(layer, lanes, tuple((v * lanes, n) for v, n in blocks), tiles, rows)


def _tap_cycles(vectors: int, pixels: int) -> float:
    return step_cycles(pixels, vectors, 1) + vectors / 4  # weights come from L2


def _tile(module: ir.Module, plan: FilterPlan, size: tuple[int, int], target: Cpu) -> ir.Function:
    """Build (x, w, sums, y, later), which computes one tile of (filters, pixels).

    x is the tile's first pixel, w the block's packed weights, sums where the tile's sums go, and y where they go after
    the transposition, which is prefetched; so is ``later``, a share of the next image.
    """
    layer, lanes = plan.layer, plan.lanes
    filters, pixels = size
    vectors = filters // lanes
    b, (x, w, sums, y, later) = function(module, f"tile_{filters}_{pixels}", "x w sums y later")
    tap_rows = layer.channels * layer.kernel
    totals = [ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)] * (vectors * pixels)

    def tap(totals: list[Any], weights: Any, row: Any) -> list[Any]:
        starts = [b.bitcast(element(b, weights, v * lanes), totals[0].type.as_pointer()) for v in range(vectors)]
        factors = [b.load(start, align=4) for start in starts]
        result = []
        for t in range(pixels):
            pixel = broadcast(b, b.load(element(b, row, t), align=4), lanes)
            result += [fma(b, target, factors[v], pixel, totals[t * vectors + v]) for v in range(vectors)]
        return result

    with for_range(b, layer.channels, totals) as c:
        with for_range(b, layer.kernel, c.values) as p:
            tap_row = b.add(offset(b, (c.index, layer.kernel)), p.index)
            planes = -(-filters // tap_rows)
            for number in range(planes):
                f = minimum(b, b.add(offset(b, (tap_row, planes)), const(number)), filters - 1)
                prefetch(b, element(b, y, offset(b, (f, layer.output_height * layer.output_width))), write=True)
            lines = -(-plan.lines_ahead // tap_rows)
            for number in range(lines):
                start = b.add(offset(b, (tap_row, lines * LINE_FLOATS)), const(number * LINE_FLOATS))
                prefetch(b, element(b, later, start), write=False)
            row = element(b, x, offset(b, (c.index, layer.height * layer.width), (p.index, layer.width)))
            weights = element(b, w, offset(b, (tap_row, layer.kernel_width * filters)))
            # A loop, not unrolled: a tap's pixels are nearly those of the previous one; all would be kept, and spilled.
            with for_range(b, layer.kernel_width, p.values) as q:
                here = element(b, weights, offset(b, (q.index, filters)))
                q.values = tap(q.values, here, element(b, row, q.index))
            p.values = q.values
        c.values = p.values
    for number, value in enumerate(c.values):
        t, v = divmod(number, vectors)
        store(b, value, element(b, sums, t * filters + v * lanes), 4 * lanes)
    b.ret_void()
    return b.function


def _transpose(module: ir.Module, plan: FilterPlan, filters: int) -> ir.Function:
    """Build (sums, y), which transposes a block's sums [pixel][filter] into rows of the planes of y."""
    lanes, plane = plan.lanes, plan.layer.output_height * plan.layer.output_width
    b, (sums, y) = function(module, f"transpose_{filters}", "sums y")
    with for_range(b, -(-plan.pixels // lanes)) as many, for_range(b, filters // lanes) as group:
        first = minimum(b, offset(b, (many.index, lanes)), plan.pixels - lanes)
        m = offset(b, (group.index, lanes))
        source = element(b, sums, b.add(offset(b, (first, filters)), m))
        to = element(b, y, b.add(offset(b, (m, plane)), first))
        rows = [load(b, element(b, source, i * filters), lanes, 4 * lanes) for i in range(lanes)]
        for i, row in enumerate(transposed(b, rows)):
            store(b, row, element(b, to, i * plane))
    b.ret_void()
    return b.function


@compiled_once
def transpose_function(products: int, target: Cpu) -> Any:
    """Compile (w, packed, filters), which packs the weights of a block: [filter][product] to [product][filter].

    There are at least as many products as lanes, and the filters fill vectors.
    """
    lanes = target.lanes
    module = ir.Module("pack")
    b, (w, packed, filters) = new_function(module, "pack", {"w": F32_PTR, "packed": F32_PTR, "filters": I64})
    with for_range(b, b.udiv(filters, const(lanes))) as group, for_range(b, -(-products // lanes)) as many:
        first = minimum(b, offset(b, (many.index, lanes)), products - lanes)
        source = element(b, w, b.add(offset(b, (group.index, lanes * products)), first))
        to = element(b, packed, b.add(b.mul(first, filters), offset(b, (group.index, lanes))))
        rows = [load(b, element(b, source, i * products), lanes) for i in range(lanes)]
        for i, column in enumerate(transposed(b, rows)):
            store(b, column, element(b, to, b.mul(filters, const(i))))
    b.ret_void()
    return compile_function(module, "pack", [ctypes.c_void_p] * 2 + [ctypes.c_int64], target)


def _rows(module: ir.Module, plan: FilterPlan, target: Cpu) -> ir.Function:
    """Build (x, w, y, sums, later, band), which computes plan.rows rows of an image, the first of them at x and y."""
    layer, plane = plan.layer, plan.layer.output_height * plan.layer.output_width
    tiles = {(f, t): _tile(module, plan, (f, t), target) for f, _ in plan.blocks for t, _ in plan.tiles}
    transposes = {f: _transpose(module, plan, f) for f, _ in plan.blocks}
    tile_count, block_count = (sum(n for _, n in pieces) for pieces in (plan.tiles, plan.blocks))
    b, (x, w, y, sums, later, band) = function(module, "rows", "x w y sums later", "band")
    for filters, above, block in each_piece(b, plan.blocks):
        weights = element(b, w, offset(b, (above, layer.products)))
        outputs = element(b, y, offset(b, (above, plane)))
        with for_range(b, plan.rows) as row:
            for pixels, column, number in each_piece(b, plan.tiles):
                pixel = b.add(offset(b, (row.index, layer.output_width)), column)
                tile_in_image = b.add(
                    offset(b, (b.add(offset(b, (band, block_count)), block), plan.rows * tile_count)),
                    b.add(offset(b, (row.index, tile_count)), number),
                )
                pointers = [
                    element(b, x, b.add(offset(b, (row.index, layer.width)), column)),
                    weights,
                    element(b, sums, offset(b, (pixel, filters))),
                    element(b, outputs, pixel),
                    element(b, later, offset(b, (tile_in_image, plan.lines_ahead * LINE_FLOATS))),
                ]
                b.call(tiles[filters, pixels], pointers)
        b.call(transposes[filters], [sums, outputs])
    b.ret_void()
    return b.function


def build(plan: FilterPlan, target: Cpu, pooling: Pooling | None = None) -> ir.Module:
    """Build the module of one layer, with its function ``conv``; ``pooling`` as in ``_direct_code.build``."""
    layer = plan.layer
    module = ir.Module("direct")
    rows = _rows(module, plan, target)
    outputs = Outputs(module, layer, target, pooling, plan.scratch)
    conv = ConvFunction.begin(module)
    b = conv.b
    x_size = math.prod(layer.x_shape[1:])
    with claimed_images(conv, lambda first: []) as each:
        x, later = (element(b, conv.x, offset(b, (image, x_size))) for image in (each.image, each.following))
        y = outputs.of(conv, each.image)
        with for_range(b, -(-layer.output_height // plan.rows)) as band:
            row = minimum(b, offset(b, (band.index, plan.rows)), layer.output_height - plan.rows)
            x_row = element(b, x, offset(b, (row, layer.width)))
            y_row = element(b, y, offset(b, (row, layer.output_width)))
            b.call(rows, [x_row, conv.w, y_row, conv.scratch, later, band.index])
        outputs.done(conv, each.image)
    b.ret_void()
    return module
