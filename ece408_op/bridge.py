"""From MXNet's arrays to views that a kernel can use, without a copy, and every rule of waiting.

MXNet's engine runs operators asynchronously. Inside ``CustomOp.forward`` the inputs are ready and
the outputs are ours; anywhere else an array must be waited for before its memory is looked at.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def cpu_view(array: Any) -> np.ndarray:
    """A writable float32 view of a CPU NDArray's own memory, of the array's shape.

    The array must be dense float32 and must outlive the view. Its memory is C-contiguous, also where
    it is a slice of another array. Raises MXNetError where MXNet gives no pointer.
    """
    shape = array.shape
    if 0 in shape:
        return np.empty(shape, np.float32)
    pointer = _data_pointer(array)
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape)


def settle(array: Any) -> None:
    """Wait for a CPU NDArray, and have MXNet put its values in plain order, in place.

    oneDNN's operators leave arrays in a blocked layout. Handed to a Custom operator such an array is
    reordered into temporary memory that is freed before the asynchronous operator reads it.
    MXNDArrayGetData reorders the array itself, which leaves nothing to be done later.
    """
    array.wait_to_read()
    if array.size:
        _data_pointer(array)


def _data_pointer(array: Any) -> ctypes.c_void_p:
    from mxnet.base import _LIB, check_call

    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer
