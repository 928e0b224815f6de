"""outer_products: weight gradients with input channels in the lanes, compiled for the layer.

A vector holds a pixel's channels, so a step adds an outer product, of F filters' gradients and two vectors of channels,
to F x 2 sums that stay in registers for all pixels of a chunk:

    w[m][c][p][q] = sum over images and pixels o of y[m][o] * pixels[o S + (p, q) D - P][c]      S stride, D dilation

A work item is a block of channels and a part of the filters, for all images. Per chunk of rows (or of small images) it
transposes its channels to [row][column][channel], between zeros for the padding P. Then, for each block of filters, it
copies their gradients side by side, and sums the products of every tap. A chunk's sums are added in float64, and
written when all images are done. No sum crosses lanes, and threads share no sums.

Arithmetic intensity: 4*F FLOP per F + 2 lanes floats, from L1 and L2. Memory: x is read once per part of the filters, y
once per block of channels. The multiply-adds limit it.
Restrictions: one group; planes of at least as many pixels as a vector has lanes.

Error: in a chunk's products, float32; over the chunks, float64. The number of threads changes no bit.
Source: E. Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.core.kernel import EPS32, CpuKernel, sum_bound
from ece408_op.problem import DILATE, PAD, RECTANGULAR, STRIDE, WEIGHT_GRADIENT, ConvProblem, WeightGradient
from ece408_op.runtime import memory
from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I64,
    Cpu,
    compile_function,
    compiled_once,
    const,
    cpu,
    element,
    fma,
    for_range,
    new_function,
    offset,
)
from ece408_op.runtime.thread_pool import share

from ._direct_tile import copy_rows
from ._ir import (
    LINE_FLOATS,
    Pieces,
    broadcast,
    each_piece,
    function,
    load,
    minimum,
    share_out,
    store,
    transposed,
    whole_lines,
)

F64 = ir.DoubleType()
F64_PTR = F64.as_pointer()

#: Vectors of channels per block, and filters per tile at most, by the number of registers.
VECTORS, MOST_FILTERS = 2, {16: 6, 32: 12}

#: The fewest output pixels of a chunk, if the layer has them, and the most images of a chunk.
CHUNK_PIXELS, MOST_IMAGES = 512, 16

#: Products per pixel and channel of a work item, at most: more items, and each reads x again.
ITEM_PRODUCTS = 640

#: The share of the lanes that channels fill, from which it is recommended. Filters of one element share no loads of
#: pixels, so it is recommended only for planes of fewer pixels, on which ``pixel_reduction`` mostly adds up lanes.
LEAST_FILLED, FEW_PIXELS = 0.85, 256


@dataclass(frozen=True)
class Plan:
    """The cut of one layer: filters of a work item, those of its blocks, rows of a chunk, and images of a chunk."""

    layer: ConvProblem
    lanes: int
    filters: int
    blocks: Pieces
    rows: int
    images: int

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return VECTORS * self.lanes

    @property
    def taps(self) -> int:
        """Elements of a filter's channel."""
        return self.layer.kernel * self.layer.kernel_width

    @property
    def columns(self) -> int:
        """Columns of the padded image."""
        return self.layer.width + 2 * self.layer.pad[1]

    @property
    def input_rows(self) -> int:
        """Rows of the padded image that a chunk reads."""
        return (self.rows - 1) * self.layer.stride[0] + (self.layer.kernel - 1) * self.layer.dilate[0] + 1

    @property
    def bands(self) -> int:
        """Chunks of rows of an image."""
        return -(-self.layer.output_height // self.rows)

    @property
    def margin(self) -> int:
        """Floats before and after a chunk's transposed rows of an image, which transposing whole vectors may write."""
        return (2 + self.lanes // self.layer.width) * self.columns * self.channels

    @property
    def image(self) -> int:
        """Floats of a chunk's transposed rows of an image, with both margins."""
        return self.input_rows * self.columns * self.channels + 2 * self.margin

    @property
    def gradient_stride(self) -> int:
        """Floats from the gradients of a filter to the next; an odd number of cache lines."""
        lines = whole_lines(self.images * self.rows * self.layer.output_width) // LINE_FLOATS
        return (lines | 1) * LINE_FLOATS

    @property
    def sums(self) -> int:
        """Sums of a work item."""
        return self.filters * self.taps * self.channels

    @property
    def scratch(self) -> int:
        """Floats of scratch per thread: the sums in float64, the gradients of a block, the transposed rows."""
        return 2 * self.sums + self.blocks[0][0] * self.gradient_stride + self.images * self.image


def make_plan(layer: ConvProblem, lanes: int, registers: int) -> Plan:
    """Return the cut for vectors of ``lanes`` floats and that many registers."""
    most = max(32, ITEM_PRODUCTS // (layer.kernel * layer.kernel_width))
    divisors = [n for n in range(most // 3, most + 1) if layer.filters % n == 0]
    filters = max(divisors, default=layer.filters)
    pixels = layer.output_height * layer.output_width
    images = max(1, min(MOST_IMAGES, CHUNK_PIXELS // pixels))
    bands = max(1, pixels // CHUNK_PIXELS)
    rows = -(-layer.output_height // bands)
    return Plan(layer, lanes, filters, share_out(filters, MOST_FILTERS[registers]), rows, images)


def _tile(module: ir.Module, plan: Plan, filters: int, target: Cpu) -> ir.Function:
    """Build (pixels, y, sums, images, rows), which adds a tap's products of a block of filters to the sums."""
    layer, lanes = plan.layer, plan.lanes
    (sh, sw), width = layer.stride, layer.output_width
    arguments = {"pixels": F32_PTR, "y": F32_PTR, "sums": F64_PTR, "images": I64, "rows": I64}
    b, (pixels, y, sums, images, rows) = new_function(module, f"tile_{filters}", arguments, internal=True)
    zero = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    with for_range(b, images, [zero] * (filters * VECTORS)) as image:
        with for_range(b, rows, image.values) as row:
            start = offset(b, (image.index, plan.image), (row.index, sh * plan.columns * plan.channels))
            read = element(b, pixels, start)
            number = b.add(b.mul(image.index, b.mul(rows, const(width))), offset(b, (row.index, width)))
            gradients = element(b, y, number)
            with for_range(b, width, row.values) as column:
                here = element(b, read, offset(b, (column.index, sw * plan.channels)))
                vectors = [load(b, element(b, here, v * lanes), lanes, 4 * lanes) for v in range(VECTORS)]
                totals = []
                for f in range(filters):
                    gradient = element(b, gradients, b.add(column.index, const(f * plan.gradient_stride)))
                    factor = broadcast(b, b.load(gradient, align=4), lanes)
                    totals += [
                        fma(b, target, vector, factor, column.values[f * VECTORS + v])
                        for v, vector in enumerate(vectors)
                    ]
                column.values = totals
            row.values = column.values
        image.values = row.values
    wide = ir.VectorType(F64, lanes)
    for number, value in enumerate(image.values):
        to = b.bitcast(element(b, sums, number * lanes), wide.as_pointer())
        b.store(b.fadd(b.load(to, align=8), b.fpext(value, wide)), to, align=8)
    b.ret_void()
    return b.function


def _transpose(module: ir.Module, plan: Plan) -> ir.Function:
    """Build (x, to, first, rows, left), which fills a chunk's rows of an image; rows outside become zeros.

    x is the block's first channel, ``left`` the number of channels from there on. ``first`` is the first row.
    """
    layer, lanes = plan.layer, plan.lanes
    width, plane = layer.width, layer.height * layer.width
    b, (x, to, first, rows, left) = function(module, "transpose", "x to", "first rows left")
    zero, last = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes), b.sub(left, const(1))
    with for_range(b, rows) as row:
        outside = b.icmp_unsigned(">=", b.add(first, row.index), const(layer.height))
        with b.if_then(outside), for_range(b, plan.columns * VECTORS) as part:
            start = offset(b, (row.index, plan.columns * plan.channels), (part.index, lanes))
            store(b, zero, element(b, to, start), 4 * lanes)
    top = b.select(b.icmp_signed("<", first, const(0)), const(0), first)
    count = b.sub(minimum(b, b.add(first, rows), layer.height), top)
    with b.if_then(b.icmp_signed(">", count, const(0))):
        vectors = b.udiv(b.add(offset(b, (count, width)), const(lanes - 1)), const(lanes))
        with for_range(b, vectors) as part:
            pixel = minimum(b, offset(b, (top, width), (part.index, lanes)), plane - lanes)
            places = []
            for lane in range(lanes):
                number = b.add(pixel, const(lane))
                row_number = b.sub(b.udiv(number, const(width)), first)
                column = b.add(b.urem(number, const(width)), const(layer.pad[1]))
                place = b.add(offset(b, (row_number, plan.columns)), column)
                places.append(element(b, to, offset(b, (place, plan.channels))))
            for v in range(VECTORS):
                channels = [minimum(b, const(v * lanes + lane), last) for lane in range(lanes)]
                read = [load(b, element(b, x, b.add(offset(b, (c, plane)), pixel)), lanes) for c in channels]
                for place, value in zip(places, transposed(b, read)):
                    store(b, value, element(b, place, v * lanes), 4 * lanes)
    b.ret_void()
    return b.function


@compiled_once
def _compiled(plan: Plan, target: Cpu) -> Any:
    """Compile (x, y, w, scratch, batch, channels): a work item, for its first channel and filter; ``channels`` left."""
    layer, lanes = plan.layer, plan.lanes
    module = ir.Module("outer_products")
    transpose = _transpose(module, plan)
    tiles = {filters: _tile(module, plan, filters, target) for filters, _ in plan.blocks}
    arguments = {**dict.fromkeys(("x", "y", "w", "scratch"), F32_PTR), "batch": I64, "channels": I64}
    b, (x, y, w, scratch, batch, channels) = new_function(module, "reduce", arguments)
    plane, pixels = layer.height * layer.width, layer.output_height * layer.output_width
    sums = b.bitcast(scratch, F64_PTR)
    gradients = element(b, scratch, 2 * plan.sums)
    rows_of_images = element(b, gradients, plan.blocks[0][0] * plan.gradient_stride + plan.margin)
    chunks = b.udiv(b.add(batch, const(plan.images - 1)), const(plan.images))
    with for_range(b, chunks) as chunk, for_range(b, plan.bands) as band:
        first = offset(b, (chunk.index, plan.images))
        images = minimum(b, b.sub(batch, first), plan.images)
        row, end = (
            b.udiv(offset(b, (number, layer.output_height)), const(plan.bands))
            for number in (band.index, b.add(band.index, const(1)))
        )
        rows = b.sub(end, row)
        begin = b.sub(offset(b, (row, layer.stride[0])), const(layer.pad[0]))
        needed = b.sub(const(plan.input_rows), offset(b, (b.sub(const(plan.rows), rows), layer.stride[0])))
        with for_range(b, images) as image:
            source = element(b, x, offset(b, (b.add(first, image.index), layer.channels * plane)))
            to = element(b, rows_of_images, offset(b, (image.index, plan.image)))
            b.call(transpose, [source, to, begin, needed, channels])
        for filters, above, _ in each_piece(b, plan.blocks):
            floats = offset(b, (rows, layer.output_width))
            with for_range(b, filters) as f, for_range(b, images) as each:
                m, number = b.add(above, f.index), b.add(first, each.index)
                width = layer.output_width
                source = element(b, y, offset(b, (number, layer.filters * pixels), (m, pixels), (row, width)))
                start = b.add(offset(b, (f.index, plan.gradient_stride)), b.mul(each.index, floats))
                copy_rows(b, lanes, width, (source, width), (element(b, gradients, start), width), rows)
            for tap in range(plan.taps):
                p, q = divmod(tap, layer.kernel_width)
                first_read = (p * layer.dilate[0] * plan.columns + q * layer.dilate[1]) * plan.channels
                total = b.add(offset(b, (above, plan.taps * plan.channels)), const(tap * filters * plan.channels))
                pointers = [element(b, rows_of_images, first_read), gradients, element(b, sums, total)]
                b.call(tiles[filters], [*pointers, images, rows])
    for filters, above, _ in each_piece(b, plan.blocks):
        with for_range(b, filters) as f, for_range(b, channels) as c, for_range(b, plan.taps) as t:
            before = offset(b, (above, plan.taps), (t.index, filters), (f.index, 1))
            value = b.load(element(b, sums, b.add(offset(b, (before, plan.channels)), c.index)), align=8)
            m = b.add(above, f.index)
            to = offset(b, (m, layer.channels * plan.taps), (c.index, plan.taps))
            b.store(b.fptrunc(value, F32), element(b, w, b.add(to, t.index)), align=4)
    b.ret_void()
    return compile_function(module, "reduce", [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2, target)


@lru_cache(maxsize=1024)
def _layer(problem: ConvProblem, target: Cpu) -> tuple[Plan, Any]:
    plan = make_plan(problem.convolution, target.lanes, target.registers)
    return plan, _compiled(plan, target)


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done."""
    _layer(problem.with_batch(1), cpu())


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (M, C, K, L), from x and w, the gradient to y: the threads claim work items."""
    plan, reduce = _layer(problem.with_batch(1), cpu())
    starts = [
        (c, m) for c in range(0, problem.channels, plan.channels) for m in range(0, problem.filters, plan.filters)
    ]
    free = [memory.aligned(plan.scratch) for _ in range(min(threads, len(starts)))]
    for scratch in free:
        scratch.fill(0)

    def work(part: int) -> None:
        c, m = starts[part]
        scratch = free.pop()
        scratch[: 2 * plan.sums] = 0
        arrays = (x[0, c:], w[0, m:], out[m:, c:], scratch)
        reduce(*(memory.address(array) for array in arrays), problem.batch, min(plan.channels, problem.channels - c))
        free.append(scratch)

    share(work, len(starts), threads)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel cannot take a problem."""
    if not isinstance(problem, WeightGradient):
        return ["it computes weight gradients only"]
    lanes, pixels = cpu().lanes, problem.height * problem.width
    return [f"pixels of a channel: at least {lanes} on this CPU, got {pixels}"] if pixels < lanes else []


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether it is expected to be faster than ``pixel_reduction`` (20 layers on a Zen 4)."""
    block = VECTORS * cpu().lanes
    filled = problem.channels / (-(-problem.channels // block) * block)
    few_pixels = problem.output_height * problem.output_width < FEW_PIXELS
    return filled >= LEAST_FILLED and (few_pixels or problem.kernel * problem.kernel_width > 1)


def bound(problem: ConvProblem) -> float:
    """Return the error bound: a chunk's sums in float32, all others in float64, and the result's rounding."""
    target = cpu()
    plan = make_plan(problem.convolution, target.lanes, target.registers)
    return sum_bound(plan.images * plan.rows * plan.layer.output_width) + 2 * EPS32


KERNEL = CpuKernel(
    "outer_products",
    "weight gradients with channels in the lanes, compiled for the layer",
    run,
    prepare,
    limits,
    features=frozenset({RECTANGULAR, STRIDE, PAD, DILATE, WEIGHT_GRADIENT}),
    error_bound=bound,
    recommended=is_profitable,
)
