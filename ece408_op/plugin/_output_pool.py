"""Memory of large outputs that nobody has any more, kept for the next ones: its pages have been touched already.

What the system hands out it clears first, page by page as they are touched, and that takes as long as a convolution.
An output that leaves its memory here gives the next one pages that are there. Linux may take them back whenever it is
short of memory (MADV_FREE); till then they cost nothing but that ``free`` counts them as used.

Memory is lent by DLPack (github.com/dmlc/dlpack): whoever has the tensor says when it needs it no longer, from any
thread and while the interpreter ends too. So machine code takes it back, and what it touches lives as long as the
process.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.runtime import llvm, memory

#: Bytes of an output from which on it is worth it.
LEAST = 4 << 20
#: Bytes of all memory that waits here. A block serves outputs of half its size and more.
_MOST, _WASTE = 4 << 30, 2

_LARGE_PAGE = 2 << 20
_CPU, _FLOAT, _BITS = 1, 2, 32  # DLPack's numbers


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("number", ctypes.c_int32), ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    """DLPack's DLManagedTensor: a tensor, and what is to be called with this structure once it is needed no longer."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Control(ctypes.Structure):
    _fields_ = [("taken", ctypes.c_int64), ("start", ctypes.c_int64), ("bytes", ctypes.c_int64)]


class _Block:
    """Memory from a large page's beginning on, and what the machine code has to know of it."""

    def __init__(self, size: int) -> None:
        size = -(-size // _LARGE_PAGE) * _LARGE_PAGE
        # As much more as the first large page may begin later.
        self._room = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._room.madvise(mmap.MADV_HUGEPAGE)
        first = memory.address(np.frombuffer(self._room, np.uint8))
        self.control = _Control(1, -(-first // _LARGE_PAGE) * _LARGE_PAGE, size)


class Keeper:
    """Blocks that are lent, and those that wait; for any number of threads."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # those that were lent last are the last
        self._lock = threading.Lock()

    def lend(self, shape: tuple[int, ...]) -> Managed | None:
        """A float32 tensor of that shape, of any values; None where there is no memory, or no such system.

        It is the caller's to have its ``deleter`` called, once.
        """
        give_back = _give_back()
        if give_back is None:
            return None
        try:
            block = self._block(4 * math.prod(shape))
        except OSError:
            return None
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor = _Tensor(block.control.start, _CPU, 0, len(shape), _FLOAT, _BITS, 1, sizes, None, 0)
        return Managed(tensor, ctypes.addressof(block.control), ctypes.cast(give_back, ctypes.c_void_p))

    def waiting(self) -> int:
        """Bytes that wait for another output."""
        return sum(block.control.bytes for block in list(self._blocks) if not block.control.taken)

    def _block(self, size: int) -> _Block:
        with self._lock:
            free = [block for block in self._blocks if not block.control.taken]
            fitting = [block for block in free if size <= block.control.bytes <= _WASTE * max(size, _LARGE_PAGE)]
            if fitting:
                block = min(fitting, key=lambda block: block.control.bytes)
                self._blocks.remove(block)
                block.control.taken = 1
            else:
                for oldest in free:
                    if self.waiting() + size > _MOST:
                        self._blocks.remove(oldest)  # its memory goes with it
                block = _Block(size)
            self._blocks.append(block)
            return block


@cache
def keeper() -> Keeper:
    """The one of this process. It is never taken down: arrays are freed while the interpreter ends too."""
    one = Keeper()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    return one


@cache
def _give_back() -> Any:
    """The machine code of every deleter: tell the system that it may have the pages, then that the block is free."""
    if not all(hasattr(mmap, name) for name in ("MADV_FREE", "MADV_HUGEPAGE", "MAP_ANONYMOUS")):
        return None
    advise = ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0
    with llvm.LOCK:
        target, module = llvm.cpu(), ir.Module()
        b, (managed,) = llvm.new_function(module, "give_back", {"managed": llvm.I64})

        def at(address: Any, place: int) -> Any:
            return b.inttoptr(b.add(address, llvm.const(place)), llvm.I64_PTR)

        control = b.load(at(managed, Managed.context.offset))
        start, size = (b.load(at(control, field.offset)) for field in (_Control.start, _Control.bytes))
        kind = ir.FunctionType(llvm.I32, [llvm.I64, llvm.I64, llvm.I32])
        free = ir.Constant(llvm.I32, mmap.MADV_FREE)
        b.call(b.inttoptr(llvm.const(advise), kind.as_pointer()), [start, size, free])
        b.store_atomic(llvm.const(0), at(control, _Control.taken.offset), "release", 8)
        b.ret_void()
        return llvm.compile_function(module, "give_back", [ctypes.c_int64], target)
