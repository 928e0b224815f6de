"""The five networks as symbol files in the course's format.

A file of 2017 or 2018: JSON whose convolutions are nodes with `"op": "New"`, attributes under `"attr"`,
each variable carrying the attributes of the operator that it belongs to. MXNet without `New` refuses it.
`baseline` alone is made of MXNet's own Convolution. Facts from the course's published symbol files
(ECE408 and CS483, University of Illinois, 2017 and 2018).

    python -m ece408_op.models.build        writes NAME-symbol.json of all five beside this file
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ece408_op.commands import guard
from ece408_op.data.atomic import replacing
from ece408_op.graph import symbol_json

from .files import FOLDER, TITLE

#: Fashion-MNIST's classes.
CLASSES = 10

#: MXNet 0.11, with which the course began: it spells attributes `attr`.
MXNET_VERSION = 1100

Layer = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class Architecture:
    """A network of the course's pattern: a convolution, tanh, max-pooling, perhaps another convolution, two
    fully connected layers with tanh between them, softmax.

    size: rows and columns of its images; convolutions: (filters, kernel) of each; hidden: outputs of the first
    fully connected layer; title: what scripts print after `Model:`, where that is not the file's name.
    """

    size: int
    convolutions: tuple[tuple[int, int], ...]
    hidden: int
    operator: str = "New"
    title: str | None = None


NETWORKS: Mapping[str, Architecture] = {
    "baseline": Architecture(28, ((50, 5),), 500, operator="Convolution"),
    "ece408-high": Architecture(28, ((50, 5),), 500),
    "ece408-low": Architecture(28, ((50, 5),), 500),
    "ece408-2018sp": Architecture(64, ((6, 5), (16, 5)), 140, title="ece408"),
    "ece408-2018fa": Architecture(72, ((12, 7), (24, 7)), 160, title="ece408"),
}


def layers(architecture: Architecture) -> list[Layer]:
    """(operator, attributes) of each node between the images and the softmax, in order."""
    found: list[Layer] = []
    for position, (filters, kernel) in enumerate(architecture.convolutions):
        attributes = {"kernel": f"({kernel}, {kernel})", "num_filter": str(filters)}
        if architecture.operator == "Convolution":
            attributes["no_bias"] = "True"
        found.append((architecture.operator, attributes))
        if position == 0:
            found.append(("Activation", {"act_type": "tanh"}))
            found.append(("Pooling", {"kernel": "(2, 2)", "pool_type": "max", "stride": "(2, 2)"}))
    found.append(("Flatten", {}))
    found.append(("FullyConnected", {"num_hidden": str(architecture.hidden)}))
    found.append(("Activation", {"act_type": "tanh"}))
    found.append(("FullyConnected", {"num_hidden": str(CLASSES)}))
    return found


_VARIABLES = {"New": ("weight",), "Convolution": ("weight",), "FullyConnected": ("weight", "bias")}


def graph(architecture: Architecture) -> symbol_json.Graph:
    """The network's nodes, named as MXNet of 2017 named them: new0, activation0, ..., fullyconnected1, softmax."""
    nodes: list[symbol_json.Node] = []

    def add(op: str, name: str, attrs: dict[str, str], inputs: Sequence[int] = ()) -> int:
        nodes.append({"op": op, "name": name, "attrs": attrs, "inputs": [[index, 0, 0] for index in inputs]})
        return len(nodes) - 1

    last = add(symbol_json.VARIABLE, "data", {TITLE: architecture.title} if architecture.title else {})
    used: Counter[str] = Counter()
    for op, attrs in layers(architecture):
        name = f"{op.lower()}{used[op]}"
        used[op] += 1
        variables = [add(symbol_json.VARIABLE, f"{name}_{part}", attrs) for part in _VARIABLES.get(op, ())]
        last = add(op, name, attrs, [last, *variables])
    label = add(symbol_json.VARIABLE, "softmax_label", {})
    last = add("SoftmaxOutput", "softmax", {}, [last, label])
    return {
        "nodes": nodes,
        "arg_nodes": [index for index, node in enumerate(nodes) if node["op"] == symbol_json.VARIABLE],
        "heads": [[last, 0, 0]],
        "attrs": {"mxnet_version": ["int", MXNET_VERSION]},
    }


def write(folder: Path = FOLDER) -> list[Path]:
    """Write NAME-symbol.json of every network into the folder; the same bytes each time. Returns the paths."""
    paths = []
    for name, architecture in NETWORKS.items():
        path = folder / f"{name}-symbol.json"
        with replacing(path) as file:
            file.write(symbol_json.dump(graph(architecture), spelling="attr").encode() + b"\n")
        paths.append(path)
    return paths


def main() -> int:
    """The command; returns its exit code."""
    argparse.ArgumentParser(
        prog="python -m ece408_op.models.build",
        description="Write NAME-symbol.json of every network beside this file.",
        epilog="example: python -m ece408_op.models.build",
    ).parse_args()
    for written in write():
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(guard("ece408_op.models.build", main))
