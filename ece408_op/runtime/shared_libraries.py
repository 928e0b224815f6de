"""Loading the shared libraries of the nvidia-* wheels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def load_libraries(names: Iterable[str]) -> None:
    """Load shared libraries of the nvidia-* wheels, so that what links to them needs no LD_LIBRARY_PATH.

    names are file names such as "libcudart.so.11.0", each behind those that it links to; each is looked for in
    site-packages/nvidia/*/lib. What is in none of these folders is left to the system's loader.
    """
    folders = [lib for entry in sys.path if entry for lib in sorted(Path(entry).glob("nvidia/*/lib"))]
    for name in names:
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is not None:
            with suppress(OSError):  # what needs it reports it
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
