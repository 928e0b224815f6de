"""A layer's x, w and y in memory of the harness that the worker maps, on the CPU NumPy's arrays, on a GPU CuPy's."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.shared_memory import SharedMemory

#: Address space on each side of a buffer that the worker cannot touch, in bytes; on a GPU a red zone.
GUARD, RED_ZONE = 1 << 26, 16 << 20
_ALIGN = 64  # buffers begin at multiples of this many bytes, as MXNet's did
MARK = 0x47  # fills red zones: as a float 51015.3, which fp16 has too, so that a sum with what lies there is wrong


class HostArray:
    """A float32 array in a file without a name, between marker bytes. Its data ends where a page ends."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        size = 4 * math.prod(shape)
        room = -(-size // _ALIGN) * _ALIGN
        mapped = max(mmap.PAGESIZE, -(-room // mmap.PAGESIZE) * mmap.PAGESIZE)
        file = os.memfd_create("ece408-grade", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, mapped)
        # A worker with the file could otherwise truncate it under the harness's own mapping.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.fchmod(file, 0o600)
        raw = np.frombuffer(mmap.mmap(file, mapped), np.uint8)
        raw[:] = MARK
        start = mapped - room
        self.zones = (raw[:start], raw[start + size :])
        self.array = raw[start : start + size].view(np.float32).reshape(shape)
        #: The worker's descriptor: read-only unless it may write.
        self.descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDWR if writable else os.O_RDONLY)
        self.handle = f"{self.descriptor}:{mapped}"
        os.close(file)

    def close(self) -> None:
        """Release the memory."""
        os.close(self.descriptor)


class DeviceArray(SharedMemory):
    """A float32 array on a GPU between two red zones, in memory which the worker maps too."""

    def __init__(self, shape: tuple[int, ...], writable: bool) -> None:
        size = 4 * math.prod(shape)
        super().__init__(2 * RED_ZONE + size)
        raw = self.array
        raw.fill(MARK)
        # The second zone begins right behind the last element.
        self.zones = (raw[:RED_ZONE], raw[RED_ZONE + size :])
        self.array = raw[RED_ZONE : RED_ZONE + size].view(np.float32).reshape(shape)
        self.handle = f"{self.descriptor}:{raw.size}"


class Arrays(AbstractContextManager[Any]):
    """The arrays x, w and y of one problem on the CPU (``number`` is None), or on the GPU of that number."""

    def __init__(self, problem: ConvProblem, number: int | None = None) -> None:
        self.problem, self.number, self.gpu = problem, number, number is not None
        self.xp: Any = cuda.cupy() if self.gpu else np
        self.guard = RED_ZONE if self.gpu else GUARD
        allocate = DeviceArray if self.gpu else HostArray
        self.arrays: list[Any] = []
        with cuda.reported(f"gpu {number}") if self.gpu else nullcontext(), ExitStack() as stack:
            stack.push(self)  # where memory lacks for one, the others' comes back
            if self.gpu:
                self.xp.cuda.Device(number).use()
            for name in "xwy":
                self.arrays.append(allocate(getattr(problem, f"{name}_shape"), name == "y"))
            stack.pop_all()
        self.x, self.w, self.y = self.arrays

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
