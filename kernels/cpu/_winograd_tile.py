"""The inner loop of ``winograd``: one class of products, for some filters and some neighbouring pairs of columns."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from ece408_op.runtime.llvm import F32, F32_PTR, I64, I64_PTR, Cpu, element, fma, for_range, new_function, offset

from ._ir import broadcast, load
from ._winograd_plan import Step, WinogradPlan

#: Channels that are unrolled, at most.
UNROLL = 4


class Kind(NamedTuple):
    """What distinguishes one function from another: its tile, and what it does with the sums."""

    filters: int
    pairs: int
    begins: bool
    adds: bool
    subtracts: bool
    last: bool

    @classmethod
    def of(cls, step: Step, filters: int, pairs: int) -> Kind:
        """Return the kind that a step needs for a tile of that size."""
        return cls(filters, pairs, step.begin is not None, step.add is not None, step.less is not None, step.last)


def step_tile(module: ir.Module, plan: WinogradPlan, kind: Kind, target: Cpu) -> ir.Function:
    """Build (table, x, w, begin, add, to, less, count), which adds a step's ``count`` products of all channels.

    ``table`` has the addresses of their inputs; those of the tile are ``x`` bytes further on. ``w`` is the block's
    packed weights of the step. The others are the sums of the block's first filter: see ``_winograd_plan.Step``.
    """
    filters, pairs = kind.filters, kind.pairs
    lanes, channels = plan.lanes, plan.layer.channels
    vector = ir.VectorType(F32, lanes)
    name = "tile_" + "_".join(str(int(word)) for word in kind)
    sums_arguments = dict.fromkeys(("w", "begin", "add", "to", "less"), F32_PTR)
    arguments = {"table": I64_PTR, "x": I64, **sums_arguments, "count": I64}
    b, (table, x, w, begin, add, to, less, count) = new_function(module, name, arguments, internal=True)

    def pointers(array: Any, output: bool) -> list[Any]:
        filter_stride, pair_stride = (plan.output_stride, 2 * lanes) if output else (plan.sum_stride, lanes)
        offsets = [f * filter_stride + p * pair_stride for f in range(filters) for p in range(pairs)]
        return [b.bitcast(element(b, array, start), vector.as_pointer()) for start in offsets]

    def product(sums: list[Any], inputs: Any, weights: Any) -> list[Any]:
        values = [load(b, element(b, inputs, p * plan.pair_stride), lanes, 4 * lanes) for p in range(pairs)]
        result = []
        for f in range(filters):
            weight = broadcast(b, b.load(element(b, weights, f), align=4), lanes)
            result += [fma(b, target, values[p], weight, sums[f * pairs + p]) for p in range(pairs)]
        return result

    sums: list[Any] = [ir.Constant(vector, [0.0] * lanes)] * (filters * pairs)
    if kind.begins:
        sums = [b.load(pointer, align=4 * lanes) for pointer in pointers(begin, False)]
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
        more = [b.load(pointer, align=4 * lanes) for pointer in pointers(add, False)]
        if kind.subtracts:
            for total, other, pointer in zip(sums, more, pointers(less, False)):
                b.store(b.fsub(total, other), pointer, align=4 * lanes)
        sums = [b.fadd(total, other) for total, other in zip(sums, more)]
    for total, pointer in zip(sums, pointers(to, kind.last)):
        b.store(total, pointer, align=4 * lanes)
    b.ret_void()
    return b.function
