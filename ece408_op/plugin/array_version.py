"""How often MXNet has written an array: its engine counts that for each array, but has no function for it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

#: Byte offsets in MXNet 1.9.1's wheels for x86-64 (include/mxnet/ndarray.h and engine.h): of the variable's address in
#: a Chunk, and of the count in a variable. An NDArray begins with the address of its Chunk.
_VARIABLE, _COUNT = 72, 8


def version_of(array: Any) -> Callable[[], int]:
    """Return a function: a number that each write to the array's memory by MXNet increases by one.

    The function keeps the array. Only where it ``is_readable``.

    Views of the memory count too. Writes that MXNet is not told of, through an array of NumPy on the same memory, do
    not. No write may be pending: call it from a function of ``engine_queue`` that writes the array, or where MXNet has
    its operator read the array.
    """
    # An array is asked at each step, hundreds of them in all: what stays is looked up once.
    chunk = _word(array.handle.value)
    first = chunk.value
    count = _word(_word(first + _VARIABLE).value + _COUNT)

    def version(array: Any = array) -> int:
        return count.value if chunk.value == first else version_of(array)()

    return version


def variable_of(array: Any) -> int:
    """Return the address of MXNet's variable for the array's memory, one for all views, where it ``is_readable``."""
    return _word(_word(array.handle.value).value + _VARIABLE).value


def _word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


@cache
def is_readable() -> bool:
    """Return whether this MXNet is one whose memory is known, after a trial, which waits for MXNet's engine."""
    import mxnet as mx

    # Without oneDNN, an array has other fields.
    known = mx.__version__ == "1.9.1" and platform.machine() == "x86_64"
    if not known or not mx.runtime.Features().is_enabled("MKLDNN"):
        return False
    array = mx.nd.zeros((2, 3), mx.cpu())
    counts: list[int] = []
    for change in (lambda: None, array.asnumpy, lambda: array[1:].__imul__(2), lambda: array.__iadd__(1)):
        change()
        array.wait_to_read()
        counts.append(version_of(array)())
    return [count - counts[0] for count in counts] == [0, 0, 1, 2]


__all__ = ("is_readable", "variable_of", "version_of")
