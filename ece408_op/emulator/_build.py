"""g++: the runtime and the headers once per version, a program once per content, in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ece408_op.errors import DeviceError
from ece408_op.runtime import cached_folders

from . import _rewrite
from ._errors import CompileError, UnsupportedCodeError

_HERE = Path(__file__).parent
#: The course's interface, as the grader gives it to submissions.
_COURSE = _HERE.parent / "submission" / "headers"
_SECONDS = 120
#: Seconds after which a file is compiled without unrolling its loops, whose nests may have thousands of rounds.
UNROLLED_SECONDS = 30
_UNROLL = re.compile(r"^[ \t]*#[ \t]*pragma GCC unroll \d+", re.MULTILINE)
_COMMON = (
    "-std=c++17",
    "-Wuninitialized",
    "-Wmaybe-uninitialized",
    "-Wvla",
    "-fpermissive",
    "-fno-gnu-unique",
    "-fno-delete-null-pointer-checks",
    "-fno-pie",
    "-D__CUDACC__=1",
    "-fmax-errors=12",
    "-fcf-protection=none",
)
#: The lines of a program's own code, without its variables; addr2line of 2022 mistakes the files of version 5.
_LINES = ("-g1", "-gdwarf-4", "-fno-var-tracking")
#: Only the usual ones of the C++ library's headers, which g++ reads in a third of the time.
FEW_HEADERS = "-DECE408_GRADE_FEW_HEADERS"
#: A variable without a value holds bytes of 0xfe, -1.7e38 as a float: a GPU's register may hold anything, and with 0, a
#: sum that begins with it would be right.
_UNSET = "-ftrivial-auto-var-init=pattern"
#: g++ calls the runtime before each access, by another name where it is volatile.
_ACCESSES = ("-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
#: Options by what a program checks. For counters, g++ optimises as nvcc does, as far as that changes accesses: values
#: stay in registers, invariant loads leave loops, and loops are unrolled where the source says so.
_CHECKS = {
    "plain": ("-O1",),
    "races": ("-O1", *_ACCESSES),
    "indices": ("-O1", "-fsanitize=bounds"),
    "counters": (
        *("-O2", "-fno-tree-vectorize", "-fno-thread-jumps", "-fno-split-paths", "-fdisable-rtl-loop2_unroll"),
        *(*_ACCESSES, "-fsanitize-coverage=trace-pc"),
    ),
}
#: A variable that is zero at first, in assembly; bytes between variables, more than a block's static shared memory.
_VARIABLE = re.compile(r"^\t\.size\t(\S+), \d+\n(?=\1:\n\t\.zero\t)", re.MULTILINE)
_GAP = 64 * 1024
#: In assembly: the call that -fsanitize-coverage puts in front of a basic block; and a conditional branch or a label.
_HOOK, _BLOCK_END = re.compile(r"\tcall\t__sanitizer_cov_trace_pc\b"), re.compile(r"\tj(?!mp)\w+\t|\.L\d+:")
#: Calls of the C library that access memory: hooks.cpp has functions that tell the emulator first.
_COPIES = re.compile(r"(\t(?:call|jmp)\t)(?=mem(?:cpy|move|set)\n)")
#: A section of one constant, read-only or not.
_CONSTANT = re.compile(r'^(\t\.section\tece408_constant)\d+,"aw?', re.MULTILINE)
#: The gaps behind the last variable of shared and of constant memory.
_LAST_GAPS = "".join(
    f"\t.section\t{name}\n\t.zero\t{_GAP}\n" for name in ('.tbss.last,"awT",@nobits', 'ece408_constant,"aw"')
)
#: g++'s messages on names and headers of CUDA and its libraries that are not in ``cuda/``.
_LACKING = re.compile(
    r"^‘(_*(?:cuda[A-Z]|cu[A-Z][a-z]|CU_|CUDART_|nvtx|atomic[A-Z]|__|tex[123]D|cu(?:blas|dnn|fft|rand|solver|sparse)[A-Z])"
    r"\w+|(?:nvcuda|cooperative_groups|cub|thrust|texture|surface)\b\S*|coalesced_\w+|this_grid|grid_group|memcpy_async"
    r"|h2?(?:log|exp|r?sqrt|rcp|sin|cos)\d*)’"
    r" (?:was|is|has|does) not"
    r"|^‘(\w+)’ .*‘[\w:]*\b(?:wmma|cooperative_groups|cg)’"
    r"|^‘struct cooperative_groups::.* no member named ‘(\w+)’"
    r"|^((?:cuda|cub|thrust|cooperative_groups|nv|cutlass)\S*): No such file|assertion failed: the emulator lacks (.*)"
)
MISSING = "expected g++ 12 or newer, which compiles the emulated programs, on PATH; found none: apt-get install g++"


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        executable: the file; it runs in a process of its own.
        source: the name of the source in the compiler's messages and in reports.
        text: the C++ that was compiled.
        indices: a second executable, which checks the indices of arrays in functions; None where it is not needed.

    g++'s warnings are in the file ``warnings`` next to the executable.
    """

    executable: Path
    source: str
    text: str
    indices: Path | None = None


@cache
def compiler_version() -> str | None:
    """Return g++'s version; None where there is no g++ that knows 16-bit floats (12 or newer)."""
    if shutil.which("g++") is None:
        return None
    done = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, encoding="utf-8", check=False)
    major = done.stdout.partition(".")[0]
    return done.stdout.strip() if major.isdigit() and int(major) >= 12 else None


def link(
    text: str, source: str, folder: Path | None, checks: str, course: bool, options: tuple[str, ...] = ()
) -> Program:
    """Compile and link C++ that defines ``ece408_run``, with the options of ``_CHECKS``, if the folder has it not yet.

    By default, the folder is in the user's cache. Raises CompileError, and DeviceError where there is no g++.
    """
    folder = folder or cached_folders.base() / "emulator"
    support = _support(folder)
    header = _header(support, checks, course, options)

    def make(scratch: Path) -> None:
        unit, flags = scratch / "unit.cpp", [*_flags(support, checks, options), "-include", str(header)]
        unit.write_text(text, encoding="utf-8")
        try:
            assembly = _assembly(unit, flags, source, seconds=UNROLLED_SECONDS if course else _SECONDS)
        except _TooLongError:
            unit.write_text(_UNROLL.sub("", text), encoding="utf-8")
            assembly = _assembly(unit, flags, source)
        objects = map(str, (assembly, *support.glob("*.o")))
        compile_with(["g++", "-no-pie", *objects, "-o", str(scratch / "program")], source)
        for intermediate in (unit, assembly):
            intermediate.unlink()

    key = hashlib.sha256(f"{support.name} {checks} {course} {options} {text}".encode()).hexdigest()[:24]
    return Program(cached_folders.folder(folder, "program", key, make) / "program", source, text)


def _assembly(unit: Path, flags: list[str], source: str, folder: Path | None = None, seconds: float = _SECONDS) -> Path:
    """Compile to assembly with a gap in front of each variable, so that an index beyond one of them hits no other."""
    assembly = (folder or unit.parent) / f"{unit.stem}.s"
    command = ["g++", *flags, "-fdata-sections", "-S", str(unit), "-o", str(assembly)]
    assembly.with_name("warnings").write_text(compile_with(command, source, seconds), encoding="utf-8")
    text = _with_lines_of_branches(assembly.read_text(encoding="utf-8"))
    text = _CONSTANT.sub(r'\1,"aw', _VARIABLE.sub(rf"\g<0>\t.zero\t{_GAP}\n", text))
    if not folder:
        text = _COPIES.sub(r"\1ece408_", text)
    last = _LAST_GAPS if folder else ""  # the runtime is linked last
    assembly.write_text(text + last, encoding="utf-8")
    return assembly


def _with_lines_of_branches(assembly: str) -> str:
    """Give the hook that begins a basic block the line of the branch that ends it: there, lanes go two ways."""
    lines: list[str] = []
    place, hook, hooked = "", 0, ""
    for line in assembly.split("\n"):
        if line.startswith("\t.loc\t") or line.startswith("\t.loc "):
            place = line
        elif _HOOK.match(line):
            hook, hooked = len(lines), place
        elif _BLOCK_END.match(line):
            if hook and line.startswith("\tj") and place != hooked and place.split()[1:2] == hooked.split()[1:2]:
                lines[hook] = f"{place}\n{lines[hook]}\n{hooked}"
            hook = 0
        lines.append(line)
    return "\n".join(lines)


def header_folders() -> tuple[Path, ...]:
    """Return the folders with the headers that a submission finds: CUDA's and the course's."""
    return _HERE / "cuda", _COURSE, _COURSE / "fallback"


def _flags(support: Path, checks: str, options: tuple[str, ...]) -> list[str]:
    folders = (f"-I{_HERE / 'cuda'}", f"-I{support / 'course'}", "-idirafter", f"{_COURSE / 'fallback'}")
    return [*_COMMON, *_LINES, _UNSET, *_CHECKS[checks], *folders, *options]


@cache
def _version() -> str:
    """The hash of everything that a program is built from except its own text."""
    version = compiler_version()
    if version is None:
        raise DeviceError(MISSING)
    files = sorted([*_HERE.rglob("*.h"), *_HERE.rglob("*.cpp"), *_HERE.glob("*.py"), *_COURSE.rglob("*.h")])
    return cached_folders.digest(files, repr((version, _COMMON, _LINES, _UNSET, _CHECKS)), root=_HERE.parent)


def _support(folder: Path) -> Path:
    """Return the folder with the runtime's object file and the course's headers, rewritten."""
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder):
        return cached_folders.folder(folder, "support", _version(), _make_support)


def _make_support(folder: Path) -> None:
    for path in _COURSE.rglob("*.h"):
        target = folder / "course" / path.relative_to(_COURSE)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _rewrite.without_missing_headers(path.read_text(encoding="utf-8"), header_folders())
        target.write_text(_rewrite.rewrite(text), encoding="utf-8")
    shutil.rmtree(folder / "course" / "fallback")
    # One unit, which reads the C++ library's headers once; api.cpp sees the builtin variables as constants.
    native = _HERE / "native"
    parts = (path for path in sorted(native.glob("*.cpp")) if path.stem != "api")
    unit = folder / "runtime.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in parts), encoding="utf-8")
    for path in (unit, native / "api.cpp"):
        assembly = _assembly(path, [*_COMMON, "-O2"], path.name, folder)
        compile_with(["g++", "-c", str(assembly), "-o", str(folder / f"{path.stem}.o")], path.name)


def _header(support: Path, checks: str, course: bool, options: tuple[str, ...]) -> Path:
    """Return the header to include first, precompiled."""
    name = "course.h" if course else "plans.h"
    key = "-".join((checks, name.partition(".")[0], *(option.partition("_")[2] for option in options)))

    def make(folder: Path) -> None:
        (folder / name).write_text(f'#include "{_HERE / "cuda" / name}"\n', encoding="utf-8")
        flags = _flags(support, checks, options)
        compile_with(["g++", *flags, "-x", "c++-header", str(folder / name), "-o", str(folder / f"{name}.gch")], name)

    with _one_at_a_time(support):
        return cached_folders.folder(support, "header", key, make) / name


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let processes that need the same files wait for the first one to compile them."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _TooLongError(CompileError):
    """g++ took too long."""


#: The compilers that run.
_running: set[subprocess.Popen[str]] = set()


def end_compilers() -> None:
    """End the compilers that other threads of this process wait for, which get a DeviceError."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def compile_with(command: list[str], source: str, seconds: float = _SECONDS) -> str:
    """Run a compiler's command and return its warnings.

    CompileError has its messages with their lines in ``source``, or that it took too long.

    Its own processes end with it.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", start_new_session=True
    ) as process:
        _running.add(process)
        try:
            _, errors = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # g++'s own processes too
            if isinstance(error, subprocess.TimeoutExpired):
                raise _TooLongError(((None, f"g++ took longer than {seconds:g} s"),)) from None
            raise
        finally:
            _running.remove(process)
    if process.returncode < 0:
        raise DeviceError(f"g++ was ended by signal {-process.returncode}")
    errors = errors.replace("warning: invalid conversion", "error: invalid conversion")  # as for nvcc
    if process.returncode or re.search(rf"{re.escape(source)}:[\d:]+ error: ", errors):
        found = _messages(errors, source)
        for line, message in found:
            lacking = _LACKING.search(message)
            if line and lacking:
                name = next(group for group in lacking.groups() if group)
                raise UnsupportedCodeError(line, f"the emulator does not have {name}")
        if re.search("(?:writ|clos|link failed).*No space left", errors):  # no fault of the file's
            raise DeviceError(f"expected room for g++'s files, got: {found[0][1]}")
        raise CompileError(found)
    return errors


def _messages(text: str, source: str) -> tuple[tuple[int | None, str], ...]:
    """Return the compiler's errors with the source's lines; those of other files where there are none."""
    own: list[tuple[int | None, str]] = []
    others: list[tuple[int | None, str]] = []
    user = None  # the source's line that uses the template in which the next error is
    for line in text.splitlines():
        found = re.match(r"(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)", line)
        used = re.match(r"(.*?):(\d+):(?:\d+:)?\s+required from", line)
        if used and Path(used[1]).name == source:
            user = int(used[2])
        if found:
            same = Path(found[1]).name == source
            number = int(found[2]) if same else user
            (own if number else others).append((number, found[3].replace(" [-fpermissive]", "") if number else line))
            user = None
        elif "undefined reference" in line:
            others.append((None, line[line.index("undefined reference") :]))
    found_lines = own or others or [(None, text.strip()[-2000:])]
    return tuple(dict.fromkeys(found_lines))
