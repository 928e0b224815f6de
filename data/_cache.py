"""A folder of the user's for what can be made or fetched again: downloads and resized images.

An array is kept as the SHA-256 of its bytes, then the bytes: a file that was cut or changed is not
believed but made anew. The cache is a help, never a condition: where it cannot be written, all
works without it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from .atomic import replacing

_DIGEST_BYTES = hashlib.sha256().digest_size


def folder() -> Path | None:
    """$XDG_CACHE_HOME/ece408-op, by default ~/.cache/ece408-op; None for a user without a home.

    Source: XDG Base Directory Specification, which has a relative XDG_CACHE_HOME ignored.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ece408-op"
    try:
        return Path.home() / ".cache" / "ece408-op"
    except RuntimeError:
        return None


def load(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The uint8 array kept under that name, or None where there is no sound one of that shape."""
    place = folder()
    if place is None:
        return None
    total = int(np.prod(shape, dtype=np.int64))
    try:
        with open(place / name, "rb") as file:
            if os.fstat(file.fileno()).st_size != _DIGEST_BYTES + total:
                return None
            digest = file.read(_DIGEST_BYTES)
            array = np.fromfile(file, np.uint8, total)
    except OSError:
        return None
    if array.size != total or hashlib.sha256(array.data).digest() != digest:
        return None
    return array.reshape(shape)


def store(name: str, array: np.ndarray) -> None:
    """Keep a C-contiguous uint8 array under that name, if the cache can be written."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        with replacing(place / name) as file:
            file.write(hashlib.sha256(array.data).digest())
            file.write(array.data)
    except OSError:
        pass
