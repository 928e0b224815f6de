"""``Graph``: the nodes of an MXNet symbol as plain Python objects, read from JSON, checked, changed and written.

A symbol file is a list of nodes in JSON. MXNet's versions have three spellings of a node's attributes, and this module
reads all: ``param`` with the user's own attributes in ``attr`` (before 0.9), ``attr`` (to 1.0) and ``attrs`` (later).
An entry refers to a node's output: [node, output] or [node, output, version]. (nnvm, src/pass/saveload_json.cc; MXNet,
src/nnvm/legacy_json_util.cc.) Nothing here needs MXNet.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, cast

from ece408_op.errors import GraphError
from ece408_op.plugin.attributes import OLD_HIDDEN

#: The op of a variable.
VARIABLE = "null"

_SPELLINGS = ("param", "attr", "attrs")
_NODE_FIELDS = {"op", "name", "inputs", *_SPELLINGS, "control_deps", "subgraphs", "backward_source_id"}
_GRAPH_FIELDS = {"nodes", "arg_nodes", "heads", "node_row_ptr", "attrs"}

#: The deepest accepted nesting of subgraphs, limited because MXNet reads them recursively.
_DEEPEST = 16

#: The first MXNet version whose files 1.9.1 reads unchanged, and 1.9.1 itself.
_UNCHANGED_SINCE, _TODAY = 1100, 10901


class Entry(NamedTuple):
    """One output of a node; ``node`` is the node's number."""

    node: int
    output: int = 0
    version: int = 0


@dataclass
class Node:
    """One variable or operator of a graph, with its attributes as text."""

    op: str
    name: str
    attrs: dict[str, str] = field(default_factory=dict)
    inputs: list[Entry] = field(default_factory=list)
    #: The numbers of nodes that must run before this node, although it does not read their outputs.
    control_deps: list[int] = field(default_factory=list)
    #: The bodies of control flow, and operators that MXNet fused.
    subgraphs: list[Graph] = field(default_factory=list)
    #: Set by ``ece408_op.network`` and not written to files: the op with parsed attributes, and the operator of one
    #: element, such as an Activation, that the node applies to its output.
    operator: Any = None
    epilogue: Any = None
    #: Set by ``ece408_op.network`` too: the number that the node with this output has in the graph before fusion.
    origin: int = -1

    @property
    def type(self) -> str:
        """The op, or the op_type of a Custom node."""
        return self.attrs.get("op_type", self.op) if self.op == "Custom" else self.op


@dataclass
class Graph:
    """A symbol: its nodes, its outputs (``heads``) and the graph's attributes, such as MXNet's version.

    row_ptr: the number of each node's first output, counted over all nodes' outputs; None unless MXNet wrote it.
    """

    nodes: list[Node]
    heads: list[Entry]
    attrs: dict[str, Any] = field(default_factory=dict)
    row_ptr: list[int] | None = None

    @classmethod
    def parse(cls, text: str, where: str) -> Graph:
        """Return the graph in the text of a symbol file, with every index and type in it checked.

        Raises GraphError, which starts with ``where`` and names the node.
        """
        try:
            raw = json.loads(text)
        except RecursionError:
            raise GraphError(f"{where}: expected a symbol in JSON, got brackets nested too deeply") from None
        except ValueError as error:
            raise GraphError(f"{where}: expected a symbol in JSON, got broken JSON: {error}") from None
        return _graph(raw, where, 0)

    def dump(self, spelling: str = "attrs", indent: int | None = 2) -> str:
        """Return the text of a symbol file; ``spelling`` is the key of the nodes' attributes."""
        return json.dumps(self._as_json(spelling), indent=indent, ensure_ascii=False)

    def for_mxnet(self) -> str:
        """Return the text to load with MXNet 1.9.1.

        MXNet prints a message for each file of an older version. Files since 0.11 without attributes in an old spelling
        need no upgrade, so this text has the version 1.9.1 for them, which avoids the message.
        """
        version = (self.attrs.get("mxnet_version") or [0])[-1]
        old = any(OLD_HIDDEN.fullmatch(key) for node, *_ in self.locations("") for key in node.attrs)
        current = not old and isinstance(version, int) and _UNCHANGED_SINCE <= version < _TODAY
        attrs = {**self.attrs, "mxnet_version": ["int", _TODAY]} if current else self.attrs
        return replace(self, attrs=attrs).dump()

    def locations(self, where: str) -> Iterator[tuple[Node, Graph, str, tuple[str, ...]]]:
        """Iterate over every node, including those in subgraphs.

        Yields a node, its graph, a label for error messages, and the names of the nodes around that graph, outermost
        first.
        """
        stack: list[tuple[Graph, str, tuple[str, ...]]] = [(self, where, ())]
        while stack:
            graph, label, parents = stack.pop()
            for index, node in enumerate(graph.nodes):
                here = _label(label, index, node.name)
                yield node, graph, here, parents
                stack += [(inner, here, (*parents, node.name)) for inner in node.subgraphs]

    def uses(self) -> Counter[int]:
        """Count the uses of each node: as an input, as an output of the graph, and as a control dependency."""
        uses = Counter(entry.node for node in self.nodes for entry in node.inputs)
        uses.update(head.node for head in self.heads)
        uses.update(source for node in self.nodes for source in node.control_deps)
        return uses

    def ordered(self) -> Graph:
        """Return the graph of the nodes that the heads need, each after its inputs, in MXNet's order of arguments."""
        done: dict[int, None] = {}
        stack = [(head.node, False) for head in reversed(self.heads)]
        while stack:
            index, ready = stack.pop()
            if ready:
                done[index] = None
            elif index not in done:
                stack.append((index, True))
                stack += [(entry.node, False) for entry in reversed(self.nodes[index].inputs) if entry.node not in done]
        return self._selected(list(done))

    def without(self, dropped: Collection[int]) -> Graph:
        """Return the graph without these nodes, which no other node may read."""
        return self._selected([index for index in range(len(self.nodes)) if index not in dropped])

    def check_outputs(self, where: str) -> None:
        """Raise GraphError if an entry refers to an output that its node does not have.

        MXNet does not check these numbers, and would read out of bounds. Only MXNet knows how many outputs a node has,
        so the graph must come from JSON that MXNet wrote, with ``row_ptr``.
        """
        assert self.row_ptr is not None, "MXNet writes node_row_ptr"
        asked = [(e, _label(where, i, node.name)) for i, node in enumerate(self.nodes) for e in node.inputs]
        for (index, output, _), label in [*asked, *((head, f"{where}: heads") for head in self.heads)]:
            count = self.row_ptr[index + 1] - self.row_ptr[index]
            if output >= count:
                name = self.nodes[index].name
                raise GraphError(f"{label}: expected one of the {count} outputs of {name!r}, got output {output}")

    def _selected(self, chosen: list[int]) -> Graph:
        numbers = {old: new for new, old in enumerate(chosen)}

        def renumbered(entries: list[Entry]) -> list[Entry]:
            return [entry._replace(node=numbers[entry.node]) for entry in entries]

        nodes = [
            replace(
                self.nodes[old],
                inputs=renumbered(self.nodes[old].inputs),
                control_deps=[numbers[source] for source in self.nodes[old].control_deps if source in numbers],
            )
            for old in chosen
        ]
        return Graph(nodes, renumbered(self.heads), self.attrs)

    def _as_json(self, spelling: str) -> dict[str, Any]:
        nodes = []
        for node in self.nodes:
            subgraphs = [inner._as_json(spelling) for inner in node.subgraphs]
            optional = {spelling: node.attrs, "control_deps": node.control_deps, "subgraphs": subgraphs}
            present = {key: value for key, value in optional.items() if value}
            nodes.append({"op": node.op, "name": node.name, "inputs": node.inputs, **present})
        variables = [index for index, node in enumerate(self.nodes) if node.op == VARIABLE]
        # Without node_row_ptr, because every reader counts the outputs itself.
        whole = {"nodes": nodes, "arg_nodes": variables, "heads": self.heads}
        return {**whole, "attrs": self.attrs} if self.attrs else whole


def _graph(raw: Any, where: str, depth: int) -> Graph:
    if depth > _DEEPEST:
        raise GraphError(f"{where}: expected at most {_DEEPEST} levels of nested subgraphs, got more")
    whole = isinstance(raw, dict) and isinstance(raw.get("nodes"), list)
    _expect(whole, where, "a symbol, an object with a list of nodes", raw)
    _check_keys(raw, _GRAPH_FIELDS, where)
    count = len(raw["nodes"])
    nodes = [_node(node, index, count, where, depth) for index, node in enumerate(raw["nodes"])]
    heads = [_entry(entry, count, f"{where}: heads") for entry in _list(raw, "heads", where)]
    _expect(bool(heads), f"{where}: heads", "at least one output", None)
    _check_acyclic(nodes, where)
    attrs = raw.get("attrs", {})
    valid = isinstance(attrs, dict) and isinstance(attrs.get("mxnet_version", []), list)
    _expect(valid, f"{where}: attrs", f"an object such as {{'mxnet_version': ['int', {_TODAY}]}}", attrs)
    return Graph(nodes, heads, attrs, raw.get("node_row_ptr"))


def _node(raw: Any, index: int, count: int, where: str, depth: int) -> Node:
    named = isinstance(raw, dict) and isinstance(raw.get("name"), str)
    _expect(named, f"{where}: node {index}", "an object with a name", raw)
    label = _label(where, index, raw["name"])
    _check_keys(raw, _NODE_FIELDS, label)
    _expect(isinstance(raw.get("op"), str), f"{label}: op", "an operator's name", raw.get("op"))
    raw = {"control_deps": [], "subgraphs": [], **raw}
    inputs = [_entry(entry, count, f"{label}: inputs") for entry in _list(raw, "inputs", label)]
    _expect(raw["op"] != VARIABLE or not inputs, f"{label}: inputs", "none for a variable", raw["inputs"])
    depending = [_index(number, count, f"{label}: control_deps") for number in _list(raw, "control_deps", label)]
    subgraphs = [_graph(inner, label, depth + 1) for inner in _list(raw, "subgraphs", label)]
    return Node(raw["op"], raw["name"], _attributes(raw, label), inputs, depending, subgraphs)


def _attributes(raw: Mapping[str, Any], label: str) -> dict[str, str]:
    """Merge the three spellings; as in MXNet, a later spelling's value for a key overrides an earlier one's."""
    merged: dict[str, str] = {}
    for spelling in _SPELLINGS:
        given = raw.get(spelling, {})
        _expect(isinstance(given, dict), f"{label}: {spelling}", "an object of texts", given)
        for key, value in given.items():
            _expect(isinstance(value, str), f"{label}: {spelling}: {key}", "a text", value)
        merged.update(given)
    return merged


def _check_keys(raw: Mapping[str, Any], known: set[str], label: str) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        hint = " (attributes belong under attrs, attr or param)" if "op" in known else ""
        raise GraphError(f"{label}: expected only {', '.join(sorted(known))}; got {', '.join(unknown)}{hint}")


def _list(raw: Mapping[str, Any], name: str, label: str) -> list[Any]:
    found = raw.get(name)
    _expect(isinstance(found, list), f"{label}: {name}", "a list", found)
    return cast("list[Any]", found)


def _entry(raw: Any, count: int, label: str) -> Entry:
    valid = isinstance(raw, list) and len(raw) in (2, 3) and all(map(_is_natural, raw))
    _expect(valid, label, "[node, output] or [node, output, version]", raw)
    _index(raw[0], count, label)
    return Entry(*raw)


def _index(raw: Any, count: int, label: str) -> int:
    if not _is_natural(raw) or raw >= count:
        raise GraphError(f"{label}: expected one of the file's {count} nodes, numbered from 0, got node {_short(raw)}")
    return int(raw)


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _check_acyclic(nodes: list[Node], where: str) -> None:
    sources = {index: [*(entry.node for entry in n.inputs), *n.control_deps] for index, n in enumerate(nodes)}
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        index = min(error.args[1])
        label = _label(where, index, nodes[index].name)
        raise GraphError(f"{label}: inputs: expected nodes that do not depend on this one, got a cycle") from None


def _label(where: str, index: int, name: str) -> str:
    return f"{where}: node {index} {name!r}"


def _expect(valid: bool, label: str, expected: str, got: Any) -> None:
    if not valid:
        raise GraphError(f"{label}: expected {expected}, got {_short(got)}")


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
