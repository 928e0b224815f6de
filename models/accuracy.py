"""Each network's accuracy on real and sample test images, as MXNet's own Convolution computes it.

    python -m ece408_op.models.accuracy            prints the table
    python -m ece408_op.models.accuracy --write    puts it into README.md, between the markers

The real images are searched for as everywhere (ECE408_DATA names their folder); without them it fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ece408_op.core.check import agreement
from ece408_op.data import load_test, sample
from ece408_op.data.atomic import replacing
from ece408_op.data.resize import resize
from ece408_op.errors import DataError, Ece408Error
from ece408_op.graph import params_io
from ece408_op.plugin import mxnet_import

from .files import Network, find, list_names, read_graph
from .shapes import info, load_symbol, with_convolutions

#: The columns of the table: accuracy on the first so many images.
COUNTS = (10, 100, 1000, 2000, 10000)

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"

_BATCH = 1000


def predictions(network: Network, images: np.ndarray) -> np.ndarray:
    """The class of each image, (B,) of int64, by MXNet's Convolution on the CPU, 1000 images at a time.

    images: (B, C, H, W), pixel values 0 to 255 of any number type.
    """
    mx = mxnet_import.load()
    symbol = load_symbol(with_convolutions(read_graph(network.symbol), str(network.symbol)), network.symbol)
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(min(_BATCH, len(images)), *images.shape[1:]))
    for key, value in params_io.read(network.params.read_bytes(), str(network.params)).items():
        kind, _, name = key.partition(":")
        places = executor.aux_dict if kind == "aux" else executor.arg_dict
        if name in places:
            places[name][:] = value.astype(np.float32)
    batch = executor.arg_dict["data"]
    classes = []
    for start in range(0, len(images), batch.shape[0]):
        part = images[start : start + batch.shape[0]]
        batch[: len(part)] = part.astype(np.float32)
        classes.append(executor.forward(is_train=False)[0].asnumpy()[: len(part)].argmax(axis=1))
    return np.concatenate(classes)


def accuracies(classes: np.ndarray, labels: np.ndarray) -> list[float]:
    """The share of right answers among the first 10, 100, ... images; classes and labels: (10000,) of integers."""
    return [agreement(classes[:count], labels[:count]).share for count in COUNTS]


def table() -> str:
    """The table in Markdown, a row for each network and set of images."""
    sets: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {"real": _real, "sample": _sample}
    rows = [
        "| network | image | images from | " + " | ".join(f"first {count}" for count in COUNTS) + " |",
        "| --- | --- | --- |" + " --- |" * len(COUNTS),
    ]
    for name in tqdm(list_names(), desc="networks"):
        network = find(name)
        _, height, width = info(network).image
        for source, load in sets.items():
            images, labels = load(height)
            shares = accuracies(predictions(network, images), labels)
            cells = [name, f"{height} x {width}", source, *(f"{share:.4f}" for share in shares)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def write_readme(text: str, readme: Path = README) -> None:
    """Put the text between the markers; raises DataError where README.md lacks them."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{readme}: expected the markers {BEGIN} and {END}, found them missing")
    with replacing(readme) as file:
        file.write(f"{before}{BEGIN}\n{text}{END}{after}".encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into README.md; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.models.accuracy",
        description="Accuracy of each network, as a table in Markdown.",
        epilog="example: ECE408_DATA=/data/fashion-mnist python -m ece408_op.models.accuracy --write",
    )
    parser.add_argument("--write", action="store_true", help="put the table into models/README.md")
    write = parser.parse_args(argv).write
    # The network's other setting fuses convolution and tanh, which is several times slower.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    try:
        text = table()
        if write:
            write_readme(text)
    except Ece408Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


def _real(size: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels, source = load_test(size=size)
    if source != "fashion-mnist":
        raise DataError("expected the real Fashion-MNIST, found none; set ECE408_DATA to a folder with its files")
    return images, labels


def _sample(size: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = sample.generate()
    return resize(images, size)[:, None], labels


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("models.accuracy", main))
