"""The submissions that a path on the command line stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import abspath, dirname, exists, isdir, isfile, islink, realpath, splitext
from pathlib import Path

from ece408_op.submission.sources import OPERATOR, SUFFIXES, SUFFIXES_OF, device_of

from ._spec import SpecError

_NAMES = ("new-forward.h", "new-forward.cuh")
_COURSES = (OPERATOR, "new.cc", "new.cu")  # the course's own files next to a student's: they are no submissions
_INNER = "ece408_src"  # the folder of the course's file
_LEVELS = 20  # levels of folders in a class
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
#: Sources too, by their own path alone: next to a submission they are its parts.
_SOURCES = (".c", ".cxx", ".hh", ".hxx", ".inl")
_PACKED = "an archive; unpack it first"


@dataclass(frozen=True)
class Submission:
    """One submission: the path that names it, and the source to compile (None where there is none).

    ``why``: the reason why it cannot be graded here, if its path already shows that. ``alone``: the file is in a folder
    with other people's submissions.
    """

    path: Path
    source: Path | None
    context: str
    why: str = ""
    alone: bool = False


#: Submissions; and the paths that are not graded, each with the reason.
Found = tuple[list[Submission], list[tuple[Path, str]]]


def find(paths: list[Path], context: str | None, gpu_here: Callable[[], bool]) -> Found:
    """Return the submissions that the paths name, in order, each once, and what their folders have that is not graded.

    A path is a file, a folder of one submission or a folder of many. Not graded are other folders, archives, and files
    that may be submissions; among several paths, as ``class/*`` gives, other files too. Raises SpecError for a path
    that does not exist or has no submission.
    """
    found: dict[str, Submission] = {}
    passed_over: list[tuple[Path, str]] = []
    for path in paths:
        if not exists(path):
            raise SpecError(f"{path}: expected a file or a folder, found nothing")
        if isfile(path) and path.suffix.lower() in _ARCHIVES:
            raise SpecError(f"{path}: expected a file or a folder, got an archive; unpack it first")
        if isfile(path) and not _may_be_one(path):
            passed_over.append((path, f"expected a folder or a file of {', '.join(SUFFIXES)}, got another file"))
            continue
        here, over = ([_of_file(path, context)], []) if isfile(path) else _within(path, context, gpu_here)
        if not here:
            why = "".join(f"; {one}: {reason}" for one, reason in over[:5])
            raise SpecError(f"{path}: expected new-forward.h, new-forward.cuh, a .cu or a .py file, found none{why}")
        for one in here:
            found.setdefault(abspath(one.path), _checked(one, path))
        passed_over += over
    if not found:
        raise SpecError("; ".join(f"{path}: {why}" for path, why in passed_over[:5]))
    # Files as class/*.cu gives them. Kernels in Python name sources next to them.
    files = [name for name, one in found.items() if one.path == one.source and one.path.suffix.lower() != ".py"]
    kinds = Counter(map(_kind, files))
    found.update({name: replace(found[name], alone=True) for name in files if kinds[_kind(name)] > 1})
    return list(found.values()), passed_over


def _kind(path: str) -> tuple[str, str]:
    """A file's folder and suffix: several such files are the work of several people."""
    return dirname(path), splitext(path)[1].lower()


def _checked(one: Submission, given: Path) -> Submission:
    """The submission; with the reason why it cannot be graded where links lead out of it."""
    if one.source is None or one.why:
        return one
    # The path that was given may be a link; whatever lies below it belongs to students.
    own, real = Path(realpath(given), one.path.relative_to(given)), Path(realpath(one.source))
    if real != own and own not in real.parents:
        return replace(one, source=None, why=f"{one.source} is a link that leads out of the submission")
    return replace(one, alone=one.path != given and one.path == one.source)


def _within(folder: Path, context: str | None, gpu_here: Callable[[], bool], levels: int = _LEVELS) -> Found:
    if _is_one(folder):
        # A folder that is one submission may hold others: a class with the course's skeleton at its top.
        inner = [child for child in _listed(folder) if isdir(child) and child.name != _INNER and _is_one(child)]
        why = f"it lies within {folder}, which is a submission by itself"
        return [_of_folder(folder, context, gpu_here)], [(child, why) for child in inner]
    found, over = [], []
    for child in _listed(folder):
        suffix = child.suffix.lower()
        if isdir(child) and islink(child) and not _is_one(child):  # folders that link to each other have no end
            over.append((child, "a link to a folder that is no submission"))
        elif isdir(child):
            more, others = _within(child, context, gpu_here, levels - 1) if levels else ([], [])
            found += more
            packed = (f"{path.name}: {why}" for path, why in others if why.endswith(_PACKED))
            over += others if more else [(child, next(packed, "no submission found in it"))]
        elif suffix in _ARCHIVES:
            over.append((child, _PACKED))
        elif suffix in (SUFFIXES_OF[context] if context else SUFFIXES[:-1]):
            found.append(_of_file(child, context))
        elif _may_be_one(child):
            over.append((child, "not taken for a submission; if it is one, give its own path"))
    return found, over


def _may_be_one(path: Path) -> bool:
    return path.suffix.lower() in (*SUFFIXES, *_SOURCES) or "forward" in path.name.lower()


def _listed(folder: Path) -> list[Path]:
    """Return a folder's entries in order, none if it cannot be read, without hidden, system and course files."""
    with suppress(OSError):
        own = (path for path in folder.iterdir() if not path.name.startswith((".", "__")))
        return sorted(path for path in own if path.name.lower() not in _COURSES)
    return []


def _is_one(folder: Path) -> bool:
    return isdir(folder / _INNER) or any(isfile(one) and one.name.lower() in _NAMES for one in _listed(folder))


def _of_file(path: Path, context: str | None) -> Submission:
    own = None
    with suppress(OSError):  # its record will say that it cannot be read
        own = device_of(path) if path.suffix.lower() in SUFFIXES else None
    if own is not None and context not in (None, own):
        return Submission(path, None, str(context), f"{path.name} is for --context {own}, not {context}")
    return Submission(path, path, own or context or "cpu")


def _of_folder(folder: Path, context: str | None, gpu_here: Callable[[], bool]) -> Submission:
    inner = folder / _INNER if isdir(folder / _INNER) else folder
    there = {kind: _source(folder, inner, suffixes) for kind, suffixes in SUFFIXES_OF.items()}
    if context is None:
        context = "gpu" if there["gpu"] is not None and (there["cpu"] is None or gpu_here()) else "cpu"
    lacks = f"it holds no new-forward{SUFFIXES_OF[context][0]}, which --context {context} asks for"
    return Submission(folder, there[context], context, "" if there[context] else lacks)


def _source(folder: Path, inner: Path, suffixes: tuple[str, ...]) -> Path | None:
    """new-forward.* where it is there, also next to ece408_src by mistake; else the only file of that kind."""
    files = [path for path in _listed(inner) if path.suffix.lower() in suffixes and isfile(path)]
    there = {path.name.lower(): path for path in reversed([*files, *_listed(folder)]) if isfile(path)}
    named = [there[name] for name in (f"new-forward{suffix}" for suffix in suffixes) if name in there]
    return named[0] if named else files[0] if len(files) == 1 else None
