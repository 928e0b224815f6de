"""The worker for a kernel in Python: native/worker.cpp as a library, with a load and a forward of Python's.

    python python_worker.py LIBRARY PATHS WHAT SOCKET DEVICE GUARD {B C H W M K X W Y}...

PATHS is sys.path, WHAT the path of a file that defines a kernel. The other words, and the protocol, are those of
native/worker.cpp.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import io
import math
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_TEXT = 1024  # bytes of a text, its zero included: see native/worker.cpp


class Call(ctypes.Structure):
    """The struct ece408_grade_call of native/worker.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "yxw"),
        *((f"{name}_shape", ctypes.c_uint * 4) for name in "yxw"),
        ("stream", ctypes.c_void_p),
        ("note", ctypes.c_char_p),
    )


class Output(io.FileIO):
    """A file that loses what it cannot take: output beyond the limit is no error, as in C++."""

    def write(self, data: Any) -> int:
        """Write as much as fits; the number of bytes given."""
        with suppress(OSError):
            super().write(data)
        return len(data)


def main(arguments: list[str]) -> int:
    """Serve until the harness closes the socket."""
    library, paths, what, *words = arguments
    sys.path[:] = paths.split(os.pathsep)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(Output(number, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
        for number in (1, 2)
    )
    from ece408_op.errors import UnsupportedError
    from ece408_op.problem import ConvProblem
    from ece408_op.runtime.thread_pool import thread_count

    device = words[1]
    kernels: list[Any] = []
    layers: dict[int, tuple[ConvProblem, list[Any]]] = {}

    def load(text: int) -> None:
        try:
            kernel = load_kernel(what)
            kernels.append(kernel)
            if kernel.device != device:
                raise TypeError(f"expected a kernel for the {device}, got {kernel.name} for the {kernel.device}")
        except BaseException as error:
            _put(text, f"unloadable {described(error, what)}")

    def forward(call: Any, layer: int, text: int) -> None:
        _put(text, "failed an exception that cannot be described")  # whatever leaves a callback is lost
        kernel = kernels[0]
        try:
            if layer not in layers:
                problem = ConvProblem.from_shapes(tuple(call.contents.x_shape), tuple(call.contents.w_shape))
                layers[layer] = problem, [_array(call.contents, name, device) for name in "xwy"]
            problem, arrays = layers[layer]
            reasons = kernel.not_supported_reasons(problem)
            if reasons:
                raise UnsupportedError("; ".join(reasons))
            if device == "cpu":
                kernel.prepare(problem, arrays[-1])
            # native/worker.cpp waits for a GPU.
            kernel.run(problem, *arrays, *([thread_count(problem.flops)] if device == "cpu" else []))
            _put(text, "")
        except UnsupportedError as error:
            _put(text, f"refused {_said(error)}")
        except BaseException as error:
            _put(text, f"failed {described(error, what)}")

    load_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    forward_type = ctypes.CFUNCTYPE(None, ctypes.POINTER(Call), ctypes.c_uint, ctypes.c_void_p)
    texts = (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words))
    return int(ctypes.CDLL(library).ece408_serve(texts, load_type(load), forward_type(forward)))


def load_kernel(what: str) -> Any:
    """The kernel that the file defines: KERNEL, or the only one."""
    from ece408_op.core.kernel import CpuKernel, CudaKernel

    loader = importlib.machinery.SourceFileLoader("submission", what)
    spec = importlib.util.spec_from_file_location("submission", what, loader=loader)
    if spec is None or spec.loader is None:
        raise TypeError(f"expected a Python file, got {Path(what).name}")
    module = sys.modules["submission"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # One kernel may have two names.
    kernels = {id(one): one for one in vars(module).values() if isinstance(one, (CpuKernel, CudaKernel))}
    found = [*kernels.values()]
    kernel = getattr(module, "KERNEL", found[0] if len(found) == 1 else None)
    if not isinstance(kernel, (CpuKernel, CudaKernel)):
        got = f"{len(found)} kernels of other names" if found else "no kernel"
        raise TypeError(f"expected a CpuKernel or CudaKernel called KERNEL, got {got}")
    return kernel


def _array(call: Call, name: str, device: str) -> Any:
    """The array x, w or y of a call, of NumPy or of CuPy."""
    import numpy as np

    at, shape = getattr(call, name), tuple(getattr(call, f"{name}_shape"))
    if device == "gpu":
        from ece408_op.runtime import cuda

        cp = cuda.cupy()
        memory = cp.cuda.UnownedMemory(at, 4 * math.prod(shape), None)
        return cp.ndarray(shape, "f", cp.cuda.MemoryPointer(memory, 0))
    array = np.ctypeslib.as_array((ctypes.c_float * math.prod(shape)).from_address(at)).reshape(shape)
    array.flags.writeable = name == "y"
    return array


def _put(text: int, line: str) -> None:
    data = " ".join(line.split()).encode(errors="replace")[: _TEXT - 1] + b"\0"
    ctypes.memmove(text, data, len(data))


def described(error: BaseException, what: str) -> str:
    """The error with the last line of the author's own file."""
    lines = [error.lineno if isinstance(error, SyntaxError) else None]
    lines += [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == what]
    line = lines[-1]
    place = f"{Path(what).name}:{line}: " if line else ""
    return f"{place}{type(error).__name__}: {_said(error)}"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # the author's own text of an exception may fail
        return "an exception without a text"


if __name__ == "__main__":
    # Nothing that a submission left for the exit runs.
    os._exit(main(sys.argv[1:]))
