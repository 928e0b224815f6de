"""Which files belong to a submission: its source, what that includes from its folder, and the headers of MXNet."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ece408_op.runtime.source_text import COURSE_HEADERS, INCLUDE

from .errors import EndedError

#: The suffixes of files in C++, by the device that one computes on.
SUFFIXES_OF = {"cpu": (".h", ".hpp", ".cpp", ".cc"), "gpu": (".cuh", ".cu")}
SUFFIXES = (*SUFFIXES_OF["cpu"], *SUFFIXES_OF["gpu"], ".py")  # the suffixes of files that can be graded
MOST_BYTES = 8 << 20  # bytes and files of one submission, at most
_MOST_FILES = 200
#: Characters of a submission that are searched: an expression holds Python's lock, and no signal is taken meanwhile.
SEARCHED = 1 << 20

_REPLACED = re.compile(COURSE_HEADERS)
#: A header of a system's own, by its place there; the course's machines had CUDA and MXNet where others do not.
_ABSOLUTE = re.compile(
    rb'^([ \t]*#[ \t]*include[ \t]*)["<](/[^">\r\n]{0,400}/include/([^">\r\n]{1,200}))[">]', re.MULTILINE
)
#: `#pragma unroll NAME`: the number of iterations is a macro.
_UNROLL = re.compile(rb"^([ \t]*#[ \t]*pragma[ \t]+unroll)\b[ \t(]*[A-Za-z_][^\r\n]*", re.MULTILINE)
#: The course's own file next to a student's, which is MXNet's for the greater part: a stand-in takes its place.
OPERATOR = "new-inl.h"
_LEVELS = 4  # how far up such a path may begin


def device_of(path: Path) -> str:
    """Return the device that a file computes on, "cpu" or "gpu", by its name or, for Python, by its text.

    Strangers' code is not imported to find out.
    """
    if path.suffix.lower() == ".py":
        with open(path, "rb") as file:
            return "gpu" if b"CudaKernel" in file.read(MOST_BYTES) else "cpu"
    return "gpu" if path.suffix.lower() in SUFFIXES_OF["gpu"] else "cpu"


def copy(source: Path, to: Path, alone: bool = False) -> None:
    """Copy the source and, at their places, the files of its folder that it includes or, in Python, names.

    Without links, and up to a size; neighbours that nobody includes stay behind: in a class they are others' work. A
    header ``</somewhere/include/NAME>`` that is not there becomes ``<NAME>``. Raises EndedError where the source itself
    cannot be read or is too large, and where one that is to be ``alone`` includes a neighbour.
    """
    root, waiting, done, left = source.parent, [source.name], set[str](), MOST_BYTES
    while waiting and len(done) < _MOST_FILES:
        name = waiting.pop()
        path = root / name
        helper = path != source
        if name in done or (helper and (path.name == OPERATOR or os.path.islink(path) or not os.path.isfile(path))):
            continue
        if alone and helper:
            text = f"it includes {name}, which lies next to it in a folder of several submissions"
            raise EndedError("unsupported", f"{text}; give each submission a folder of its own")
        try:
            if not path.is_file() or path.stat().st_size > left:
                raise OSError(f"expected a file of at most {MOST_BYTES >> 20} MB")
            content = _ABSOLUTE.sub(_by_name, path.read_bytes())
        except OSError as error:
            if not helper:
                raise EndedError("unsupported", f"{name} cannot be read: {error.strerror or error}") from None
            continue
        left -= len(content)
        done.add(name)
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
        (to / name).chmod(0o644)
        waiting += _named(root, content) if source.suffix.lower() == ".py" else _within(root, path.parent, content)


def text(folder: Path) -> str:
    """The beginning of all that was copied, as one text."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)[:SEARCHED]


def unroll_without_names(folder: Path) -> bool:
    """Remove the number of times from each ``#pragma unroll NAME`` in all that was copied; whether there was one."""
    found = 0
    for path in filter(Path.is_file, folder.rglob("*")):
        content, count = _UNROLL.subn(rb"\1", path.read_bytes())
        path.write_bytes(content)
        found += count
    return found > 0


def _by_name(include: re.Match[bytes]) -> bytes:
    return include[0] if os.path.isfile(include[2]) else b"%b<%b>" % (include[1], include[3])


def add_stubs(code: str, stubs: Path) -> list[Path]:
    """Make an empty header for each that the code includes and MXNet's tree or CUDA had.

    Returns the folders to look in last: from the n-th, a path that begins with n ``../`` leads to the headers.
    """
    folders = [stubs.joinpath(*["down"] * level) for level in range(_LEVELS)]
    folders[-1].mkdir(parents=True, exist_ok=True)
    names = {found[2] or found[3] for found in INCLUDE.finditer(code)}
    for name in sorted(filter(_REPLACED.match, names)):
        rest = Path(re.sub(r"^(\./|\.\./)+", "", name))
        if ".." in rest.parts or rest.is_absolute():
            continue
        with suppress(OSError, ValueError):  # a name that no file can have is none
            (stubs / rest).parent.mkdir(parents=True, exist_ok=True)
            (stubs / rest).touch()
    return folders


def _named(root: Path, content: bytes) -> list[str]:
    """The names of the root's files that a Python file's text holds: kernels' sources lie next to it."""
    files = [path for path in root.iterdir() if path.suffix.lower() in (".cu", ".cuh", ".h") and path.is_file()]
    return [path.name for path in files if os.fsencode(path.name) in content]


def _within(root: Path, folder: Path, content: bytes) -> list[str]:
    """The names, from the root, of what a file in that folder includes by quotes and that lies within the root."""
    names, top = [], os.path.realpath(root)
    quoted = (found[2] for found in INCLUDE.finditer(content.decode(errors="replace")))
    for name in list(dict.fromkeys(filter(None, quoted)))[:_MOST_FILES]:
        with suppress(ValueError, OSError):
            names.append(str(Path(os.path.realpath(folder / name)).relative_to(top)))
    return names
