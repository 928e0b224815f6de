"""g++: the runtime and the headers once per version, a program once per content, in a cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ece408_op.errors import DeviceError

from . import _rewrite
from ._errors import CompileError

_HERE = Path(__file__).parent
#: The course's interface, as the grader gives it to submissions.
_COURSE = _HERE.parent / "grade" / "headers"
_SECONDS = 120
_COMMON = ("-std=c++17", "-w", "-fpermissive", "-fno-gnu-unique", "-fno-pie", "-D__CUDACC__=1", "-fmax-errors=12")
#: What is watched has nvcc's optimisations as far as they change accesses: values stay in registers, invariant loads
#: leave loops, and loops are unrolled where the source says so. Blocks of code keep their order (counters.cpp).
_WATCHED = (
    *("-O2", "-g1", "-fno-tree-vectorize", "-fno-reorder-blocks", "-fdisable-rtl-loop2_unroll", "-fcf-protection=none"),
    *("-fsanitize=thread", "-fsanitize-coverage=trace-pc"),
)
_PLAIN = ("-O1", "-fcf-protection=none")
MISSING = "expected g++ 12 or newer, which compiles the emulated programs, on PATH; found none: apt-get install g++"


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        executable: the file; it runs in a process of its own.
        source: the name of the source in the compiler's messages and in reports.
    """

    executable: Path
    source: str


@cache
def compiler_version() -> str | None:
    """Return g++'s version and target; None where there is no g++ that knows 16-bit floats."""
    if shutil.which("g++") is None:
        return None
    probe = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(probe, input="_Float16 x;", text=True, check=False, capture_output=True).returncode:
        return None
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def default_folder() -> Path:
    """Return the folder of compiled programs: in ``XDG_CACHE_HOME``, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ece408-op" / "emulator"


def link(text: str, source: str, folder: Path, watched: bool, course: bool) -> Program:
    """Compile and link C++ that defines ``ece408_run``; raises CompileError, DeviceError without a g++."""
    support = _support(folder)
    name = hashlib.sha256(f"{support.name} {watched} {course} {text}".encode()).hexdigest()[:24]
    program = folder / name
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unit, built = Path(scratch) / "unit.cpp", Path(scratch) / "program"
            unit.write_text(text, encoding="utf-8")
            header = _header(support, watched, course)
            command = ["g++", *_flags(support, watched), "-include", str(header), "-c", str(unit), "-o", f"{built}.o"]
            _run(command, source)
            _run(["g++", "-no-pie", f"{built}.o", *map(str, support.glob("*.o")), "-o", str(built)], source)
            os.replace(built, program)
    return Program(program, source)


def header_folders() -> tuple[Path, ...]:
    """Return the folders with the headers that a submission finds: CUDA's and the course's."""
    return _HERE / "cuda", _COURSE, _COURSE / "fallback"


def prepare(folder: Path) -> None:
    """Compile the runtime and the course's headers, unless the folder has them."""
    _header(_support(folder), True, True)


def _flags(support: Path, watched: bool) -> list[str]:
    folders = (f"-I{_HERE / 'cuda'}", f"-I{support / 'course'}", "-idirafter", f"{_COURSE / 'fallback'}")
    return [*_COMMON, *(_WATCHED if watched else _PLAIN), *folders]


@cache
def _version() -> str:
    """The hash of everything that a program is built from besides its own text."""
    found = compiler_version()
    if found is None:
        raise DeviceError(MISSING)
    digest = hashlib.sha256(repr((found, _COMMON, _WATCHED, _PLAIN)).encode())
    for path in sorted([*_HERE.rglob("*.h"), *_HERE.rglob("*.cpp"), *_HERE.glob("*.py"), *_COURSE.rglob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _support(folder: Path) -> Path:
    """Return the folder with the runtime's object file and the course's headers, rewritten."""
    support = folder / f"support-{_version()}"
    if not support.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        for path in _COURSE.rglob("*.h"):
            target = scratch / "course" / path.relative_to(_COURSE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_rewrite.rewrite(path.read_text(encoding="utf-8"), check=False), encoding="utf-8")
        shutil.rmtree(scratch / "course" / "fallback")
        for path in (_HERE / "native").glob("*.cpp"):
            _run(["g++", *_COMMON, "-O2", "-c", str(path), "-o", str(scratch / f"{path.stem}.o")], path.name)
        _into_place(scratch, support)
    return support


def _header(support: Path, watched: bool, course: bool) -> Path:
    """Return the header to include first, precompiled."""
    name = "course.h" if course else "plans.h"
    folder = support / f"{'watched' if watched else 'plain'}-{name.partition('.')[0]}"
    if not folder.exists():
        scratch = Path(tempfile.mkdtemp(dir=support))
        (scratch / name).write_text(f'#include "{_HERE / "cuda" / name}"\n', encoding="utf-8")
        flags = _flags(support, watched)
        _run(["g++", *flags, "-x", "c++-header", str(scratch / name), "-o", str(scratch / f"{name}.gch")], name)
        _into_place(scratch, folder)
    return folder / name


def _into_place(scratch: Path, folder: Path) -> None:
    """Rename a folder; another process may have been faster."""
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)


def _run(command: list[str], source: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise CompileError(((None, f"g++ took longer than {_SECONDS} s"),)) from None
    if done.returncode:
        raise CompileError(_messages(done.stderr, source))


def _messages(text: str, source: str) -> tuple[tuple[int | None, str], ...]:
    """Return the compiler's errors with the source's lines; those of other files where there are none."""
    own: list[tuple[int | None, str]] = []
    others: list[tuple[int | None, str]] = []
    for line in text.splitlines():
        found = re.match(r"(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)", line)
        if found:
            same = Path(found[1]).name == source
            (own if same else others).append((int(found[2]) if same else None, found[3] if same else line))
        elif "undefined reference" in line:
            others.append((None, line[line.index("undefined reference") :]))
    found_lines = own or others or [(None, text.strip()[-2000:])]
    return tuple(dict.fromkeys(found_lines))
