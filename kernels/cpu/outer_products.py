"""outer_products: weight gradients with input channels in the lanes, compiled for the layer.

A vector holds a pixel's channels. A step adds the outer product of F filters' gradients and two vectors of channels to
F x 2 sums, which stay in registers for all pixels of a chunk:

    w[m][c][p][q] = sum over images and pixels o of y[m][o] * pixels[o S + (p, q) D - P][c]      S stride, D dilation

A work item is a block of channels and a part of the filters, for all images. Per chunk of rows (or of small images) it
transposes its channels to [row][column][channel], with zeros around them for the padding P, and sums the products of
each block of filters with each tap. The sums of all chunks are added in float64, and written when all images are done.
No sum crosses lanes, and threads share no sums.

Arithmetic intensity: 4*F FLOP per F + 2 lanes floats, from L1 and L2. Memory: x is read once per part of the filters, y
once per block of channels. The multiply-adds limit it.
Restrictions: one group; planes of at least as many pixels as a vector has lanes.

Error: sums are float32 within a chunk, and float64 over the chunks. The number of threads changes no bit.
Source: E. Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.core.kernel import EPS32, CpuKernel, sum_bound
from ece408_op.problem import DILATE, PAD, RECTANGULAR, STRIDE, WEIGHT_GRADIENT, ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div, round_up
from ece408_op.runtime.llvm import F32, Function, Module, Value, compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from ._ir import Partition, add_in_float64, add_products, each_part, partition, transposed

#: Vectors of channels per block, and filters per tile at most, by the number of registers.
VECTORS, MOST_FILTERS = 2, {16: 6, 32: 12}

#: The fewest output pixels of a chunk, if the layer has them, and the most images of a chunk.
CHUNK_PIXELS, MOST_IMAGES = 512, 16

#: The most products per pixel and channel of a work item. A smaller limit makes more items, and each item reads x.
ITEM_PRODUCTS = 640

#: The kernel is recommended if channels fill at least this share of the lanes. 1 x 1 filters share no loads of pixels,
#: so for them it is recommended only below this many pixels per plane, where ``pixel_reduction`` mostly adds up lanes.
LEAST_FILLED, FEW_PIXELS = 0.85, 256


class Plan:
    """The tiling of one layer, a batch of one.

    filters        filters of a work item
    blocks         filters of each block of a work item
    rows, images   rows of a chunk, and images of a chunk
    channels       channels of a block
    taps           elements of a filter's channel
    columns        columns of the padded image
    input_rows     rows of the padded image that a chunk reads
    bands          chunks of rows of an image
    margin         floats before and after a chunk's transposed rows of an image, which transposing whole vectors may
                   write; ``image``: floats of the rows with both margins
    sums           sums of a work item
    scratch        floats of scratch per thread: the sums in float64, the transposed rows
    """

    def __init__(self, layer: ConvProblem, lanes: int, filters: int, blocks: Partition, rows: int, images: int) -> None:
        self.layer, self.lanes, self.filters, self.blocks = layer, lanes, filters, blocks
        self.rows, self.images, self.channels = rows, images, VECTORS * lanes
        self.taps, self.columns = layer.kernel * layer.kernel_width, layer.width + 2 * layer.pad[1]
        self.input_rows = (rows - 1) * layer.stride[0] + (layer.kernel - 1) * layer.dilate[0] + 1
        self.bands = ceil_div(layer.output_height, rows)
        self.margin = (2 + lanes // layer.width) * self.columns * self.channels
        self.image = self.input_rows * self.columns * self.channels + 2 * self.margin
        self.sums = filters * self.taps * self.channels
        self.scratch = 2 * self.sums + images * self.image


def make_plan(problem: ConvProblem, target: Cpu) -> Plan:
    """Return the tiling of a layer and its gradients."""
    layer = problem.convolution
    most = max(32, ITEM_PRODUCTS // (layer.kernel * layer.kernel_width))
    divisors = [n for n in range(most // 3, most + 1) if layer.filters % n == 0]
    filters = max(divisors, default=layer.filters)
    pixels = layer.output_height * layer.output_width
    images = max(1, min(MOST_IMAGES, CHUNK_PIXELS // pixels))
    bands = max(1, pixels // CHUNK_PIXELS)
    rows = ceil_div(layer.output_height, bands)
    return Plan(layer, target.lanes, filters, partition(filters, MOST_FILTERS[target.registers]), rows, images)


def _tile(module: Module, plan: Plan, filters: int) -> Function:
    """Build (pixels, y, sums, images, rows), which adds a tap's products of a block of filters to the sums."""
    (layer, lanes), (sh, sw) = (plan.layer, plan.lanes), plan.layer.stride
    plane = layer.output_height * layer.output_width
    with Function(module, f"tile_{filters}", "pixels y sums:f64", "images rows") as f:
        pixels, y, sums, images, rows = f.arguments
        with f.loop(images, [f.vector(0.0)] * (filters * VECTORS)) as image:
            with f.loop(rows, image.values) as row:
                read = pixels[image.index * plan.image + row.index * (sh * plan.columns * plan.channels)]
                gradients = y[image.index * (layer.filters * plane) + row.index * layer.output_width]
                with f.loop(layer.output_width, row.values) as column:
                    here = read[column.index * (sw * plan.channels)]
                    vectors = [here[v * lanes].load(lanes, aligned=True) for v in range(VECTORS)]
                    factors = gradients[column.index]
                    column.values = add_products(column.values, vectors, factors, filters, plane)
                row.values = column.values
            image.values = row.values
        for number, value in enumerate(image.values):
            add_in_float64(sums[number * lanes], value)
    return f


def _transpose(module: Module, plan: Plan) -> Function:
    """Build (x, to, first, rows, left), which fills a chunk's rows of an image; rows outside the image become zeros.

    x is the block's first channel, ``left`` the number of channels from it on, ``first`` the first row.
    """
    layer, lanes, channels = plan.layer, plan.lanes, plan.channels
    width, plane = layer.width, layer.height * layer.width
    with Function(module, "transpose", "x to", "first rows left") as f:
        x, to, first, rows, left = f.arguments
        with f.range(rows) as row, f.when(~(first + row).below(layer.height)), f.range(plan.columns * VECTORS) as part:
            to[row * (plan.columns * channels) + part * lanes].store(f.vector(0.0), aligned=True)
        top = (first < 0).select(0, first)
        count = (first + rows).min(layer.height) - top
        with f.when(count > 0), f.range((count * width + (lanes - 1)) // lanes) as part:
            pixel = (top * width + part * lanes).min(plane - lanes)
            targets = []
            for lane in range(lanes):
                number = pixel + lane
                row_number, column = number // width - first, number % width + layer.pad[1]
                targets.append(to[(row_number * plan.columns + column) * channels])
            for v in range(VECTORS):
                sources = [f.const(v * lanes + lane).min(left - 1) * plane for lane in range(lanes)]
                read = [x[source + pixel].load(lanes) for source in sources]
                for target, value in zip(targets, transposed(read)):
                    target[v * lanes].store(value, aligned=True)
    return f


@compiled_once
def _layer(problem: ConvProblem, target: Cpu) -> tuple[Plan, Any]:
    """Plan, and compile (x, y, w, scratch, batch, channels), which computes a work item.

    x, y and w begin at the item's first channel and filter; ``channels`` is the number of channels from there on.
    """
    plan = make_plan(problem, target)
    layer, module = plan.layer, Module("outer_products", target)
    transpose = _transpose(module, plan)
    tiles = {filters: _tile(module, plan, filters) for filters, _ in plan.blocks}
    plane, (height, width) = layer.height * layer.width, layer.y_shape[2:]
    with Function(module, "reduce", "x y w scratch", "batch channels", exported=True) as f:
        x, y, w, scratch, batch, channels = f.arguments
        sums, rows_of_images = scratch.to("f64"), scratch[2 * plan.sums + plan.margin]
        chunks = (batch + (plan.images - 1)) // plan.images
        with f.range(chunks) as chunk, f.range(plan.bands) as band:
            first = chunk * plan.images
            images = (batch - first).min(plan.images)
            row = band * height // plan.bands
            rows = (band + 1) * height // plan.bands - row
            begin = row * layer.stride[0] - layer.pad[0]
            needed = plan.input_rows - (plan.rows - rows) * layer.stride[0]
            with f.range(images) as image:
                source = x[(first + image) * (layer.channels * plane)]
                transpose(source, rows_of_images[image * plan.image], begin, needed, channels)
            for filters, above, _ in each_part(f, plan.blocks):
                gradients = y[(first * layer.filters + above) * (height * width) + row * width]
                for tap in range(plan.taps):
                    p, q = divmod(tap, layer.kernel_width)
                    first_read = (p * layer.dilate[0] * plan.columns + q * layer.dilate[1]) * plan.channels
                    total = above * (plan.taps * plan.channels) + tap * filters * plan.channels
                    tiles[filters](rows_of_images[first_read], gradients, sums[total], images, rows)
        for filters, above, _ in each_part(f, plan.blocks):
            with f.range(filters) as m, f.range(channels) as c, f.range(plan.taps) as t:
                value = sums[(above * plan.taps + t * filters + m) * plan.channels + c].load()
                to = w[(above + m) * (layer.channels * plan.taps) + c * plan.taps + t]
                to.store(Value(f, f.b.fptrunc(value.ir, F32)))
    return plan, f.compiled()


def run(problem: ConvProblem, x: np.ndarray, y: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out (M, C, K, L) from x and the gradient of y; the threads claim work items."""
    plan, reduce = _layer(problem, cpu())
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
        arrays = (x[0, c:], y[0, m:], out[m:, c:], scratch)
        reduce(*(memory.address(array) for array in arrays), problem.batch, min(plan.channels, problem.channels - c))
        free.append(scratch)

    parallel_for(work, len(starts), threads)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support a problem; empty if it does."""
    lanes, pixels = cpu().lanes, problem.height * problem.width
    return [f"pixels of a channel: at least {lanes} on this CPU, got {pixels}"] if pixels < lanes else []


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether this kernel is predicted to be faster than ``pixel_reduction`` (20 layers on a Zen 4)."""
    block = VECTORS * cpu().lanes
    filled = problem.channels / round_up(problem.channels, block)
    few_pixels = problem.output_height * problem.output_width < FEW_PIXELS
    return filled >= LEAST_FILLED and (few_pixels or problem.kernel * problem.kernel_width > 1)


def bound(problem: ConvProblem) -> float:
    """Return the error bound: a chunk's sums are in float32, the other sums in float64, and the result is rounded."""
    plan = make_plan(problem, cpu())
    return sum_bound(plan.images * plan.rows * plan.layer.output_width) + 2 * EPS32


KERNEL = CpuKernel(
    "outer_products",
    "weight gradients with channels in the lanes, compiled for the layer",
    run,
    lambda problem, out: _layer(problem, cpu()),
    limits,
    features=frozenset({RECTANGULAR, STRIDE, PAD, DILATE, WEIGHT_GRADIENT}),
    required=WEIGHT_GRADIENT,
    error_bound=bound,
    recommended=is_profitable,
)
