"""The harness's own programs, compiled once for this machine, the options for submissions, and folders."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from ece408_op.data import cache_folder
from ece408_op.data.atomic import output_folder_problem
from ece408_op.runtime import cached_folders
from ece408_op.runtime.cached_folders import digest

from .errors import HarnessError
from .sandbox import HELP, Tools


def cached_folder(kind: str, key: str, make: Callable[[Path], None], private: bool = True) -> Path:
    """The folder of that kind and key, which ``make`` fills if it is new.

    It is in the user's cache; where that can't be written, or others have to read it (not ``private``), in a temporary
    folder until the program ends.
    """
    base = cache_folder() if private else None
    if base is None or output_folder_problem(base):
        base = _temporary()
    return cached_folders.folder(base, kind, key, make)


@cache
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="ece408-op-"))
    path.chmod(0o755)
    atexit.register(partial(shutil.rmtree, path, ignore_errors=True))
    return path


_HERE = Path(__file__).parent
#: How submissions for the CPU are compiled: as MXNet was (assert() does nothing), and for C++11's successor, since
#: many need it. The harness's caller of forward is in the same unit, so that the compiler could see that a pointer is
#: null and drop what is written through it: a crash has to stay one.
CPU_OPTIONS = (
    *("-std=c++14", "-O3", "-DNDEBUG=1", "-w", "-fPIC", "-fopenmp", "-fno-delete-null-pointer-checks"),
    *(("-msse3",) if platform.machine() == "x86_64" else ()),
)
#: The header that is in front of every submission; for the CPU it is precompiled.
_BEFORE = "headers/ece408_grade/before.h"
_PREFIX = "ece408-grade-"


def compiler(name: str) -> str:
    """The path of a compiler; raises HarnessError where this machine lacks it."""
    found = shutil.which(name)
    if found is None and name == "nvcc" and Path("/usr/local/cuda/bin/nvcc").exists():
        found = "/usr/local/cuda/bin/nvcc"
    if found is None:
        raise HarnessError(f"expected the compiler {name} on this machine, found none; install it or put it on PATH")
    return found


@contextmanager
def new_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder of this process, which all may read, and a later harness removes if this one is killed."""
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-{purpose}-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def remove_folders(own: int | None = None) -> None:
    """Remove the temporary folders of harnesses that were killed, and of the process ``own``."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}[0-9]*-*"):
        pid = path.name[len(_PREFIX) :].partition("-")[0]
        with suppress(OSError):
            if (pid == str(own) or not os.path.exists(f"/proc/{pid}")) and path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)


def build(*, hidden: tuple[Path, ...] = (), unsafe: bool = False, trusted: bool = False) -> Tools:
    """The harness's programs, compiled unless they are in the cache; raises HarnessError where that fails.

    The arguments are those of Tools.
    """
    if not unsafe and shutil.which("bwrap") is None:
        text = "expected bubblewrap for the sandbox, found no bwrap; install it (Debian: apt-get install bubblewrap)"
        raise HarnessError(text + HELP)
    gxx, native = compiler("g++"), _HERE / "native"
    worker = [gxx, "-std=c++17", "-O1", "-fPIC", str(native / "worker.cpp"), "-ldl"]
    commands = (  # the supervisor without optimisation, which would take longer than it saves; the file comes last
        [gxx, "-std=c++17", str(native / "supervisor.cpp"), "-o", "supervisor"],
        [*worker, "-o", "worker"],
        [*worker, "-shared", "-o", "worker.so"],
        [gxx, *CPU_OPTIONS, "-x", "c++-header", _BEFORE, "-o", f"{_BEFORE}.gch"],
    )
    files = [path for part in ("native", "headers") for path in sorted((_HERE / part).rglob("*")) if path.is_file()]
    version = os.stat(gxx)  # a compiler's size and time tell its versions apart
    words = repr(commands), f"{version.st_size} {version.st_mtime_ns}"
    # A submission's process may be another user's, and without a sandbox nothing binds the folder for it.
    private = trusted or not unsafe or os.geteuid() != 0
    folder = cached_folder("tools", digest(files, *words, root=_HERE), lambda to: _make(to, commands), private)
    return Tools(folder, hidden, unsafe, trusted)


def _make(folder: Path, commands: Iterable[list[str]]) -> None:
    folder.chmod(0o755)
    shutil.copytree(_HERE / "headers", folder / "headers")
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
        (folder / name).chmod(0o755)
