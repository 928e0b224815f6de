"""Submissions in Python: a kernel of this package by its name, or a file that defines one."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from ece408_op import kernels
from ece408_op.kernels import KERNELS

from ._worker import Program

_WORKER = Path(__file__).with_name("python_worker.py")
_PACKAGE = _WORKER.parents[1]
#: What of a checkout belongs to the package.
_PARTS = ("ece408_op", "kernels", "models", "data")


def names_in(path: Path) -> list[str]:
    """The names of our own kernels that a file of kernels/ defines; empty for any other file."""
    home = Path(kernels.__file__).resolve().parent
    if home not in path.resolve().parents:
        return []
    parts = path.resolve().relative_to(home).with_suffix("").parts
    module = importlib.import_module(".".join((kernels.__name__, *parts)))
    return [kernel.name for kernel in KERNELS if any(kernel is value for value in vars(module).values())]


def device_of(text: str) -> str:
    """Which device a file's kernel is for, by its text: strangers' code is not imported to find out."""
    return "gpu" if "CudaKernel" in text else "cpu"


def program(what: str, folder: Path | None = None) -> Program:
    """The worker for a kernel's name, or for the file in ``folder``: it sees Python and this package."""
    paths = [path for path in sys.path if path and Path(path).is_dir()]
    root = _PACKAGE.parent
    seen = {Path(sys.prefix), Path(sys.base_prefix), *(Path(path) for path in paths if Path(path) != root)}
    seen |= {root / part for part in _PARTS if (root / part).is_dir()}
    if str(root) not in paths:
        paths.insert(0, str(root))
    command = (sys.executable, "-I", "-B", str(_WORKER), os.pathsep.join(paths), what)
    inner = () if folder is None else (folder,)
    return Program(command, (*sorted(_outermost(seen)), *inner), hidden=False, folder=f"{folder}/" if folder else "")


def _outermost(paths: set[Path]) -> set[Path]:
    """Without those that lie within another, or do not exist."""
    there = {path for path in paths if path.exists()}
    return {path for path in there if not any(other in path.parents for other in there)}
