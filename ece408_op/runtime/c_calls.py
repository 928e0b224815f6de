"""Hundreds of short calls of a C function as one call.

By ctypes, each would take half a microsecond, and pass the interpreter's lock to another thread, or keep it from all.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir

from . import host_cpu, llvm
from .memory import address

#: The arguments of a call.
ARGUMENTS = 3


def address_of(function: Any) -> int:
    """Return the address of a C function, one of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def any_nonzero(function: int, rows: np.ndarray) -> bool:
    """Call the C function at that address with each row's integers; return whether any call returns another than 0.

    rows: int64 (calls, ARGUMENTS), C-contiguous. The function returns an int, and takes at most that many integers or
    pointers. Other threads run meanwhile.
    """
    if not len(rows):
        return False
    found = ctypes.c_int64()
    _calls()(address(rows), ctypes.addressof(found), function, len(rows))
    return found.value != 0


@llvm.compiled_once
def _calls() -> Any:
    with llvm.Function(
        llvm.Module("calls", host_cpu.cpu()), "calls", "rows:i64 found:i64", "function count", True
    ) as f:
        rows, found, function, count = f.arguments
        called = f.b.inttoptr(function.ir, ir.FunctionType(llvm.I32, [llvm.I64] * ARGUMENTS).as_pointer())
        with f.loop(count, [f.const(0)]) as loop:
            row = rows[loop.index * ARGUMENTS]
            result = f.b.call(called, [row[n].load().ir for n in range(ARGUMENTS)])
            loop.values = [loop.values[0] | llvm.Value(f, f.b.zext(result, llvm.I64))]
        found.store(loop.values[0])
    return f.compiled()
