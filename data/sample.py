"""The sample set: 10,000 labelled images drawn from a statistical model of Fashion-MNIST's classes.

It replaces the real images if they are not available, so that every script still runs. Each class is a mixture of
24 Gaussians in the space of the first 48 principal components of its training images:

    g         a cluster of k-means, with the probability of its share of the training images
    z_j       an almost normal number for component j: the sum of 12 random bytes minus 1530, whose variance
              12 * (256**2 - 1) / 12 gives a standard deviation of 256 within 0.001 %
    a_j       centre[g, j] + spread[g, j] * z_j / 256
    pixel     mean + sum over j of a_j * component[j], clipped to 0..255

All of this is integer arithmetic on random bytes of RandomState, whose stream NumPy keeps unchanged (NEP 19). So every
machine generates the same images with any BLAS, libm or NumPy.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ece408_op.errors import DataError

#: The file of the fitted model, with the arrays of ``Model``.
MODEL = Path(__file__).with_name("sample_model.npz")

#: SHA-256 of the generated images, then the labels.
SHA256 = "968d9225761eccc90b9a8bd5c60ccba7324d0288fb671429834a5193a998c27d"

SEED = 408
COUNT = 10000
CLASSES = 10
SIZE = 28

#: The fraction bits of a_j * component[j], and of the mean.
FRACTION_BITS, MEAN_BITS = 12, 6
#: Random bytes per almost normal number, the mean of their sum, and the bits of its standard deviation.
NORMAL_BYTES, NORMAL_CENTRE, NORMAL_BITS = 12, 1530, 8


class Model(NamedTuple):
    """The integers of the model, for 10 classes, G clusters, K components and P = 28 * 28 pixels."""

    #: (10, P), int16, in 1/64 of a grey level.
    mean: np.ndarray
    #: (10, K, P), int8, each component scaled to the range of the type.
    components: np.ndarray
    #: (10, G), int16: training images per cluster.
    sizes: np.ndarray
    #: (10, G, K), int16: centres; times ``components``, they are in 1/4096 of a grey level. ``spreads`` likewise.
    centres: np.ndarray
    spreads: np.ndarray


def _draw(model: Model) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(SEED)
    labels = random.permutation(np.repeat(np.arange(CLASSES, dtype=np.uint8), COUNT // CLASSES))
    images = np.empty((COUNT, SIZE * SIZE), np.uint8)
    for label in range(CLASSES):
        where = np.flatnonzero(labels == label)
        edges = np.cumsum(model.sizes[label], dtype=np.int64)
        cluster = np.searchsorted(edges, random.randint(0, int(edges[-1]), len(where), np.int64), side="right")
        wanted = (NORMAL_BYTES, len(where), model.components.shape[1])
        normal = random.randint(0, 256, wanted, np.uint8).sum(axis=0, dtype=np.int32) - NORMAL_CENTRE
        spread = model.spreads[label, cluster].astype(np.int32)
        weights = model.centres[label, cluster] + ((spread * normal) >> NORMAL_BITS)  # (1000, K)
        pixels = np.matmul(weights, model.components[label].astype(np.int32))  # (1000, P): no BLAS for integers
        pixels += model.mean[label].astype(np.int32) << (FRACTION_BITS - MEAN_BITS)
        pixels += 1 << (FRACTION_BITS - 1)  # the shift then rounds to nearest
        images[where] = np.clip(pixels >> FRACTION_BITS, 0, 255)
    return images.reshape(COUNT, SIZE, SIZE), labels


def generate() -> tuple[np.ndarray, np.ndarray]:
    """Return the sample set, images (10000, 28, 28) and labels (10000,), both uint8, with 1000 images per class.

    Raises DataError if the model file cannot be read or gives other images than this version's.
    """
    try:
        with np.load(MODEL, allow_pickle=False) as arrays:
            model = Model(**{name: arrays[name] for name in Model._fields})
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{MODEL}: expected the sample set's model, cannot read it ({error}); reinstall") from error
    images, labels = _draw(model)
    got = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if got != SHA256:
        raise DataError(f"{MODEL}: expected a model whose images have the SHA-256 {SHA256}, got {got}; reinstall")
    return images, labels
