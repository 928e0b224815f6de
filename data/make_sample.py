"""Fit the sample set's model to Fashion-MNIST's training images and write sample_model.npz.

    python -m ece408_op.data.make_sample [FOLDER]

FOLDER holds the training files; without it they are searched for as everywhere. Prints the SHA-256
to be put into sample.py as ``SHA256``. Means and components come from BLAS and LAPACK, so another
machine may fit a model that differs in a last bit: the file in the repository is the one that counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from ece408_op.commands import guard
from ece408_op.errors import DataError

from . import sample
from ._fashion_mnist import load_training
from .atomic import replacing

#: Principal components and clusters of a class: 348 kB, and images that keep what tells classes apart.
COMPONENTS = 48
CLUSTERS = 24
ROUNDS = 60
INT8_MOST = 127


def k_means(points: np.ndarray, clusters: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Lloyd's algorithm on points (N, K): centres (G, K), and the cluster of each point (N,)."""
    centres = points[random.choice(len(points), clusters, replace=False)]
    for _ in range(ROUNDS):
        # |p - c|^2 less |p|^2, which is the same for every centre
        nearest = np.argmin((centres**2).sum(axis=1) - 2 * points @ centres.T, axis=1)
        for cluster in np.unique(nearest):
            centres[cluster] = points[nearest == cluster].mean(axis=0)
    return centres, nearest


def fit(images: np.ndarray, labels: np.ndarray) -> sample.Model:
    """The model of images (N, 28, 28) and labels (N,), both uint8."""
    random = np.random.RandomState(sample.SEED)
    fitted = []
    for label in range(sample.CLASSES):
        pixels = images[labels == label].reshape(-1, sample.SIZE**2).astype(np.float64)
        mean = pixels.mean(axis=0)
        pixels -= mean
        _, vectors = np.linalg.eigh(pixels.T @ pixels)  # in order of rising variance
        vectors = vectors[:, ::-1][:, :COMPONENTS]  # (P, K)
        points = pixels @ vectors
        centres, nearest = k_means(points, CLUSTERS, random)
        unit = np.abs(vectors).max(axis=0) / INT8_MOST  # (K,): one step of a component as int8
        scale = unit * 2**sample.FRACTION_BITS
        members = [points[nearest == cluster] for cluster in range(CLUSTERS)]
        spreads = np.array([own.std(axis=0) if len(own) else np.zeros(COMPONENTS) for own in members])
        fitted.append(
            sample.Model(
                mean=_integers(mean * 2**sample.MEAN_BITS, np.int16),
                components=_integers((vectors / unit).T, np.int8),
                sizes=_integers(np.array([len(own) for own in members]), np.int16),
                centres=_integers(centres * scale, np.int16),
                spreads=_integers(spreads * scale, np.int16),
            )
        )
    return sample.Model(*(np.stack(parts) for parts in zip(*fitted)))


def _integers(values: np.ndarray, dtype: type[np.signedinteger]) -> np.ndarray:
    rounded = np.rint(values)
    limits = np.iinfo(dtype)
    if rounded.min() < limits.min or rounded.max() > limits.max:
        raise DataError(f"the model does not fit {limits.dtype}: {rounded.min():g} to {rounded.max():g}")
    return rounded.astype(dtype)


def main(arguments: Sequence[str]) -> int:
    """Write the model; the exit code is 0, 1 where the training files cannot be used, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.data.make_sample",
        description=str(__doc__).split("\n", 1)[0],
        epilog="example: python -m ece408_op.data.make_sample /data/fashion-mnist",
    )
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help="with the training files (default: the usual places)"
    )
    options = parser.parse_args(arguments)
    try:
        training = load_training(folder=options.folder)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    model = fit(training.images[:, 0], training.labels)
    with replacing(sample.MODEL) as file:
        np.savez_compressed(file, **model._asdict())
    print(sample.digest(*sample.draw(model)))
    return 0


if __name__ == "__main__":
    sys.exit(guard("ece408_op.data.make_sample", lambda: main(sys.argv[1:])))
