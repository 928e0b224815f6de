"""Start a program in a sandbox: bubblewrap's namespaces, a supervisor (native/worker.cpp) as process 1, limits.

With ``--unsafe`` there are no namespaces: the supervisor is an ordinary process with only the limits and the filter.
"""

from __future__ import annotations

import glob
import mmap
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from . import HarnessError, StoppedError
from ._filter import filter_program

#: The paths that every program sees: the system's libraries and compilers, and harmless devices.
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/opt", "/etc/ld.so.cache", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/alternatives", "/dev/null", "/dev/full", "/dev/urandom", "/dev/random"),
)
#: The paths that a program on the GPU sees in addition. /dev/zero gives shared memory that no limit counts.
_DRIVER = (*sorted(glob.glob("/dev/nvidia*")), "/dev/zero", "/sys", "/etc/nvidia", "/run/nvidia-persistenced")
#: Users that submissions run as where the harness runs as root; each program has one that no other process has.
_FIRST_UID, _UIDS = 64000, 1000
_INODES, _DESCRIPTORS = 10_000, 1024  # files and folders in /tmp; open files, pipes and sockets, with what they hold
_STACK_BYTES = 8 << 20  # as a shell gives
#: Since Linux 5.14 a user namespace counts its own processes; before, all of the harness's user would count.
_COUNTS_BY_NAMESPACE = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 14)
HELP = "; --unsafe grades without a sandbox"
#: A program stops in 0.05 ms where a CPU is free. Later it waits for one, and to look on and on would keep it waiting.
_SPIN_SECONDS = 0.0002


@dataclass(frozen=True)
class LimitsSpec:
    """Seconds and bytes for one submission: ``run_seconds`` for a call of forward, ``all_seconds`` for all of them.

    ``memory_bytes`` counts a program's memory and the files in its /tmp together, ``disk_bytes`` the files alone.
    """

    build_seconds: float = 180.0
    load_seconds: float = 20.0
    run_seconds: float = 30.0
    all_seconds: float = 1800.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    #: A file with a thread per image has up to 550 at once: a thread takes as long as hundreds take to start.
    processes: int = 1024


@dataclass(eq=False)
class Process:
    """A started program."""

    process: subprocess.Popen
    control: socket.socket
    cgroup: Path | None
    user: socket.socket | None
    running: Processes
    ended: str | None = None  # "exit 0", "signal 11" and the like, once the program has ended
    #: The program's process id, and a descriptor that means it and no later process of that id.
    pid: int = 0
    _handle: int = -1

    def begin(self, seconds: float) -> str:
        """Wait until the supervisor has started the program; returns why it has not, or an empty text."""
        if not select.select([self.control], [], [], seconds)[0]:
            return f"nothing within {seconds:g} s"
        data, credentials, *_ = self.control.recvmsg(4096, socket.CMSG_SPACE(12))
        if data != b"started":
            return data.decode(errors="replace") or "the sandbox's end"
        with suppress(ProcessLookupError):
            (self.pid,) = struct.unpack("i", credentials[0][2][:4])
            self._handle = os.pidfd_open(self.pid)
        return ""

    def wait(self, seconds: float) -> bool:
        """Wait for the program's end; False where it has not come in time."""
        if self.ended is None and select.select([self.control], [], [], max(0.0, seconds))[0]:
            self.ended = self.control.recv(4096).decode(errors="replace") or "lost"
        return self.ended is not None

    def stop(self) -> bool:
        """Stop the program; False where it has ended."""
        self.send(signal.SIGSTOP)
        start = time.monotonic()
        while self.runs():
            seconds = time.monotonic() - start
            if seconds > 5.0 or self.wait(0):
                return False
            if seconds > _SPIN_SECONDS:
                time.sleep(_SPIN_SECONDS)
        return not self.wait(0)

    def runs(self) -> bool:
        """Is a thread of the program neither stopped nor at its end?"""
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(FileNotFoundError), open(f"/proc/{self.pid}/task/{thread}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] not in (b"T", b"Z", b"X"):
                        return True
        return False

    def kill(self) -> None:
        """Kill everything inside without waiting; any thread may call this."""
        self.send(signal.SIGKILL)
        if self.process.poll() is None:
            with suppress(ProcessLookupError):  # bwrap's child waits for ever for a bwrap that ends before it has begun
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, seconds: float = 10.0) -> str:
        """Kill everything inside and return how the program had ended: "exit N", "signal N" or "lost"."""
        self.wait(0)
        if self.ended is None and self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        handle, self._handle = self._handle, -1
        if handle >= 0:
            select.select([handle], [], [], seconds)  # readable once the program has ended
            os.close(handle)
        self.running.remove(self)
        self.control.close()
        self.process.wait(seconds)
        end = time.monotonic() + 0.2
        while self.cgroup and self.cgroup.exists() and time.monotonic() < end:
            with suppress(OSError):  # a dying process is counted for a moment; one that stays is empty and harmless
                self.cgroup.rmdir()
            time.sleep(0.001)
        if self.user is not None:
            self.user.close()
        return self.ended or "lost"

    def pages(self) -> tuple[int, int]:
        """Bytes of the program's memory in RAM, and bytes that it may write to and shares with no other."""
        with suppress(OSError, ValueError, IndexError):
            numbers = [int(one) * mmap.PAGESIZE for one in Path(f"/proc/{self.pid}/statm").read_text().split()]
            return numbers[1], numbers[5]
        return 0, 0

    def send(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._handle, number)


class Processes:
    """The programs that run, so that an interrupted harness can end them all; safe for threads."""

    def __init__(self) -> None:
        self._all: set[Process] = set()
        self.closed = False

    def add(self, process: Process) -> None:
        """Add one; it is killed at once where all have been ended."""
        self._all.add(process)
        if self.closed:
            process.kill()

    def remove(self, process: Process) -> None:
        """Remove one that has ended."""
        self._all.discard(process)

    def require_open(self) -> None:
        """Raise StoppedError where all have been ended; long computations of the harness call this too."""
        if self.closed:
            raise StoppedError("the grading was interrupted")

    def close(self) -> None:
        """End all of them, and let no other start."""
        self.closed = True
        for one in tuple(self._all):
            one.kill()


@dataclass(frozen=True)
class Tools:
    """The compiled programs in ``folder``, which everyone may read.

    ``hidden`` are folders that no program sees, ``unsafe`` gives up the sandbox, ``processes`` are those that run.
    ``trusted``: they run the user's own files, so they need neither another user nor a filter of system calls.
    """

    folder: Path
    hidden: tuple[Path, ...] = ()
    unsafe: bool = False
    trusted: bool = False
    processes: Processes = field(default_factory=Processes, compare=False)


def start(
    tools: Tools, command: Sequence[str], limits: LimitsSpec, cpu_seconds: int, output: IO[bytes],
    seen: Iterable[Path] = (), descriptors: Sequence[int] = (), device: int | None = None, reserved: int = 0, *,
    written: Path | None = None, python: bool = False,
) -> Process:  # fmt: skip
    """Start the command, which may read the paths ``seen``.

    ``reserved`` bytes of its address space hold no memory; ``device`` is the number of the GPU that it uses. A compiler
    may write to the folder ``written``, and start processes. A ``python`` program sees Python's packages, and forbidden
    calls fail there; elsewhere they are fatal. Raises HarnessError where the sandbox cannot be built, or all programs
    were ended.
    """
    tools.processes.require_open()
    gpu = device is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # reports come with the sender's process id
    seccomp = -1 if written or tools.trusted else filter_program(not (gpu or python), gpu)
    cgroup, uid, user = _cgroup(limits), 0, None
    numbers = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits.output_bytes, resource.RLIMIT_CPU: cpu_seconds}
    numbers[resource.RLIMIT_NOFILE] = _DESCRIPTORS
    if not written:  # NVRTC raises its process's, and so that of all that it starts; a compiler needs more
        numbers[resource.RLIMIT_STACK] = _STACK_BYTES
    if cgroup is None and not gpu:  # an address space limit keeps CUDA from starting
        numbers[resource.RLIMIT_AS] = limits.memory_bytes - limits.disk_bytes + reserved
    if os.geteuid() == 0 and not tools.trusted:
        uid, user = _free_user()
    if user is not None or (_COUNTS_BY_NAMESPACE and not tools.unsafe):
        numbers[resource.RLIMIT_NPROC] = limits.processes
    tmpfs = [f"size={limits.disk_bytes},nr_inodes={_INODES},mode=1777", "/dev/shm" if gpu else "/tmp"]
    words = [str(tools.folder / "worker"), "supervise", str(theirs.fileno()), *tmpfs, str(uid), str(seccomp)]
    words += [f"{number}:{value}" for number, value in numbers.items()]
    inherited = [theirs.fileno(), *descriptors, *([] if seccomp < 0 else [seccomp])]
    around = [] if tools.unsafe else _bubblewrap(map(str, seen), written, python, tools, gpu)
    if cgroup is not None:
        around = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs"), *around]
    try:
        process = subprocess.Popen(
            [*around, *words, "--", *command], cwd=tools.folder, env=_environment(device), pass_fds=inherited,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            umask=0o022,  # the worker reads the compiler's library, and may be another user
        )  # fmt: skip
    except OSError as error:
        raise HarnessError(f"expected to start the harness's supervisor, got {error}") from error
    finally:
        theirs.close()
    one = Process(process, ours, cgroup, user, tools.processes)
    tools.processes.add(one)
    failed = one.begin(30.0)
    if failed or tools.processes.closed:
        one.end()
        tools.processes.require_open()
        said = beginning(Path(output.name), 4096).strip() or failed
        raise HarnessError(f"expected the sandbox to start {command[0]}, got: {said}{'' if tools.unsafe else HELP}")
    return one


def beginning(path: Path, most: int) -> str:
    """The first bytes of a file as text; empty where it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(most).decode(errors="replace")
    return ""


def _bubblewrap(seen: Iterable[str], written: Path | None, python: bool, tools: Tools, gpu: bool) -> list[str]:
    """The command that builds the namespaces and the file system."""
    packages = [] if python else [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    words = ["bwrap", "--die-with-parent", "--as-pid-1", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--unshare-cgroup-try", *([] if gpu else ["--unshare-ipc"])]
    if os.geteuid() != 0:  # the supervisor limits the size of /tmp with this; the program loses it
        words += ["--unshare-user", "--cap-add", "CAP_SYS_ADMIN"]
    words += ["--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp", "--proc", "/proc"]
    visible = [*_SYSTEM, *(_DRIVER if gpu else ()), str(tools.folder), *seen]
    # bubblewrap would make the folders above them for its own user only.
    roots, above = {*map(Path, visible)}, {folder for path in visible for folder in list(Path(path).parents)[:-1]}
    for folder in sorted(above - {Path("/tmp")}):
        if roots.isdisjoint([folder, *folder.parents]):
            words += ["--dir", str(folder)]
    for path in filter(os.path.lexists, visible):
        bind = "--dev-bind" if path.startswith("/dev/") else "--ro-bind"
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else [bind, path, path]
    roots, secrets = {*filter(os.path.isdir, roots)}, {*map(Path, packages), *tools.hidden}
    for secret in sorted(secrets):
        below = not roots.isdisjoint([secret, *secret.parents])
        if below and secret.is_dir() and secrets.isdisjoint(secret.parents):
            words += ["--tmpfs", str(secret), "--remount-ro", str(secret)]
    words += ["--bind", str(written), str(written)] if written else []
    words += ["--perms", "1777", "--tmpfs", "/dev/shm"] if gpu else []
    return [*words, "--remount-ro", "/"]


def _environment(device: int | None) -> dict[str, str]:
    environment = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ}
    environment.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME="/tmp", TMPDIR="/tmp", LC_ALL="C")
    if device is not None:
        # The GPU of that number here is to be the only one there.
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        environment["CUDA_VISIBLE_DEVICES"] = names[device].strip() if device < len(names) else str(device)
    return environment


def _free_user() -> tuple[int, socket.socket]:
    """A user that no other harness of this machine gives to a program, and the socket whose name reserves it."""
    for uid in range(_FIRST_UID, _FIRST_UID + _UIDS):
        reservation = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            reservation.bind(f"\0ece408-grade-user-{uid}")
            return uid, reservation
        reservation.close()
    raise HarnessError(f"expected one of {_UIDS} users for a program, but all are taken")


def _cgroup(limits: LimitsSpec) -> Path | None:
    """A new cgroup with these limits; None where the system has none to give."""
    top = Path("/sys/fs/cgroup")
    path = top / f"ece408-grade-{os.getpid()}-{time.monotonic_ns()}"
    try:
        control = top / "cgroup.subtree_control"
        for name in {"memory", "pids"}.difference(control.read_text().split()):
            control.write_text(f"+{name}")
        path.mkdir()
        (path / "memory.max").write_text(str(limits.memory_bytes))
        (path / "pids.max").write_text(str(limits.processes))
    except OSError:
        return None
    return path
