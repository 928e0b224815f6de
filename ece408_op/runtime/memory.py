"""Memory for CPU kernels: aligned scratch memory, and outputs with mapped pages."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .thread_pool import parallel_for

_BYTE = ctypes.c_byte

#: A cache line, in bytes.
LINE = 64

#: Below this many bytes a system call costs more than it saves.
_WORTH = 4 << 20

#: madvise's MADV_POPULATE_WRITE, in Linux 5.14 and later; Python has no name for it.
_POPULATE_WRITE = 23

#: Elements that a thread maps at a time.
_MAPPED = 8 << 20


def aligned(count: int) -> np.ndarray:
    """Return an uninitialised float32 array of ``count`` elements that begins at a cache line."""
    raw = np.empty(count * 4 + LINE, np.uint8)
    skip = -address(raw) % LINE
    return raw[skip : skip + count * 4].view(np.float32)


def address(array: np.ndarray) -> int:
    """Return the address of a C-contiguous array; several times as fast as ``array.ctypes.data``."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(array))  # type: ignore[arg-type] # a buffer it is
    except (TypeError, ValueError):  # not to be written to, or empty
        return int(array.__array_interface__["data"][0])


@cache
def l2_bytes() -> int:
    """Return the size of a core's L2; 512 KiB, as most CPUs have at least, if the system does not report it."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, LookupError):
        return 512 << 10


@cache
def _system() -> Any:
    """Return the C library, for madvise and mincore."""
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def advise_huge_pages(array: np.ndarray) -> None:
    """Advise Linux to use huge pages for a large array that is about to be filled.

    The first touch of each page of a fresh output is a page fault, and with pages of 4 KiB the faults take longer than
    the convolution. The advice covers the array's whole pages only. If Linux declines, nothing happens.
    """
    if array.nbytes < _WORTH:
        return
    start = address(array)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _system().madvise(first, last - first, mmap.MADV_HUGEPAGE)


def map_pages(array: np.ndarray, threads: int) -> None:
    """Map every page of a C-contiguous array that is about to be overwritten; its values are lost.

    A mapped page costs next to nothing, so that a reused output is not slowed down.
    """
    data = array.reshape(-1)
    if data.nbytes < _WORTH:
        data[:: mmap.PAGESIZE // data.itemsize] = 0  # the first write maps a page
        data[-1:] = 0
        return
    advise_huge_pages(array)
    parallel_for(lambda part: _map(data[part * _MAPPED : (part + 1) * _MAPPED]), -(-data.size // _MAPPED), threads)


def _map(data: np.ndarray) -> None:
    system = _system()
    start = address(data)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    size = start + data.nbytes - first
    # Querying which pages are mapped takes a hundredth of the time of mapping mapped ones again.
    mapped = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if system.mincore(first, size, address(mapped)) == 0 and (mapped & 1).all():
        return
    if system.madvise(first, size, _POPULATE_WRITE) == 0:
        return
    data[:: mmap.PAGESIZE // data.itemsize] = 0
    data[-1:] = 0
