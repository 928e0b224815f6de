"""A user's own file, compiled once and run in the grader's worker process: for m2.py to m4.py and ``ece408-lab``.

The file is the user's own work, so it runs without a sandbox, as the user. The process keeps a crash away from the
caller, and the supervisor ends it after a limit of time or memory. Compiled files and the harness's programs are in the
user's cache folder, by a digest of their content.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cached_folders, cuda
from ece408_op.runtime.occupancy import KernelNotes

from . import build, sources
from .arrays import Arrays
from .sandbox import LimitsSpec, Tools
from .worker import Program, Worker, python_program

#: A call may take this many seconds, and those of the layer's operations at this rate: unoptimised loops are faster.
_LEAST_SECONDS, _LEAST_FLOPS_PER_SECOND = 5.0, 1e8


@dataclass(frozen=True)
class File:
    """A compiled file: its path, its device ("cpu" or "gpu"), its program with what ptxas reports on its kernels."""

    path: Path
    device: str
    program: Program
    tools: Tools


def compile_file(path: Path) -> File:
    """Compile a .h, .cuh, .cu or .py file, or take it from the cache.

    Raises EndedError where the file is wrong, and DeviceError where this machine lacks a compiler or a GPU.
    """
    device, python = sources.device_of(path), path.suffix.lower() == ".py"
    architecture = f"sm_{cuda.chip().architecture}" if device == "gpu" else ""
    tools = build.tools(unsafe=True, trusted=True)
    if python:
        program = python_program(path.resolve())
        # The file's neighbours may be imported too.
        return File(path, device, replace(program, paths=(*program.paths, str(path.resolve().parent))), tools)
    try:
        with ThreadPoolExecutor(1) as pool:
            if device == "gpu":
                pool.submit(_warm_gpu)
            return File(path, device, _cached_program(path, device, tools, architecture), tools)
    except OSError as error:
        raise DeviceError(f"{path}: expected a file that can be read and compiled, got {error}") from None


class Session(ExitStack):
    """A worker process that has loaded a file, and the arrays of some layers of one batch size.

    The process computes all layers, as in the course, because files keep counters and buffers between calls. Use it as
    a context manager. ``cuda_error`` names the CUDA error that the last call left unread; empty without one. Raises
    EndedError where the file ends its process, writes outside its arrays, or takes too long.
    """

    def __init__(self, file: File, problems: Sequence[ConvProblem]) -> None:
        super().__init__()
        self._file, self.problems, self.cuda_error = file, list(problems), ""

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            folder = stack.enter_context(build.new_folder("run"))
            number = 0 if self._file.device == "gpu" else None
            self._buffers = [stack.enter_context(Arrays(problem, number)) for problem in self.problems]
            worker = Worker(self._file.tools, self._file.program, self._buffers, folder, LimitsSpec())
            self._worker = stack.enter_context(worker)
            self._worker.begin()
            self._worker.call(0, LimitsSpec().load_seconds, "load")
            self.enter_context(stack.pop_all())
        return self

    def call(self, layer: int, x: np.ndarray, w: np.ndarray, fill: float = 0.0) -> float:
        """Compute the layer of that index from x (B, C, H, W) and w (M, C, K, K), float32, into its output.

        The output holds ``fill`` before the call. Returns the seconds in the file's forward, until a GPU is done.
        """
        buffers, problem = self._buffers[layer], self.problems[layer]
        buffers.x.array[...], buffers.w.array[...] = buffers.xp.asarray(x), buffers.xp.asarray(w)
        buffers.clear(fill)
        call = self._worker.call(layer, _LEAST_SECONDS + problem.flops / _LEAST_FLOPS_PER_SECOND)
        self.cuda_error = call.note
        return call.worker_seconds

    def output(self, layer: int, images: Sequence[int] | None = None) -> Any:
        """Return these images of the layer's output (default: all), (B, M, OH, OW) float32 in the host's memory.

        The next call may change it.
        """
        array: Any = self._buffers[layer].y.array[slice(None) if images is None else list(images)]
        return array.get() if self._file.device == "gpu" else array

    def wrote_outside(self, layer: int) -> bool:
        """Return whether something wrote to the memory next to the layer's arrays."""
        return self._buffers[layer].wrote_outside()

    @property
    def printed(self) -> str:
        """The beginning of what the file printed."""
        return self._worker.printed


@cache
def _warm_gpu() -> None:
    """Make the GPU's context and load CuPy's kernels for ``Arrays``, which takes a second: while nvcc runs."""
    with Arrays(ConvProblem(1, 1, 1, 1, 1, 1), 0) as buffers:
        buffers.x.array[...] = buffers.xp.asarray(np.zeros(1, np.float32))
        buffers.clear(0.0)
        buffers.wrote_outside()


def _cached_program(path: Path, device: str, tools: Tools, architecture: str) -> Program:
    def make(folder: Path) -> None:
        with build.new_folder("build") as scratch:
            built = build.build(path, device, scratch, tools, LimitsSpec(), architecture)
            shutil.copy(built.what, folder)
            (folder / "notes.json").write_text(json.dumps([asdict(note) for note in built.notes]), encoding="utf-8")

    key = build.sources_digest(path, tools.folder.name, architecture, path.name)
    folder = cached_folders.folder(cached_folders.base(), "file", key, make)
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    return Program(str(folder / "submission.so"), (folder,), notes=tuple(KernelNotes(**note) for note in notes))
