"""MXNet's symbol files as plain data: read, judged, written; no MXNet needed.

A symbol file is a list of nodes in JSON. Its writers spelled a node's attributes in three ways, all
read here: ``param`` with the user's own beside it in ``attr`` (before 0.9), ``attr`` (to 1.0) and
``attrs`` (later). An entry that refers to a node's output is [node, output] or [node, output, version].
(nnvm, src/pass/saveload_json.cc; MXNet, src/nnvm/legacy_json_util.cc.)

A graph here is a dictionary: "nodes" (each with op, name, attrs, inputs and, where it has them,
control_deps and subgraphs), "arg_nodes", "heads", "attrs" and, where it came, "node_row_ptr".
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ece408_op.errors import GraphError

Graph = dict[str, Any]
Node = dict[str, Any]

VARIABLE = "null"

_SPELLINGS = ("param", "attr", "attrs")
_NODE_FIELDS = {"op", "name", "inputs", *_SPELLINGS, "control_deps", "subgraphs", "backward_source_id"}
_GRAPH_FIELDS = {"nodes", "arg_nodes", "heads", "node_row_ptr", "attrs"}

#: Subgraphs within subgraphs, at most: MXNet reads them by recursion.
_DEEPEST = 16

#: MXNet's own attributes as files from before 0.9.4 spell them, on the node or for one of its inputs.
_OLD_HIDDEN = re.compile(r"(\w+_)?(ctx_group|lr_mult|wd_mult|force_mirroring|mirror_stage)")


class Place(NamedTuple):
    """A node, the graph that it is in, where it stands in words, and the nodes around that graph."""

    node: Node
    graph: Graph
    where: str
    around: tuple[str, ...]


def parse(text: str, where: str) -> Graph:
    """The graph in the text of a symbol file, every index and type in it checked.

    Raises GraphError, which begins with ``where`` and names the node.
    """
    try:
        raw = json.loads(text)
    except RecursionError:
        raise GraphError(f"{where}: expected a symbol in JSON, got brackets nested too deeply") from None
    except ValueError as error:
        raise GraphError(f"{where}: expected a symbol in JSON, got broken JSON: {error}") from None
    return _graph(raw, where, 0)


#: MXNet 0.11, whose files 1.9.1 takes as they are, and 1.9.1 itself.
_UNCHANGED_SINCE, _TODAY = 1100, 10901


def dump(graph: Graph, spelling: str = "attrs") -> str:
    """The text of a symbol file; ``spelling`` is the key that attributes go under."""
    return json.dumps(_spelled(graph, spelling), indent=2, ensure_ascii=False)


def for_mxnet(graph: Graph) -> str:
    """The text to give to MXNet 1.9.1.

    MXNet tells on stderr of every file older than itself. Files since 0.11 that have no attribute in an old
    spelling need no upgrade, so they are given out as today's.
    """
    version = graph.get("attrs", {}).get("mxnet_version", ["int", 0])[-1]
    old = any(_OLD_HIDDEN.fullmatch(key) for place in places(graph, "") for key in place.node["attrs"])
    if not old and isinstance(version, int) and _UNCHANGED_SINCE <= version < _TODAY:
        graph = {**graph, "attrs": {**graph["attrs"], "mxnet_version": ["int", _TODAY]}}
    return dump(graph)


def places(graph: Graph, where: str) -> Iterator[Place]:
    """Every node, those in the subgraphs of control flow too."""
    stack: list[tuple[Graph, str, tuple[str, ...]]] = [(graph, where, ())]
    while stack:
        current, label, around = stack.pop()
        for index, node in enumerate(current["nodes"]):
            here = _label(label, index, node["name"])
            yield Place(node, current, here, around)
            stack += [(sub, here, (*around, node["name"])) for sub in node.get("subgraphs", ())]


def is_mxnets_own(name: str) -> bool:
    """Whether MXNet, not the operator, reads this attribute: ``__lr_mult__``, or an old ``lr_mult``."""
    return (name.startswith("__") and name.endswith("__")) or _OLD_HIDDEN.fullmatch(name) is not None


def integers(text: str) -> list[int] | None:
    """The numbers of a shape as MXNet spells it: "(5, 5)", "[5,5]", "(5L, 5L)" from Python 2; None if it is none."""
    body = text.strip()
    if body[:1] + body[-1:] in ("()", "[]"):
        body = body[1:-1]
    parts = [part.strip() for part in body.split(",")]
    if parts[-1] == "":
        parts.pop()
    if not all(re.fullmatch(r"-?[0-9]{1,9}L?", part) for part in parts):
        return None
    return [int(part.rstrip("L")) for part in parts]


def check_output_numbers(graph: Graph, where: str) -> None:
    """Raise GraphError where an entry asks a node for an output that it does not have.

    Only MXNet knows how many outputs a node has: the graph is one that it wrote, with node_row_ptr.
    MXNet itself does not look and reads beyond its memory.
    """
    rows, nodes = graph["node_row_ptr"], graph["nodes"]
    asked = [(entry, _label(where, i, node["name"])) for i, node in enumerate(nodes) for entry in node["inputs"]]
    asked += [(entry, f"{where}: heads") for entry in graph["heads"]]
    for (index, output, *_), label in asked:
        count = rows[index + 1] - rows[index]
        if output >= count:
            name = nodes[index]["name"]
            raise GraphError(f"{label}: expected one of the {count} outputs of {name!r}, got output {output}")


def _graph(raw: Any, where: str, depth: int) -> Graph:
    if depth > _DEEPEST:
        raise GraphError(f"{where}: expected at most {_DEEPEST} subgraphs within each other, got more")
    if not isinstance(raw, dict) or not isinstance(raw.get("nodes"), list):
        raise GraphError(f"{where}: expected a symbol, an object with a list of nodes, got {_short(raw)}")
    _only_known(raw, _GRAPH_FIELDS, where)
    for field in ("heads", "arg_nodes"):
        if not isinstance(raw.get(field), list):
            raise GraphError(f"{where}: {field}: expected a list, got {_short(raw.get(field))}")
    count = len(raw["nodes"])
    nodes = [_node(node, index, count, where, depth) for index, node in enumerate(raw["nodes"])]
    graph = {
        "nodes": nodes,
        "arg_nodes": [_index(index, count, f"{where}: arg_nodes") for index in raw["arg_nodes"]],
        "heads": [_entry(entry, count, f"{where}: heads") for entry in raw["heads"]],
        **{field: raw[field] for field in ("attrs", "node_row_ptr") if field in raw},
    }
    if not graph["heads"]:
        raise GraphError(f"{where}: heads: expected at least one output, got none")
    for index in graph["arg_nodes"]:
        if nodes[index]["op"] != VARIABLE:
            name, op = nodes[index]["name"], nodes[index]["op"]
            raise GraphError(
                f"{where}: arg_nodes: expected variables (op null), got node {index} {name!r} of op {op!r}"
            )
    _check_acyclic(nodes, where)
    return graph


def _node(raw: Any, index: int, count: int, where: str, depth: int) -> Node:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise GraphError(f"{where}: node {index}: expected an object with a name, got {_short(raw)}")
    label = _label(where, index, raw["name"])
    _only_known(raw, _NODE_FIELDS, label)
    if not isinstance(raw.get("op"), str):
        raise GraphError(f"{label}: op: expected an operator's name, got {_short(raw.get('op'))}")
    for field in ("inputs", "control_deps", "subgraphs"):
        if not isinstance(raw.get(field, [] if field != "inputs" else None), list):
            raise GraphError(f"{label}: {field}: expected a list, got {_short(raw.get(field))}")
    node: Node = {
        "op": raw["op"],
        "name": raw["name"],
        "attrs": _attributes(raw, label),
        "inputs": [_entry(entry, count, f"{label}: inputs") for entry in raw["inputs"]],
    }
    if node["op"] == VARIABLE and node["inputs"]:
        raise GraphError(f"{label}: inputs: expected none for a variable, got {_short(raw['inputs'])}")
    if raw.get("control_deps"):
        node["control_deps"] = [_index(dep, count, f"{label}: control_deps") for dep in raw["control_deps"]]
    if raw.get("subgraphs"):
        node["subgraphs"] = [_graph(sub, label, depth + 1) for sub in raw["subgraphs"]]
    return node


def _attributes(raw: Node, label: str) -> dict[str, str]:
    """All three spellings in one; where two of them have a key, the later spelling's value holds, as in MXNet."""
    merged: dict[str, str] = {}
    for spelling in _SPELLINGS:
        given = raw.get(spelling, {})
        if not isinstance(given, dict):
            raise GraphError(f"{label}: {spelling}: expected an object of texts, got {_short(given)}")
        for key, value in given.items():
            if not isinstance(value, str):
                raise GraphError(f"{label}: {spelling}: {key}: expected a text, got {_short(value)}")
        merged.update(given)
    return merged


def _only_known(raw: Node, known: set[str], label: str) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        hint = " (attributes stand under attrs, attr or param)" if "op" in known else ""
        raise GraphError(f"{label}: expected only {', '.join(sorted(known))}; got {', '.join(unknown)}{hint}")


def _entry(raw: Any, count: int, label: str) -> list[int]:
    if not isinstance(raw, list) or len(raw) not in (2, 3) or not all(_is_natural(number) for number in raw):
        raise GraphError(f"{label}: expected [node, output] or [node, output, version], got {_short(raw)}")
    _index(raw[0], count, label)
    return [*raw, 0][:3]


def _index(raw: Any, count: int, label: str) -> int:
    if not _is_natural(raw) or raw >= count:
        raise GraphError(f"{label}: expected one of the file's {count} nodes, numbered from 0, got node {_short(raw)}")
    return int(raw)


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _check_acyclic(nodes: Sequence[Node], where: str) -> None:
    """Take away, again and again, the nodes that wait for nothing; what is left goes round in circles."""
    before = [{entry[0] for entry in node["inputs"]} | set(node.get("control_deps", ())) for node in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for index, needs in enumerate(before):
        for need in needs:
            after[need].append(index)
    waiting = Counter({index: len(needs) for index, needs in enumerate(before)})
    ready = [index for index, needs in enumerate(before) if not needs]
    while ready:
        for index in after[ready.pop()]:
            waiting[index] -= 1
            if not waiting[index]:
                ready.append(index)
    stuck = [index for index in range(len(nodes)) if waiting[index]]
    if stuck:
        label = _label(where, stuck[0], nodes[stuck[0]]["name"])
        raise GraphError(f"{label}: inputs: expected nodes that do not depend on this one, got a circle")


def _spelled(graph: Graph, spelling: str) -> Graph:
    nodes = []
    for node in graph["nodes"]:
        new = {"op": node["op"], "name": node["name"], spelling: node["attrs"], "inputs": node["inputs"]}
        if not node["attrs"]:
            del new[spelling]
        if "control_deps" in node:
            new["control_deps"] = node["control_deps"]
        if "subgraphs" in node:
            new["subgraphs"] = [_spelled(sub, spelling) for sub in node["subgraphs"]]
        nodes.append(new)
    # node_row_ptr is left out: counts of outputs, which every reader works out for itself.
    return {"nodes": nodes, **{key: graph[key] for key in ("arg_nodes", "heads", "attrs") if key in graph}}


def _label(where: str, index: int, name: str) -> str:
    return f"{where}: node {index} {name!r}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
