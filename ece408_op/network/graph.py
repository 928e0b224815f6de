"""A symbol's JSON as typed nodes, in an order in which they can run; or a refusal that names every unknown node.

Values are numbered: an argument's, a state's, or a node's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ece408_op.errors import GraphError
from ece408_op.graph import symbol_graph
from ece408_op.graph.symbol_graph import VARIABLE, Graph, integers

from ._op_attributes import Refused, Settings
from ._op_definition import Kind, Shape
from ._operators import OPERATORS

#: Where a parameter's shape stands in the graph that the node keeps.
SHAPE = "__shape__"
_WHERE = "network"
#: How many graphs stay parsed: shapes are inferred many times.
_KEPT = 32


@dataclass(frozen=True)
class Node:
    """One operator at work: value numbers in, one value out; ``activation``: applied to the output in its place."""

    name: str
    kind: Kind
    settings: Any
    inputs: tuple[int, ...]
    output: int
    activation: str | None = None


@dataclass(frozen=True)
class Variable:
    """An argument or a state: its name and value number; its shape where it is a parameter."""

    name: str
    value: int
    shape: Shape | None = None
    auxiliary: bool = False


@dataclass(frozen=True)
class Label:
    """An argument that inference ignores: it belongs to the node, which infers its shape."""

    name: str
    node: int


@dataclass(frozen=True)
class Network:
    """The graph: nodes in order, arguments and states in MXNet's order, outputs by name."""

    nodes: tuple[Node, ...]
    variables: tuple[Variable, ...]
    labels: tuple[Label, ...]
    #: The names of all arguments in order, labels among them.
    arguments: tuple[str, ...]
    outputs: tuple[tuple[str, int], ...]

    @property
    def data(self) -> tuple[Variable, ...]:
        """The arguments that are no parameters."""
        return tuple(v for v in self.variables if v.shape is None)

    @property
    def parameters(self) -> tuple[Variable, ...]:
        """Parameters, and states."""
        return tuple(v for v in self.variables if v.shape is not None)

    @property
    def values(self) -> int:
        """How many values there are."""
        return 1 + max([v.value for v in self.variables] + [node.output for node in self.nodes], default=-1)

    def with_nodes(self, nodes: Sequence[Node]) -> Network:
        """The same with other nodes between the same values."""
        return replace(self, nodes=tuple(nodes))


@lru_cache(maxsize=_KEPT)
def parse(text: str) -> Network:
    """The network in a graph's JSON; raises GraphError with name and operator of every node that it cannot take."""
    graph = Graph.parse(text, _WHERE)
    nodes = graph.nodes
    refused, known = [], {}
    for index, node in enumerate(nodes):
        if node.op == VARIABLE:
            continue
        try:
            known[index] = _judged(node)
        except Refused as error:
            refused.append(f"{node.name!r} ({node.type}): {error}")
    for user, entries in [*((node.name, node.inputs) for node in nodes), ("the network", graph.heads)]:
        for source, output, *_ in entries:
            if output and source in known:
                made = nodes[source]
                refused.append(f"{made.name!r} ({made.type}): {user} uses its output {output}, beyond the first")
    if refused:
        raise GraphError(
            f"{_WHERE}: expected only operators that gpu_network knows, got {len(refused)} node"
            f"{'s' if len(refused) > 1 else ''} that it cannot take: {'; '.join(refused)}"
        )
    return _assembled(graph, known)


def _judged(node: symbol_graph.Node) -> tuple[Kind, Any]:
    kind = OPERATORS.get(node.type)
    if kind is None:
        raise Refused("unknown here")
    settings = Settings(node.attrs)
    read = kind.read(settings)
    settings.done()
    most = kind.count(read) if kind.count else len(kind.inputs)
    if not kind.inputs[-1].endswith("*") and len(node.inputs) != most:
        raise Refused(f"expected {most} inputs, got {len(node.inputs)}")
    return kind, read


def _assembled(graph: Graph, known: Mapping[int, tuple[Kind, Any]]) -> Network:
    nodes = graph.nodes
    order = _order(nodes, [head[0] for head in graph.heads])
    states = {
        node.inputs[kind.inputs.index(name)][0]
        for index, (kind, _) in known.items()
        for node in [nodes[index]]
        for name in kind.auxiliary
    }
    read = {
        source
        for index in order
        if index in known
        for (source, *_), name in zip(nodes[index].inputs, _names(known[index][0], len(nodes[index].inputs)))
        if name not in known[index][0].ignored
    } | {head[0] for head in graph.heads}
    found, variables, labels, arguments = [], [], [], []
    for index in order:
        node = nodes[index]
        if index in known:
            kind, settings = known[index]
            found.append(Node(node.name, kind, settings, tuple(source for source, *_ in node.inputs), index))
            continue
        if index not in states:
            arguments.append(node.name)
        if index in read:
            shape = node.attrs.get(SHAPE)
            numbers = None if shape is None else integers(shape)
            sizes = None if numbers is None else tuple(numbers)
            variables.append(Variable(node.name, index, sizes, index in states))
    positions = {node.output: position for position, node in enumerate(found)}
    for index in order:
        if index not in known and index not in read:
            user = next(i for i in order if i in known and index in [source for source, *_ in nodes[i].inputs])
            labels.append(Label(nodes[index].name, positions[user]))
    _check_names(arguments)
    outputs = tuple((f"output{number}", head[0]) for number, head in enumerate(graph.heads))
    if len(outputs) == 1:
        outputs = (("output", outputs[0][1]),)
    return Network(tuple(found), tuple(variables), tuple(labels), tuple(arguments), outputs)


def _names(kind: Kind, count: int) -> tuple[str, ...]:
    return kind.inputs if not kind.inputs[-1].endswith("*") else (kind.inputs[0],) * count


def _order(nodes: Sequence[symbol_graph.Node], heads: Sequence[int]) -> list[int]:
    """Nodes that the heads need, each behind its inputs, in the order in which MXNet lists arguments."""
    done: dict[int, None] = {}
    stack = [(head, False) for head in reversed(heads)]
    while stack:
        index, ready = stack.pop()
        if ready:
            done[index] = None
        elif index not in done:
            stack.append((index, True))
            stack += [(source, False) for source, *_ in reversed(nodes[index].inputs) if source not in done]
    return list(done)


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise GraphError(f"{_WHERE}: expected arguments of different names, got several called {', '.join(twice)}")
