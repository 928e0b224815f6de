"""The doors: Fashion-MNIST's test and training images at any square size, ready for a network."""

from __future__ import annotations

import os
import sys
from operator import index
from typing import NamedTuple

import numpy as np

from ece408_op.errors import DataError

from . import _cache, _official, sample
from .resize import resize

#: The size of the published images: rows, and columns.
ORIGINAL_SIZE = 28

#: Of at most 120 characters, whatever the paths that were searched are called.
SAMPLE_NOTICE = (
    "Using the generated sample set: Fashion-MNIST was neither found nor downloaded; set ECE408_DATA to its folder"
)

#: A resized set is kept in the cache up to this many bytes (10,000 images of 163 x 163).
CACHED_BYTES = 2**28


class TestSet(NamedTuple):
    """Images to classify, with the truth."""

    #: (N, 1, S, S), float32, pixel values 0 to 255, not normalised.
    images: np.ndarray
    #: (N,), uint8, classes 0 to 9.
    labels: np.ndarray
    #: 'fashion-mnist', or 'sample' where the generated set took its place.
    source: str


class TrainingSet(NamedTuple):
    """Images to learn from: (N, 1, S, S), uint8, and their classes: (N,), uint8."""

    images: np.ndarray
    labels: np.ndarray


class Found(NamedTuple):
    """The test images as they are published: (10000, 28, 28) and (10000,), uint8; where from, and their SHA-256."""

    images: np.ndarray
    labels: np.ndarray
    source: str
    digest: str


def find_test(folder: str | os.PathLike[str] | None = None) -> Found:
    """The test images, searched for as ``official.find`` says.

    Where they are nowhere, the generated sample set takes their place, and one line on stderr says so; not so where
    ``folder`` is given. Raises DataError for a folder without the files, or a file that is not the published one.
    """
    try:
        images, labels = _official.find(_official.TEST, folder)
    except _official.AbsentError:
        print(SAMPLE_NOTICE, file=sys.stderr)
        return Found(*sample.generate(), "sample", sample.SHA256)
    return Found(images, labels, "fashion-mnist", _official.TEST[0].sha256)


def load_test(
    size: int = ORIGINAL_SIZE,
    count: int = 10000,
    folder: str | os.PathLike[str] | None = None,
    found: Found | None = None,
) -> TestSet:
    """The first ``count`` test images of ``found``, or of ``find_test(folder)``, resized to ``size`` x ``size`` pixels.

    Raises DataError for a size below 1, a count outside 1 to 10000, and as ``find_test`` does.
    """
    size = _whole("size", size, None)
    count = _whole("count", count, _official.TEST[0].shape[0])
    images, labels, source, digest = find_test(folder) if found is None else found
    pixels = _sized(images, size, count, f"{source}-test-{digest[:16]}-{size}.u8")
    return TestSet(pixels.astype(np.float32)[:, None], labels[:count].copy(), source)


def load_training(size: int = ORIGINAL_SIZE, folder: str | os.PathLike[str] | None = None) -> TrainingSet:
    """The 60,000 training images, resized to ``size`` x ``size`` pixels; searched for as the test images are.

    Raises DataError for a size below 1, where the files are nowhere (no sample takes their place), or
    where a file is not the published one.
    """
    size = _whole("size", size, None)
    images, labels = _official.find(_official.TRAINING, folder)
    digest = _official.TRAINING[0].sha256
    pixels = _sized(images, size, len(images), f"fashion-mnist-training-{digest[:16]}-{size}.u8")
    return TrainingSet(pixels[:, None], labels)


def _whole(name: str, value: int, most: int | None) -> int:
    """The value as an int, at least 1 and at most ``most``."""
    expected = f"an integer of 1 to {most}" if most else "an integer of 1 or more"
    try:
        whole = index(value)
    except TypeError:
        raise DataError(f"{name}: expected {expected}, got {value!r}") from None
    if whole < 1 or (most is not None and whole > most):
        raise DataError(f"{name}: expected {expected}, got {whole}")
    return whole


def _sized(images: np.ndarray, size: int, count: int, name: str) -> np.ndarray:
    """The first ``count`` images (N, 28, 28) as (count, size, size), through the cache where all N fit it."""
    if size == images.shape[1]:
        return images[:count]
    shape = (len(images), size, size)
    if len(images) * size * size > CACHED_BYTES:
        return resize(images[:count], size)
    pixels = _cache.load(name, shape)
    if pixels is None:
        pixels = resize(images, size)
        _cache.store(name, pixels)
    return pixels[:count]
