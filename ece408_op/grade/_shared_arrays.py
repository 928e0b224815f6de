"""Arrays in memory of the harness that a worker maps, between bytes that bear a mark."""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
from typing import Any

import numpy as np

from ece408_op.runtime import cuda

#: Address space on each side of a buffer that the worker cannot touch, in bytes; on a GPU a red zone.
GUARD, RED_ZONE = 1 << 26, 16 << 20
#: Buffers begin at multiples of this many bytes, as MXNet's did.
_ALIGN = 64
#: Fills red zones.
MARK = 0xA5
#: Of linux/fcntl.h: Python names them since 3.8, mypy's types on Linux alone.
_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 1, 2, 4


class HostArray:
    """A float32 array in a file without a name, between bytes that bear a mark. Its data ends where a page ends."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        size = 4 * math.prod(shape)
        room = -(-size // _ALIGN) * _ALIGN
        mapped = max(mmap.PAGESIZE, -(-room // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._file = os.memfd_create("ece408-grade", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, mapped)
        # A worker with the file could otherwise truncate it under the harness's own mapping.
        fcntl.fcntl(self._file, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        os.fchmod(self._file, 0o600)
        raw = np.frombuffer(mmap.mmap(self._file, mapped), np.uint8)
        raw[:] = MARK
        start = mapped - room
        self.zones = (raw[:start], raw[start + size :])
        self.array = raw[start : start + size].view(np.float32).reshape(shape)
        #: The worker's descriptor: read-only unless it may write.
        self.descriptor = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR if writable else os.O_RDONLY)
        self.handle = str(self.descriptor)

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)
        os.close(self._file)


class DeviceArray:
    """A float32 array on a GPU between two red zones.

    Its memory comes from the driver's virtual memory API and is shared by a descriptor: scattered stores to memory that
    a process has opened through CUDA IPC are several times slower than to its own. IPC is for drivers without that API.
    """

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        cp = cuda.cupy()
        size = 4 * math.prod(shape)
        total, self.descriptor, self._handle = 2 * RED_ZONE + size, -1, ctypes.c_uint64()
        device = int(cp.cuda.runtime.getDevice())
        try:
            cp.cuda.runtime.free(0)  # the driver's own functions need the runtime's context
            self.pointer, total = self._share(total, device)
            self.handle = f"{self.descriptor}:{total}"
        except OSError:
            self.close()
            self.pointer = int(cp.cuda.runtime.malloc(total))
            self.handle = cp.cuda.runtime.ipcGetMemHandle(self.pointer).hex()
        self._total = total
        owner = cp.cuda.UnownedMemory(self.pointer, total, self, device)
        raw = cp.ndarray((total,), np.uint8, cp.cuda.MemoryPointer(owner, 0))
        raw.fill(MARK)
        # The second zone begins right behind the last element.
        self.zones = (raw[:RED_ZONE], raw[RED_ZONE + size :])
        self.array = raw[RED_ZONE : RED_ZONE + size].view(np.float32).reshape(shape)

    def close(self) -> None:
        """Release the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            _driver("cuMemUnmap", ctypes.c_uint64(self.pointer), ctypes.c_size_t(self._total))
            _driver("cuMemAddressFree", ctypes.c_uint64(self.pointer), ctypes.c_size_t(self._total))
        elif not self._handle.value:
            cuda.cupy().cuda.runtime.free(getattr(self, "pointer", 0))
        if self._handle.value:
            _driver("cuMemRelease", self._handle)
        self.descriptor, self._handle = -1, ctypes.c_uint64()

    def _share(self, least: int, device: int) -> tuple[int, int]:
        """The address and size of new memory, whose descriptor this sets; raises OSError where the driver cannot."""
        properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_DEVICE, device))
        unit, at, descriptor = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
        size = ctypes.c_size_t(-(-least // unit.value) * unit.value)
        zero = ctypes.c_uint64(0)
        _driver("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(properties), zero)
        _driver("cuMemAddressReserve", ctypes.byref(at), size, ctypes.c_size_t(0), zero, zero)
        _driver("cuMemMap", at, size, ctypes.c_size_t(0), self._handle, zero)
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        _driver("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        _driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._handle, _DESCRIPTOR, zero)
        self.descriptor = descriptor.value
        return at.value, size.value


#: Of cuda.h: CU_MEM_ALLOCATION_TYPE_PINNED and CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
#: CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED = _DEVICE = _DESCRIPTOR = 1
_READ_WRITE = 3


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *(("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location)),
        *(("windows", ctypes.c_void_p), ("flags", ctypes.c_uint64)),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _driver(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver; raises OSError where it is missing or fails."""
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except AttributeError as error:
        raise OSError(str(error)) from None
    if code:
        raise OSError(code, f"{name} failed")
