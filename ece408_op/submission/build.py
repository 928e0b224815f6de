"""Compile a submission into a shared library, behind the replacements for MXNet's headers; and the harness's programs.

A submission is compiled in the sandbox. The harness's programs are compiled once for this machine.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ece408_op.runtime import cached_folders, ptxas
from ece408_op.runtime.cached_folders import digest

from . import EndedError, HarnessError, sandbox, sources
from .sandbox import HELP, LimitsSpec, Tools
from .worker import Program, python_program

_HERE = Path(__file__).parent
#: How submissions for the CPU are compiled: as MXNet was (assert() does nothing), and for C++11's successor, since
#: many need it. The harness's caller of forward is in the same unit, so that the compiler could see that a pointer is
#: null and drop what is written through it: a crash has to stay one.
CPU_OPTIONS = (
    *("-std=c++14", "-O3", "-DNDEBUG=1", "-w", "-fPIC", "-fopenmp", "-fno-delete-null-pointer-checks"),
    *(("-msse3",) if platform.machine() == "x86_64" else ()),
)
_PREFIX = "ece408-grade-"
#: Names that CUDA has dropped since, and those of MXNet that no submission of the course used.
_DROPPED = (
    r"\b(cudaConfigureCall|cudaSetupArgument|cudaLaunch|cudaLaunchCooperativeKernelMultiDevice|cudaLaunchParams"
    r"|cudaProfilerInitialize|cudaKeyValuePair)\b"
)
_MXNETS = r"\b(TensorContainer|half_t|TShape|TBlob|blas_handle_|dnn_handle_)\b"
#: Features that CUDA or the harness lacks: the code, the compiler's words, both with the group of the other filled in,
#: the reason, and the library without which it applies.
_LACKS: tuple[tuple[str, ...], ...] = (
    (r"\b(texture|surface)\s*<", "{}", "it uses {}<> references, which CUDA 12 removed"),
    (r"\btex[123]D\w*\s*\(|cudaBindTexture", "texture", "it uses texture<> references, which CUDA 12 dropped"),
    (r"\bx\b", r'class "__half" has no member "x"', "it uses the member x of half, which CUDA 9 dropped"),
    (_DROPPED, "{}", "it uses {}, which today's CUDA no longer has"),
    (r"\b(cudaDeviceSynchronize)\b", r'__host__ function\("{}', "a kernel calls {}, which CUDA 12 dropped"),
    (_MXNETS, r"error: .{0,200}[\"'](?:\w+::)*{}[\"']", "it uses {} of MXNet, which the harness's replacements lack"),
    (r"#[ \t]*include[ \t]*[<\"]torch/|\btorch::Tensor\b", "torch", "it is written for PyTorch, not for MXNet"),
    (r"\bcblas_\w+\s*\(", "cblas", "it calls a BLAS library for the CPU, which the harness does not link"),
    (r"\b(cudnn|cufft|curand|cusparse|cusolver)[A-Z]\w*\s*\(", "{}", "it calls {}, which the harness does not link"),
    (r"\bcublas[A-Z]\w*\s*\(", "cublas", "it calls cuBLAS, which this machine's CUDA lacks", "libcublas.so"),
    (r"\bcu[A-Z]\w*\s*\(", "reference to `cu[A-Z]", "it calls CUDA's driver, which this machine lacks", "libcuda.so"),
)
#: Errors of the compiler that are shown, characters of a line of code, and kernels whose registers are recorded.
_SHOWN, _WIDEST, _MOST_KERNELS = 12, 120, 20
#: Bytes of a compiler's temporary files and of its output that are read, and characters per line.
_TMP_BYTES, _MOST_OUTPUT, _LONGEST_LINE = 512 << 20, 1 << 20, 4000
_NO_FORWARD = r"undefined (reference|symbol).*op::forward[<(]"
#: A macro's name there, which nvcc does not replace: once it passed over such a line, now it ends at it.
_UNROLL = r"#[ \t]*pragma[ \t]+unroll"
#: An error's line; and where the bracket is that is open.
_ERROR = r"\berror\b|undefined (reference|symbol)|relocation truncated|fatal|note: to match this"
#: The compiler's messages on the lines after a submission, and on the number of its errors.
_BEHIND = r"^(ece408_grade/after\.h[:(][\d:]+\)?:?|At end of source:)"
_NOT_THERE = re.compile(r"after\.h\S*: error: .*forward")
_OPEN_BRACKET = r"""expected (a )?["']}["']"""
#: The course's files were written for C++11; headers of today's CUDA may want more, a kernel that starts kernels too,
#: and a forward that is declared otherwise than the course's: without it ``#pragma GCC target`` holds for theirs too.
#: Each is tried where the errors so far speak of it. The first, for nvcc alone, has few of the C++ library's headers,
#: which it reads more slowly than most submissions.
_QUICK = ("-std=c++14", "-DECE408_GRADE_FEW_HEADERS")
_NEWER = r"C\+\+ ?17"
_FATAL = r"(?m)^\S+:\d+:(\d+:)? fatal error:"  # such as a missing header: no option adds it
_OTHERWISE = f"ambiguous|more than one instance|target specific option|{_NO_FORWARD}"
_ATTEMPTS = (
    ("", _QUICK),
    ("", ("-std=c++14",)),
    ("", ("-std=c++17",)),
    ("separate compilation", ("-std=c++14", "-rdc=true")),
    (r"CUDA_KERNEL_LOOP|cuda_get_num_blocks|CUDA_CALL", ("-std=c++14", "-DECE408_GRADE_OPERATORS")),
    (_OTHERWISE, ("-std=c++14", "-DECE408_GRADE_OWN_FORWARD")),
)
#: Every name has to be there, and a submission's own variable goes before the system's function of its name.
_LINK = "-z,defs,-Bsymbolic"


def build(
    source: Path, context: str, folder: Path, tools: Tools, limits: LimitsSpec, architecture: str = "",
    alone: bool = False,
) -> Program:  # fmt: skip
    """Compile it, or copy a kernel in Python; raises EndedError (compile_error, unsupported or timed_out)."""
    if source.suffix.lower() == ".py":
        sources.copy(source, folder, alone)
        _let_all_read(folder)
        return python_program(folder / source.name)
    inner, unit = folder / "src", folder / f"unit.{'cu' if context == 'gpu' else 'cpp'}"
    inner.mkdir()
    code = sources.copy(source, inner, alone)
    sources.check_text(source.name, (inner / source.name).read_bytes())
    name = re.sub(r'["\r\n\\?]', "_", source.name)  # no #include takes these: "??!" is a trigraph
    (inner / source.name).rename(inner / name)
    unit.write_bytes(os.fsencode(f'#include "src/{name}"\n#include <ece408_grade/after.h>\n'))
    command = _command(unit, code, tools.folder / "headers", architecture)
    _let_all_read(folder)
    (folder / "out").mkdir()
    (folder / "out").chmod(0o777)
    texts: list[str] = []
    until = time.monotonic() + limits.build_seconds  # of all attempts
    for needed, options in _ATTEMPTS[context == "cpu" :]:
        if needed and not any(re.search(needed, text) for text in texts):
            continue
        try:
            ended, text = _compile([*command, *options], folder, tools, limits, until)
            if ended != "exit 0" and re.search(_UNROLL, text) and sources.unroll_without_names(inner):
                ended, text = _compile([*command, *options], folder, tools, limits, until)
        except EndedError:
            # An attempt may cure the errors that speak of it; others say more than that this one had no time.
            if not texts or any(re.search(cured or _NEWER, text) for cured, _ in _ATTEMPTS for text in texts):
                raise
            break
        if ended == "exit 0":
            units, notes = arithmetic(code), tuple(ptxas.kernels(text)[:_MOST_KERNELS])
            library = folder / "out" / "submission.so"
            return Program(str(library), (library.parent,), arithmetic=units, notes=notes)
        if options is _QUICK:
            continue  # whatever it lacked, the next attempt has it
        if ended.startswith("signal"):
            raise EndedError("compile_error", f"the compiler was ended ({ended}): memory or output over its limit")
        reason = None if re.search(_NEWER, text) else not_supported(code, text)
        if reason:
            raise EndedError("unsupported", reason)
        texts.append(text)
        if re.search(_FATAL, text) and not re.search(_NEWER, text):
            break
    # The first attempt's errors, unless they are about the language's version.
    first = next((text for text in texts if not re.search(_NEWER, text)), texts[-1])
    text = errors(first, folder, tools, name)
    if context == "cpu" and "__global__" in text:
        text = f"it holds a kernel in CUDA: is it the file for --context gpu, called .h?\n{text}"
    raise EndedError("compile_error", text)


def arithmetic(code: str) -> str:
    """The arithmetic units that CUDA code names, a key of ``core.roofline.PRODUCTS``."""
    tensor_cores = re.search(r"\bw?g?mma(_sync|\.sync|_async|::|\.mma)|\bcublas(GemmEx|LtMatmul)\b", code)
    return "fp32" if tensor_cores is None else "tf32" if "tf32" in code.lower() else "fp16"


def not_supported(code: str, said: str) -> str | None:
    """Return what the code uses and today's CUDA or the harness lacks, if the compiler's errors name it."""
    for used, complaint, reason, *library in _LACKS:
        for found in dict.fromkeys(one[1] if one.groups() else "" for one in re.finditer(used, code)):
            if re.search(complaint.replace("{}", found), said, re.IGNORECASE) and not (library and _library(*library)):
                return reason.replace("{}", found)
    return None


def errors(text: str, folder: Path, tools: Tools, name: str) -> str:
    """The compiler's errors with the student's own file, of that name, and line."""
    for ours in (f"{folder}/src/", f"{folder}/", f"{tools.folder}/headers/"):
        text = text.replace(ours, "")
    lines = [line for line in text.splitlines() if line.strip()]
    own = re.compile(rf"{re.escape(name)}[:(]\d")
    if not re.search(_OPEN_BRACKET, text) and (_NOT_THERE.search(text) or re.search(_NO_FORWARD, text)):
        there = [line for line in lines if own.match(line)]
        text = "it has no forward(y, x, w) for this device in namespace mxnet::op that can be called"
        return f"{text}\n{_chosen(there, own)}" if there else text
    # The author did not write the replacement for new-inl.h.
    lines = [line for line in lines if "ece408_grade_go" not in line] or lines
    # A bracket that is never closed shows in what the harness puts behind the file, which then means nothing.
    lines = [line for line in lines if not re.match(r"\d+ errors? detected", line) and not _NOT_THERE.search(line)]
    return _chosen([re.sub(_BEHIND, f"behind the end of {name}:", line) for line in lines], own)


def _chosen(lines: list[str], own: re.Pattern[str]) -> str:
    """The lines to show: the errors and, where none of these is about the student's ``own`` file, what is."""
    behind = dict(zip(lines, lines[1:]))
    wanted = [line for line in lines if re.search(_ERROR, line) and not line[:1].isspace()]  # code stands further in
    if not any(own.search(line) or "behind the end" in line for line in wanted):
        wanted += [line for line in lines if own.match(line)]
    chosen = list(dict.fromkeys(wanted or lines))
    more = f"\n... and {len(chosen) - _SHOWN} more" if len(chosen) > _SHOWN else ""
    shown = []
    for line in chosen[:_SHOWN]:  # below an error in that file stands the line of code that it is about
        code = re.match(r" +(?:\d+ \| )?\s*(?!\^)(\S.*)", behind.get(line, "")) if own.match(line) else None
        shown += [line, f"    {code[1].rstrip()[:_WIDEST]}"] if code else [line]
    return "\n".join(shown) + more if chosen else "the compiler failed and said nothing"


def _command(unit: Path, code: str, headers: Path, architecture: str) -> list[str]:
    """The command that compiles the unit to out/submission.so; for a GPU where it has an architecture."""
    folders = (headers / "fallback", *sources.add_stubs(code, unit.parent / "stubs"))
    last = [word for folder in folders for word in ("-idirafter", str(folder))]
    common = ["-include", "ece408_grade/before.h", "-I", str(headers), str(unit)]
    common += ["-shared", "-o", str(unit.parent / "out" / "submission.so")]
    # A helper in a folder below may include one at the top; <string.h> stays the system's. And __FILE__ is as the
    # author knows it.
    last += ["-iquote", f"{unit.parent}/src", f"-ffile-prefix-map={unit.parent}/src/="]
    if not architecture:
        return [compiler("g++"), *CPU_OPTIONS, f"-Wl,{_LINK}", *common, *last, "-ldl"]
    host = ",".join(("-fPIC", "-fopenmp", "-fno-delete-null-pointer-checks", *last))
    command = [compiler("nvcc"), "-O3", "-DNDEBUG=1", "-w", "-cudart", "static", "-arch", architecture, *common]
    command += ["-Xcompiler", host, "-Xptxas", "-v", "-Xlinker", f"{_LINK},--exclude-libs,ALL,--as-needed"]
    # MXNet brought cuBLAS along. What the code does not call is not linked.
    cublas, driver = _library("libcublas.so"), _library("libcuda.so")
    command += ["-Xlinker", f"-rpath,{cublas.parent}", str(cublas)] if cublas else []
    return [*command, str(driver)] if driver else command


def _library(name: str) -> Path | None:
    """A library of the toolkit or the driver, or the toolkit's stub of it."""
    toolkit = Path(compiler("nvcc")).resolve().parent.parent
    folders = [home / "lib64" / stubs for home in (toolkit, Path("/usr/local/cuda")) for stubs in ("", "stubs")]
    system = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
    places = [*(folder / name for folder in folders), *(folder / f"{name}.1" for folder in system)]
    return next((place for place in places if place.exists()), None)


def _compile(command: list[str], folder: Path, tools: Tools, limits: LimitsSpec, until: float) -> tuple[str, str]:
    """Run a compiler in the sandbox until that time: how it ended, and the beginning of its output."""
    memory, seconds, log = limits.memory_bytes + _TMP_BYTES, limits.build_seconds, folder / "output.txt"
    own = LimitsSpec(memory_bytes=memory, output_bytes=64 << 20, disk_bytes=_TMP_BYTES, processes=512)
    with open(log, "wb") as file:
        process = sandbox.start(tools, command, own, int(seconds) + 1, file, (folder,), written=folder / "out")
        on_time = process.wait(until - time.monotonic())
        ended = process.end()
    if ended.startswith("lost "):
        raise HarnessError(f"expected a compiler that the sandbox sees, such as one below /usr, got {ended[5:]}{HELP}")
    if not on_time:
        raise EndedError("timed_out", f"compiling took longer than its limit of {seconds:g} s")
    # Some expressions that search it take time in the square of a line's length.
    text = "\n".join(line[:_LONGEST_LINE] for line in sandbox.beginning(log, _MOST_OUTPUT).splitlines())
    # A full disk has no room for the linker's message; collect2's line follows after the linker's output is removed.
    silent = text.partition(":")[0] in ("", "collect2")
    lacks_disk = silent or ended.startswith("signal") or "No space left" in text or "Disk quota" in text
    if ended != "exit 0" and lacks_disk and (free := shutil.disk_usage(folder).free) < own.output_bytes:
        raise HarnessError(f"expected {own.output_bytes >> 20} MB of disk for the compiler, got {free >> 20}: {folder}")
    return ended, text


def compiler(name: str) -> str:
    """The path of a compiler; raises HarnessError where this machine lacks it."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        raise HarnessError(f"expected the compiler {name} on this machine, found none; install it or put it on PATH")
    return found


@contextmanager
def new_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder of this process, which all may read, and a later harness removes if this one is killed."""
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-{purpose}-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def sources_digest(source: Path, *words: str, alone: bool = False) -> str:
    """A digest of the words and of all that is compiled of a submission, the files that its source includes too."""
    with new_folder("sources") as copied:
        with suppress(EndedError, OSError):  # what the build will say
            sources.copy(source, copied, alone)
        return digest(sorted(filter(Path.is_file, copied.rglob("*"))), *words, root=copied)


def remove_folders(own: int | None = None) -> None:
    """Remove the temporary folders of harnesses that were killed, and of the process ``own``."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name[len(_PREFIX) :].partition("-")[0]
        with suppress(OSError):
            if (pid == str(own) or not os.path.exists(f"/proc/{pid}")) and path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)


def tools(*, hidden: tuple[Path, ...] = (), unsafe: bool = False, trusted: bool = False) -> Tools:
    """The harness's programs, compiled unless cached, with the arguments of Tools; HarnessError where that fails."""
    if not unsafe and shutil.which("bwrap") is None:
        text = "expected bubblewrap for the sandbox, found no bwrap; install it (Debian: apt-get install bubblewrap)"
        raise HarnessError(text + HELP)
    gxx, before = compiler("g++"), "headers/ece408_grade/before.h"  # that is in front of every submission
    worker = [gxx, "-std=c++17", "-O1", "-fPIC", str(_HERE / "native" / "worker.cpp"), "-ldl"]
    commands = (  # the file comes last
        [*worker, "-o", "worker"],
        [*worker, "-shared", "-o", "worker.so"],
        [gxx, *CPU_OPTIONS, "-x", "c++-header", before, "-o", f"{before}.gch"],
    )
    files = [path for part in ("native", "headers") for path in sorted((_HERE / part).rglob("*")) if path.is_file()]
    version = os.stat(gxx)  # a compiler's size and time tell its versions apart
    words = repr(commands), f"{version.st_size} {version.st_mtime_ns}"
    # A submission's process may be another user's, and without a sandbox nothing binds the folder for it.
    private = trusted or not unsafe or os.geteuid() != 0
    base, key = cached_folders.base(private), digest(files, *words, root=_HERE)
    folder = cached_folders.folder(base, "tools", key, lambda to: _make(to, commands))
    return Tools(folder, hidden, unsafe, trusted)


def _let_all_read(folder: Path) -> None:
    """Whatever this process's umask: a program in the sandbox may be another user's. The owner may also write."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def _make(folder: Path, commands: Iterable[list[str]]) -> None:
    shutil.copytree(_HERE / "headers", folder / "headers")
    _let_all_read(folder)  # the package's own folders may be read-only, and their modes are copied
    script = "".join(f"{shlex.join(command)} & " for command in commands) + "wait"
    environment = {**os.environ, "TMPDIR": str(folder)}  # a killed compiler leaves its files
    with subprocess.Popen(
        script, shell=True, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        try:
            _, errors = shell.communicate()
        except BaseException:
            os.killpg(shell.pid, signal.SIGKILL)
            raise
    for *command, name in commands:
        if not (folder / name).exists():
            raise HarnessError(f"expected {command[0]} to build the harness's own {name}, got: {errors.strip()}")
    _let_all_read(folder)
