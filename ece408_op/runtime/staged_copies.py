"""Copies between pageable host memory and a GPU through a pinned staging buffer, without the interpreter's lock.

A call moves an array in blocks: while the GPU's copy engine moves one, the CPU copies the next one to or from the other
half of the staging buffer, which its cache holds. The loop is machine code that calls CUDA's driver: with several
threads, Python would wait for the interpreter's lock at each block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from . import cuda, llvm
from .llvm import I32, I64, Cpu, Function, Module, Operand, Value
from .memory import address

#: The bytes of a block. Eight threads copy 154 MB that the CPU's cache holds to two GPUs in 2.1 ms; with blocks of 1
#: and 8 MB they take 2.9 ms. Memory itself is slower, so that more threads pay.
BLOCK_BYTES = 2 << 20


class Driver(NamedTuple):
    """The addresses of the C functions that the loops call."""

    to_device: int
    to_host: int
    record: int
    wait: int
    get_context: int
    set_context: int
    memcpy: int


class Staging(NamedTuple):
    """A pinned buffer of two blocks from an address on, a stream, two events, and the CUDA context of all of them."""

    address: int
    stream: int
    events: tuple[int, int]
    context: int


@cache
def driver() -> Driver:
    """Return the functions of CUDA and of the C library."""
    names = "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventSynchronize"
    library, contexts = ctypes.CDLL("libcuda.so.1"), ("cuCtxGetCurrent", "cuCtxSetCurrent")
    found = [_address_of(library, name) for name in (*names, *contexts)]
    return Driver(*[*found, _address_of(ctypes.CDLL(None), "memcpy")])


def copy_to_device(host: np.ndarray, device: int, staging: Staging, functions: Driver | None = None) -> None:
    """Copy a C-contiguous array to the GPU's address, behind what is on the stream; raises CuPy's CUDADriverError."""
    functions = functions or driver()
    _run(_to_device, host, device, staging, functions, functions.to_device)


def copy_to_host(host: np.ndarray, device: int, staging: Staging, functions: Driver | None = None) -> None:
    """Fill an array from the GPU's address, behind what is on the stream; raises CuPy's CUDADriverError."""
    functions = functions or driver()
    _run(_to_host, host, device, staging, functions, functions.to_host)


def _run(loop: Any, host: np.ndarray, device: int, staging: Staging, functions: Driver, copy: int) -> None:
    if not host.nbytes:
        return
    status = (ctypes.c_int64 * 2)()
    given = staging.address, staging.stream, *staging.events, staging.context
    loop(llvm.cpu())(status, address(host), device, host.nbytes, *given, copy, *functions[2:])
    if status[0]:
        raise cuda.cupy().cuda.driver.CUDADriverError(status[0])


def _address_of(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


_INTEGERS = "host device bytes staging stream first second context copy record wait get_context set_context memcpy"


class _Loop:
    """A function under construction that moves blocks, with the context of the copies as the current one.

    Its argument ``status`` has the first error, and then the caller's context.
    """

    def __init__(self, f: Function) -> None:
        self.f = f
        self.status, self.host, self.device, self.bytes, *integers = f.arguments
        self.staging, self.stream, self.first, self.second, self.context, self.copy, self.record = integers[:7]
        self.wait, self.get_context, self.set_context, self.memcpy = integers[7:]
        self.blocks = (self.bytes + BLOCK_BYTES - 1) // BLOCK_BYTES

    def __enter__(self) -> _Loop:
        self.call(self.get_context, Value(self.f, self.f.b.ptrtoint(self.status[1].ir, I64)))
        self.call(self.set_context, self.context)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.call(self.set_context, self.status[1].load())

    def block(self, number: Value) -> tuple[Value, Value, Value, Value, Value]:
        """Return a block's address on the host, on the GPU and in the staging buffer, its bytes, and its event."""
        start, odd = number * BLOCK_BYTES, number & 1
        staged, event = self.staging + odd * BLOCK_BYTES, odd.equals(1).select(self.second, self.first)
        return self.host + start, self.device + start, staged, (self.bytes - start).min(BLOCK_BYTES), event

    def call(self, function: Value, *arguments: Operand) -> None:
        """Emit a call of one of CUDA's functions; the first status that is an error stays."""
        f, old = self.f, self.status.load()
        new = Value(f, f.b.zext(self._called(function, I32, arguments), I64))
        self.status.store(old.equals(0).select(new, old))

    def copied(self, target: Value, source: Value, count: Value) -> None:
        """Emit a copy on the CPU."""
        self._called(self.memcpy, I64, (target, source, count))

    def _called(self, function: Value, result: Any, arguments: Sequence[Operand]) -> Any:
        b, values = self.f.b, [self.f.const(0) + each for each in arguments]
        kind = ir.FunctionType(result, [I64] * len(values))
        return b.call(b.inttoptr(function.ir, kind.as_pointer()), [value.ir for value in values])


@llvm.compiled_once
def _to_device(target: Cpu) -> Any:
    function = Function(Module("to_device", target), "to_device", "status:i64", _INTEGERS, exported=True)
    with function as f, _Loop(f) as loop:
        with f.range(loop.blocks) as number:
            host, device, staged, count, event = loop.block(number)
            with f.when(number > 1):
                loop.call(loop.wait, event)
            loop.copied(staged, host, count)
            loop.call(loop.copy, device, staged, count, loop.stream)
            loop.call(loop.record, event, loop.stream)
        *_, last = loop.block(loop.blocks - 1)
        loop.call(loop.wait, last)
    return f.compiled()


@llvm.compiled_once
def _to_host(target: Cpu) -> Any:
    function = Function(Module("to_host", target), "to_host", "status:i64", _INTEGERS, exported=True)
    with function as f, _Loop(f) as loop, f.range(loop.blocks + 1) as number:
        with f.when(number < loop.blocks):
            _, device, staged, count, event = loop.block(number)
            loop.call(loop.copy, staged, device, count, loop.stream)
            loop.call(loop.record, event, loop.stream)
        with f.when(number > 0):
            host, _, staged, count, event = loop.block(number - 1)
            loop.call(loop.wait, event)
            loop.copied(host, staged, count)
    return f.compiled()


__all__ = ("BLOCK_BYTES", "Driver", "Staging", "copy_to_device", "copy_to_host", "driver")
