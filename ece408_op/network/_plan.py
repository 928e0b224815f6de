"""Shapes of all values for a batch, and where in memory each lies.

One block of memory serves all values between the layers. A value lives from the node that makes it to the last
that reads it; values that never live at the same time may lie on each other. The largest are placed first, each
as low as those already placed allow (greedy by size: Y. Pisarchyk and J. Lee, Efficient Memory Management for Deep
Neural Net Inference, 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from ece408_op.errors import GraphError
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.launch import round_up

from ._op_attributes import Refused
from ._op_definition import Shape, size
from .graph import Network, Node

#: Values begin at multiples of so many bytes: what the widest loads and the libraries like.
ALIGNMENT = 256


@dataclass(frozen=True)
class Block:
    """Bytes ``offset`` and on of the one block of memory."""

    offset: int


@dataclass(frozen=True)
class Given:
    """The memory of another value, which the network is given: data or a parameter."""

    value: int


Place = Union[Block, Given]


@dataclass(frozen=True)
class Plan:
    """What one batch size needs: shapes and places by value number, scratch by node, bytes in all."""

    shapes: Mapping[int, Shape]
    places: Mapping[int, Place]
    scratch: Mapping[int, Block]
    bytes: int


def infer(network: Network, data: Mapping[str, Shape]) -> dict[int, Shape]:
    """The shape of every value; raises GraphError, naming the node, where the data's shapes do not fit."""
    shapes = {v.value: v.shape if v.shape is not None else tuple(data[v.name]) for v in network.variables}
    for node in network.nodes:
        names = node.kind.inputs
        given = [() if name in node.kind.ignored else shapes[v] for v, name in zip(node.inputs, _named(node, names))]
        try:
            shapes[node.output] = node.kind.infer(node.settings, given)
        except Refused as error:
            raise GraphError(f"network: {node.name!r} ({node.kind.names[0]}): {error}") from None
    return shapes


def _named(node: Node, names: Sequence[str]) -> Sequence[str]:
    return [names[0]] * len(node.inputs) if names[-1].endswith("*") else names


def read_values(node: Node) -> list[int]:
    """The values that a node reads."""
    names = _named(node, node.kind.inputs)
    return [value for value, name in zip(node.inputs, names) if name not in node.kind.ignored]


def splits(network: Network, data: Mapping[str, Shape]) -> bool:
    """Whether images are computed apart from each other, the first axis of all data and outputs being theirs.

    Asked by looking at the shapes for one image more: all that depends on the data must grow by one in
    its first axis and nowhere else.
    """
    if not data or any(not shape for shape in data.values()):
        return False
    (count, *others) = {shape[0] for shape in data.values()}
    if others:
        return False
    more = {name: (count + 1, *shape[1:]) for name, shape in data.items()}
    try:
        here, there = infer(network, data), infer(network, more)
    except GraphError:
        return False
    moving = {v.value for v in network.data}
    for node in network.nodes:
        if moving.isdisjoint(read_values(node)):
            continue
        old, new = here[node.output], there[node.output]
        dimensions = len(here[read_values(node)[0]])
        if old[:1] != (count,) or new != (count + 1, *old[1:]) or node.kind.mixes(node.settings, dimensions):
            return False
        moving.add(node.output)
    return all(value in moving for _, value in network.outputs)


def plan(network: Network, shapes: Mapping[int, Shape], scratch: Sequence[int] | None = None) -> Plan:
    """Place all values, and the scratch memory of each node, in bytes, beside them."""
    scratch = scratch or [0] * len(network.nodes)
    last = _last_reads(network)
    owners: dict[int, int] = {variable.value: variable.value for variable in network.variables}
    given = set(owners)
    lives: dict[int, list[int]] = {}
    for step, node in enumerate(network.nodes):
        owner = _taken_over(node, step, owners, given, last, shapes)
        owners[node.output] = node.output if owner is None else owner
        if owner is None:
            lives[node.output] = [step, last[node.output]]
        elif owner in lives:
            lives[owner][1] = max(lives[owner][1], last[node.output])
    # Scratch memory is a value that lives for its own node alone: numbers below zero.
    wanted = [(ITEM_BYTES * size(shapes[value]), life[0], life[1], value) for value, life in lives.items()]
    wanted += [(count, step, step, -1 - step) for step, count in enumerate(scratch) if count]
    offsets, total = _place(wanted)
    places: dict[int, Place] = {
        value: Given(owner) if owner in given else Block(offsets[owner]) for value, owner in owners.items()
    }
    blocks = {-1 - key: Block(offset) for key, offset in offsets.items() if key < 0}
    return Plan(dict(shapes), places, blocks, total)


def _last_reads(network: Network) -> dict[int, int]:
    last = {node.output: step for step, node in enumerate(network.nodes)}
    for step, node in enumerate(network.nodes):
        for value in read_values(node):
            last[value] = step
    for _, value in network.outputs:
        last[value] = len(network.nodes)
    return last


def _taken_over(
    node: Node,
    step: int,
    owners: Mapping[int, int],
    given: set[int],
    last: Mapping[int, int],
    shapes: Mapping[int, Shape],
) -> int | None:
    """The value whose memory the node's output takes: its input's for a view, or where that is read no more."""
    if not node.inputs:
        return None
    first = node.inputs[0]
    owner = owners[first]
    if node.kind.view and node.activation is None:
        return owner
    alike = [value for value, other in owners.items() if other == owner]
    free = owner not in given and all(last.get(value, -1) <= step for value in alike)
    others = [owners[value] for value in read_values(node)[1:]]
    fits = size(shapes[first]) == size(shapes[node.output])
    return owner if node.kind.inplace and free and fits and owner not in others else None


def _place(wanted: Sequence[tuple[int, int, int, int]]) -> tuple[dict[int, int], int]:
    """Offsets by key for (bytes, first step, last step, key), and the bytes of all together."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    total = 0
    for count, first, last, key in sorted(wanted, key=lambda row: (-row[0], row[1])):
        room = round_up(max(count, 1), ALIGNMENT)
        offset = 0
        for start, end, begun, ended in sorted(placed):
            if begun <= last and first <= ended and start < offset + room and offset < end:
                offset = end
        placed.append((offset, offset + room, first, last))
        offsets[key] = offset
        total = max(total, offset + room)
    return offsets, total
