"""tap_copies: a direct convolution with every attribute, from copies of the image, compiled for the layer.

A tap is an element (c, p, q) of a filter. Copies of the image make the pixels that a tap meets contiguous
(``_copies``):

    y[m][o] = sum over the taps of w[m][tap] * copies[offset of the tap + o]

A tile of F filters x P vectors of pixels stays in registers for all taps: each loads P vectors, broadcasts F weights
and does F*P multiply-adds. The last vector of a plane overlaps the one before it. Each group is copied and computed in
turn, so that the copies of a depthwise layer stay in L1 or L2. A data gradient of stride 1 is a convolution of y, with
filters turned by half a turn.

Arithmetic intensity: 2*C*K*L / G FLOP per output. Memory: each pixel is written L times to L2. The multiply-adds limit
layers of many filters per group, the loads depthwise ones.
Source: as ``direct``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, ConvProblem, DataGradient, WeightGradient
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

from . import im2col
from ._copies import Copies
from ._direct_plan import SPARE, cheapest_cut, step_cycles, tile_sizes
from ._direct_tile import store_first
from ._few_images import sharing
from ._ir import Pieces, broadcast, each_piece, load, minimum

#: Bytes of output that a thread claims at a time, unless one image has more.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The cut of one layer: filters per block, in a group, and vectors of pixels per tile."""

    copies: Copies
    blocks: Pieces
    tiles: Pieces

    @property
    def scratch(self) -> int:
        """Floats of scratch per thread: the copies of a group, and a vector that may be read beyond them."""
        layer = self.copies.layer
        return layer.channels // layer.groups * self.copies.channel + self.copies.lanes


@cache
def make_plan(layer: ConvProblem, lanes: int, registers: int) -> Plan:
    """Return the cheapest cut for vectors of ``lanes`` floats and that many registers."""
    copies = Copies(layer, lanes)
    filters, vectors = layer.filters // layer.groups, -(-copies.pixels // lanes)
    return Plan(copies, *cheapest_cut(filters, vectors, tile_sizes(registers, SPARE), step_cycles))


def _tile(module: ir.Module, plan: Plan, size: tuple[int, int], target: Cpu) -> ir.Function:
    """Build (x, x_last, w, y, y_last, offsets), which computes a tile of (filters, vectors).

    x is the tile's first pixel in the copies for the tap of offset 0; x_last its last vector there; y and y_last are
    the same in the output.
    """
    filters, vectors = size
    lanes, pixels = plan.copies.lanes, plan.copies.pixels
    arguments = {**dict.fromkeys(("x", "x_last", "w", "y", "y_last"), F32_PTR), "offsets": I64_PTR}
    b, (x, x_last, w, y, y_last, offsets) = new_function(module, f"tile_{filters}_{vectors}", arguments, internal=True)
    zero = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
    with for_range(b, plan.copies.layer.products, [zero] * (filters * vectors)) as tap:
        start = b.load(element(b, offsets, tap.index), align=8)
        here, last = element(b, x, start), element(b, x_last, start)
        values = [load(b, element(b, here, v * lanes) if v < vectors - 1 else last, lanes) for v in range(vectors)]
        sums = []
        for f in range(filters):
            weight = b.load(element(b, w, b.add(offset(b, (tap.index, filters)), const(f))), align=4)
            factor = broadcast(b, weight, lanes)
            sums += [fma(b, target, value, factor, tap.values[f * vectors + v]) for v, value in enumerate(values)]
        tap.values = sums
    for number, value in enumerate(tap.values):
        f, v = divmod(number, vectors)
        to = element(b, y, f * pixels + v * lanes) if v < vectors - 1 else element(b, y_last, f * pixels)
        store_first(b, value, to, min(pixels, lanes))
    b.ret_void()
    return b.function


@compiled_once
def _compiled(plan: Plan, target: Cpu) -> Any:
    """Compile (x, w, y, copies, offsets, images) for packed weights and copies whose padding is zeros."""
    layer, lanes, pixels = plan.copies.layer, plan.copies.lanes, plan.copies.pixels
    module = ir.Module("tap_copies")
    copy = plan.copies.build(module)
    tiles = {(f, p): _tile(module, plan, (f, p), target) for f, _ in plan.blocks for p, _ in plan.tiles}
    arguments = {**dict.fromkeys(("x", "w", "y", "copies"), F32_PTR), "offsets": I64_PTR, "images": I64}
    b, (x, w, y, copies, offsets, images) = new_function(module, "conv", arguments)
    channels, filters_of_group = layer.channels // layer.groups, layer.filters // layer.groups
    with for_range(b, images) as image, for_range(b, layer.groups) as group:
        number = b.add(offset(b, (image.index, layer.groups)), group.index)
        source = element(b, x, offset(b, (number, channels * layer.height * layer.width)))
        b.call(copy, [source, copies, const(channels)])
        outputs = element(b, y, offset(b, (number, filters_of_group * pixels)))
        weights = element(b, w, offset(b, (group.index, filters_of_group * layer.products)))
        for filters, above, _ in each_piece(b, plan.blocks):
            block = element(b, outputs, offset(b, (above, pixels)))
            packed = element(b, weights, offset(b, (above, layer.products)))
            for vectors, covered, _ in each_piece(b, plan.tiles):
                first = offset(b, (covered, lanes))
                last = minimum(b, b.add(first, const((vectors - 1) * lanes)), max(pixels - lanes, 0))
                pointers = [element(b, copies, first), element(b, copies, last), packed]
                pointers += [element(b, block, first), element(b, block, last), offsets]
                b.call(tiles[filters, vectors], pointers)
    b.ret_void()
    return compile_function(module, "conv", [ctypes.c_void_p] * 5 + [ctypes.c_int64], target)


def forward(problem: ConvProblem) -> ConvProblem:
    """Return the convolution, with a batch of one, that computes the problem; its padding may be negative."""
    if not isinstance(problem, DataGradient):
        return problem.with_batch(1)
    sizes = (problem.kernel, problem.kernel_width)
    top, left = (d * (size - 1) - p for d, size, p in zip(problem.dilate, sizes, problem.pad))
    _, channels, height, width = problem.y_shape
    pad, groups = (top, left), problem.groups
    return ConvProblem(
        1, channels, height, width, problem.channels, *sizes, pad=pad, dilate=problem.dilate, groups=groups
    )


def _pack(plan: Plan, problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """Return the weights as [group][block][tap][filter], flat."""
    layer, groups = plan.copies.layer, problem.groups
    if isinstance(problem, DataGradient):
        grouped = w.reshape(groups, -1, *w.shape[1:])[..., ::-1, ::-1]
        w = np.ascontiguousarray(grouped.transpose(0, 2, 1, 3, 4))
    rows = w.reshape(groups, layer.filters // groups, layer.products)
    if plan.blocks[0][0] == 1:
        return np.ascontiguousarray(rows).reshape(-1)
    blocks, first = [], 0
    for filters, count in plan.blocks:
        some = rows[:, first : first + filters * count].reshape(groups, count, filters, layer.products)
        blocks.append(some.transpose(0, 1, 3, 2).reshape(groups, -1))
        first += filters * count
    return np.ascontiguousarray(np.concatenate(blocks, axis=1)).reshape(-1)


def _plan(problem: ConvProblem) -> Plan:
    target = cpu()
    return make_plan(forward(problem), target.lanes, target.registers)


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done."""
    _compiled(_plan(problem), cpu())


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill the third operand: the threads claim some images at a time."""
    if isinstance(problem, DataGradient) and not np.isfinite(w).all():
        im2col.run(problem, x, w, out, threads)  # zeros around y must not meet infinity
        return
    plan = _plan(problem)
    conv, offsets, packed = _compiled(plan, cpu()), plan.copies.offsets(), _pack(plan, problem, w)
    memory.advise_huge_pages(out)
    count = max(1, min(CHUNK_BYTES * problem.batch // out.nbytes, -(-problem.batch // threads)))
    firsts = iter(range(0, problem.batch, count))

    def work(part: int) -> None:
        copies = memory.aligned(plan.scratch)
        copies.fill(0)
        last = [memory.address(array) for array in (copies, offsets)]
        for first in firsts:  # next() is atomic
            pointers = [memory.address(array) for array in (x[first:], packed, out[first:])]
            conv(*pointers, *last, min(count, problem.batch - first))

    share(work, threads, threads)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel cannot take a problem."""
    if isinstance(problem, WeightGradient):
        return ["it does not compute weight gradients"]
    if not isinstance(problem, DataGradient):
        return []
    found = [] if problem.stride == (1, 1) else ["it computes data gradients of stride 1 only"]
    reach = [d * (size - 1) for d, size in zip(problem.dilate, problem.w_shape[2:])]
    if any(p > most for p, most in zip(problem.pad, reach)):
        found.append(f"padding of a data gradient: less than the kernel, got {problem.pad}")
    return found


KERNEL = CpuKernel(
    "tap_copies",
    "every attribute, from copies in which a tap's pixels are contiguous, compiled for the layer",
    *sharing(run, prepare),
    limits,
    features=ATTRIBUTES | {DATA_GRADIENT},
)
