"""The worker for a kernel in Python: the program that runs in containment in native/runner.cpp's place.

    python python_worker.py PATHS WHAT IN OUT GUARD {B C H W M K X W Y}...

PATHS is sys.path, WHAT the name of a kernel of this package or the path of a file that defines one. Commands,
replies, descriptors and handles are the runner's own: see there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, TextIO

_WORDS = 9
_READ, _WRITE = 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_ALIGN = 64


def main(arguments: list[str]) -> int:
    """Serve until the pipe of commands ends."""
    paths, what, commands, replies, guard, *layers = arguments
    sys.path[:] = paths.split(os.pathsep)
    out = int(replies)

    def reply(text: str) -> None:
        os.write(out, (" ".join(text.split())[:1000] + "\n").encode())

    from ece408_op.errors import UnsupportedError
    from ece408_op.problem import ConvProblem

    words = [layers[at : at + _WORDS] for at in range(0, len(layers), _WORDS)]
    problems = [ConvProblem(*map(int, one[:6])) for one in words]
    on_gpu = not words[0][6].isdigit() or len(words[0][6]) > 20
    opened = _gpu_array if on_gpu else _host_array
    arrays = []
    for problem, one in zip(problems, words):
        shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
        arrays.append([opened(place, shape, int(guard), shape is shapes[2]) for place, shape in zip(one[6:], shapes)])
    reply("open")
    lines = os.fdopen(int(commands))
    _wait_for_load(lines, reply, [y for _, _, y in arrays])
    try:
        kernel = _load(what)
        device = "gpu" if on_gpu else "cpu"
        if kernel.device != device:
            raise TypeError(f"expected a kernel for the {device}, got {kernel.name} for the {kernel.device}")
        run = _on_gpu(kernel) if on_gpu else _on_cpu(kernel)
    except Exception as error:
        reply(f"unloadable {_told(error, what)}")
        return 4
    reply("ready")
    for line in lines:
        word, call, *rest = line.split()
        if word == "empty":
            reply(f"done {call} 0 -")
            continue
        problem = problems[int(rest[0])]
        reasons = kernel.not_supported_reasons(problem)
        if reasons:
            reply(f"refused {'; '.join(reasons)}")
            continue
        try:
            start = time.monotonic_ns()
            run(problem, *arrays[int(rest[0])])
            reply(f"done {call} {time.monotonic_ns() - start} -")
        except UnsupportedError as error:
            reply(f"refused {error}")
        except Exception as error:
            reply(f"failed {_told(error, what)}")
    return 0


def _load(what: str) -> Any:
    """The kernel of that name, or the one that the file defines: KERNEL, or the only one."""
    from ece408_op.core import dispatch
    from ece408_op.core.kernel import CpuKernel, CudaKernel

    if not what.endswith(".py"):
        return dispatch.find(what)
    spec = importlib.util.spec_from_file_location("submission", what)
    if spec is None or spec.loader is None:
        raise TypeError(f"expected a Python file, got {Path(what).name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["submission"] = module
    spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, (CpuKernel, CudaKernel))]
    kernel = getattr(module, "KERNEL", found[0] if len(found) == 1 else None)
    if not isinstance(kernel, (CpuKernel, CudaKernel)):
        got = f"{len(found)} kernels of other names" if found else "no kernel"
        raise TypeError(f"expected a CpuKernel or CudaKernel called KERNEL, got {got}")
    return kernel


def _wait_for_load(lines: TextIO, reply: Callable[[str], None], outputs: list[Any]) -> None:
    """Answer calls that are empty, or fill an output with zeros, until the command to load the kernel comes."""
    for line in lines:
        word, *rest = line.split()
        if word == "touch":
            from ece408_op.runtime import cuda

            outputs[int(rest[1])].fill(0)
            cuda.cupy().cuda.runtime.deviceSynchronize()
        elif word != "empty":
            return
        reply(f"done {rest[0]} 0 -")


def _on_cpu(kernel: Any) -> Callable[..., None]:
    from ece408_op.core import dispatch

    def run(problem: Any, x: Any, w: Any, y: Any) -> None:
        kernel.prepare(problem, y)
        kernel.run(problem, x, w, y, dispatch.thread_count(problem))

    return run


def _on_gpu(kernel: Any) -> Callable[..., None]:
    from ece408_op.runtime import cuda

    def run(problem: Any, x: Any, w: Any, y: Any) -> None:
        kernel.run(problem, x, w, y)
        with cuda.reported(kernel.name):
            cuda.cupy().cuda.runtime.deviceSynchronize()

    return run


def _host_array(place: str, shape: tuple[int, ...], guard: int, writable: bool) -> Any:
    """The parent's memory between pages that cannot be touched; the data ends where they begin, within 64 bytes."""
    import numpy as np

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    descriptor = int(place)
    mapped = os.fstat(descriptor).st_size
    failed = ctypes.c_void_p(-1).value
    base: int = libc.mmap(None, mapped + 2 * guard, 0, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
    access = _READ | _WRITE if writable else _READ
    at: int = base if base == failed else libc.mmap(base + guard, mapped, access, _SHARED | _FIXED, descriptor, 0)
    if at == failed:
        raise OSError(ctypes.get_errno(), "mapping the parent's buffer")
    os.close(descriptor)
    count = int(np.prod(shape, dtype=np.int64))
    start = at + mapped - -(-4 * count // _ALIGN) * _ALIGN
    array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(start)).reshape(shape)
    array.flags.writeable = writable
    return array


def _gpu_array(place: str, shape: tuple[int, ...], guard: int, writable: bool) -> Any:
    """The parent's memory, opened through CUDA IPC, between its red zones."""
    from ece408_op.runtime import cuda

    cp = cuda.cupy()
    base = cp.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(place))
    size = 4
    for length in shape:
        size *= length
    memory = cp.cuda.UnownedMemory(base + guard, size, None)
    return cp.ndarray(shape, "f", cp.cuda.MemoryPointer(memory, 0))


def _told(error: Exception, what: str) -> str:
    """The error with the last line of the author's own file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == what]
    number = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    line = frames[-1].lineno if frames else number
    place = f"{Path(what).name}:{line}: " if line else ""
    return f"{place}{type(error).__name__}: {error}"


if __name__ == "__main__":
    # Nothing that a submission left at exit runs.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
