"""tap_copies: a direct convolution with every attribute, from copies of the image, compiled for the layer.

A tap is an element (c, p, q) of a filter. Copies of the image make the pixels that a tap multiplies contiguous
(``_copies``):

    y[m][o] = sum over the taps of w[m][tap] * copies[offset of the tap + o]

A tile of F filters x P vectors of pixels stays in registers for all taps: each tap loads P vectors, broadcasts F
weights and does F*P multiply-adds. The last vector of a plane overlaps the vector before it. Each group is copied and
computed in turn, so that the copies of a depthwise layer stay in L1 or L2. A data gradient of stride 1 is a convolution
of y with filters rotated by 180 degrees.

Arithmetic intensity: 2*C*K*L / G FLOP per output. Memory: each pixel is written L times to L2. The multiply-adds limit
layers of many filters per group; the loads limit depthwise layers.
Source: as ``direct``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, ConvProblem, DataGradient
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module, compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from . import _padded, im2col
from ._copies import Copies
from ._direct_plan import SPARE, fastest_tiling, step_cycles, tile_sizes
from ._few_images import sharing
from ._ir import Partition, add_products, each_part, packed, store_first

#: Bytes of output that a thread claims at a time, unless one image has more.
CHUNK_BYTES = 1 << 20


class Plan:
    """The tiling of one layer: filters per block, in a group, and vectors of pixels per tile.

    ``scratch``: floats of scratch per thread, for the copies of a group and a vector that may be read beyond them.
    """

    def __init__(self, copies: Copies, blocks: Partition, tiles: Partition) -> None:
        self.copies, self.blocks, self.tiles = copies, blocks, tiles
        self.scratch = copies.layer.channels // copies.layer.groups * copies.channel + copies.lanes


def make_plan(layer: ConvProblem, target: Cpu) -> Plan:
    """Return the fastest predicted tiling."""
    copies = Copies(layer, target.lanes)
    filters, vectors = layer.filters // layer.groups, ceil_div(copies.pixels, target.lanes)
    return Plan(copies, *fastest_tiling(filters, vectors, tile_sizes(target.registers, SPARE), step_cycles))


def _tile(module: Module, plan: Plan, size: tuple[int, int]) -> Function:
    """Build (x, x_last, w, y, y_last, offsets), which computes a tile of (filters, vectors).

    x is the tile's first pixel in the copies for the tap of offset 0, x_last its last vector there; y and y_last are
    its first pixel and last vector in the output.
    """
    (filters, vectors), lanes, pixels = size, plan.copies.lanes, plan.copies.pixels
    with Function(module, f"tile_{filters}_{vectors}", "x x_last w y y_last offsets:i64") as f:
        x, x_last, w, y, y_last, offsets = f.arguments
        with f.loop(plan.copies.layer.products, [f.vector(0.0)] * (filters * vectors)) as tap:
            start = offsets[tap.index].load()
            here, last = x[start], x_last[start]
            values = [(here[v * lanes] if v < vectors - 1 else last).load(lanes) for v in range(vectors)]
            tap.values = add_products(tap.values, values, w[tap.index * filters], filters)
        for number, value in enumerate(tap.values):
            m, v = divmod(number, vectors)
            to = y[m * pixels + v * lanes] if v < vectors - 1 else y_last[m * pixels]
            store_first(value, to, min(pixels, lanes))
    return f


@compiled_once
def _layer(problem: ConvProblem, target: Cpu) -> tuple[Plan, Any]:
    """Plan, and compile (x, w, y, copies, offsets, images) for packed weights and copies whose padding is zeros."""
    plan = make_plan(_padded.forward(problem), target)
    layer, lanes, pixels = plan.copies.layer, plan.copies.lanes, plan.copies.pixels
    module = Module("tap_copies", target)
    copy = plan.copies.build(module)
    tiles = {(m, p): _tile(module, plan, (m, p)) for m, _ in plan.blocks for p, _ in plan.tiles}
    channels, filters_of_group = layer.channels // layer.groups, layer.filters // layer.groups
    with Function(module, "conv", "x w y copies offsets:i64", "images", exported=True) as f:
        x, w, y, copies, offsets, images = f.arguments
        with f.range(images) as image, f.range(layer.groups) as group:
            number = image * layer.groups + group
            copy(x[number * (channels * layer.height * layer.width)], copies, channels)
            outputs, weights = y[number * (filters_of_group * pixels)], w[group * (filters_of_group * layer.products)]
            for filters, above, _ in each_part(f, plan.blocks):
                block, factors = outputs[above * pixels], weights[above * layer.products]
                for vectors, covered, _ in each_part(f, plan.tiles):
                    first = covered * lanes
                    last = (first + (vectors - 1) * lanes).min(max(pixels - lanes, 0))
                    pointers = copies[first], copies[last], factors, block[first], block[last], offsets
                    tiles[filters, vectors](*pointers)
    return plan, f.compiled()


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill the third operand; the threads claim some images at a time."""
    if isinstance(problem, DataGradient) and not np.isfinite(w).all():
        im2col.run(problem, x, w, out, threads)  # infinity times the zeros around y is NaN
        return
    plan, conv = _layer(problem, cpu())
    filters = _padded.forward_weights(problem, w).reshape(problem.groups, -1, plan.copies.layer.products)
    offsets, weights = plan.copies.offsets(), np.ascontiguousarray(packed(plan.blocks, filters))
    memory.advise_huge_pages(out)
    count = max(1, min(CHUNK_BYTES * problem.batch // out.nbytes, ceil_div(problem.batch, threads)))
    firsts = iter(range(0, problem.batch, count))

    def work(part: int) -> None:
        copies = memory.aligned(plan.scratch)
        copies.fill(0)
        fixed = [memory.address(array) for array in (copies, offsets)]
        for first in firsts:  # next() is atomic
            pointers = [memory.address(array) for array in (x[first:], weights, out[first:])]
            conv(*pointers, *fixed, min(count, problem.batch - first))

    parallel_for(work, threads, threads)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support a problem; empty if it does."""
    strided = isinstance(problem, DataGradient) and problem.stride != (1, 1)
    return ["it computes data gradients of stride 1 only"] * strided + _padded.limits(problem)


KERNEL = CpuKernel(
    "tap_copies",
    "every attribute, from copies in which a tap's pixels are contiguous, compiled for the layer",
    *sharing(run, lambda problem, out: _layer(problem, cpu())),
    limits,
    features=ATTRIBUTES | {DATA_GRADIENT},
    recommended=_padded.is_profitable,
)
