"""The machine code of ``direct``: what direct.py says in words, as LLVM IR for one plan.

The work on an image is cut into units: a pass over some channels, for a band of rows. While a unit computes, the next
one's rows are shifted, the next image's first unit's included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from ece408_op.runtime.llvm import (
    F32_PTR,
    I64,
    Cpu,
    const,
    element,
    for_range,
    new_function,
    nontemporal_fence,
    offset,
)

from ._direct_images import at_most, new_conv, taken_images
from ._direct_outputs import Outputs
from ._direct_plan import Pieces, Plan
from ._direct_tile import shift_rows, tile
from ._tanh_pool import Pooling


def _shift(module: ir.Module, plan: Plan) -> ir.Function:
    """A function (x, shifted, first, last) that fills all rows of channels first to last - 1 of a unit's copies.

    x is at the unit's first row in its first channel. Nothing is done where last is not above first.
    """
    layer = plan.layer
    arguments = {"x": F32_PTR, "shifted": F32_PTR, "first": I64, "last": I64}
    b, (x, shifted, first, last) = new_function(module, "shift", arguments, internal=True)
    count = b.sub(last, first)
    with b.if_then(b.icmp_signed(">", count, const(0))), for_range(b, count) as loop, for_range(b, layer.kernel) as q:
        c = b.add(first, loop.index)
        source = element(b, x, offset(b, (c, layer.height * layer.width), (q.index, 1)))
        to = element(b, shifted, offset(b, (c, plan.channel_stride), (q.index, plan.shift_stride)))
        shift_rows(b, plan, source, to, plan.shifted_rows)
    b.ret_void()
    return b.function


class _Unit(NamedTuple):
    """Where a unit lies: ``x`` its first row in its first channel, ``y`` its first row; channels in it, and before."""

    x: Any
    y: Any
    channels: Any
    done: Any


def _unit(b: ir.IRBuilder, plan: Plan, x: Any, y: Any, number: Any) -> _Unit:
    """Unit ``number`` of an image, which ``x`` and ``y`` are at the start of."""
    layer = plan.layer
    (size, many), passes = plan.passes[0], plan.pass_count
    band, turn = b.udiv(number, const(passes)), b.urem(number, const(passes))
    row = at_most(b, offset(b, (band, plan.rows)), layer.output_height - plan.rows)
    smaller = b.icmp_signed(">=", turn, const(many))  # by one channel each
    channels = b.select(smaller, const(plan.passes[-1][0]), const(size))
    done = b.sub(offset(b, (turn, size)), b.select(smaller, b.sub(turn, const(many)), const(0)))
    pixels = offset(b, (done, layer.height * layer.width), (row, layer.width))
    return _Unit(element(b, x, pixels), element(b, y, offset(b, (row, layer.output_width))), channels, done)


def _compute(module: ir.Module, plan: Plan, target: Cpu, streamed: bool) -> ir.Function:
    """A function (w, y, shifted, source, later, to, channels, done, ahead) for one unit, whose shifted rows are there.

    The rows of the next unit, of ``ahead`` channels, go from ``source`` to ``to``; the one after begins at ``later``.
    """
    layer, lanes, plane = plan.layer, plan.lanes, plan.layer.output_height * plan.layer.output_width
    tiles = {
        (filters, vectors): tile(module, plan, (filters, vectors), target, streamed)
        for filters, _ in plan.blocks
        for vectors, _ in plan.tiles
    }
    pointers, numbers = ("w", "y", "shifted", "source", "later", "to"), ("channels", "done", "ahead")
    arguments = {**dict.fromkeys(pointers, F32_PTR), **dict.fromkeys(numbers, I64)}
    b, (w, y, shifted, source, later, to, channels, done, ahead) = new_function(
        module, "compute", arguments, internal=True
    )
    for filters, number, block in each_piece(b, plan.blocks):
        weights = element(b, w, offset(b, (number, layer.products), (done, layer.kernel**2 * filters)))
        outputs = element(b, y, offset(b, (number, plane)))
        for vectors, covered, count in each_piece(b, plan.tiles):
            pixel = offset(b, (covered, lanes))
            last = at_most(b, b.add(pixel, const((vectors - 1) * lanes)), max(plan.pixels - lanes, 0))
            following = b.add(pixel, const(vectors * lanes))
            inside = b.icmp_signed("<", following, const(plan.pixels))
            following = b.select(inside, following, const(filters * plane))
            row = offset(b, (block, plan.tile_count * plan.ahead), (count, plan.ahead))
            any_left = b.icmp_signed("<", row, const(plan.shifted_rows))
            row = at_most(b, row, plan.shifted_rows - plan.ahead)
            places = [
                *(element(b, shifted, place) for place in (pixel, last)),
                weights,
                *(element(b, outputs, place) for place in (pixel, last, following)),
                *(element(b, array, offset(b, (row, layer.width))) for array in (source, later)),
                element(b, to, offset(b, (row, layer.output_width))),
            ]
            b.call(tiles[filters, vectors], [*places, channels, done, b.select(any_left, ahead, const(0))])
    b.ret_void()
    return b.function


def each_piece(b: ir.IRBuilder, pieces: Pieces) -> Iterator[tuple[int, Any, Any]]:
    """Each (size, count) pair as a loop: a piece's size, what the pieces before it cover, and how many they are."""
    covered = number = 0
    for size, count in pieces:
        with for_range(b, count) as loop:
            yield size, b.add(const(covered), offset(b, (loop.index, size))), b.add(const(number), loop.index)
        covered += size * count
        number += count


def build(plan: Plan, target: Cpu, streamed: bool, pooling: Pooling | None = None) -> ir.Module:
    """The module of one layer, with the function ``conv`` of direct_images.

    ``streamed`` writes y past the caches: y must begin at a cache line then, and plan.whole_lines hold. With
    ``pooling``, y gets the tanh of the maxima; an image's convolution stays behind the plan's own scratch.
    """
    module = ir.Module("direct")
    shift = _shift(module, plan)
    compute = _compute(module, plan, target, streamed)
    outputs = Outputs(module, plan.layer, target, pooling, plan.scratch)
    conv = new_conv(module)
    b = conv.b
    x_size = math.prod(plan.layer.x_shape[1:])

    def unit_of(image: Any, number: Any, y: Any = None) -> _Unit:
        x = element(b, conv.x, offset(b, (image, x_size)))
        return _unit(b, plan, x, conv.y if y is None else y, number)

    def before(first: Any) -> list[Any]:
        unit = unit_of(first, const(0))
        b.call(shift, [unit.x, conv.scratch, const(0), unit.channels])
        return [conv.scratch, element(b, conv.scratch, plan.copies)]

    with taken_images(conv, before) as each:
        y = outputs.of(conv, each.image)
        with for_range(b, plan.units, each.values) as loop:
            unit = unit_of(each.image, loop.index, y)
            number = b.add(loop.index, const(1))
            last = b.icmp_signed("==", number, const(plan.units))
            after = unit_of(b.select(last, each.following, each.image), b.select(last, const(0), number))
            # Where a thread goes on with other images than the next, what is asked for early is not what it needs.
            later = b.add(loop.index, const(2))
            later_image = b.add(each.image, b.udiv(later, const(plan.units)))
            later = unit_of(later_image, b.urem(later, const(plan.units)))
            shifted, to = loop.values
            ahead = b.select(b.or_(b.not_(last), each.goes_on), after.channels, const(0))
            b.call(compute, [conv.w, unit.y, shifted, after.x, later.x, to, unit.channels, unit.done, ahead])
            b.call(shift, [after.x, to, unit.channels, ahead])  # of a channel more than this unit has
            loop.values = [to, shifted]
        each.values = loop.values
        outputs.done(conv, each.image)
    if streamed:
        nontemporal_fence(b)
    b.ret_void()
    return module
