"""Which files a path given on the command line means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os.path import isdir, isfile, realpath
from pathlib import Path

from ece408_op.core import dispatch

from . import _python_side, _sources
from ._errors import SpecError

CPU_SUFFIXES = (".h", ".hpp", ".cpp", ".cc")
GPU_SUFFIXES = (".cuh", ".cu")
PYTHON_SUFFIX = ".py"
_SUFFIXES = {"cpu": CPU_SUFFIXES, "gpu": GPU_SUFFIXES}
_NAMES = ("new-forward.h", "new-forward.cuh")
#: The course's own files next to a student's: they are no submissions.
_COURSES = (_sources.OPERATOR, "new.cc", "new.cu")
#: The folder of the course's file.
_INNER = "ece408_src"
#: Levels of folders in a class.
_LEVELS = 20
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")


@dataclass(frozen=True)
class Submission:
    """One submission: the path by which it is known, and the source to compile (None where there is none)."""

    path: Path
    source: Path | None
    context: str
    #: Why it cannot be graded here, where that is known before it is looked at.
    why: str = ""
    #: The name of the kernel, where it is one of this package's own.
    kernel: str = ""
    #: Is it a file in a folder of many, whose neighbours are others' work?
    alone: bool = False

    @property
    def python(self) -> bool:
        """Is it a Python file that defines a kernel for this package?"""
        return self.source is not None and self.source.suffix.lower() == PYTHON_SUFFIX


def find(paths: list[Path], context: str | None, gpu_here: Callable[[], bool]) -> list[Submission]:
    """The submissions that the paths mean: files, folders of one, folders of many; in order, each once.

    A path that is none may be the name of a kernel of this package. Raises SpecError where a path is neither, or
    holds no submission.
    """
    found: dict[Path, Submission] = {}
    for path in paths:
        if not path.exists() and str(path) not in dispatch.names():
            known = ", ".join(dispatch.names())
            raise SpecError(f"{path}: expected a file, a folder or a kernel's name ({known}), found nothing")
        here = _within(path, context, gpu_here) if path.exists() else [_own(str(path))]
        if not here:
            text = f"{path}: expected new-forward.h, new-forward.cuh, a .cu or a .py file, found none"
            python = path.is_dir() and any(child.suffix == PYTHON_SUFFIX for child in _listed(path))
            raise SpecError(f"{text}; a .py file is taken by its own path, and in no folder" if python else text)
        for one in here:
            found.setdefault(one.path, _checked(one, path))
    return list(found.values())


def _checked(one: Submission, given: Path) -> Submission:
    """The submission; with the reason why it cannot be graded where links lead out of it."""
    if one.source is None or one.kernel or one.why:
        return one
    # The path that was given may be a link; whatever lies below it belongs to students.
    own = Path(realpath(given)) / one.path.relative_to(given) if one.path != given else Path(realpath(given))
    real = Path(realpath(one.source))
    if real != own and own not in real.parents:
        return replace(one, source=None, why=f"{one.source} is a link that leads out of the submission")
    return replace(one, alone=one.path != given and one.path == one.source)


def passed_over(paths: list[Path], found: list[Submission]) -> list[tuple[Path, str]]:
    """What lies in the folders given and is not graded, with the reason: folders, archives, files that may be meant."""
    own = {one.path.absolute() for one in found}
    above = {folder for path in own for folder in path.parents}

    def beside(folder: Path) -> Iterator[tuple[Path, str]]:
        for child in _listed(folder):
            if child.absolute() in own or _skipped(child):
                continue
            if isdir(child) and child.absolute() in above:
                yield from beside(child)
            elif isdir(child):
                yield child, "no submission found in it"
            elif child.suffix.lower() in _ARCHIVES:
                yield child, "an archive; unpack it first"
            elif (
                child.suffix.lower() in (*CPU_SUFFIXES, *GPU_SUFFIXES, PYTHON_SUFFIX) or "forward" in child.name.lower()
            ):
                yield child, "taken for no submission; one that it is has to be given by its own path"

    over = [entry for folder in paths if folder.is_dir() and folder.absolute() not in own for entry in beside(folder)]
    # A folder that is one submission may hold others: a class with the course's skeleton at its top.
    ones = [path for path in paths if path.is_dir() and path.absolute() in own]
    below = [child for one in ones for child in _listed(one) if isdir(child) and child.name != _INNER]
    inner = [child for child in below if not _skipped(child) and _is_one(child)]
    return over + [(child, f"it lies within {child.parent}, which is a submission by itself") for child in inner]


def _within(path: Path, context: str | None, gpu_here: Callable[[], bool], levels: int = _LEVELS) -> list[Submission]:
    if path.is_file() and path.suffix.lower() in _ARCHIVES:
        raise SpecError(f"{path}: expected a file or a folder, got an archive; unpack it first")
    if path.is_file():
        return [_of_file(path, context)]
    if _is_one(path):
        return [_of_folder(path, context, gpu_here)]
    found = []
    for child in _listed(path):
        if _skipped(child):
            continue
        if isdir(child):
            found += _within(child, context, gpu_here, levels - 1) if levels else []
        elif child.suffix.lower() in (_SUFFIXES[context] if context else (*CPU_SUFFIXES, *GPU_SUFFIXES)):
            found.append(_of_file(child, context))
    return found


def _listed(folder: Path) -> list[Path]:
    """What lies in the folder, in order; nothing where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _skipped(path: Path) -> bool:
    """Is it hidden, the system's (``__MACOSX``), the course's, or a link to a folder that it lies in?"""
    if path.name.startswith((".", "__")) or path.name.lower() in _COURSES:
        return True
    return path.is_symlink() and realpath(path) in (realpath(folder) for folder in path.absolute().parents)


def _own(name: str) -> Submission:
    return Submission(Path(name), None, dispatch.find(name).device, kernel=name)


def _is_one(folder: Path) -> bool:
    names = {path.name.lower() for path in _listed(folder) if isfile(path)}
    return isdir(folder / _INNER) or not names.isdisjoint(_NAMES)


def _of_file(path: Path, context: str | None) -> Submission:
    suffix = path.suffix.lower()
    own = "gpu" if suffix in GPU_SUFFIXES else "cpu" if suffix in CPU_SUFFIXES else None
    if suffix == PYTHON_SUFFIX:
        own = _python_side.device_of(path.read_text(encoding="utf-8", errors="replace"))
    if own is not None and context not in (None, own):
        return Submission(path, None, str(context), f"{path.name} is for --context {own}, not {context}")
    return Submission(path, path, own or context or "cpu")


def _of_folder(folder: Path, context: str | None, gpu_here: Callable[[], bool]) -> Submission:
    inner = folder / _INNER if isdir(folder / _INNER) else folder
    there = {kind: _source(inner, suffixes) for kind, suffixes in _SUFFIXES.items()}
    for kind, suffixes in _SUFFIXES.items():
        # A file that was put beside ece408_src by mistake.
        there[kind] = there[kind] or _named(folder, suffixes)
    if context is None:
        context = "gpu" if there["gpu"] is not None and (there["cpu"] is None or gpu_here()) else "cpu"
    return Submission(folder, there[context], context)


def _source(folder: Path, suffixes: tuple[str, ...]) -> Path | None:
    """new-forward.* where it is there, else the only file of that kind."""
    files = [path for path in _listed(folder) if isfile(path) and path.suffix.lower() in suffixes]
    files = [path for path in files if not _skipped(path)]
    return _named(folder, suffixes) or (files[0] if len(files) == 1 else None)


def _named(folder: Path, suffixes: tuple[str, ...]) -> Path | None:
    files = {path.name.lower(): path for path in reversed(_listed(folder)) if isfile(path)}
    return next((files[name] for suffix in suffixes if (name := f"new-forward{suffix}") in files), None)
