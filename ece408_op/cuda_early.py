"""Launches that may begin before the one before them has ended (CUDA's programmatic dependent launch).

CuPy launches kernels one after another; the driver's own call takes the attribute. The kernel waits by itself, with
the instruction ``griddepcontrol.wait``, before it touches what the one before it writes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from .launch import Launch, Triple

#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_EARLY = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which, and a union of 64 bytes that begins with an int."""

    _fields_ = (("which", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _driver() -> Any:
    """The driver's call, None where the driver is older than it."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    return call


class _Prepared:
    """All that one thread's calls of one launch have in common; what differs is filled in each time."""

    def __init__(self, grid: Triple, block: Triple, shared: int, count: int) -> None:
        # Little-endian integers: a parameter of four bytes is the first half of its eight.
        self.values = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.attribute = _Attribute(_EARLY, 0, 1)
        self.config = _Config(grid, block, shared, None, ctypes.pointer(self.attribute), 1)
        self.reference = ctypes.byref(self.config)


class _Mine(threading.local):
    """A thread's launches: threads do not wait for one another, since a full stream may keep a call waiting."""

    def __init__(self) -> None:
        self.prepared = lru_cache(maxsize=256)(_Prepared)


_mine = _Mine()


def launch(function: int, step: Launch, arguments: Sequence[Any], stream: int) -> bool:
    """Put the step, a launch of that CUfunction, on the stream; False where the driver cannot or will not.

    ``arguments`` are addresses and other integers.
    """
    call = _driver()
    if call is None:
        return False
    prepared = _mine.prepared(step.grid, step.block, step.shared, len(arguments))
    prepared.values[:] = [int(argument) % 2**64 for argument in arguments]
    prepared.config.stream = stream
    return bool(call(prepared.reference, function, prepared.pointers, None) == 0)
