"""The harness's own programs, compiled for this machine once per run, and the options for submissions."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ._errors import HarnessError
from ._sandbox import Tools, require

_NATIVE = Path(__file__).with_name("native")
_HEADERS = Path(__file__).with_name("headers")
#: How submissions for the CPU are compiled: as MXNet was (assert() does nothing), and for C++11's successor, since
#: many need it. The harness's caller of forward is in the same unit, so that the compiler could see that a pointer is
#: null and drop what is written through it: a crash has to stay one.
CPU_OPTIONS = (
    *("-std=c++14", "-O3", "-DNDEBUG=1", "-w", "-fPIC", "-fopenmp", "-fno-delete-null-pointer-checks"),
    *(("-msse3",) if platform.machine() == "x86_64" else ()),
)


_PREFIX = "ece408-grade-"


def compiler(name: str) -> str:
    """The path of a compiler; raises HarnessError where this machine lacks it."""
    found = shutil.which(name)
    if found is None and name == "nvcc" and Path("/usr/local/cuda/bin/nvcc").exists():
        found = "/usr/local/cuda/bin/nvcc"
    if found is None:
        raise HarnessError(f"expected the compiler {name} on this machine, found none; install it or put it on PATH")
    return found


def new_folder(purpose: str) -> tempfile.TemporaryDirectory:
    """A temporary folder of this process, which a later harness removes if this one is killed."""
    return tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-{purpose}-")


def remove_stale() -> None:
    """Remove the folders of harnesses that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name[len(_PREFIX) :].partition("-")[0]
        with suppress(OSError):
            if not os.path.exists(f"/proc/{pid}") and path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)


def build(
    folder: Path,
    kinds: Iterable[tuple[bool, bool]],
    *,
    many: bool = False,
    hidden: tuple[Path, ...] = (),
    unsafe: bool = False,
) -> Tools:
    """Compile the harness's programs into the folder; raises HarnessError where that fails.

    ``kinds`` says of each kind of submission whether it is for a GPU, and in Python. For ``many`` submissions on the
    CPU, the headers that all of them include are precompiled.
    """
    require(unsafe)
    folder.chmod(0o755)
    shutil.copytree(_HEADERS, folder / "headers")
    tools = Tools(folder, hidden, unsafe)
    gxx = [compiler("g++"), "-std=c++17"]  # without optimisation: it would take longer than it saves
    commands = {"supervisor": [*gxx, str(_NATIVE / "supervisor.cpp")]}
    for gpu, python in set(kinds):
        options = ["-cudart", "static", "-DECE408_GRADE_GPU", "-x", "cu", "-Xcompiler", "-fPIC"] if gpu else ["-fPIC"]
        first = [compiler("nvcc" if gpu else "g++"), "-O1", "-std=c++17", *options, *(["-shared"] if python else [])]
        commands[tools.worker(gpu, python).name] = [*first, str(_NATIVE / "worker.cpp"), "-ldl"]
    if many:
        before = folder / "headers" / "ece408_grade" / "before.h"
        commands["headers/ece408_grade/before.h.gch"] = [*gxx[:1], *CPU_OPTIONS, "-x", "c++-header", str(before)]
    started = {
        name: subprocess.Popen(
            [*words, "-o", str(folder / name)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},  # a killed compiler leaves its files
        )
        for name, words in commands.items()
    }
    try:
        for name, process in started.items():
            _, errors = process.communicate()
            if process.returncode != 0:
                compilers = commands[name][0]
                raise HarnessError(f"expected {compilers} to build the harness's own {name}, got: {errors.strip()}")
            (folder / name).chmod(0o755)
    except BaseException:
        for process in started.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    return tools
