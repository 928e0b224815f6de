"""The output pool: it keeps the memory of freed large outputs for later outputs, whose pages are then mapped already.

Linux clears fresh memory page by page at the first touch, which takes as long as a convolution. Linux may reclaim the
pages of unused blocks when it is short of memory (MADV_FREE); until then ``free`` counts them as used. The environment
variable ECE408_OUTPUT_POOL limits the pool, in bytes, 4 GiB by default; 0 turns it off.

Arrays use the memory through DLPack (github.com/dmlc/dlpack): the owner of a tensor calls the tensor's deleter to
release it, from any thread and also while the interpreter exits. So the deleter is machine code, and the deleter, the
pool and its blocks live as long as the process.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from functools import cache
from typing import Any

import mxnet as mx
from llvmlite import ir

from ece408_op.errors import DeviceError
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import host_cpu, llvm

#: The size in bytes from which on outputs use the pool.
LEAST_BYTES = 4 << 20
#: The default limit, in bytes.
LIMIT = 4 << 30
VARIABLE = "ECE408_OUTPUT_POOL"

#: Linux's numbers for madvise; not every Python has names for them.
_FREE, _HUGE_PAGES = 8, 14
_CPU, _FLOAT, _BITS = 1, 2, 32  # DLPack's numbers


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("number", ctypes.c_int32), ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class _ManagedTensor(ctypes.Structure):
    """DLPack's DLManagedTensor: a tensor, and the function that releases it, which takes this structure."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Block(ctypes.Structure):
    """A block of memory, and the fields that the deleter's machine code reads and writes."""

    _fields_ = [("in_use", ctypes.c_int64), ("start", ctypes.c_int64), ("bytes", ctypes.c_int64)]

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(_HUGE_PAGES)
        super().__init__(1, ctypes.addressof(ctypes.c_byte.from_buffer(self._memory)), size)


class OutputPool:
    """Used and unused blocks, together at most ``limit`` bytes; safe from any thread.

    The pool must outlive the arrays.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[_Block] = []  # the last used ones are last
        self._lock = threading.Lock()

    def array(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised float32 NDArray of mx.cpu(); None if the limit or the memory does not suffice."""
        try:
            block = self._block(ITEM_BYTES * math.prod(shape))
        except OSError:
            return None
        if block is None:
            return None
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        tensor = _Tensor(block.start, _CPU, 0, len(shape), _FLOAT, _BITS, 1, sizes, None, 0)
        managed = _ManagedTensor(tensor, ctypes.addressof(block), ctypes.cast(_deleter(), ctypes.c_void_p))
        handle = mx.base.NDArrayHandle()
        mx.base.check_call(mx.base._LIB.MXNDArrayFromDLPackEx(ctypes.byref(managed), True, ctypes.byref(handle)))
        return mx.nd.NDArray(handle=handle)

    def _block(self, size: int) -> _Block | None:
        with self._lock:
            waiting = [block for block in self._blocks if not block.in_use]
            for block in waiting:
                if block.bytes == size:
                    self._blocks.remove(block)
                    block.in_use = 1
                    break
            else:
                free = self._limit - sum(block.bytes for block in self._blocks)
                if free + sum(block.bytes for block in waiting) < size:
                    return None
                while free < size:
                    free += waiting[0].bytes
                    self._blocks.remove(waiting.pop(0))  # this was the last reference, so its memory is freed
                block = _Block(size)
            self._blocks.append(block)
            return block


@cache
def pool() -> OutputPool:
    """Return the pool of this process; raises DeviceError if ECE408_OUTPUT_POOL is not a number of bytes."""
    text = os.environ.get(VARIABLE, "").strip() or str(LIMIT)
    if not text.isdecimal():
        raise DeviceError(f"{VARIABLE}: expected a number of bytes, or 0 to turn the output pool off, got {text!r}")
    return _never_freed(OutputPool(int(text)))


def _never_freed(value: Any) -> Any:
    """Return the object, and never free it, because arrays may use it even while the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


@cache
def _deleter() -> Any:
    """Return the machine code of the deleter: it lets Linux reclaim the pages, then marks the block as unused."""
    advise = ctypes.cast(ctypes.CDLL(None).madvise, ctypes.c_void_p).value or 0
    with host_cpu.LOCK:
        with llvm.Function(llvm.Module("pool", host_cpu.cpu()), "free_block", "", "managed", exported=True) as f:
            (managed,) = f.arguments
            block = managed.pointer_at(_ManagedTensor.context.offset).load()
            start, size = (block.pointer_at(each.offset).load() for each in (_Block.start, _Block.bytes))
            kind = ir.FunctionType(llvm.I32, [llvm.I64, llvm.I64, llvm.I32])
            free = ir.Constant(llvm.I32, _FREE)
            f.b.call(f.b.inttoptr(f.const(advise).ir, kind.as_pointer()), [start.ir, size.ir, free])
            in_use = block.pointer_at(_Block.in_use.offset)
            f.b.store_atomic(f.const(0).ir, in_use.ir, "release", 8)
        return _never_freed(f.compiled())
