"""A layer's x, w and y in memory of the harness that the worker maps, on the CPU NumPy's arrays, on a GPU CuPy's."""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import struct
from contextlib import nullcontext
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from .errors import HarnessError

#: Address space on each side of a buffer that the worker cannot touch, in bytes; on a GPU a red zone.
GUARD, RED_ZONE = 1 << 26, 16 << 20
#: Buffers begin at multiples of this many bytes, as MXNet's did.
_ALIGN = 64
#: Fills red zones.
MARK = 0xA5


class HostArray:
    """A float32 array in a file without a name, between bytes that bear a mark. Its data ends where a page ends."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        size = 4 * math.prod(shape)
        room = -(-size // _ALIGN) * _ALIGN
        mapped = max(mmap.PAGESIZE, -(-room // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._file = os.memfd_create("ece408-grade", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, mapped)
        # A worker with the file could otherwise truncate it under the harness's own mapping.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.fchmod(self._file, 0o600)
        raw = np.frombuffer(mmap.mmap(self._file, mapped), np.uint8)
        raw[:] = MARK
        start = mapped - room
        self.zones = (raw[:start], raw[start + size :])
        self.array = raw[start : start + size].view(np.float32).reshape(shape)
        #: The worker's descriptor: read-only unless it may write.
        self.descriptor = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR if writable else os.O_RDONLY)
        self.handle = f"{self.descriptor}:{mapped}"

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)
        os.close(self._file)


class DeviceArray:
    """A float32 array on a GPU between two red zones, in memory that the driver shares by a descriptor.

    The memory comes from the virtual memory API: scattered stores to memory that a process has opened through CUDA IPC
    are several times slower than to its own. Raises HarnessError if the driver lacks that API.
    """

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        cp = cuda.cupy()
        device, size = int(cp.cuda.runtime.getDevice()), 4 * math.prod(shape)
        cp.cuda.runtime.free(0)  # the driver's own functions need the runtime's context
        zero, unit, descriptor = ctypes.c_uint64(0), ctypes.c_size_t(), ctypes.c_int()
        # CUmemAllocationProp: pinned memory, shared by a POSIX file descriptor, on a device; CUmemAccessDesc: on a
        # device, to read and write.
        properties, access = struct.pack("iiiiPQ", 1, 1, 1, device, 0, 0), struct.pack("iii", 1, device, 3)
        self._memory, self._at = ctypes.c_uint64(), ctypes.c_uint64()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(unit), properties, 0)
        self._total = ctypes.c_size_t(-(-(2 * RED_ZONE + size) // unit.value) * unit.value)
        _driver("cuMemCreate", ctypes.byref(self._memory), self._total, properties, zero)
        _driver("cuMemAddressReserve", ctypes.byref(self._at), self._total, zero, zero, zero)
        _driver("cuMemMap", self._at, self._total, zero, self._memory, zero)
        _driver("cuMemSetAccess", self._at, self._total, access, ctypes.c_size_t(1))
        _driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._memory, 1, zero)
        self.descriptor, self.handle = descriptor.value, f"{descriptor.value}:{self._total.value}"
        owner = cp.cuda.UnownedMemory(self._at.value, self._total.value, self, device)
        raw = cp.ndarray((self._total.value,), np.uint8, cp.cuda.MemoryPointer(owner, 0))
        raw.fill(MARK)
        # The second zone begins right behind the last element.
        self.zones = (raw[:RED_ZONE], raw[RED_ZONE + size :])
        self.array = raw[RED_ZONE : RED_ZONE + size].view(np.float32).reshape(shape)

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)
        _driver("cuMemUnmap", self._at, self._total)
        _driver("cuMemAddressFree", self._at, self._total)
        _driver("cuMemRelease", self._memory)


def _driver(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver; raises HarnessError if it is missing or fails."""
    try:
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise HarnessError(f"expected CUDA's virtual memory API, got {error}") from None
    if code:
        raise HarnessError(f"expected {name} of CUDA's driver to succeed, got error {code}")


class Arrays:
    """The arrays x, w and y of one problem on the CPU (``number`` is None), or on the GPU of that number."""

    def __init__(self, problem: ConvProblem, number: int | None = None) -> None:
        self.problem, self.number, self.gpu = problem, number, number is not None
        self.xp: Any = cuda.cupy() if self.gpu else np
        self.guard = RED_ZONE if self.gpu else GUARD
        allocate = DeviceArray if self.gpu else HostArray
        with cuda.reported(f"gpu {number}") if self.gpu else nullcontext():
            if self.gpu:
                self.xp.cuda.Device(number).use()
            self.arrays = [allocate(getattr(problem, f"{name}_shape"), name == "y") for name in "xwy"]
        self.x, self.w, self.y = self.arrays

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()  # no kernel may run on memory that is unmapped
        for one in self.arrays:
            one.close()
        if self.gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    def wait(self) -> None:
        """Wait until this process's work on a GPU is done."""
        if self.gpu:
            self.xp.cuda.runtime.deviceSynchronize()

    def clear(self, fill: float) -> None:
        """Set every element of y."""
        self.y.array.fill(fill)
        self.wait()

    def wrote_outside(self) -> bool:
        """Has something been written to the memory next to the arrays?"""
        return any(bool((zone != MARK).any()) for one in self.arrays for zone in one.zones)
