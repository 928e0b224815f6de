"""The memory plan of a network for one batch size: an offset for each value in one block.

One block of memory stores all values between the layers. A value lives from the node that computes it to the last node
that reads it; values that do not live at the same time may overlap. The largest are placed first, each as low as the
values placed before allow (greedy by size: Y. Pisarchyk and J. Lee, Efficient Memory Management for Deep Neural Net
Inference, 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ece408_op.errors import GraphError
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.launch import round_up

from ._definition import Shape
from ._network import Network, read_values

#: Values begin at multiples of this many bytes, for the widest loads and the libraries.
ALIGNMENT = 256


@dataclass(frozen=True)
class MemoryPlan:
    """The memory offsets of all values.

    shapes: those of all values. offsets: byte offsets in the block, of the values in it. given: for data, a parameter
    or a view of one, the variable's number. scratch: byte offsets of nodes' scratch memory. bytes: the block's size.
    """

    shapes: Mapping[int, Shape]
    offsets: Mapping[int, int]
    given: Mapping[int, int]
    scratch: Mapping[int, int]
    bytes: int


def splits(network: Network, data: Mapping[str, Shape]) -> bool:
    """Return whether images are computed independently, and are the first axis of all data and outputs.

    The function compares all shapes with those for one image more: every value that depends on the data must be larger
    by one in its first axis and equal in the others.
    """
    if not data or any(not shape for shape in data.values()):
        return False
    (count, *others) = {shape[0] for shape in data.values()}
    if others:
        return False
    try:
        here = network.infer(data)
        there = network.infer({name: (count + 1, *shape[1:]) for name, shape in data.items()})
    except GraphError:
        return False
    depending = set(network.data)
    for number, node in network.operators:
        values = read_values(node)
        if depending.isdisjoint(values):
            continue
        old, new = here[number], there[number]
        mixed = node.operator.mixes_images(len(here[values[0]]))
        if old[:1] != (count,) or new != (count + 1, *old[1:]) or mixed:
            return False
        depending.add(number)
    return all(value in depending for value in network.outputs)


def plan(
    network: Network,
    shapes: Mapping[int, Shape],
    scratch: Mapping[int, int] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> MemoryPlan:
    """Place all values and each node's scratch memory. sizes: the bytes of values that are not float32 arrays."""
    bytes_of = {value: ITEM_BYTES * prod(shape) for value, shape in shapes.items()} | dict(sizes or {})
    last = {value: number for number, node in network.operators for value in [number, *read_values(node)]}
    last.update(dict.fromkeys(network.outputs, len(network.graph.nodes)))
    variables = {*network.data, *network.parameters}
    owners = {value: value for value in variables}
    lives: dict[int, list[int]] = {}
    for number, node in network.operators:
        read = read_values(node)
        owner = owners[read[0]] if read else number
        if not node.operator.view:
            # The output may overwrite the first input after the last read of its memory.
            shared = [value for value, other in owners.items() if other == owner] if node.operator.inplace else []
            free = owner not in variables and all(last.get(value, -1) <= number for value in shared)
            others = [owners[value] for value in read[1:]]
            if not (shared and free and bytes_of[read[0]] == bytes_of[number] and owner not in others):
                owner = number
        owners[number] = owner
        if owner == number:
            lives[number] = [number, last[number]]
        elif owner in lives:
            lives[owner][1] = max(lives[owner][1], last[number])
    # Scratch memory is a value that lives only during its node; its key is negative.
    wanted = [(bytes_of[value], first, end, value) for value, (first, end) in lives.items()]
    wanted += [(count, number, number, -1 - number) for number, count in (scratch or {}).items() if count]
    offsets, total = _place(wanted)
    return MemoryPlan(
        dict(shapes),
        {value: offsets[owner] for value, owner in owners.items() if owner not in variables},
        {value: owner for value, owner in owners.items() if owner in variables},
        {-1 - key: offset for key, offset in offsets.items() if key < 0},
        total,
    )


def _place(wanted: Sequence[tuple[int, int, int, int]]) -> tuple[dict[int, int], int]:
    """Return offsets by key for (bytes, first node, last node, key), and the bytes of the block."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    for count, first, last, key in sorted(wanted, key=lambda row: (-row[0], row[1])):
        room = round_up(max(count, 1), ALIGNMENT)
        offset = 0
        for start, end, begun, ended in sorted(placed):
            if begun <= last and first <= ended and start < offset + room and offset < end:
                offset = end
        placed.append((offset, offset + room, first, last))
        offsets[key] = offset
    return offsets, max((end for _, end, _, _ in placed), default=0)
