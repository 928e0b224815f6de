"""Fit the sample set's model to Fashion-MNIST's training images and write sample_model.npz.

    python -m ece408_op.data.make_sample [FOLDER]

FOLDER holds the training files; without it the usual places are searched. The command prints the SHA-256 for
``sample.SHA256``. BLAS and LAPACK compute means and components, so another machine may fit a model that differs in a
last bit; the file in the repository counts.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from ece408_op.commands import guard
from ece408_op.errors import DataError

from . import sample
from ._fashion_mnist import load_training
from .atomic import replacing

#: Principal components and clusters per class: a file of 348 kB, and images that keep what distinguishes the classes.
COMPONENTS, CLUSTERS = 48, 24
ITERATIONS = 60
INT8_MOST = 127


def k_means(points: np.ndarray, clusters: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Lloyd's algorithm on points (N, K): return the centres (G, K) and the cluster of each point (N,)."""
    centres = points[random.choice(len(points), clusters, replace=False)]
    for _ in range(ITERATIONS):
        # |p - c|^2 minus |p|^2, which is the same for every centre
        nearest = np.argmin((centres**2).sum(axis=1) - 2 * points @ centres.T, axis=1)
        for cluster in np.unique(nearest):
            centres[cluster] = points[nearest == cluster].mean(axis=0)
    return centres, nearest


def fit(images: np.ndarray, labels: np.ndarray) -> sample.Model:
    """Return the model of images (N, 28, 28) and labels (N,), both uint8."""
    random = np.random.RandomState(sample.SEED)
    fitted = []
    for label in range(sample.CLASSES):
        pixels = images[labels == label].reshape(-1, sample.SIZE**2).astype(np.float64)
        mean = pixels.mean(axis=0)
        pixels -= mean
        _, vectors = np.linalg.eigh(pixels.T @ pixels)  # in ascending order of variance
        vectors = vectors[:, ::-1][:, :COMPONENTS]  # (P, K)
        points = pixels @ vectors
        centres, nearest = k_means(points, CLUSTERS, random)
        unit = np.abs(vectors).max(axis=0) / INT8_MOST  # (K,): one step of a component as int8
        scale = unit * 2**sample.FRACTION_BITS
        members = [points[nearest == cluster] for cluster in range(CLUSTERS)]
        spreads = np.array([own.std(axis=0) if len(own) else np.zeros(COMPONENTS) for own in members])
        sizes = np.array([len(own) for own in members])
        fitted.append((mean * 2**sample.MEAN_BITS, (vectors / unit).T, sizes, centres * scale, spreads * scale))
    types: list[type[np.signedinteger]] = [np.int16, np.int8, np.int16, np.int16, np.int16]
    return sample.Model(*(_integers(np.stack(values), dtype) for values, dtype in zip(zip(*fitted), types)))


def _integers(values: np.ndarray, dtype: type[np.signedinteger]) -> np.ndarray:
    rounded = np.rint(values)
    limits = np.iinfo(dtype)
    if rounded.min() < limits.min or rounded.max() > limits.max:
        raise DataError(f"the model does not fit {limits.dtype}: {rounded.min():g} to {rounded.max():g}")
    return rounded.astype(dtype)


def main() -> int:
    """Write the model; return 0, or 1 if the training files cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.data.make_sample",
        description=str(__doc__).split("\n", 1)[0],
        epilog="example: python -m ece408_op.data.make_sample /data/fashion-mnist",
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="with the training files (default: usual places)")
    try:
        training = load_training(folder=parser.parse_args().folder)
        model = fit(training.images[:, 0], training.labels)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    with replacing(sample.MODEL) as file:
        np.savez_compressed(file, **model._asdict())
    print(sample.digest(*sample.draw(model)))
    return 0


if __name__ == "__main__":
    sys.exit(guard("ece408_op.data.make_sample", main))
