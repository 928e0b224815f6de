"""Launches that may begin before the one before them has ended (CUDA's programmatic dependent launch).

CuPy launches kernels one after another; the driver's own call takes the attribute. The kernel waits by itself, with
the instruction ``griddepcontrol.wait``, before it touches what the one before it writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .launch import Launch

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


def launch(function: int, step: Launch, arguments: Sequence[np.generic], stream: int) -> bool:
    """Put the step, a launch of that CUfunction, on the stream; False where the driver cannot or will not."""
    call = _driver()
    if call is None:
        return False
    held = [np.asarray(argument) for argument in arguments]  # of the parameters' own types
    pointers = (ctypes.c_void_p * len(held))(*(each.ctypes.data for each in held))
    attribute = _Attribute(_EARLY, 0, 1)
    config = _Config(step.grid, step.block, step.shared, stream, ctypes.pointer(attribute), 1)
    return bool(call(ctypes.byref(config), function, pointers, None) == 0)
