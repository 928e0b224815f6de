"""Find a network by its name: NAME-symbol.json and NAME-NNNN.params, MXNet's own file names, in one folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ece408_op.errors import GraphError
from ece408_op.graph import params_io
from ece408_op.graph.symbol_graph import VARIABLE, Graph, Node

#: The networks' folder, both in a checkout and in an installed package.
FOLDER = Path(__file__).resolve().parent

#: The data node's attribute with the name to print, if that differs from the file's name.
TITLE = "__model_name__"

_SYMBOL = "-symbol.json"


@dataclass(frozen=True)
class Network:
    """The two files of a network, the epoch in the name of its weights, and the title to print after `Model:`."""

    name: str
    symbol: Path
    params: Path
    epoch: int
    title: str

    @property
    def prefix(self) -> str:
        """The first argument of load_checkpoint; the second is `epoch`."""
        return str(self.symbol)[: -len(_SYMBOL)]


def list_names() -> list[str]:
    """Return the sorted names of the networks in the folder that have both files."""
    names = [file.name[: -len(_SYMBOL)] for file in FOLDER.glob(f"*{_SYMBOL}")]
    return sorted(name for name in names if name and _newest(name) is not None)


def read_weights(network: Network) -> dict[str, np.ndarray]:
    """Return the parameters by name, without MXNet's prefixes; raises GraphError with the name of a broken file."""
    arrays = params_io.read(network.params.read_bytes(), str(network.params))
    return {key.partition(":")[2]: array for key, array in arrays.items()}


def find(name: str) -> Network:
    """Return the network of that name; if it has several weight files, take the one with the highest number.

    Raises GraphError, which names the file, if a file is missing or the symbol file is broken.
    """
    symbol = FOLDER / f"{name}{_SYMBOL}"
    if not name or Path(name).name != name or not symbol.is_file():
        known = ", ".join(list_names()) or "none yet"
        raise GraphError(f"{symbol}: expected a model's symbol file, found none; models in {FOLDER}: {known}")
    params = _newest(name)
    if params is None:
        raise GraphError(f"{symbol}: expected weights in its folder, such as {name}-0001.params, found none")
    title = data_node(read_graph(symbol), symbol).attrs.get(TITLE, name)
    return Network(name, symbol, params, _number(params), title)


def read_graph(symbol: Path) -> Graph:
    """Return the graph of a symbol file. Raises GraphError, which names the file, if it is unreadable or broken."""
    try:
        text = symbol.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError(f"{symbol}: expected a symbol file in JSON, cannot read it: {error}") from None
    return Graph.parse(text, str(symbol))


def data_node(graph: Graph, symbol: Path) -> Node:
    """Return the variable for the images. Raises GraphError if the graph has none named `data`."""
    for node in graph.nodes:
        if node.name == "data" and node.op == VARIABLE:
            return node
    raise GraphError(f"{symbol}: expected a variable 'data' for the images, found none")


def _number(params: Path) -> int:
    return int(params.stem.rpartition("-")[2])


def _newest(name: str) -> Path | None:
    pattern = re.compile(re.escape(name) + r"-[0-9]{4,}\.params")
    return max((file for file in FOLDER.glob("*.params") if pattern.fullmatch(file.name)), key=_number, default=None)
