"""A second way of ``direct``, for layers whose filters fill vectors: a vector holds filters, not pixels.

A tile of F filters x P pixels of one output row stays in registers, its vectors along the filters. Each tap loads its F
weights, which are neighbours, and broadcasts P pixels straight from the image:

    sums[m][j] += w[c][p][q][m] * x[c][i + p][j + q]

Nothing is shifted, and no load crosses a cache line. The sums of some rows at a time are stored [pixel][filter] and
then transposed into planes, in registers, 16 x 16 (8 x 8, 4 x 4) sums at a time. The more products an output has, the
smaller is the share of the transposition.

No layer of the course is computed in this way. Layers of image classifiers are, if their images take several units
(``DirectPlan.units``); exceptions are 3 x 3 layers, which ``winograd_gemm`` computes, and 1 x 1 layers on large planes.
On one core of a Xeon, pixels in the vectors took 1.05 times as long on most 5 x 5 layers, and 1.3 to 1.4 times as long
on 1 x 7 layers.
"""

from __future__ import annotations

import math
from typing import Any

from ece408_op.problem import ConvProblem
from ece408_op.runtime.host_cpu import Cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module, Operand, Value, compiled_once

from ._direct_code import CONV
from ._direct_plan import SPARE, fastest_tiling, step_cycles, tile_sizes
from ._ir import LINE_FLOATS, Partition, add_products, claimed_ranges, each_part, transposed, whole_lines

#: The bytes of sums that are stored [pixel][filter] at a time: few enough to stay in L1 or near it.
STAGE_BYTES = 64 * 1024

#: The fewest products per output for which the transposition costs little; the number from which filters in the lanes
#: are faster even for rows of whole vectors.
PRODUCTS, MANY_PRODUCTS = 128, 1000


class FilterPlan:
    """The tiling of one layer.

    blocks       filters per block
    tiles        pixels per tile
    rows         the rows whose sums are stored at a time; ``pixels`` are their output pixels
    scratch      floats of scratch per thread: the stored sums of one block, in whole cache lines
    lines_ahead  cache lines of the next image that each tile prefetches
    """

    def __init__(self, layer: ConvProblem, lanes: int, blocks: Partition, tiles: Partition, rows: int) -> None:
        self.layer, self.lanes, self.blocks, self.tiles, self.rows = layer, lanes, blocks, tiles, rows
        self.pixels = rows * layer.output_width
        self.scratch = whole_lines(self.pixels * blocks[0][0])
        tile_count = layer.output_height * sum(n for _, n in tiles) * sum(n for _, n in blocks)
        self.lines_ahead = ceil_div(math.prod(layer.x_shape[1:]), LINE_FLOATS * tile_count)


def make_filter_plan(layer: ConvProblem, lanes: int, registers: int) -> FilterPlan | None:
    """Return the fastest predicted tiling for such vectors and registers; None if pixels in the lanes are faster.

    Pixels are faster if filters leave lanes empty or fill only one vector, and if an output has few products. They are
    also faster if rows are whole vectors, so that no load crosses a cache line, unless an output has many products.
    """
    pixels = layer.output_height * layer.output_width
    few = layer.filters < 2 * lanes or layer.products < PRODUCTS or pixels < lanes
    whole_rows = layer.output_width % lanes == 0 and layer.products < MANY_PRODUCTS
    if few or whole_rows or layer.filters % lanes:
        return None
    sizes = sorted((v, p) for p, v in tile_sizes(registers, SPARE))
    blocks, tiles = fastest_tiling(layer.filters // lanes, layer.output_width, sizes, _tap_cycles)
    rows = max(1, STAGE_BYTES // (4 * blocks[0][0] * lanes * layer.output_width), ceil_div(lanes, layer.output_width))
    rows = min(layer.output_height, rows)
    rows = ceil_div(layer.output_height, ceil_div(layer.output_height, rows))  # as even as possible
    return FilterPlan(layer, lanes, tuple((v * lanes, n) for v, n in blocks), tiles, rows)


def _tap_cycles(vectors: int, pixels: int) -> float:
    return step_cycles(pixels, vectors, 1) + vectors / 4  # weights come from L2


def _tile(module: Module, plan: FilterPlan, size: tuple[int, int]) -> Function:
    """Build (x, w, sums, y, later), which computes one tile of (filters, pixels).

    x is the tile's first pixel, w the block's packed weights. The tile's sums are stored at ``sums``, and later
    transposed into y. The function prefetches y and ``later``, a share of the next image.
    """
    layer, lanes, (filters, pixels) = plan.layer, plan.lanes, size
    vectors, tap_rows = filters // lanes, layer.channels * layer.kernel
    with Function(module, f"tile_{filters}_{pixels}", "x w sums y later") as f:
        x, w, sums, y, later = f.arguments
        with f.loop(layer.channels, [f.vector(0.0)] * (vectors * pixels)) as c:
            with f.loop(layer.kernel, c.values) as p:
                tap_row = c.index * layer.kernel + p.index
                planes = ceil_div(filters, tap_rows)
                for number in range(planes):
                    m = (tap_row * planes + number).min(filters - 1)
                    y[m * (layer.output_height * layer.output_width)].prefetch(write=True)
                lines = ceil_div(plan.lines_ahead, tap_rows)
                for number in range(lines):
                    later[tap_row * (lines * LINE_FLOATS) + number * LINE_FLOATS].prefetch()
                row = x[c.index * (layer.height * layer.width) + p.index * layer.width]
                weights = w[tap_row * (layer.kernel_width * filters)]
                # Not unrolled: neighbouring taps share most pixels, so the compiler would keep all pixels, and spill.
                with f.loop(layer.kernel_width, p.values) as q:
                    here = weights[q.index * filters]
                    factors = [here[v * lanes].load(lanes) for v in range(vectors)]
                    q.values = add_products(q.values, factors, row[q.index], pixels)
                p.values = q.values
            c.values = p.values
        for number, value in enumerate(c.values):
            t, v = divmod(number, vectors)
            sums[t * filters + v * lanes].store(value, aligned=True)
    return f


def _transpose(source: tuple[Value, int], to: tuple[Value, Operand], rows: Operand, columns: Operand) -> None:
    """Emit the transposition of a matrix, whose sides are at least a vector; other arguments as of ``copy_rows``."""
    f, lanes = source[0].f, source[0].f.module.target.lanes
    with f.range((rows + (lanes - 1)) // lanes) as down, f.range((columns + (lanes - 1)) // lanes) as across:
        # The last vectors overlap the vectors before them.
        row, column = (down * lanes).min(rows - lanes), (across * lanes).min(columns - lanes)
        read = [source[0][(row + i) * source[1] + column].load(lanes) for i in range(lanes)]
        for i, vector in enumerate(transposed(read)):
            to[0][(column + i) * to[1] + row].store(vector)


@compiled_once
def transpose_function(products: int, target: Cpu) -> Any:
    """Compile (w, packed, filters), which packs the weights of a block: [filter][product] to [product][filter].

    It requires at least as many products, and filters, as lanes.
    """
    with Function(Module("pack", target), "pack", "w packed", "filters", exported=True) as f:
        w, packed, filters = f.arguments
        _transpose((w, products), (packed, filters), filters, products)
    return f.compiled()


def _rows(module: Module, plan: FilterPlan) -> Function:
    """Build (x, w, y, sums, later, band), which computes plan.rows rows of an image; the first row is at x and y."""
    layer, plane = plan.layer, plan.layer.output_height * plan.layer.output_width
    tiles = {(m, t): _tile(module, plan, (m, t)) for m, _ in plan.blocks for t, _ in plan.tiles}
    tile_count, block_count = (sum(n for _, n in pieces) for pieces in (plan.tiles, plan.blocks))
    with Function(module, "rows", "x w y sums later", "band") as f:
        x, w, y, sums, later, band = f.arguments
        for filters, above, block in each_part(f, plan.blocks):
            weights, outputs = w[above * layer.products], y[above * plane]
            with f.range(plan.rows) as row:
                for pixels, column, number in each_part(f, plan.tiles):
                    pixel = row * layer.output_width + column
                    tile_in_image = (band * block_count + block) * (plan.rows * tile_count) + row * tile_count + number
                    ahead = later[tile_in_image * (plan.lines_ahead * LINE_FLOATS)]
                    here = x[row * layer.width + column]
                    tiles[filters, pixels](here, weights, sums[pixel * filters], outputs[pixel], ahead)
            _transpose((sums, filters), (outputs, plane), plan.pixels, filters)
    return f


def build(plan: FilterPlan, target: Cpu) -> Function:
    """Build the function ``conv`` of one layer; its arguments as in ``_direct_code.build``."""
    layer, module = plan.layer, Module("direct", target)
    rows, (x_size, y_size) = _rows(module, plan), (math.prod(shape[1:]) for shape in (layer.x_shape, layer.y_shape))
    with Function(module, "conv", *CONV, exported=True) as f:
        x, w, y, scratch, counter, images, most, parts = f.arguments
        bands = ceil_div(layer.output_height, plan.rows)
        with (
            claimed_ranges(counter, images, most, parts) as (first, count),
            f.range(count) as n,
            f.range(bands) as band,
        ):
            image, row = first + n, (band * plan.rows).min(layer.output_height - plan.rows)
            here = x[image * x_size][row * layer.width]
            to = y[image * y_size][row * layer.output_width]
            rows(here, w, to, scratch, x[(image + 1) * x_size], band)
    return f
