"""Arrays in memory of the harness that a worker maps, between bytes that bear a mark."""

from __future__ import annotations

import fcntl
import math
import mmap
import os

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
    """A float32 array on a GPU between two red zones, in an allocation of its own, which alone can be shared."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        cp = cuda.cupy()
        size = 4 * math.prod(shape)
        total = 2 * RED_ZONE + size
        self.pointer = cp.cuda.runtime.malloc(total)
        owner = cp.cuda.UnownedMemory(self.pointer, total, self)
        raw = cp.ndarray((total,), np.uint8, cp.cuda.MemoryPointer(owner, 0))
        raw.fill(MARK)
        # The second zone begins right behind the last element.
        self.zones = (raw[:RED_ZONE], raw[RED_ZONE + size :])
        self.array = raw[RED_ZONE : RED_ZONE + size].view(np.float32).reshape(shape)
        self.handle = cp.cuda.runtime.ipcGetMemHandle(self.pointer).hex()

    def close(self) -> None:
        """Release the memory."""
        cuda.cupy().cuda.runtime.free(self.pointer)
