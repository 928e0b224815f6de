"""x, w and y in memory that the parent owns and the worker maps, its data ending where a page ends."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from types import TracebackType

import numpy as np

from ece408_op.problem import ConvProblem

#: Address space on each side of a buffer that the worker cannot touch, in bytes.
GUARD = 1 << 26
#: Buffers begin at multiples of so many bytes, as MXNet's did.
ALIGN = 64

_MARK = 0xA5
#: Of linux/fcntl.h: Python names them since 3.8, mypy's types on Linux alone.
_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1033, 1, 2, 4


class SharedArray:
    """A float32 array in a file without a name. Between its ends and the guard pages every byte bears a mark."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        self.bytes = 4 * math.prod(shape)
        room = -(-self.bytes // ALIGN) * ALIGN
        mapped = max(mmap.PAGESIZE, -(-room // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._file = os.memfd_create("ece408-grade", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, mapped)
        # Whoever got at the file could else cut it off under the parent's own mapping.
        fcntl.fcntl(self._file, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        os.fchmod(self._file, 0o600)
        self._map = mmap.mmap(self._file, mapped)
        self._start = mapped - room
        raw = np.frombuffer(self._map, np.uint8)
        raw[:] = _MARK
        self._raw = raw
        self.array = raw[self._start : self._start + self.bytes].view(np.float32).reshape(shape)
        #: The descriptor for the worker: for reading alone unless it is to be written.
        self.descriptor = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR if writable else os.O_RDONLY)

    def touched(self) -> bool:
        """Was anything written between the data and the guard pages?"""
        end = self._start + self.bytes
        return bool((self._raw[: self._start] != _MARK).any() or (self._raw[end:] != _MARK).any())

    def close(self) -> None:
        """Give the memory back."""
        os.close(self.descriptor)
        os.close(self._file)


class Buffers:
    """The three arrays of one problem."""

    def __init__(self, problem: ConvProblem) -> None:
        self.x = SharedArray(problem.x_shape, writable=False)
        self.w = SharedArray(problem.w_shape, writable=False)
        self.y = SharedArray(problem.y_shape, writable=True)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """Those of x, w and y."""
        return (self.x.descriptor, self.w.descriptor, self.y.descriptor)

    def __enter__(self) -> Buffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self.x, self.w, self.y):
            one.close()
