"""The user's cache folder, for downloads and resized images.

A cached array is stored as its SHA-256 followed by its bytes; `load` ignores a file that was truncated or changed. The
package works without the cache, for example where the folder is not writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from pathlib import Path

import numpy as np

from .atomic import replacing


def folder() -> Path | None:
    """Return $XDG_CACHE_HOME/ece408-op, by default ~/.cache/ece408-op; None for a user without a home folder.

    A relative XDG_CACHE_HOME is ignored (XDG Base Directory Specification).
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "ece408-op"
    try:
        return Path.home() / ".cache" / "ece408-op"
    except RuntimeError:
        return None


def load(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the uint8 array stored under ``name``, or None without an undamaged one of that shape."""
    cache = folder()
    if cache is None:
        return None
    digest_bytes, total = hashlib.sha256().digest_size, math.prod(shape)
    try:
        with open(cache / name, "rb") as file:
            if os.fstat(file.fileno()).st_size != digest_bytes + total:
                return None
            digest = file.read(digest_bytes)
            array = np.fromfile(file, np.uint8, total)
    except OSError:
        return None
    sound = array.size == total and hashlib.sha256(array.data).digest() == digest
    return array.reshape(shape) if sound else None


def store(name: str, array: np.ndarray) -> None:
    """Store a C-contiguous uint8 array under ``name`` if the cache is writable."""
    cache = folder()
    if cache is not None:
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            with replacing(cache / name) as file:
                file.write(hashlib.sha256(array.data).digest())
                file.write(array.data)
