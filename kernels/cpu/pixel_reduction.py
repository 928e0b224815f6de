"""pixel_reduction: weight gradients with output pixels in the lanes, compiled for the layer.

A tap is an element (c, p, q) of a filter. Copies of the image make the pixels that a tap multiplies contiguous
(``_copies``):

    w[m][tap] = sum over images and pixels o of y[m][o] * copies[offset of the tap + o]

A tile of F filters x T taps stays in registers for all pixels of a few images: each step loads F vectors of y and T
vectors of the copies, and does F*T multiply-adds. Then the lanes of each sum are added up in float32, and the result is
added to a sum in float64.

Arithmetic intensity: 2*F*T FLOP per F + T floats, from L1 and L2. Memory: x and y once; the copies have L times as many
pixels as x and stay in L2. The multiply-adds limit it.
Restrictions: at least as many output pixels as a vector has lanes.

Error: a lane sums the pixels of a few images in float32; these sums are added in float64. The result does not depend on
the number of threads, unless the sums take more than SUMS_BYTES: then each thread has separate sums.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.core.kernel import EPS32, CpuKernel, sum_bound
from ece408_op.problem import ATTRIBUTES, WEIGHT_GRADIENT, ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div, round_up
from ece408_op.runtime.llvm import Function, Module, Operand, Value, compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from ._copies import Copies
from ._direct_plan import fastest_tiling, step_cycles, tile_sizes
from ._few_images import sharing
from ._ir import Partition, add_in_float64, each_part, lane_sums

#: The most taps of a tile.
MOST_TAPS = 9

#: Bytes of copies and of y that a thread works on at a time, unless one image has more.
CHUNK_BYTES = 640 << 10

#: The most images at a time; the most independent copies of the sums that threads work on.
MOST_IMAGES, PARTS = 16, 64

#: The most bytes of all copies of the sums, unless one copy per thread takes more.
SUMS_BYTES = 8 << 20


class Plan:
    """The tiling of one layer, a batch of one.

    blocks        filters per block, in a group
    tiles         taps per tile, in a group
    image_copies  floats of an image's copies
    images        images at a time
    tile_sums     room for a tile's sums: whole vectors
    sums          room for the sums of all tiles of all groups
    """

    def __init__(self, copies: Copies, blocks: Partition, tiles: Partition) -> None:
        layer, self.copies, self.blocks, self.tiles = copies.layer, copies, blocks, tiles
        self.layer, self.lanes, self.pixels = layer, copies.lanes, copies.pixels
        self.image_copies = layer.channels * copies.channel
        floats = self.image_copies + layer.filters * copies.pixels
        self.images = max(1, min(MOST_IMAGES, CHUNK_BYTES // (4 * floats)))
        self.tile_sums = round_up(blocks[0][0] * tiles[0][0], copies.lanes)
        self.sums = layer.groups * sum(n for _, n in blocks) * sum(n for _, n in tiles) * self.tile_sums


def make_plan(problem: ConvProblem, target: Cpu) -> Plan:
    """Return the fastest predicted tiling of a layer and its gradients."""
    layer = problem.convolution
    sizes = sorted((f, t) for t, f in tile_sizes(target.registers, 1) if t <= MOST_TAPS)
    tiling = fastest_tiling(layer.filters // layer.groups, layer.products, sizes, step_cycles)
    return Plan(Copies(layer, target.lanes), *tiling)


def _copy_sums(plan: Plan, sums: np.ndarray, out: np.ndarray) -> None:
    """Copy the sums of all tiles, (plan.sums,), to the weights, (M, C / G, K, L)."""
    groups = plan.layer.groups
    block_count, tile_count = (sum(many for _, many in pieces) for pieces in (plan.blocks, plan.tiles))
    tiled = sums.reshape(groups, block_count, tile_count, plan.tile_sums)
    weights = out.reshape(groups, -1, plan.layer.products)
    block = row = 0
    for f, blocks in plan.blocks:
        tile = column = 0
        for t, tiles in plan.tiles:
            some = tiled[:, block : block + blocks, tile : tile + tiles, : f * t]
            whole = some.reshape(groups, blocks, tiles, f, t).transpose(0, 1, 3, 2, 4)
            target = weights[:, row : row + blocks * f, column : column + tiles * t]
            target[...] = whole.reshape(target.shape)
            tile, column = tile + tiles, column + tiles * t
        block, row = block + blocks, row + blocks * f


def _tile(module: Module, plan: Plan, size: tuple[int, int]) -> Function:
    """Build (y, copies, offsets, sums, images), which adds the sums of a tile of (filters, taps)."""
    (filters, taps), lanes, layer = size, plan.lanes, plan.layer
    pointers = "y copies offsets:i64 sums:f64"
    with Function(module, f"tile_{filters}_{taps}", pointers, "images") as f:
        y, copies, offsets, sums, images = f.arguments
        starts = [copies[offsets[t].load()] for t in range(taps)]

        def step(totals: list[Value], image: Value, pixel: Operand, counted: int = 0) -> list[Value]:
            """Emit the products of a vector of pixels; its first ``counted`` lanes, already added, are left out."""
            mask = ir.Constant(ir.VectorType(ir.IntType(1), lanes), [int(lane >= counted) for lane in range(lanes)])

            def pixels(pointer: Value, stride: int) -> Value:
                value = pointer[image * stride + pixel].load(lanes)
                return Value(f, mask).select(value, f.vector(0.0)) if counted else value

            gradients = [pixels(y[m * plan.pixels], layer.filters * plan.pixels) for m in range(filters)]
            result = list(totals)
            for t, start in enumerate(starts):
                x = pixels(start, plan.image_copies)
                for m in range(filters):
                    result[m * taps + t] = gradients[m].fma(x, totals[m * taps + t])
            return result

        with f.loop(images, [f.vector(0.0)] * (filters * taps)) as image:
            with f.loop(plan.pixels // lanes, image.values) as many:
                many.values = step(many.values, image.index, many.index * lanes)
            rest = plan.pixels % lanes
            image.values = many.values
            if rest:
                image.values = step(many.values, image.index, plan.pixels - lanes, lanes - rest)
        for first in range(0, filters * taps, lanes):
            some = image.values[first : first + lanes]
            add_in_float64(sums[first], lane_sums(some + [f.vector(0.0)] * (lanes - len(some))))
    return f


@compiled_once
def _layer(problem: ConvProblem, target: Cpu) -> tuple[Plan, Any]:
    """Plan, and compile (x, y, copies, offsets, sums, images), which adds the gradients of some images to the sums."""
    plan = make_plan(problem, target)
    layer, module = plan.layer, Module("pixel_reduction", target)
    copy = plan.copies.build(module)
    tiles = {(m, t): _tile(module, plan, (m, t)) for m, _ in plan.blocks for t, _ in plan.tiles}
    block_count, tile_count = (sum(many for _, many in pieces) for pieces in (plan.blocks, plan.tiles))
    filters_of_group, copies_of_group = layer.filters // layer.groups, plan.image_copies // layer.groups
    with Function(module, "reduce", "x y copies offsets:i64 sums:f64", "images", exported=True) as f:
        x, y, copies, offsets, sums, images = f.arguments
        copy(x, copies, images * layer.channels)
        with f.range(layer.groups) as group:
            for filters, above, block in each_part(f, plan.blocks):
                gradients = y[group * (filters_of_group * plan.pixels) + above * plan.pixels]
                group_copies = copies[group * copies_of_group]
                for taps, before, tile in each_part(f, plan.tiles):
                    number = (group * block_count + block) * tile_count + tile
                    to = sums[number * plan.tile_sums]
                    tiles[filters, taps](gradients, group_copies, offsets[before], to, images)
    return plan, f.compiled()


def run(problem: ConvProblem, x: np.ndarray, y: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out (M, C / G, K, L) from x and the gradient of y; the threads share the images."""
    plan, reduce = _layer(problem, cpu())
    chunks = ceil_div(problem.batch, plan.images)
    parts = min(chunks, max(threads, min(PARTS, SUMS_BYTES // (8 * plan.sums))))
    edges = [chunks * part // parts * plan.images for part in range(parts)] + [problem.batch]
    sums, offsets = np.zeros((parts, plan.sums)), plan.copies.offsets()
    free = [memory.aligned(plan.images * plan.image_copies) for _ in range(threads)]
    for copies in free:
        copies.fill(0)

    def work(part: int) -> None:
        copies = free.pop()
        fixed = [memory.address(array) for array in (copies, offsets, sums[part])]
        for first in range(edges[part], edges[part + 1], plan.images):
            some = min(plan.images, edges[part + 1] - first)
            reduce(memory.address(x[first:]), memory.address(y[first:]), *fixed, some)
        free.append(copies)

    parallel_for(work, parts, threads)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are no error
        total = sums.sum(axis=0) if parts > 1 else sums[0]
        _copy_sums(plan, total, out)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support a problem; empty if it does."""
    lanes, pixels = cpu().lanes, problem.output_height * problem.output_width
    return [f"output pixels: at least {lanes} on this CPU, got {pixels}"] if pixels < lanes else []


def bound(problem: ConvProblem) -> float:
    """Return the error bound: a lane sums the products of a few images, the lanes are added, the result is rounded."""
    plan = make_plan(problem, cpu())
    return sum_bound(plan.images * (plan.pixels // plan.lanes + 1) + int(math.log2(plan.lanes))) + 2 * EPS32


KERNEL = CpuKernel(
    "pixel_reduction",
    "weight gradients with pixels in the lanes, compiled for the layer",
    *sharing(run, lambda problem, out: _layer(problem, cpu())),
    limits,
    features=ATTRIBUTES | {WEIGHT_GRADIENT},
    required=WEIGHT_GRADIENT,
    error_bound=bound,
)
