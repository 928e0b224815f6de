"""What a CPU kernel asks of memory: aligned scratch, and large pages under a large output."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_BYTE = ctypes.c_byte

#: A cache line, in bytes.
LINE = 64

#: Below this many bytes a call of the system costs more than it saves.
_WORTH = 4 << 20


def aligned(count: int) -> np.ndarray:
    """An uninitialised float32 array of ``count`` elements that begins at a cache line."""
    raw = np.empty(count * 4 + LINE, np.uint8)
    skip = -address(raw) % LINE
    return raw[skip : skip + count * 4].view(np.float32)


def address(array: np.ndarray) -> int:
    """Where a C-contiguous array begins; several times as quick as ``array.ctypes.data``."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(array))  # type: ignore[arg-type] # a buffer it is
    except (TypeError, ValueError):  # not to be written to, or empty
        return int(array.__array_interface__["data"][0])


@cache
def second_level_bytes() -> int:
    """The size of a core's second-level cache; where the system does not say, what most CPUs have at least."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, LookupError):
        return 512 << 10


@cache
def _madvise() -> Any:
    """The C library's madvise, or None where there are no large pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def advise_huge_pages(array: np.ndarray) -> None:
    """Ask Linux for large pages under an array about to be filled, where it is large.

    A fresh output is not in memory yet: each page's first touch is a fault, and at 4 KiB a page they
    take longer than the convolution. Only the array's own whole pages are named; elsewhere than
    on Linux, or where the system says no, nothing happens.
    """
    madvise = _madvise()
    if madvise is None or array.nbytes < _WORTH:
        return
    start = address(array)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(first, last - first, mmap.MADV_HUGEPAGE)
