"""Start a program under the supervisor (native/sandbox.cpp): with limits, and with little of this machine in sight."""

from __future__ import annotations

import glob
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ._errors import HarnessError

NATIVE = Path(__file__).with_name("native")
HEADERS = Path(__file__).with_name("headers")
#: How submissions for the CPU are compiled: as MXNet was (assert() does nothing), and for C++11's successor, since
#: many need it.
CPU_OPTIONS = (
    "-std=c++14",
    "-O3",
    "-DNDEBUG=1",
    "-w",
    "-fPIC",
    "-fopenmp",
    *(("-msse3",) if platform.machine() == "x86_64" else ()),
)
#: What every program needs to see: the system's libraries and compilers, and harmless devices.
_SEEN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/opt", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/alternatives", "/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random"),
)
#: What a program on the GPU needs to see beside.
_DRIVER = tuple(map(Path, [*sorted(glob.glob("/dev/nvidia*")), "/sys", "/etc/nvidia", "/run/nvidia-persistenced"]))
#: On a GPU a call may take less time than a sleeping process to wake up: the keeper stays awake between two commands.
_SPIN_MILLISECONDS = 5
#: What is left of a memory limit without a cgroup, on the CPU and on the GPU.
_MEMORY = {False: "memory is limited by address space", True: "the worker's memory has no limit"}
#: The user that submissions run as where the harness was started as root: one that nobody is.
_UID = 64000


@dataclass(frozen=True)
class Limits:
    """Bytes, seconds and numbers; 0 is no limit."""

    memory: int = 0
    #: Address space that holds no memory.
    reserved: int = 0
    cpu_seconds: int = 0
    file_bytes: int = 64 << 20
    tmp_bytes: int = 64 << 20
    processes: int = 0


@dataclass
class Inside:
    """A started program. ``had`` and ``lacks`` say which means of containment this system gave."""

    process: subprocess.Popen
    control: socket.socket
    cgroup: Path | None
    had: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    #: "exit 0", "signal 11" and the like, once the program has ended.
    ended: str | None = None
    #: Did it run on by itself while it was to stand still?
    woke: bool = False
    #: Those that it is one of until it has ended.
    running: Running | None = None
    _rest: str = ""

    def wait_for(self, word: str, seconds: float) -> bool:
        """Read the keeper's reports until that word or the end; False where neither came in time."""
        deadline = time.monotonic() + seconds
        while self.ended is None:
            while "\n" in self._rest:
                line, _, self._rest = self._rest.partition("\n")
                self._take(line)
                if line == word:
                    return True
                if self.ended is not None:
                    return word == "ended"
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.control], [], [], left)[0]:
                return False
            data = self.control.recv(4096)
            if not data:
                self.ended = self.ended or "lost"
            self._rest += data.decode(errors="replace")
        return word == "ended"

    def stop(self, seconds: float = 5.0) -> bool:
        """Stop every process inside; False where the program has ended."""
        self._send(b"s")
        return self.wait_for("stopped", seconds)

    def go(self) -> None:
        """Let them run again."""
        self._send(b"g")

    def kill(self) -> None:
        """Kill everything inside, and wait for nothing; any thread may."""
        self._send(b"k")

    def end(self, seconds: float = 10.0) -> str:
        """Kill everything inside and say how the program had ended: "exit N", "signal N" or "lost"."""
        self.kill()
        self.wait_for("ended", seconds)
        if self.running is not None:
            self.running.remove(self)
        self.control.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.cgroup is not None:
            _remove(self.cgroup)
        return self.ended or "lost"

    def data_bytes(self) -> int:
        """Bytes that the innermost process may write to and shares with none; 0 where the system does not tell."""
        pid, pages = self.process.pid, 0
        with suppress(OSError, ValueError, IndexError):
            while True:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if not children:
                    break
                pid = int(children[0])
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[5])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _send(self, command: bytes) -> None:
        try:
            self.control.send(command)
        except OSError:
            self.ended = self.ended or "lost"

    def _take(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "had":
            self.had.append(rest)
        elif kind == "lacks":
            self.lacks.append(rest)
        elif kind in ("exit", "signal"):
            self.ended = line
        elif kind == "woke":
            self.woke = True


class Running:
    """The programs that run, so that whoever gives up can end them all; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._those: list[Inside] = []
        self._closed = False

    def add(self, inside: Inside) -> None:
        """One more; killed at once where all have been ended."""
        with self._lock:
            inside.running = self
            self._those.append(inside)
            if self._closed:
                inside.kill()

    def remove(self, inside: Inside) -> None:
        """One that has ended: its control socket may be closed now."""
        with self._lock:
            self._those = [one for one in self._those if one is not inside]

    def require_open(self) -> None:
        """Raise HarnessError where all have been ended."""
        if self._closed:
            raise HarnessError("expected to start a program, but the grading was interrupted")

    def close(self) -> None:
        """End all of them, and let no other begin."""
        with self._lock:
            self._closed = True
            for one in self._those:
                one.kill()


@dataclass(frozen=True)
class Tools:
    """The compiled keeper and runners, in a folder that everyone may read, and what runs of them."""

    folder: Path
    jail: Path
    runner: Path
    gpu_runner: Path | None = None
    running: Running = field(default_factory=Running, compare=False)

    @property
    def headers(self) -> Path:
        """The stand-ins for MXNet's headers, where submissions are compiled."""
        return self.folder / "headers"


def compiler(name: str) -> str:
    """The path of a compiler; raises HarnessError where this machine lacks it."""
    found = shutil.which(name)
    if found is None and name == "nvcc" and Path("/usr/local/cuda/bin/nvcc").exists():
        found = "/usr/local/cuda/bin/nvcc"
    if found is None:
        raise HarnessError(f"expected the compiler {name} on this machine, found none; install it or put it on PATH")
    return found


def build_tools(folder: Path, gpu: bool = False, many: bool = False) -> Tools:
    """Compile the keeper and the runners into the folder; raises HarnessError where that fails.

    For ``many`` submissions on the CPU, the headers that all of them get are compiled too, once for all.
    """
    folder.chmod(0o755)
    shutil.copytree(HEADERS, folder / "headers")
    gxx = [compiler("g++"), "-O1"]
    commands = {"jail": [*gxx, str(NATIVE / "sandbox.cpp")], "runner": [*gxx, str(NATIVE / "runner.cpp"), "-ldl"]}
    if many:
        before = folder / "headers" / "ece408_grade" / "before.h"
        commands["headers/ece408_grade/before.h.gch"] = [*gxx[:1], *CPU_OPTIONS, "-x", "c++-header", str(before)]
    if gpu:
        nvcc = [compiler("nvcc"), "-O1", "-cudart", "static", "-DECE408_GRADE_GPU"]
        commands["gpu_runner"] = [*nvcc, "-x", "cu", str(NATIVE / "runner.cpp"), "-ldl"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = {
        name: subprocess.Popen(  # type: ignore[call-overload]
            [*words, "-o", str(folder / name)], **pipes, start_new_session=True
        )
        for name, words in commands.items()
    }
    made = {}
    try:
        for name, process in started.items():
            _, errors = process.communicate()
            if process.returncode != 0:
                compilers = commands[name][0]
                raise HarnessError(f"expected {compilers} to build the harness's own {name}, got: {errors.strip()}")
            made[name] = folder / name
            made[name].chmod(0o755)
    except BaseException:
        for process in started.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    return Tools(folder, made["jail"], made["runner"], made.get("gpu_runner"))


def start(
    tools: Tools,
    command: Sequence[str],
    *,
    root: Path,
    limits: Limits,
    stdout: IO[bytes],
    stderr: IO[bytes],
    seen: Sequence[Path] = (),
    written: Sequence[Path] = (),
    descriptors: Sequence[int] = (),
    cwd: str = "/tmp",
    filtered: bool = True,
    user: bool = True,
    device: int | None = None,
    slot: int = 0,
    hidden: bool = True,
) -> Inside:
    """Start the command; ``root`` is an empty folder, ``seen`` and ``written`` the paths that it may read and write.

    ``device`` is the number of the GPU that it uses; without ``hidden`` Python's packages are seen.
    Raises HarnessError where the keeper cannot be started, or all that ran was ended.
    """
    tools.running.require_open()
    gpu = device is not None
    ours, theirs = socket.socketpair()
    words = [f"root={root}", f"control={theirs.fileno()}", f"cwd={cwd}", f"filter={int(filtered)}", f"gpu={int(gpu)}"]
    words += [f"soft={int(gpu or not hidden)}", f"spin={_SPIN_MILLISECONDS if gpu else 0}"]
    words += [f"fsize={limits.file_bytes}", f"tmp={limits.tmp_bytes}", f"cpu={limits.cpu_seconds}"]
    cgroup = _cgroup(limits)
    if cgroup is not None:
        words.append(f"cgroup={cgroup}")
    elif not gpu:  # an address space limit keeps CUDA from starting
        words.append(f"as={limits.memory + limits.reserved}")
    seen = (*seen, *(_DRIVER if gpu else ()))
    if user and os.geteuid() == 0:
        words += [f"uid={_UID + slot}", f"nproc={limits.processes}"]
    words += [f"bind={path}" for path in (*_SEEN, *map(str, seen))] + [f"write={path}" for path in written]
    words += [f"hide={path}" for path in (_hidden() if hidden else ())]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LC_ALL": "C"}
    for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(device)
    try:
        process = subprocess.Popen(
            [str(tools.jail), *words, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(theirs.fileno(), *descriptors),
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise HarnessError(f"expected to start the harness's keeper, got {error}") from error
    finally:
        theirs.close()
    inside = Inside(process, ours, cgroup)
    tools.running.add(inside)
    if not inside.wait_for("started", 30.0):
        inside.end()
        raise HarnessError(f"expected the keeper to start {command[0]}, got: {'; '.join(inside.lacks) or inside.ended}")
    if cgroup is None:
        inside.lacks.append("cgroup: no writable cgroup v2 with memory and pids; " + _MEMORY[gpu])
    return inside


def _visible(device: int) -> str:
    """What the GPU of that number here is called where it is to be the only one."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[device].strip() if device < len(names) else str(device)


def _remove(cgroup: Path) -> None:
    """A dying process is counted for a moment; a folder that stays is empty and harmless."""
    for _ in range(20):
        with suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.01)


def _hidden() -> list[str]:
    """Folders within those seen where this package or Python's other packages lie."""
    places = {str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if path)}
    return sorted(path for path in places if path.startswith(("/usr/", "/opt/")) and Path(path).is_dir())


def _cgroup(limits: Limits) -> Path | None:
    """A new cgroup with these limits; None where the system has none to give."""
    top = Path("/sys/fs/cgroup")
    path = top / f"ece408-grade-{os.getpid()}-{time.monotonic_ns()}"
    try:
        enabled = (top / "cgroup.subtree_control").read_text().split()
        for name in ("memory", "pids"):
            if name not in enabled:
                (top / "cgroup.subtree_control").write_text(f"+{name}")
        path.mkdir()
        if limits.memory:
            (path / "memory.max").write_text(str(limits.memory))
        if limits.processes:
            (path / "pids.max").write_text(str(limits.processes))
    except OSError:
        return None
    return path
