"""Fashion-MNIST: the published files and their checksums, the places to search for them, and their images at any size.

Fashion-MNIST: H. Xiao, K. Rasul, R. Vollgraf, 'Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms', arXiv:1708.07747; MIT licence; https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import sys
import time
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ece408_op.errors import DataError

from . import sample
from .atomic import replacing
from .resize import resize

#: The environment variable with the name of a folder that has the files.
VARIABLE = "ECE408_DATA"

#: The project's data folder.
PROJECT_FOLDER = Path(__file__).resolve().parent

#: The authors' server.
URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"

#: Seconds to wait for a connection and for each packet; after these, the fewest bytes per second.
TIMEOUT, LEAST_RATE = 5.0, 10_000

#: The rows and columns of the published images.
ORIGINAL_SIZE = 28

_GZIP_MAGIC = b"\x1f\x8b"
#: The most bytes of a download to read at a time.
_CHUNK = 1 << 16

#: At most 120 characters, so it does not list the places that were searched.
SAMPLE_NOTICE = (
    "Using the generated sample set: Fashion-MNIST was neither found nor downloaded; set ECE408_DATA to its folder"
)


@dataclass(frozen=True)
class PublishedFile:
    """One file in IDX format: its name without .gz, the shape of its uint8 array, and the SHA-256 without compression.

    An IDX file has two zero bytes, the type (8), the number of dimensions, each dimension as a big-endian integer of 32
    bits, and the elements in C order.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str


TEST = (
    PublishedFile(
        "t10k-images-idx3-ubyte",
        (10000, 28, 28),
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    PublishedFile(
        "t10k-labels-idx1-ubyte",
        (10000,),
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

TRAINING = (
    PublishedFile(
        "train-images-idx3-ubyte",
        (60000, 28, 28),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    PublishedFile(
        "train-labels-idx1-ubyte",
        (60000,),
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
)


class TestSet(NamedTuple):
    """Images to classify: (N, 1, S, S), float32, pixel values 0 to 255; their classes 0 to 9: (N,), uint8.

    ``source`` is 'fashion-mnist', or 'sample' for the generated set.
    """

    images: np.ndarray
    labels: np.ndarray
    source: str


class TrainingSet(NamedTuple):
    """Images to learn from: (N, 1, S, S), uint8, and their classes: (N,), uint8."""

    images: np.ndarray
    labels: np.ndarray


class Found(NamedTuple):
    """The test images in their original size, (10000, 28, 28), their labels, (10000,), both uint8, and their source."""

    images: np.ndarray
    labels: np.ndarray
    source: str


class _AbsentError(DataError):
    """The files are in none of the searched places, and the download failed; the message names every place."""


def find_test(folder: str | os.PathLike[str] | None = None) -> Found:
    """Return the test images, from ``folder`` if it is given.

    Otherwise these places are searched in order: the folder in the environment variable ECE408_DATA, the project's data
    folder, the cache folder. Then the files are downloaded into the cache folder. If all fail, the generated sample set
    is returned, and a line on stderr says so. Files may be gzipped or not; their checksums are verified.

    Raises DataError if ``folder`` lacks the files, if ECE408_DATA names no folder, or if a file outside the cache
    differs from the published one (in the cache, such a file is downloaded again).
    """
    try:
        images, labels = _find(TEST, folder)
    except _AbsentError:
        print(SAMPLE_NOTICE, file=sys.stderr)
        return Found(*sample.generate(), "sample")
    return Found(images, labels, "fashion-mnist")


def load_test(
    size: int = ORIGINAL_SIZE,
    count: int = 10000,
    folder: str | os.PathLike[str] | None = None,
    found: Found | None = None,
) -> TestSet:
    """Return the first ``count`` test images of ``found``, or of ``find_test(folder)``, as ``size`` x ``size`` pixels.

    Raises DataError if ``size`` is below 1 or ``count`` outside 1 to 10000, and for the reasons of ``find_test``.
    """
    if not 1 <= count <= TEST[0].shape[0]:
        raise DataError(f"count: expected 1 to {TEST[0].shape[0]}, got {count}")
    images, labels, source = find_test(folder) if found is None else found
    pixels = _sized(images[:count], size)
    return TestSet(pixels.astype(np.float32)[:, None], labels[:count].copy(), source)


def load_training(size: int = ORIGINAL_SIZE, folder: str | os.PathLike[str] | None = None) -> TrainingSet:
    """Return the 60,000 training images as ``size`` x ``size`` pixels, from the places of ``find_test``.

    Raises DataError if ``size`` is below 1, for the reasons of ``find_test``, and if the files are not found, because
    no sample set replaces them.
    """
    images, labels = _find(TRAINING, folder)
    return TrainingSet(_sized(images, size)[:, None], labels)


def cache_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/ece408-op, by default ~/.cache/ece408-op; None if the user has no home folder.

    A relative XDG_CACHE_HOME is ignored (XDG Base Directory Specification).
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ece408-op"
    try:
        return Path.home() / ".cache" / "ece408-op"
    except RuntimeError:
        return None


def _sized(images: np.ndarray, size: int) -> np.ndarray:
    if size < 1:
        raise DataError(f"size: expected 1 or more, got {size}")
    return images if size == images.shape[1] else resize(images, size)


def _find(files: Sequence[PublishedFile], folder: str | os.PathLike[str] | None) -> list[np.ndarray]:
    """Return the arrays of TEST or TRAINING from ``folder``, or else from the first place that has them."""
    wanted = " and ".join(f"{file.name}.gz" for file in files)
    named = os.environ.get(VARIABLE)
    if folder is None and named and not Path(named).is_dir():
        raise DataError(f"{VARIABLE}: expected a folder, got {named}; unset it, or name a folder with {wanted}")
    places = [Path(place) for place in ([named, PROJECT_FOLDER] if folder is None else [folder]) if place]
    for place in places:
        arrays = _read_folder(place, files)
        if arrays is not None:
            return arrays
    if folder is not None:
        raise DataError(f"{folder}: expected a folder with {wanted} (gzipped or not)")
    cache = cache_folder()
    try:
        if cache is None:
            raise DataError("this user has no home folder for the download")
        cache.mkdir(parents=True, exist_ok=True)
        return [_cached_or_downloaded(cache, file) for file in files]
    except (DataError, OSError) as error:
        searched = ", ".join(map(str, [*places, cache] if cache else places))
        raise _AbsentError(
            f"Fashion-MNIST is not in {searched} and could not be downloaded ({error}); "
            f"set {VARIABLE} to a folder with {wanted}"
        ) from error


def _read_folder(folder: Path, files: Sequence[PublishedFile]) -> list[np.ndarray] | None:
    """Return the arrays of the files in that folder, gzipped or not; None if the folder lacks one of them."""
    found = []
    for file in files:
        paths = (folder / f"{file.name}.gz", folder / file.name)
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        found.append((path, file))
    return [_read(path, file) for path, file in found]


def _read(path: Path, file: PublishedFile) -> np.ndarray:
    """Return the file's array, read-only. Raises DataError, which names the path, for any other content."""
    elements = math.prod(file.shape)
    length = 4 + 4 * len(file.shape) + elements
    try:
        with open(path, "rb") as raw, gzip.open(raw) as unpacked:
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            # Reading one byte more detects a longer file, and makes gzip check the CRC at the end.
            content = (unpacked if packed else raw).read(length + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason}); replace the file by a fresh copy") from error
    got = hashlib.sha256(content).hexdigest()
    if got != file.sha256:
        raise DataError(
            f"{path}: not the published {file.name}: expected content of SHA-256 {file.sha256}, got {got}; "
            "replace the file by a fresh copy"
        )
    return np.frombuffer(content, np.uint8)[-elements:].reshape(file.shape)


def _cached_or_downloaded(cache: Path, file: PublishedFile) -> np.ndarray:
    """Return the file's array from the cache folder; download a missing or damaged file."""
    damaged = ""
    try:
        arrays = _read_folder(cache, [file])
        if arrays is not None:
            return arrays[0]
    except DataError as error:
        damaged = f"; {error}"
    name = f"{file.name}.gz"
    try:
        with replacing(cache / name) as copy:
            _download(name, copy)
            try:
                return _read(Path(copy.name), file)
            except DataError as error:
                raise DataError("the server sent another file, or not all of it") from error
    except (DataError, OSError, ValueError, http.client.HTTPException) as error:
        raise DataError(f"{URL}{name}: {error}{damaged}") from error


def _download(name: str, target: BinaryIO) -> None:
    """Copy a file from the authors' server into ``target``, with a progress bar on stderr."""
    from tqdm import tqdm

    request = urllib.request.Request(f"{URL}{name}", headers={"User-Agent": "ece408-op"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        size = int(response.headers.get("Content-Length", 0)) or None
        start, received = time.monotonic(), 0
        with tqdm(total=size, desc=f"Downloading {name}", unit="B", unit_scale=True) as bar:
            while chunk := response.read1(_CHUNK):
                target.write(chunk)
                bar.update(len(chunk))
                received += len(chunk)
                if time.monotonic() - start > TIMEOUT + received / LEAST_RATE:
                    raise DataError(f"expected {LEAST_RATE} bytes per second, got {received} in all")
    target.flush()
