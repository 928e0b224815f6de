"""Loading the shared libraries of the nvidia-* wheels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path


def load_libraries(names: Iterable[str], folders: Iterable[Path] | None = None) -> list[str]:
    """Load shared libraries of the nvidia-* wheels, so that what links to them needs no LD_LIBRARY_PATH.

    names are file names such as "libcudart.so.11.0"; each is looked for in site-packages/nvidia/*/lib, or
    in folders. Returns the paths loaded; what is in none of the folders is left to the system's loader.
    """
    if folders is None:
        folders = [lib for entry in sys.path if entry for lib in sorted(Path(entry).glob("nvidia/*/lib"))]
    places = list(folders)
    found = (next((folder / name for folder in places if (folder / name).is_file()), None) for name in names)
    waiting = [path for path in found if path is not None]
    loaded: list[str] = []
    while waiting:
        left = []
        for path in waiting:
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                left.append(path)  # perhaps it links to one that comes later
            else:
                loaded.append(str(path))
        if len(left) == len(waiting):
            break
        waiting = left
    return loaded
