"""The four files of Fashion-MNIST: their checksums, and where they are looked for.

Fashion-MNIST: H. Xiao, K. Rasul, R. Vollgraf, 'Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms', arXiv:1708.07747; MIT licence; https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ece408_op.errors import DataError

from . import _cache, _download, _idx

#: The environment variable that names a folder with the files.
VARIABLE = "ECE408_DATA"

#: The project's data folder: this one.
PROJECT_FOLDER = Path(__file__).resolve().parent

#: Where the authors publish the files. Their second address has no https; the checksum guards both.
MIRRORS = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)


@dataclass(frozen=True)
class OfficialFile:
    """One file: its name without .gz, the array in it, and the sums of both forms of it."""

    name: str
    shape: tuple[int, ...]
    #: SHA-256 of the elements in C order, without the IDX header.
    sha256: str
    #: Length and SHA-256 of the .gz file as published.
    gz_bytes: int
    gz_sha256: str


TEST = (
    OfficialFile(
        "t10k-images-idx3-ubyte",
        (10000, 28, 28),
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        4422102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    OfficialFile(
        "t10k-labels-idx1-ubyte",
        (10000,),
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        5148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

TRAINING = (
    OfficialFile(
        "train-images-idx3-ubyte",
        (60000, 28, 28),
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        26421880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    OfficialFile(
        "train-labels-idx1-ubyte",
        (60000,),
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        29515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
)


class AbsentError(DataError):
    """The files are in none of the places, and no server gave them; the message names every place."""


def _path(folder: Path, file: OfficialFile) -> Path | None:
    """The file in that folder, gzipped or not."""
    for path in (folder / f"{file.name}.gz", folder / file.name):
        if path.is_file():
            return path
    return None


def _read(path: Path, file: OfficialFile) -> np.ndarray:
    array = _idx.read(path, file.shape)
    got = hashlib.sha256(array.data).hexdigest()
    if got != file.sha256:
        raise DataError(
            f"{path}: not the published {file.name}: expected elements of SHA-256 {file.sha256}, got {got}; "
            "replace the file by a fresh copy"
        )
    return array


def read_folder(folder: Path, files: Sequence[OfficialFile]) -> list[np.ndarray] | None:
    """The arrays of the files in that folder, or None where it lacks one.

    Raises DataError naming the file where one is there and is not the published one.
    """
    paths = [_path(folder, file) for file in files]
    if None in paths:
        return None
    return [_read(path, file) for path, file in zip(paths, files) if path is not None]


def find(files: Sequence[OfficialFile], folder: str | os.PathLike[str] | None = None) -> list[np.ndarray]:
    """The arrays of TEST or TRAINING, images first.

    They are read from ``folder`` where it is given, and from nowhere else. Without it the first place
    that has them counts: the folder that ECE408_DATA names, this project's data folder, the cache
    folder, and last a download into the cache folder. Files are taken gzipped or not, and their
    checksums are verified.

    Raises AbsentError where no place has them; DataError where ECE408_DATA names no folder, or, naming the file, where
    one is there and is not the published one. In the cache folder such a file is downloaded again instead.
    """
    wanted = " and ".join(f"{file.name}.gz" for file in files)
    if folder is not None:
        arrays = read_folder(Path(folder), files)
        if arrays is None:
            raise DataError(f"{folder}: expected a folder with {wanted} (gzipped or not)")
        return arrays
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise DataError(f"{VARIABLE}: expected a folder, got {named}; unset it, or name a folder with {wanted}")
    places = ([Path(named)] if named else []) + [PROJECT_FOLDER]
    for place in places:
        arrays = read_folder(place, files)
        if arrays is not None:
            return arrays
    kept = _cache.folder()
    looked = ", ".join(map(str, [*places, kept] if kept else places))
    try:
        if kept is None:
            raise DataError("this user has no home folder to keep it in")
        kept.mkdir(parents=True, exist_ok=True)
        return [_kept_or_fetched(kept, file) for file in files]
    except (DataError, OSError) as error:
        raise AbsentError(
            f"Fashion-MNIST is not in {looked} and could not be downloaded ({error}); "
            f"set {VARIABLE} to a folder with {wanted}"
        ) from error


def _kept_or_fetched(folder: Path, file: OfficialFile) -> np.ndarray:
    """The file's array from the cache folder, where a damaged copy is replaced and a missing one fetched."""
    failures = []
    path = _path(folder, file)
    if path is not None:
        try:
            return _read(path, file)
        except DataError as error:
            failures.append(str(error))
    target = folder / f"{file.name}.gz"
    for mirror in MIRRORS:
        try:
            _download.fetch(f"{mirror}{target.name}", target, file.gz_bytes, file.gz_sha256)
            return _read(target, file)
        except DataError as error:
            failures.append(str(error))
    raise DataError("; ".join(failures))
