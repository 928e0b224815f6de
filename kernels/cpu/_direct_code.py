"""The machine code of ``direct`` for one plan, as LLVM IR; ``direct`` describes the algorithm.

The work on an image is divided into units: a unit is a pass over some channels, for a band of rows. While a unit
computes, each of its tiles shifts some rows of the next unit. After an image's last unit comes the next image's first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ece408_op.problem import PooledProblem
from ece408_op.runtime.host_cpu import Cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module, Operand, Value

from . import _tanh_pool
from ._direct_plan import DirectPlan
from ._ir import LINE_FLOATS, add_products, claimed_ranges, copy_rows, each_part, store_first

#: The arguments of the function ``conv``: see ``build``.
CONV = "x w y scratch counter:i64", "images most parts"


def _tile(module: Module, plan: DirectPlan, size: tuple[int, int], nontemporal: bool) -> Function:
    """Build the function that computes one tile, of (filters, vectors), in one pass.

    x, y         the tile's first pixel in the shifted copies, and in y
    x_last, y_last
                 the tile's last vector there, which may overlap the vector before it
    y_next       the next tile's first pixel in y, whose lines are prefetched
    w            the pass's packed weights of the block
    channels     the channels of this pass; the sums of ``done`` earlier channels are in y
    source, to   the next unit's rows, in the image and in its shifted copies. The tile shifts plan.rows_ahead rows of
                 each of the first ``ahead`` channels; each tap row does a share of the shifts
    later        the same rows of the unit after the next, which are prefetched
    """
    layer, lanes, (filters, vectors) = plan.layer, plan.lanes, size
    kernel, width, plane = layer.kernel, layer.kernel_width, layer.output_height * layer.output_width
    pointers, integers = "x x_last w y y_last y_next source later to", "channels done ahead"
    with Function(module, f"tile_{filters}_{vectors}", pointers, integers) as f:
        x, x_last, w, y, y_last, y_next, source, later, to, channels, done, ahead = f.arguments
        outputs = [
            y_last[m * plane] if v == vectors - 1 else y[v * lanes + m * plane]
            for m in range(filters)
            for v in range(vectors)
        ]
        sums = [f.vector(0.0)] * len(outputs)
        if plan.pass_count > 1:
            sums = [done.equals(0).select(zero, output.load(lanes)) for zero, output in zip(sums, outputs)]
        with f.loop(channels if plan.pass_count > 1 else layer.channels, sums) as c:
            with f.loop(kernel, c.values) as p:
                with f.when(c.index < ahead):
                    _shift_ahead(plan, (source, later, to), c.index, p.index)
                tap_row = c.index * kernel + p.index
                if not nontemporal:
                    _prefetch_outputs(plan, size, y_next, tap_row)
                start = c.index * plan.channel_stride + p.index * layer.output_width
                with f.loop(width, p.values) as q:
                    here, last = (pointer[start + q.index * plan.shift_stride] for pointer in (x, x_last))
                    values = [(here[v * lanes] if v < vectors - 1 else last).load(lanes) for v in range(vectors)]
                    q.values = add_products(q.values, values, w[(tap_row * width + q.index) * filters], filters)
                p.values = q.values
            c.values = p.values
        for value, output in zip(c.values, outputs):
            if plan.pixels < lanes:
                store_first(value, output, plan.pixels)
            elif nontemporal:
                output.store_nontemporal(value)
            else:
                output.store(value)
    return f


def _prefetch_outputs(plan: DirectPlan, size: tuple[int, int], y_next: Value, tap_row: Value) -> None:
    """Prefetch a share of the lines of y that the next tile writes; this tile's tap rows together prefetch them all."""
    filters, vectors = size
    plane = plan.layer.output_height * plan.layer.output_width
    lines = ceil_div(vectors * plan.lanes, LINE_FLOATS) + 1
    count = ceil_div(filters * lines, plan.layer.channels // plan.pass_count * plan.layer.kernel)
    for number in range(count):
        line = tap_row * count + number
        y_next[(line // lines).min(filters - 1) * plane + line % lines * LINE_FLOATS].prefetch(write=True)


def _shift_ahead(plan: DirectPlan, pointers: tuple[Value, Value, Value], c: Value, p: Value) -> None:
    """Do the p-th of K shares of the L shifts of channel c, for plan.rows_ahead rows of the next unit.

    Also prefetch a share of the rows of the unit after the next or, without copies, of the next unit.
    """
    layer, (source, later, to) = plan.layer, pointers
    channel = c * (layer.height * layer.width)
    count = ceil_div(ceil_div(plan.rows_ahead * layer.width, LINE_FLOATS) + 1, layer.kernel)
    for number in range(count):
        (source if plan.in_place else later)[channel][p * (count * LINE_FLOATS) + number * LINE_FLOATS].prefetch()
    if plan.in_place:
        return
    shifts = ceil_div(layer.kernel_width, layer.kernel)
    for number in range(shifts):
        q = (p * shifts + number).min(layer.kernel_width - 1)
        shifted = to[c * plan.channel_stride + q * plan.shift_stride]
        _shift_rows(plan, source[channel][q], shifted, plan.rows_ahead)


def _shift_rows(plan: DirectPlan, source: Value, to: Value, rows: Operand) -> None:
    """Emit a copy of ``rows`` rows of one channel, output_width columns each, from the image to a shifted copy."""
    columns = plan.layer.output_width
    copy_rows(plan.lanes, columns, (source, plan.layer.width), (to, columns), rows)


def _shift(module: Module, plan: DirectPlan) -> Function:
    """Build (x, shifted, first, last), which fills channels first to last - 1 of a unit's shifted copies.

    x is the unit's first row in its first channel. The function does nothing unless first < last.
    """
    layer = plan.layer
    with Function(module, "shift", "x shifted", "first last") as f:
        x, shifted, first, last = f.arguments
        count = last - first
        with f.when(count > 0), f.range(count) as number, f.range(layer.kernel_width) as q:
            c = first + number
            to = shifted[c * plan.channel_stride + q * plan.shift_stride]
            _shift_rows(plan, x[c * (layer.height * layer.width) + q], to, plan.shifted_rows)
    return f


class _Unit(NamedTuple):
    """A unit: its first row in its first channel of x, its first row in y, its channels, the channels before them."""

    x: Value
    y: Value
    channels: Value
    done: Value


def _compute(module: Module, plan: DirectPlan, nontemporal: bool) -> Function:
    """Build the function that computes one unit, whose shifted rows are complete; its arguments are as in ``_tile``.

    The next unit has ``ahead`` channels, whose rows go from ``source`` to ``to``; the unit after begins at ``later``.
    """
    layer, lanes, plane = plan.layer, plan.lanes, plan.layer.output_height * plan.layer.output_width
    sizes = [(filters, vectors) for filters, _ in plan.blocks for vectors, _ in plan.tiles]
    tiles = {size: _tile(module, plan, size, nontemporal) for size in sizes}
    with Function(module, "compute", "w y shifted source later to", "channels done ahead") as f:
        w, y, shifted, source, later, to, channels, done, ahead = f.arguments
        for filters, above, block in each_part(f, plan.blocks):
            weights = w[above * layer.products + done * (layer.products // layer.channels * filters)]
            outputs = y[above * plane]
            for vectors, covered, count in each_part(f, plan.tiles):
                pixel = covered * lanes
                last = (pixel + (vectors - 1) * lanes).min(max(plan.pixels - lanes, 0))
                following = pixel + vectors * lanes
                following = (following < plan.pixels).select(following, filters * plane)
                row = block * (plan.tile_count * plan.rows_ahead) + count * plan.rows_ahead
                ahead_here = (row < plan.shifted_rows).select(ahead, 0)
                row = row.min(plan.shifted_rows - plan.rows_ahead)
                pointers = [shifted[pixel], shifted[last], weights, outputs[pixel], outputs[last], outputs[following]]
                pointers += [source[row * layer.width], later[row * layer.width], to[row * layer.output_width]]
                tiles[filters, vectors](*pointers, channels, done, ahead_here)
    return f


def build(plan: DirectPlan, target: Cpu, nontemporal: bool, pooled: PooledProblem | None = None) -> Function:
    """Build the function ``conv``(x, w, y, scratch, counter, images, most, parts) of one layer.

    ``nontemporal`` stores y past the caches: y must begin at a cache line, and plan.nontemporal must hold. With
    ``pooled``, y gets the tanh of the maxima; an image's convolution stays in scratch, after the plan's scratch. The
    last arguments are those of ``_ir.claimed_ranges``.
    """
    layer, module = plan.layer, Module("direct", target)
    shift = _shift(module, plan)
    compute = _compute(module, plan, nontemporal)
    pool = _tanh_pool.build(module, pooled) if pooled else None
    x_size, y_size = math.prod(layer.x_shape[1:]), math.prod((pooled or layer).y_shape[1:])
    with Function(module, "conv", *CONV, exported=True) as f:
        x, w, y, scratch, counter, images, most, parts = f.arguments
        stage = scratch[plan.scratch]  # an image's convolution, if pooling follows

        def unit_of(number: Value) -> _Unit:
            """Emit the addresses and sizes of a unit, counted from the first unit of image 0 on."""
            image, in_image = number // plan.units, number % plan.units
            band, in_band = in_image // plan.pass_count, in_image % plan.pass_count
            row = (band * plan.rows).min(layer.output_height - plan.rows)
            done, end = ((in_band + n) * layer.channels // plan.pass_count for n in range(2))
            pixels = image * x_size + done * (layer.height * layer.width) + row * layer.width
            outputs = stage if pool else y[image * y_size]
            return _Unit(x[pixels], outputs[row * layer.output_width], end - done, done)

        with claimed_ranges(counter, images, most, parts) as (first, count):
            begin, copies = first * plan.units, [] if plan.in_place else [scratch, scratch[plan.copies]]
            if copies:
                unit = unit_of(begin)
                shift(unit.x, scratch, 0, unit.channels)
            with f.loop(count * plan.units, copies) as loop:
                number = begin + loop.index
                # If another thread has the next images, their prefetch is useless, but harmless.
                unit, after, later = (unit_of(number + n) for n in range(3))
                shifted, to = loop.values or (unit.x, unit.x)
                ahead = (loop.index + 1 < count * plan.units).select(after.channels, 0)
                compute(w, unit.y, shifted, after.x, later.x, to, unit.channels, unit.done, ahead)
                if copies:
                    shift(after.x, to, unit.channels, ahead)  # of a channel more than this unit has
                    loop.values = [to, shifted]
                if pool:
                    with f.when(((number + 1) % plan.units).equals(0)):
                        pool(stage, y[number // plan.units * y_size])
        if nontemporal:
            f.nontemporal_fence()
    return f
