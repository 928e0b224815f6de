"""The course's five networks, and their symbol files in the course's format.

    python -m ece408_op.models.build        writes NAME-symbol.json of all five into this folder

A symbol file of 2017 or 2018 is JSON whose convolutions are nodes with `"op": "New"`, with attributes under `"attr"`;
each variable carries the attributes of its operator. MXNet refuses it unless `New` is registered. Only `baseline` uses
MXNet's own Convolution. The layers are those of the course's published symbol files (ECE408 and CS483, University of
Illinois, 2017 and 2018).
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
from ece408_op.graph.symbol_graph import VARIABLE, Entry, Graph, Node

from .files import FOLDER, TITLE

#: Classes of Fashion-MNIST.
CLASSES = 10

#: MXNet 0.11, which spells attributes `attr`: the version that the course began with.
MXNET_VERSION = 1100


@dataclass(frozen=True)
class Architecture:
    """A network of the course: convolution, tanh, 2 x 2 max-pooling, perhaps another convolution, then two fully
    connected layers with a tanh between them, and softmax.

    size: rows and columns of its images; convolutions: (filters, kernel) of each; hidden: outputs of the first fully
    connected layer; title: the name that scripts print after `Model:`, if it is not the file's.
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

_VARIABLES = {"New": ("weight",), "Convolution": ("weight",), "FullyConnected": ("weight", "bias")}


def graph(architecture: Architecture) -> Graph:
    """Return the network's nodes with MXNet's names of 2017: new0, activation0, ..., fullyconnected1, softmax."""
    nodes: list[Node] = []
    used: Counter[str] = Counter()

    def node(op: str, name: str, attributes: dict[str, str], inputs: Sequence[int] = ()) -> int:
        nodes.append(Node(op, name, attributes, [Entry(index) for index in inputs]))
        return len(nodes) - 1

    def layer(op: str, data: int, **attributes: str) -> int:
        name = f"{op.lower()}{used[op]}"
        used[op] += 1
        weights = [node(VARIABLE, f"{name}_{part}", attributes) for part in _VARIABLES.get(op, ())]
        return node(op, name, attributes, [data, *weights])

    last = node(VARIABLE, "data", {TITLE: architecture.title} if architecture.title else {})
    own = {"no_bias": "True"} if architecture.operator == "Convolution" else {}
    for position, (filters, kernel) in enumerate(architecture.convolutions):
        sizes = {"kernel": f"({kernel}, {kernel})", "num_filter": str(filters)}
        last = layer(architecture.operator, last, **sizes, **own)
        if position == 0:
            last = layer("Activation", last, act_type="tanh")
            last = layer("Pooling", last, kernel="(2, 2)", pool_type="max", stride="(2, 2)")
    last = layer("Flatten", last)
    last = layer("FullyConnected", last, num_hidden=str(architecture.hidden))
    last = layer("Activation", last, act_type="tanh")
    last = layer("FullyConnected", last, num_hidden=str(CLASSES))
    label = node(VARIABLE, "softmax_label", {})
    last = node("SoftmaxOutput", "softmax", {}, [last, label])
    return Graph(nodes, [Entry(last)], {"mxnet_version": ["int", MXNET_VERSION]})


def write(folder: Path = FOLDER) -> list[Path]:
    """Write NAME-symbol.json of every network into the folder, the same bytes each time; return the paths."""
    paths = []
    for name, architecture in NETWORKS.items():
        paths.append(folder / f"{name}-symbol.json")
        with replacing(paths[-1]) as file:
            file.write(graph(architecture).dump("attr").encode() + b"\n")
    return paths


def main() -> int:
    """Write the files and print their paths; return the exit code."""
    argparse.ArgumentParser(
        prog="python -m ece408_op.models.build",
        description="Write NAME-symbol.json of every network into the folder of this module.",
        epilog="example: python -m ece408_op.models.build",
    ).parse_args()
    print(*write(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard("ece408_op.models.build", main))
