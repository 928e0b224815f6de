"""pixel_reduction: weight gradients with output pixels in the lanes, compiled for the layer.

A tap is an element (c, p, q) of a filter. Copies of the image make the pixels that a tap meets contiguous
(``_copies``):

    w[m][tap] = sum over images and pixels o of y[m][o] * copies[offset of the tap + o]

A tile of F filters x T taps stays in registers for all pixels of a few images: each step loads F vectors of y and T of
the copies, and does F*T multiply-adds. Then the lanes of each sum are added up, in float32, and the result is added to
sums in float64.

Arithmetic intensity: 2*F*T FLOP per F + T floats, from L1 and L2. Memory: x and y once; the copies have L times as many
pixels as x and stay in L2. The multiply-adds limit it.
Restrictions: at least as many output pixels as a vector has lanes.

Error: within a lane, the pixels of a few images; over all images, that of float64. The result does not depend on the
number of threads, unless the sums take more than SUMS_BYTES, so that each thread has its own.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.core.kernel import EPS32, CpuKernel, sum_bound
from ece408_op.problem import ATTRIBUTES, WEIGHT_GRADIENT, ConvProblem, WeightGradient
from ece408_op.runtime import memory
from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I64,
    I64_PTR,
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

from ._copies import Copies
from ._direct_plan import cheapest_cut, step_cycles, tile_sizes
from ._few_images import sharing
from ._ir import Pieces, each_piece, lane_sums, load

F64 = ir.DoubleType()
F64_PTR = F64.as_pointer()

#: Taps of a tile at most.
MOST_TAPS = 9

#: Bytes of copies and of y that a thread works on at a time, unless one image has more.
CHUNK_BYTES = 640 << 10

#: Images at a time at most, and sums at most that threads work on independently of each other.
MOST_IMAGES, PARTS = 16, 64

#: Bytes of all these sums at most, unless each thread's own take more.
SUMS_BYTES = 8 << 20


@dataclass(frozen=True)
class Plan:
    """The cut of one layer: filters per block, taps per tile, both within a group, and images at a time."""

    copies: Copies
    blocks: Pieces
    tiles: Pieces

    @property
    def layer(self) -> ConvProblem:
        """The layer, with a batch of one."""
        return self.copies.layer

    @property
    def lanes(self) -> int:
        """Floats in a vector."""
        return self.copies.lanes

    @property
    def pixels(self) -> int:
        """Pixels of an output plane."""
        return self.copies.pixels

    @property
    def image_copies(self) -> int:
        """Floats of an image's copies."""
        return self.layer.channels * self.copies.channel

    @property
    def images(self) -> int:
        """Images at a time."""
        floats = self.image_copies + self.layer.filters * self.pixels
        return max(1, min(MOST_IMAGES, CHUNK_BYTES // (4 * floats)))

    @property
    def tile_sums(self) -> int:
        """Room for a tile's sums: whole vectors."""
        return -(-self.blocks[0][0] * self.tiles[0][0] // self.lanes) * self.lanes

    @property
    def sums(self) -> int:
        """Room for the sums of all tiles of all groups."""
        count = sum(many for _, many in self.blocks) * sum(many for _, many in self.tiles)
        return self.layer.groups * count * self.tile_sums


@cache
def make_plan(layer: ConvProblem, lanes: int, registers: int) -> Plan:
    """Return the cheapest cut for vectors of ``lanes`` floats and that many registers."""
    sizes = sorted((f, t) for t, f in tile_sizes(registers, 1) if t <= MOST_TAPS)
    return Plan(Copies(layer, lanes), *cheapest_cut(layer.filters // layer.groups, layer.products, sizes, step_cycles))


@cache
def _order(plan: Plan) -> np.ndarray:
    """Return the number of each weight's sum among those of the tiles, shape (M, C / G * K * L)."""
    filters, taps = plan.layer.filters // plan.layer.groups, plan.layer.products
    order, number, first = np.empty((filters, taps), np.int64), 0, 0
    for f in (size for size, many in plan.blocks for _ in range(many)):
        start = 0
        for t in (size for size, many in plan.tiles for _ in range(many)):
            tile = number * plan.tile_sums + np.arange(f * t).reshape(f, t)
            order[first : first + f, start : start + t] = tile
            number, start = number + 1, start + t
        first += f
    groups = np.arange(plan.layer.groups)[:, None, None] * number * plan.tile_sums
    return (groups + order).reshape(-1, taps)


def _tile(module: ir.Module, plan: Plan, size: tuple[int, int], target: Cpu) -> ir.Function:
    """Build (y, copies, offsets, sums, images), which adds the sums of a tile of (filters, taps)."""
    filters, taps = size
    arguments = {"y": F32_PTR, "copies": F32_PTR, "offsets": I64_PTR, "sums": F64_PTR, "images": I64}
    b, values = new_function(module, f"tile_{filters}_{taps}", arguments, internal=True)
    y, copies, offsets, sums, images = values
    starts = [element(b, copies, b.load(element(b, offsets, t), align=8)) for t in range(taps)]
    vector, mask = ir.VectorType(F32, plan.lanes), ir.VectorType(ir.IntType(1), plan.lanes)
    zero = ir.Constant(vector, [0.0] * plan.lanes)

    def step(totals: list[Any], image: Any, pixel: Any, counted: int = 0) -> list[Any]:
        """Emit the products of a vector of pixels, without its first ``counted`` lanes."""

        def pixels(pointer: Any, stride: int) -> Any:
            value = load(b, element(b, pointer, b.add(offset(b, (image, stride)), pixel)), plan.lanes)
            if not counted:
                return value
            return b.select(ir.Constant(mask, [int(lane >= counted) for lane in range(plan.lanes)]), value, zero)

        gradients = [pixels(element(b, y, f * plan.pixels), plan.layer.filters * plan.pixels) for f in range(filters)]
        result = list(totals)
        for t, start in enumerate(starts):
            x = pixels(start, plan.image_copies)
            for f in range(filters):
                result[f * taps + t] = fma(b, target, gradients[f], x, totals[f * taps + t])
        return result

    with for_range(b, images, [zero] * (filters * taps)) as image:
        with for_range(b, plan.pixels // plan.lanes, image.values) as many:
            many.values = step(many.values, image.index, offset(b, (many.index, plan.lanes)))
        rest = plan.pixels % plan.lanes
        totals = many.values
        image.values = step(totals, image.index, const(plan.pixels - plan.lanes), plan.lanes - rest) if rest else totals
    wide = ir.VectorType(F64, plan.lanes)
    for first in range(0, filters * taps, plan.lanes):
        some = image.values[first : first + plan.lanes]
        total = b.fpext(lane_sums(b, some + [zero] * (plan.lanes - len(some))), wide)
        to = b.bitcast(element(b, sums, first), wide.as_pointer())
        b.store(b.fadd(b.load(to, align=8), total), to, align=8)
    b.ret_void()
    return b.function


@compiled_once
def _compiled(plan: Plan, target: Cpu) -> Any:
    """Compile (x, y, copies, offsets, sums, images), which adds the gradients of some images to the sums."""
    layer, module = plan.layer, ir.Module("pixel_reduction")
    copy = plan.copies.build(module)
    tiles = {(f, t): _tile(module, plan, (f, t), target) for f, _ in plan.blocks for t, _ in plan.tiles}
    block_count, tile_count = (sum(many for _, many in pieces) for pieces in (plan.blocks, plan.tiles))
    pointers = {"x": F32_PTR, "y": F32_PTR, "copies": F32_PTR, "offsets": I64_PTR, "sums": F64_PTR}
    b, (x, y, copies, offsets, sums, images) = new_function(module, "reduce", {**pointers, "images": I64})
    b.call(copy, [x, copies, b.mul(images, const(layer.channels))])
    of_group = layer.filters // layer.groups, layer.channels // layer.groups * plan.copies.channel
    with for_range(b, layer.groups) as group:
        for filters, above, block in each_piece(b, plan.blocks):
            gradients = element(b, y, offset(b, (group.index, of_group[0] * plan.pixels), (above, plan.pixels)))
            images_of_group = element(b, copies, offset(b, (group.index, of_group[1])))
            for taps, before, tile in each_piece(b, plan.tiles):
                number = offset(b, (offset(b, (group.index, block_count), (block, 1)), tile_count), (tile, 1))
                to = element(b, sums, offset(b, (number, plan.tile_sums)))
                b.call(tiles[filters, taps], [gradients, images_of_group, element(b, offsets, before), to, images])
    b.ret_void()
    return compile_function(module, "reduce", [ctypes.c_void_p] * 5 + [ctypes.c_int64], target)


def _plan(problem: ConvProblem) -> Plan:
    target = cpu()
    return make_plan(problem.convolution.with_batch(1), target.lanes, target.registers)


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done."""
    _compiled(_plan(problem), cpu())


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (M, C / G, K, L), from x and w, the gradient to y: the threads share the images."""
    plan = _plan(problem)
    reduce = _compiled(plan, cpu())
    chunks = -(-problem.batch // plan.images)
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
            reduce(memory.address(x[first:]), memory.address(w[first:]), *fixed, some)
        free.append(copies)

    share(work, parts, threads)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are no error
        total = sums.sum(axis=0) if parts > 1 else sums[0]
        out.reshape(-1)[...] = total[_order(plan).reshape(-1)]


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel cannot take a problem."""
    if not isinstance(problem, WeightGradient):
        return ["it computes weight gradients only"]
    lanes, pixels = cpu().lanes, problem.output_height * problem.output_width
    return [f"output pixels: at least {lanes} on this CPU, got {pixels}"] if pixels < lanes else []


def bound(problem: ConvProblem) -> float:
    """Return the error bound: a lane adds the products of a few images, the lanes are added, the result is rounded."""
    plan = _plan(problem)
    return sum_bound(plan.images * (plan.pixels // plan.lanes + 1) + int(math.log2(plan.lanes))) + 2 * EPS32


KERNEL = CpuKernel(
    "pixel_reduction",
    "weight gradients with pixels in the lanes, compiled for the layer",
    *sharing(run, prepare),
    limits,
    features=ATTRIBUTES | {WEIGHT_GRADIENT},
    error_bound=bound,
)
