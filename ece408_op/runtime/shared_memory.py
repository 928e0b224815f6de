"""GPU memory that another process maps too, by CUDA's virtual memory API (CUDA Driver API, Virtual Memory Management).

Scattered stores to memory that a process has opened through CUDA IPC are several times slower than to its own; to this
memory they are not.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError

from . import cuda

_PINNED = _FILE_DESCRIPTOR = _ON_DEVICE = 1
_READ_AND_WRITE = 3


class SharedMemory:
    """At least ``size`` bytes on the current GPU: ``array``, uint8 of CuPy; another process imports the descriptor.

    Raises DeviceError if the driver lacks the API or has no memory.
    """

    def __init__(self, size: int) -> None:
        cp = cuda.cupy()
        device = int(cp.cuda.runtime.getDevice())
        cp.cuda.runtime.free(0)  # the driver's own functions need the runtime's context
        zero, unit, descriptor = ctypes.c_uint64(0), ctypes.c_size_t(), ctypes.c_int()
        # CUmemAllocationProp and CUmemAccessDesc.
        properties = struct.pack("iiiiPQ", _PINNED, _FILE_DESCRIPTOR, _ON_DEVICE, device, 0, 0)
        access = struct.pack("iii", _ON_DEVICE, device, _READ_AND_WRITE)
        self._memory, self._at = ctypes.c_uint64(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), properties, 0)
        self._total = ctypes.c_size_t(-(-size // unit.value) * unit.value)
        _call("cuMemCreate", ctypes.byref(self._memory), self._total, properties, zero)
        _call("cuMemAddressReserve", ctypes.byref(self._at), self._total, zero, zero, zero)
        _call("cuMemMap", self._at, self._total, zero, self._memory, zero)
        _call("cuMemSetAccess", self._at, self._total, access, ctypes.c_size_t(1))
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._memory, _FILE_DESCRIPTOR, zero)
        self.descriptor = descriptor.value
        owner = cp.cuda.UnownedMemory(self._at.value, self._total.value, self, device)
        self.array: Any = cp.ndarray((self._total.value,), np.uint8, cp.cuda.MemoryPointer(owner, 0))

    def close(self) -> None:
        """Release the memory, which no kernel may use any more."""
        os.close(self.descriptor)
        _call("cuMemUnmap", self._at, self._total)
        _call("cuMemAddressFree", self._at, self._total)
        _call("cuMemRelease", self._memory)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver; raises DeviceError if it is missing or fails."""
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"expected CUDA's virtual memory API, got {error}") from None
    if code:
        raise DeviceError(f"expected {name} of CUDA's driver to succeed, got error {code}")
