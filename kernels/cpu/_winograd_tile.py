"""The inner loop of ``winograd``: one class of products, for some filters and some neighbouring pairs of columns."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from ece408_op.runtime.llvm import F32, F32_PTR, I64, I64_PTR, Cpu, element, fma, for_range, new_function, offset

from ._direct_tile import all_lanes
from ._winograd_plan import Step, WinogradPlan

#: Channels that are written out one after the other.
UNROLL = 4


class Kind(NamedTuple):
    """What makes one function differ from another: its tile, and what becomes of the sums."""

    filters: int
    pairs: int
    begins: bool
    adds: bool
    subtracts: bool
    last: bool

    @classmethod
    def of(cls, step: Step, filters: int, pairs: int) -> Kind:
        """The kind that a step needs for a tile of that size."""
        return cls(filters, pairs, step.begin is not None, step.add is not None, step.less is not None, step.last)


def step_tile(module: ir.Module, plan: WinogradPlan, kind: Kind, target: Cpu) -> ir.Function:
    """A function (table, x, w, begin, add, to, less, count) for a step's ``count`` products of all channels.

    ``table`` has the addresses of their inputs, from which those of the tile are ``x`` bytes on; ``w`` is at the
    block's packed weights of the step, the others at the sums of the block's first filter.
    """
    filters, pairs = kind.filters, kind.pairs
    lanes, channels = plan.lanes, plan.layer.channels
    vector = ir.VectorType(F32, lanes)
    name = "tile_" + "_".join(str(int(word)) for word in kind)
    arguments = {
        "table": I64_PTR,
        "x": I64,
        **dict.fromkeys(("w", "begin", "add", "to", "less"), F32_PTR),
        "count": I64,
    }
    b, (table, x, w, begin, add, to, less, count) = new_function(module, name, arguments, internal=True)

    def places(array: Any, output: bool) -> list[Any]:
        stride, each = (plan.output_stride, 2 * lanes) if output else (plan.sum_stride, lanes)
        numbers = [f * stride + p * each for f in range(filters) for p in range(pairs)]
        return [b.bitcast(element(b, array, number), vector.as_pointer()) for number in numbers]

    def product(sums: list[Any], inputs: Any, weights: Any) -> list[Any]:
        values = [
            b.load(b.bitcast(element(b, inputs, p * plan.pair_stride), vector.as_pointer()), align=4 * lanes)
            for p in range(pairs)
        ]
        result = []
        for f in range(filters):
            weight = all_lanes(b, b.load(element(b, weights, f), align=4), lanes)
            result += [fma(b, target, values[p], weight, sums[f * pairs + p]) for p in range(pairs)]
        return result

    sums: list[Any] = [ir.Constant(vector, [0.0] * lanes)] * (filters * pairs)
    if kind.begins:
        sums = [b.load(place, align=4 * lanes) for place in places(begin, False)]
    unroll = max(u for u in range(1, UNROLL + 1) if channels % u == 0)
    with for_range(b, count, sums) as each:
        inputs = b.inttoptr(b.add(b.load(element(b, table, each.index)), x), F32_PTR)
        weights = element(b, w, offset(b, (each.index, channels * filters)))
        with for_range(b, channels // unroll, each.values) as some:
            for u in range(unroll):
                here = element(b, inputs, offset(b, (some.index, unroll * lanes)))
                here = element(b, here, u * lanes)
                factors = element(b, weights, offset(b, (some.index, unroll * filters)))
                some.values = product(some.values, here, element(b, factors, u * filters))
        each.values = some.values
    sums = each.values
    if kind.adds:
        more = [b.load(place, align=4 * lanes) for place in places(add, False)]
        if kind.subtracts:
            for total, other, place in zip(sums, more, places(less, False)):
                b.store(b.fsub(total, other), place, align=4 * lanes)
        sums = [b.fadd(total, other) for total, other in zip(sums, more)]
    for total, place in zip(sums, places(to, kind.last)):
        b.store(total, place, align=4 * lanes)
    b.ret_void()
    return b.function
