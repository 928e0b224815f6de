"""Submissions in Python: a kernel of this package by its name, or a file that defines one."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

from ece408_op.core import dispatch

from ._worker import Program

#: What of a checkout belongs to the package.
_PARTS = ("ece408_op", "kernels", "models", "data")


def device_of(text: str) -> str:
    """Which device a file's kernel is for, by its text: strangers' code is not imported to find out."""
    return "gpu" if "CudaKernel" in text else "cpu"


def program(what: str, folder: Path | None = None) -> Program:
    """The worker's program for a kernel's name, or for the file in ``folder``: it sees Python and this package."""
    root = Path(__file__).resolve().parents[2]
    # Of sys.path only Python's own folders: the caller's may hold a class and the grader's file.
    own = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    own |= set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) - {"", str(root)}
    paths = [str(root), *(path for path in sys.path if path in own or path.endswith("lib-dynload"))]
    seen = {Path(sys.prefix), Path(sys.base_prefix), *(Path(path) for path in paths[1:])}
    seen |= {root / part for part in _PARTS if (root / part).is_dir()}
    inner = () if folder is None else (folder,)
    arithmetic = "fp32" if folder else dispatch.find(what).arithmetic
    shown = f"{folder}/" if folder else ""
    return Program(what, (*sorted(_outermost(seen)), *inner), tuple(paths), shown, arithmetic=arithmetic)


def _outermost(paths: set[Path]) -> set[Path]:
    """Without those that lie within another, or do not exist."""
    there = {path for path in paths if path.exists()}
    return {path for path in there if not any(other in path.parents for other in there)}
