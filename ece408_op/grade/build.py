"""Compile a submission into a shared library, in containment, behind the stand-ins for MXNet's headers."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import jail, sources
from .spec import LimitsSpec
from .worker import EndedError

#: MXNet was built so.
_MACHINE = ("-msse3",) if platform.machine() == "x86_64" else ()
_CUBLAS = re.compile(r"\bcublas[A-Z]\w*\s*\(")
#: Lines of the compiler's errors that are shown.
_SHOWN = 12
_NO_FORWARD = r"undefined (reference|symbol).*op::forward[<(]"
#: The course's files were written for C++11; headers of today's CUDA may want more, a kernel that starts kernels too,
#: and a forward that is declared otherwise than the course's. Each is tried where the errors so far speak of it.
_ATTEMPTS = (
    ("", ("-std=c++14",)),
    ("", ("-std=c++17",)),
    ("separate compilation", ("-std=c++14", "-rdc=true")),
    (f"ambiguous|more than one instance|{_NO_FORWARD}", ("-std=c++14", "-DECE408_GRADE_OWN_FORWARD")),
)
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
    sources.copy(source, inner)
    code = sources.text(inner)
    sources.lend(code, tools.headers, folder / "stubs")
    unit = folder / f"unit.{'cu' if context == 'gpu' else 'cpp'}"
    unit.write_text(f'#include "{source.name}"\n#include <ece408_grade/after.h>\n', encoding="utf-8")
    target = folder / "out"
    target.mkdir()
    target.chmod(0o777)
    texts: list[str] = []
    for needed, attempt in _ATTEMPTS:
        if needed and not any(re.search(needed, text) for text in texts):
            continue
        command = _command(context, unit, inner, tools.headers, attempt, architecture, code)
        ended, text = _compile(command, folder, target, tools, limits)
        if ended == "exit 0":
            _reject_replaced(target / "submission.so")
            return Built(target / "submission.so", text)
        if ended.startswith("signal"):
            raise EndedError("compile_error", f"the compiler was ended ({ended}): memory or output over its limit")
        texts.append(text)
    # The first attempt's errors, unless they are about the language's version.
    first = texts[1] if re.search(r"C\+\+ ?17", texts[0]) else texts[0]
    if re.search(r"\btexture\s*<|\btex[123]D\w*\s*\(|cudaBindTexture", code) and "texture" in first:
        raise EndedError("unsupported", "it uses texture<> references, which CUDA has no longer had since CUDA 12")
    if _CUBLAS.search(code) and "cublas" in first.lower() and _cublas() is None:
        raise EndedError("unsupported", "it calls cuBLAS, which the CUDA toolkit of this machine lacks")
    raise EndedError("compile_error", errors(first, folder, tools, source.name))


def errors(text: str, folder: Path, tools: jail.Tools, name: str) -> str:
    """The compiler's errors with the student's own file, of that name, and line."""
    text = re.sub(rf"{re.escape(str(folder))}/src/|{re.escape(str(folder))}/", "", text)
    text = text.replace(f"{tools.headers}/", "")
    lines = [line for line in text.splitlines() if line.strip()]
    if re.search(rf"after\.h\S*: error: .*forward|{_NO_FORWARD}", text):
        return f"it has no forward(y, x, w) for this device in namespace mxnet::op that can be called\n{_chosen(lines)}"
    # A bracket that is never closed shows in what the harness puts behind the file.
    return _chosen(
        [re.sub(r"^ece408_grade/after\.h[:(][\d:]+\)?:?", f"behind the end of {name}:", line) for line in lines]
    )


def _chosen(lines: list[str]) -> str:
    wanted = [line for line in lines if re.search(r"\berror\b|undefined (reference|symbol)|fatal", line)]
    chosen = wanted or lines
    more = f"\n... and {len(chosen) - _SHOWN} more" if len(chosen) > _SHOWN else ""
    return "\n".join(chosen[:_SHOWN]) + more if chosen else "the compiler failed and said nothing"


def _command(
    context: str, unit: Path, inner: Path, headers: Path, options: tuple[str, ...], architecture: str,
    code: str,
) -> list[str]:  # fmt: skip
    target = unit.parent / "out" / "submission.so"
    last = _last(headers, unit.parent / "stubs")
    common = ["-include", "ece408_grade/before.h", "-I", str(headers), "-I", str(inner)]
    if context == "cpu":
        return [
            *(jail.compiler("g++"), *options, "-O3", "-w", "-fPIC", "-shared", "-fopenmp", "-Wl,-z,defs"),
            *(*_MACHINE, *common, *last, "-o", str(target), str(unit), "-ldl"),
        ]
    nvcc = jail.compiler("nvcc")
    return [
        *(nvcc, *options, "-O3", "-w", "-shared", "-cudart", "static", "-arch", architecture),
        *("-Xcompiler", ",".join(("-fPIC", "-fopenmp", *last)), "-Xptxas", "-v"),
        *("-Xlinker", "-z,defs,--exclude-libs,ALL", *common, "-o", str(target), str(unit), *_linked(code)),
    ]


def _last(headers: Path, stubs: Path) -> tuple[str, ...]:
    """Where headers are looked for that are nowhere else; from ``beside`` a path that begins with .. is found."""
    fallback = headers / "fallback"
    folders = (fallback, fallback / "beside", *sources.stub_folders(stubs))
    return tuple(word for folder in folders for word in ("-idirafter", str(folder)))


def _linked(code: str) -> list[str]:
    """The libraries of the toolkit that the code calls; MXNet brought cuBLAS along."""
    library = _cublas() if _CUBLAS.search(code) else None
    return [] if library is None else ["-lcublas", "-Xlinker", f"-rpath,{library.parent}"]


def _cublas() -> Path | None:
    toolkit = Path(jail.compiler("nvcc")).resolve().parent.parent
    places = (home / "lib64" / "libcublas.so" for home in (toolkit, Path("/usr/local/cuda")))
    return next((place for place in places if place.exists()), None)


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


def _reject_replaced(library: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        return
    done = subprocess.run([nm, "-D", "--defined-only", str(library)], capture_output=True, text=True, check=False)
    defined = {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.split()}
    replaced = sorted(defined & _REPLACED)
    if replaced:
        raise EndedError("tampered", f"it defines {', '.join(replaced)} in place of the system's own")
