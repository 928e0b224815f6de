"""direct: a convolution blocked for registers and caches, compiled for the layer.

The output plane of an image is one row of OH*OW pixels, cut into vectors. Shifted copies of the image make a
tap's pixels contiguous there, with nothing wasted at the ends of rows:

    shifted[q][c][r*OW + j] = x[c][r][j + q]                       for q in 0..K-1, j in 0..OW-1
    y[m][o] = sum over c, p, q of w[m][c][p][q] * shifted[q][c][p*OW + o]

A tile of F filters x P vectors stays in registers while c, p and q run: each tap loads P vectors and F
weights (one number to all lanes) and does F*P multiply-adds. What is left at the plane's end is a vector that
overlaps the one before it.

Arithmetic: 2*C*K*K operations an output. Bytes: shifting writes K times the image and its products stay in the
second-level cache, band of rows by band; weights are packed [block of F filters][c][p][q][filter], so that a tap's
lie side by side; outputs are written once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op import memory
from ece408_op.kernel import CpuKernel
from ece408_op.llvm import (
    F32,
    F32_PTR,
    I32,
    I64,
    I64_PTR,
    LOCK,
    Cpu,
    compile_function,
    const,
    cpu,
    element,
    fma,
    for_range,
    new_function,
    offset,
)
from ece408_op.parallel import share
from ece408_op.problem import ConvProblem

from .direct_plan import Plan, make_plan

#: Bytes of output that a thread fills before it asks for more work.
CHUNK_BYTES = 4 << 20

#: Columns of a filter that are written out one after the other; in larger ones they are a loop.
UNROLL = 16


def _tile(module: ir.Module, plan: Plan, filters: int, vectors: int, target: Cpu) -> ir.Function:
    """A function for one tile: (x, x_last, w, y, y_last).

    ``x`` and ``y`` are at the tile's first pixel, ``x_last`` and ``y_last`` at its last vector, which may overlap the
    one before; ``w`` is at the block's packed weights.
    """
    layer, lanes = plan.layer, plan.lanes
    vector = ir.VectorType(F32, lanes)
    name = f"tile_{filters}_{vectors}"
    b, (x, x_last, w, y, y_last) = new_function(
        module, name, {"x": F32_PTR, "x_last": F32_PTR, "w": F32_PTR, "y": F32_PTR, "y_last": F32_PTR}, internal=True
    )

    def at(first: Any, last: Any, v: int, place: int) -> Any:
        start = element(b, last, place) if v == vectors - 1 else element(b, first, v * lanes + place)
        return b.bitcast(start, vector.as_pointer())

    def tap(sums: list[Any], here: Any, last: Any, weights: Any, q: int) -> list[Any]:
        pixels = [b.load(at(here, last, v, q * plan.shift_stride), align=4) for v in range(vectors)]
        result = []
        for f in range(filters):
            weight = _all_lanes(b, b.load(element(b, weights, q * filters + f), align=4), lanes)
            result += [fma(b, target, pixels[v], weight, sums[f * vectors + v]) for v in range(vectors)]
        return result

    zero = ir.Constant(vector, [0.0] * lanes)
    with for_range(b, layer.channels, [zero] * (filters * vectors)) as c:
        with for_range(b, layer.kernel, c.values) as p:
            place = offset(b, (c.index, plan.channel_stride), (p.index, layer.output_width))
            here, last = element(b, x, place), element(b, x_last, place)
            row = offset(b, (c.index, layer.kernel**2 * filters), (p.index, layer.kernel * filters))
            weights = element(b, w, row)
            if layer.kernel <= UNROLL:
                for q in range(layer.kernel):
                    p.values = tap(p.values, here, last, weights, q)
            else:
                with for_range(b, layer.kernel, p.values) as many:
                    shift = offset(b, (many.index, plan.shift_stride))
                    step = element(b, weights, offset(b, (many.index, filters)))
                    many.values = tap(many.values, element(b, here, shift), element(b, last, shift), step, 0)
                p.values = many.values
        c.values = p.values
    plane = layer.output_height * layer.output_width
    for f in range(filters):
        for v in range(vectors):
            target_place = at(y, y_last, v, f * plane)
            if plan.pixels < lanes:
                _store_first(b, c.values[f * vectors + v], target_place, plan.pixels)
            else:
                b.store(c.values[f * vectors + v], target_place, align=4)
    b.ret_void()
    return b.function


def _all_lanes(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(F32, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _store_first(b: ir.IRBuilder, value: Any, pointer: Any, count: int) -> None:
    """Store the first ``count`` lanes only."""
    scalar = b.bitcast(pointer, F32_PTR)
    for lane in range(count):
        b.store(b.extract_element(value, ir.Constant(I32, lane)), element(b, scalar, lane), align=4)


def _shift(module: ir.Module, plan: Plan) -> ir.Function:
    """A function (x, shifted) that fills the shifted copies of a band whose first row, first channel is at x."""
    layer = plan.layer
    width, columns = layer.width, layer.output_width
    b, (x, shifted) = new_function(module, "shift", {"x": F32_PTR, "shifted": F32_PTR}, internal=True)
    # A row is copied in vectors of the largest power of two that fits; the last overlaps, so that none
    # reads beyond the row.
    lanes = 1 << (min(plan.lanes, columns).bit_length() - 1)
    vector = ir.VectorType(F32, lanes) if lanes > 1 else F32
    rows = plan.rows + layer.kernel - 1
    with for_range(b, layer.channels) as c, for_range(b, rows) as r, for_range(b, layer.kernel) as q:
        source = element(b, x, offset(b, (c.index, layer.height * width), (r.index, width), (q.index, 1)))
        place = offset(b, (q.index, plan.shift_stride), (c.index, plan.channel_stride), (r.index, columns))
        to = element(b, shifted, place)

        def copy(start: Any, source: Any = source, to: Any = to) -> None:
            value = b.load(b.bitcast(element(b, source, start), vector.as_pointer()), align=4)
            b.store(value, b.bitcast(element(b, to, start), vector.as_pointer()), align=4)

        if columns // lanes <= UNROLL:
            for number in range(columns // lanes):
                copy(number * lanes)
        else:
            with for_range(b, columns // lanes) as part:
                copy(offset(b, (part.index, lanes)))
        if columns % lanes:
            copy(columns - lanes)
    b.ret_void()
    return b.function


def build(plan: Plan, target: Cpu) -> ir.Module:
    """The module with ``conv``(x, w, y, scratch, counter, images, chunk): takes ``chunk`` images at a time from the
    counter that all threads share, until all are taken. Hold llvm.LOCK."""
    layer, lanes = plan.layer, plan.lanes
    module = ir.Module("direct")
    shift = _shift(module, plan)
    tiles = {
        (filters, vectors): _tile(module, plan, filters, vectors, target)
        for filters, _ in plan.blocks
        for vectors, _ in plan.tiles
    }
    b, (x, w, y, scratch, counter, images, chunk) = new_function(
        module,
        "conv",
        {"x": F32_PTR, "w": F32_PTR, "y": F32_PTR, "scratch": F32_PTR, "counter": I64_PTR, "images": I64, "chunk": I64},
    )
    plane = layer.output_height * layer.output_width
    take, some, finish = (b.append_basic_block(word) for word in ("take", "some", "finish"))
    b.branch(take)
    b.position_at_end(take)
    first = b.atomic_rmw("add", counter, chunk, "monotonic")
    b.cbranch(b.icmp_signed("<", first, images), some, finish)
    b.position_at_end(finish)
    b.ret_void()
    b.position_at_end(some)
    left = b.sub(images, first)
    with for_range(b, b.select(b.icmp_signed("<", chunk, left), chunk, left)) as loop, for_range(b, plan.bands) as band:
        image = b.add(first, loop.index)
        row = _at_most(b, offset(b, (band.index, plan.rows)), layer.output_height - plan.rows)
        corner = offset(b, (image, layer.channels * layer.height * layer.width), (row, layer.width))
        b.call(shift, [element(b, x, corner), scratch])
        start = element(b, y, offset(b, (image, layer.filters * plane), (row, layer.output_width)))
        done = 0
        for filters, blocks in plan.blocks:
            with for_range(b, blocks) as block:
                number = b.add(const(done), offset(b, (block.index, filters)))
                weights = element(b, w, offset(b, (number, layer.products)))
                planes = element(b, start, offset(b, (number, plane)))
                covered = 0
                for vectors, count in plan.tiles:
                    with for_range(b, count) as tile:
                        pixel = b.add(const(covered * lanes), offset(b, (tile.index, vectors * lanes)))
                        last = _at_most(b, b.add(pixel, const((vectors - 1) * lanes)), max(plan.pixels - lanes, 0))
                        b.call(
                            tiles[filters, vectors],
                            [
                                element(b, scratch, pixel),
                                element(b, scratch, last),
                                weights,
                                element(b, planes, pixel),
                                element(b, planes, last),
                            ],
                        )
                    covered += vectors * count
            done += filters * blocks
    b.branch(take)
    return module


def _at_most(b: ir.IRBuilder, value: Any, limit: int) -> Any:
    return b.select(b.icmp_signed("<", value, const(limit)), value, const(limit))


@cache
def _compiled(layer: ConvProblem, target: Cpu) -> tuple[Plan, Any]:
    plan = make_plan(layer, target.lanes, target.registers)
    with LOCK:
        conv = compile_function(build(plan, target), "conv", [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2, target)
    return plan, conv


def pack(plan: Plan, w: np.ndarray) -> np.ndarray:
    """The weights, shape (M, C, K, K), block by block as [block][c][p][q][filter], flat."""
    packed = np.empty(w.size, np.float32)
    flat = w.reshape(plan.layer.filters, plan.layer.products)
    done = 0
    for filters, blocks in plan.blocks:
        part = slice(done, done + filters * blocks)
        to = packed[part.start * plan.layer.products : part.stop * plan.layer.products]
        blocked = flat[part].reshape(blocks, filters, plan.layer.products)
        to.reshape(blocks, plan.layer.products, filters)[...] = blocked.transpose(0, 2, 1)
        done = part.stop
    return packed


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): the images are shared out among the threads, some megabytes at a time."""
    plan, conv = _compiled(problem.with_batch(1), cpu())
    memory.advise_huge_pages(out)
    packed = pack(plan, w)
    counter = np.zeros(1, np.int64)
    image_bytes = out.nbytes // problem.batch
    chunk = max(1, min(CHUNK_BYTES // image_bytes, -(-problem.batch // (4 * threads))))

    def work(part: int) -> None:
        arrays = (x, packed, out, memory.aligned(plan.scratch), counter)
        conv(*(array.ctypes.data for array in arrays), problem.batch, chunk)

    share(work, threads, threads)


KERNEL = CpuKernel("direct", "tiles of filters x pixels in registers, compiled for the layer", run)
