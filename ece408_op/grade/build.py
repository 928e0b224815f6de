"""Compile a submission into a shared library, in containment, behind the stand-ins for MXNet's headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import jail
from .spec import LimitsSpec
from .worker import EndedError

#: What of a submission's folder is copied beside its source, at most.
_COPIED_BYTES = 8 << 20
_COPIED_SUFFIXES = (".h", ".hpp", ".cuh", ".cu", ".cpp", ".cc", ".inl", ".inc")
#: Lines of the compiler's errors that are shown.
_SHOWN = 12
#: The course's files were written for C++11; headers of today's CUDA may want more, a kernel that starts kernels too.
_ATTEMPTS = (("-std=c++14",), ("-std=c++17",), ("-std=c++14", "-rdc=true"))
#: C functions that a submission has no reason to define: the clock's, and those the runner talks by.
_REPLACED = frozenset(
    (
        *("clock", "clock_gettime", "clock_getres", "gettimeofday", "time", "times", "getrusage", "read", "write"),
        *("mmap", "munmap", "dlopen", "dlsym", "exit", "_exit", "cudaEventElapsedTime", "cudaEventRecord"),
        *("cudaDeviceSynchronize", "cudaStreamSynchronize"),
    )
)


@dataclass(frozen=True)
class Built:
    """A library, and what the compiler said beside errors."""

    library: Path
    notes: str = ""


def build(
    source: Path, context: str, folder: Path, tools: jail.Tools, limits: LimitsSpec, architecture: str = ""
) -> Built:
    """Compile it; raises EndedError (compile_error, unsupported, timed_out, tampered) where there is no library."""
    folder.chmod(0o755)
    inner = folder / "src"
    inner.mkdir()
    copy(source, inner)
    unit = folder / f"unit.{'cu' if context == 'gpu' else 'cpp'}"
    unit.write_text(f'#include "{source.name}"\n#include <ece408_grade/after.h>\n', encoding="utf-8")
    target = folder / "out"
    target.mkdir()
    target.chmod(0o777)
    texts: list[str] = []
    for attempt in _ATTEMPTS if context == "gpu" else _ATTEMPTS[:2]:
        if "-rdc=true" in attempt and not any("separate compilation" in text for text in texts):
            continue
        command = _command(context, unit, inner, tools.headers, attempt, architecture)
        code, text = _compile(command, folder, target, tools, limits)
        if code == "exit 0":
            _reject_replaced(target / "submission.so")
            return Built(target / "submission.so", text)
        if code.startswith("signal"):
            raise EndedError("compile_error", f"the compiler was ended ({code}): memory or output over its limit")
        texts.append(text)
    # The first attempt's errors, unless they are about the language's version.
    first = texts[1] if re.search(r"C\+\+ ?17", texts[0]) else texts[0]
    if re.search(r"\btexture\s*<|\btex[123]D\w*\s*\(|cudaBindTexture", _code(inner)) and "texture" in first:
        raise EndedError("unsupported", "it uses texture<> references, which CUDA has no longer had since CUDA 12")
    raise EndedError("compile_error", errors(first, folder, tools))


def errors(text: str, folder: Path, tools: jail.Tools) -> str:
    """The compiler's errors with the student's own file and line."""
    text = re.sub(rf"{re.escape(str(folder))}/src/|{re.escape(str(folder))}/", "", text)
    text = text.replace(f"{tools.headers}/", "")
    lines = [line for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if re.search(r"\berror\b|undefined (reference|symbol)|fatal", line)]
    chosen = wanted or lines
    more = f"\n... and {len(chosen) - _SHOWN} more" if len(chosen) > _SHOWN else ""
    return "\n".join(chosen[:_SHOWN]) + more if chosen else "the compiler failed and said nothing"


def _command(
    context: str, unit: Path, inner: Path, headers: Path, options: tuple[str, ...], architecture: str
) -> list[str]:
    target = unit.parent / "out" / "submission.so"
    common = ["-include", "ece408_grade/before.h", "-I", str(headers), "-I", str(inner)]
    if context == "cpu":
        return [
            *(jail.compiler("g++"), *options, "-O3", "-w", "-fPIC", "-shared", "-fopenmp", "-Wl,-z,defs"),
            *(*common, *_last(headers), "-o", str(target), str(unit), "-ldl"),
        ]
    nvcc = jail.compiler("nvcc")
    return [
        *(nvcc, *options, "-O3", "-w", "-shared", "-cudart", "static", "-arch", architecture),
        *("-Xcompiler", ",".join(("-fPIC", "-fopenmp", *_last(headers))), "-Xptxas", "-v"),
        *("-Xlinker", "-z,defs,--exclude-libs,ALL", *common, "-o", str(target), str(unit)),
    ]


def _last(headers: Path) -> tuple[str, ...]:
    """Where headers are looked for that are nowhere else; from ``beside`` a path that begins with .. is found."""
    fallback = headers / "fallback"
    return ("-idirafter", str(fallback), "-idirafter", str(fallback / "beside"))


def _compile(command: list[str], folder: Path, target: Path, tools: jail.Tools, limits: LimitsSpec) -> tuple[str, str]:
    root = folder / "root"
    root.mkdir(exist_ok=True)
    log = folder / "compiler.txt"
    with open(log, "wb") as file:
        inside = jail.start(
            tools,
            command,
            root=root,
            limits=jail.Limits(
                memory=limits.memory_bytes,
                cpu_seconds=int(limits.build_seconds) + 1,
                tmp_bytes=512 << 20,
                processes=512,
            ),
            stdout=file,
            stderr=file,
            seen=(folder, tools.folder),
            written=(target,),
            filtered=False,
        )
        on_time = inside.wait_for("ended", limits.build_seconds)
        code = inside.end()
    if not on_time:
        raise EndedError("timed_out", f"compiling took longer than its limit of {limits.build_seconds:g} s")
    return code, log.read_text(encoding="utf-8", errors="replace")[:1_000_000]


def copy(source: Path, to: Path) -> None:
    """The source and the sources beside it, without links, up to a size."""
    left = _COPIED_BYTES
    beside = [path for path in sorted(source.parent.iterdir()) if path.suffix in _COPIED_SUFFIXES and path != source]
    for path in [source, *beside[:200]]:
        if (path.is_symlink() and path != source) or not path.is_file() or path.stat().st_size > left:
            continue
        left -= path.stat().st_size
        shutil.copyfile(path, to / path.name)
        (to / path.name).chmod(0o644)


def _code(inner: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in inner.iterdir())


def _reject_replaced(library: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        return
    done = subprocess.run([nm, "-D", "--defined-only", str(library)], capture_output=True, text=True, check=False)
    defined = {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()}
    replaced = sorted(defined & _REPLACED)
    if replaced:
        raise EndedError("tampered", f"it defines {', '.join(replaced)} in place of the system's own")
