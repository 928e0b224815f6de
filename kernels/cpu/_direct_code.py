"""The machine code of ``direct`` for one plan, as LLVM IR; ``direct`` describes the algorithm.

The work on an image is divided into units: a pass over some channels, for a band of rows. While a unit computes, it
shifts the next unit's rows, those of the next image's first unit included.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir

from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import Cpu, const, element, for_range, nontemporal_fence, offset

from . import _tanh_pool
from ._direct_plan import DirectPlan
from ._direct_tile import shift_rows, tile
from ._ir import ConvFunction, claimed_images, each_piece, function, minimum
from ._tanh_pool import Pooling


class Outputs:
    """Where an image's convolution goes: to y, or with ``pooling`` to scratch from float ``start`` on, then to y."""

    def __init__(self, module: ir.Module, layer: ConvProblem, target: Cpu, pooling: Pooling | None, start: int) -> None:
        self._size = pooling.size if pooling else math.prod(layer.y_shape[1:])
        self._pool = _tanh_pool.build(module, pooling, target) if pooling else None
        self._start = start

    def of(self, conv: ConvFunction, image: Any) -> Any:
        """Return the pointer for the convolution of an image: filters x rows x columns."""
        return element(conv.b, conv.scratch, self._start) if self._pool else self._y(conv, image)

    def done(self, conv: ConvFunction, image: Any) -> None:
        """Emit the pooling, if any, of an image whose convolution is complete."""
        if self._pool:
            conv.b.call(self._pool, [self.of(conv, image), self._y(conv, image)])

    def _y(self, conv: ConvFunction, image: Any) -> Any:
        return element(conv.b, conv.y, offset(conv.b, (image, self._size)))


def _shift(module: ir.Module, plan: DirectPlan) -> ir.Function:
    """Build (x, shifted, first, last), which fills channels first to last - 1 of a unit's shifted copies.

    x is the unit's first row in its first channel. Nothing is done if last is not above first.
    """
    layer = plan.layer
    b, (x, shifted, first, last) = function(module, "shift", "x shifted", "first last")
    count = b.sub(last, first)
    with (
        b.if_then(b.icmp_signed(">", count, const(0))),
        for_range(b, count) as loop,
        for_range(b, layer.kernel_width) as q,
    ):
        c = b.add(first, loop.index)
        source = element(b, x, offset(b, (c, layer.height * layer.width), (q.index, 1)))
        to = element(b, shifted, offset(b, (c, plan.channel_stride), (q.index, plan.shift_stride)))
        shift_rows(b, plan, source, to, plan.shifted_rows)
    b.ret_void()
    return b.function


class _Unit(NamedTuple):
    """A unit's first row in its first channel of x, its first row in y, its channels, and the channels before them."""

    x: Any
    y: Any
    channels: Any
    done: Any


def _unit(b: ir.IRBuilder, plan: DirectPlan, x: Any, y: Any, number: Any) -> _Unit:
    """Emit the addresses and sizes of unit ``number`` of the image at x and y."""
    layer = plan.layer
    (size, many), passes = plan.passes[0], plan.pass_count
    band, number_in_band = b.udiv(number, const(passes)), b.urem(number, const(passes))
    row = minimum(b, offset(b, (band, plan.rows)), layer.output_height - plan.rows)
    smaller = b.icmp_signed(">=", number_in_band, const(many))  # by one channel each
    channels = b.select(smaller, const(plan.passes[-1][0]), const(size))
    larger_done = offset(b, (number_in_band, size))
    done = b.sub(larger_done, b.select(smaller, b.sub(number_in_band, const(many)), const(0)))
    pixels = offset(b, (done, layer.height * layer.width), (row, layer.width))
    return _Unit(element(b, x, pixels), element(b, y, offset(b, (row, layer.output_width))), channels, done)


def _compute(module: ir.Module, plan: DirectPlan, target: Cpu, nontemporal: bool) -> ir.Function:
    """Build the function that computes one unit, whose shifted rows are complete; its arguments are those of tiles.

    The next unit has ``ahead`` channels, whose rows go from ``source`` to ``to``; the one after begins at ``later``.
    """
    layer, lanes, plane = plan.layer, plan.lanes, plan.layer.output_height * plan.layer.output_width
    tiles = {
        (filters, vectors): tile(module, plan, (filters, vectors), target, nontemporal)
        for filters, _ in plan.blocks
        for vectors, _ in plan.tiles
    }
    b, arguments = function(module, "compute", "w y shifted source later to", "channels done ahead")
    w, y, shifted, source, later, to, channels, done, ahead = arguments
    for filters, number, block in each_piece(b, plan.blocks):
        weights = element(b, w, offset(b, (number, layer.products), (done, layer.products // layer.channels * filters)))
        outputs = element(b, y, offset(b, (number, plane)))
        for vectors, covered, count in each_piece(b, plan.tiles):
            pixel = offset(b, (covered, lanes))
            last = minimum(b, b.add(pixel, const((vectors - 1) * lanes)), max(plan.pixels - lanes, 0))
            following = b.add(pixel, const(vectors * lanes))
            inside = b.icmp_signed("<", following, const(plan.pixels))
            following = b.select(inside, following, const(filters * plane))
            row = offset(b, (block, plan.tile_count * plan.rows_ahead), (count, plan.rows_ahead))
            any_left = b.icmp_signed("<", row, const(plan.shifted_rows))
            row = minimum(b, row, plan.shifted_rows - plan.rows_ahead)
            pointers = [
                *(element(b, shifted, start) for start in (pixel, last)),
                weights,
                *(element(b, outputs, start) for start in (pixel, last, following)),
                *(element(b, array, offset(b, (row, layer.width))) for array in (source, later)),
                element(b, to, offset(b, (row, layer.output_width))),
            ]
            b.call(tiles[filters, vectors], [*pointers, channels, done, b.select(any_left, ahead, const(0))])
    b.ret_void()
    return b.function


def build(plan: DirectPlan, target: Cpu, nontemporal: bool, pooling: Pooling | None = None) -> ir.Module:
    """Build the module of one layer, with its function ``conv`` (see ``_ir.ConvFunction``).

    ``nontemporal`` stores y past the caches: y must begin at a cache line, and plan.nontemporal must hold. With
    ``pooling``, y gets the tanh of the maxima; an image's convolution stays in scratch behind the plan's own.
    """
    module = ir.Module("direct")
    shift = _shift(module, plan)
    compute = _compute(module, plan, target, nontemporal)
    outputs = Outputs(module, plan.layer, target, pooling, plan.scratch)
    conv = ConvFunction.begin(module)
    b = conv.b
    x_size = math.prod(plan.layer.x_shape[1:])

    def unit_of(image: Any, number: Any, y: Any = None) -> _Unit:
        x = element(b, conv.x, offset(b, (image, x_size)))
        return _unit(b, plan, x, conv.y if y is None else y, number)

    def before(first: Any) -> list[Any]:
        if plan.in_place:
            return []
        unit = unit_of(first, const(0))
        b.call(shift, [unit.x, conv.scratch, const(0), unit.channels])
        return [conv.scratch, element(b, conv.scratch, plan.copies)]

    with claimed_images(conv, before) as each:
        y = outputs.of(conv, each.image)
        with for_range(b, plan.units, each.values) as loop:
            unit = unit_of(each.image, loop.index, y)
            number = b.add(loop.index, const(1))
            last = b.icmp_signed("==", number, const(plan.units))
            after = unit_of(b.select(last, each.following, each.image), b.select(last, const(0), number))
            # If the thread's next image is not the following one, the prefetch is useless, and harmless.
            later = b.add(loop.index, const(2))
            later_image = b.add(each.image, b.udiv(later, const(plan.units)))
            later = unit_of(later_image, b.urem(later, const(plan.units)))
            shifted, to = (unit.x, unit.x) if plan.in_place else loop.values
            ahead = b.select(b.or_(b.not_(last), each.has_next), after.channels, const(0))
            b.call(compute, [conv.w, unit.y, shifted, after.x, later.x, to, unit.channels, unit.done, ahead])
            if not plan.in_place:
                b.call(shift, [after.x, to, unit.channels, ahead])  # of a channel more than this unit has
                loop.values = [to, shifted]
        each.values = loop.values
        outputs.done(conv, each.image)
    if nontemporal:
        nontemporal_fence(b)
    b.ret_void()
    return module
