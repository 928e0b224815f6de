"""Print each network's accuracy on the real and the sample test images, as MXNet's own Convolution computes it.

    python -m ece408_op.models.accuracy         the table of README.md, in Markdown

The real images are searched for as everywhere (ECE408_DATA names their folder); without them the command fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from ece408_op.data import load_test, sample
from ece408_op.data.resize import resize
from ece408_op.errors import DataError, Ece408Error
from ece408_op.plugin import mxnet_import

from . import inference
from .files import Network, find, list_names
from .shapes import info

#: The table's columns are accuracies on the first n test images.
COUNTS = (10, 100, 1000, 2000, 10000)


def predictions(network: Network, images: np.ndarray, batch: int = 1000) -> np.ndarray:
    """Return the class of each image, (B,) of int64, computed by MXNet's Convolution on the CPU, `batch` at a time.

    images: (B, C, H, W), pixel values 0 to 255 of any number type.
    """
    loaded, cpu = inference.built_in(network), mxnet_import.load().cpu()
    parts = (images[start : start + batch].astype(np.float32) for start in range(0, len(images), batch))
    return np.concatenate([inference.predict(loaded, part, cpu) for part in parts])


def table() -> str:
    """Return the table in Markdown: a row per network and set of images. Raises DataError without the real images."""
    rows = [
        "| network | image | images from | " + " | ".join(f"first {count}" for count in COUNTS) + " |",
        "| --- | --- | --- |" + " --- |" * len(COUNTS),
    ]
    for name in tqdm(list_names(), desc="networks"):
        network = find(name)
        size = info(network).image[1]
        real, labels, source = load_test(size=size)
        if source != "fashion-mnist":
            raise DataError("expected the real Fashion-MNIST, found none; set ECE408_DATA to a folder with its files")
        generated, generated_labels = sample.generate()
        sets = {"real": (real, labels), "sample": (resize(generated, size)[:, None], generated_labels)}
        for images_from, (images, truth) in sets.items():
            right = predictions(network, images) == truth
            shares = " | ".join(f"{right[:count].mean():.4f}" for count in COUNTS)
            rows.append(f"| {name} | {size} x {size} | {images_from} | {shares} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    argparse.ArgumentParser(
        prog="python -m ece408_op.models.accuracy",
        description="Print the accuracy of each network, as a table in Markdown.",
        epilog="example: ECE408_DATA=/data/fashion-mnist python -m ece408_op.models.accuracy",
    ).parse_args(argv)
    # MXNet's default subgraph backend fuses convolution and tanh, which is several times slower.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    try:
        print(table())
    except Ece408Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("models.accuracy", main))
