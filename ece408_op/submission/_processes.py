"""Programs that run under the supervisor (native/supervisor.cpp): what the kernel lets them do, and how they are ended.

The system calls that a submission may make are a list for libseccomp, which turns it into a filter for the kernel. The
harness itself stops, continues and ends a program.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import HarnessError, StoppedError

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek open openat creat close close_range
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64
getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
truncate ftruncate fallocate fsync fdatasync fadvise64 dup dup2 dup3 pipe pipe2 flock umask chmod fchmod fchmodat
utimensat copy_file_range sendfile poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd eventfd2 ioctl brk mmap munmap mprotect mremap madvise mincore msync mlock mlock2
munlock mlockall munlockall membarrier pkey_alloc pkey_free pkey_mprotect get_mempolicy set_mempolicy mbind execve
exit exit_group wait4 waitid futex futex_waitv set_robust_list get_robust_list set_tid_address rseq restart_syscall
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_setscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval sched_getattr sched_setattr getpriority
setpriority getrlimit setrlimit prlimit64 getrusage times sysinfo uname getcpu prctl arch_prctl capget gettid getpid
getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid getresgid getgroups rt_sigaction
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait sigaltstack signalfd signalfd4 pause alarm
setitimer getitimer timerfd_create timerfd_settime timerfd_gettime clock_gettime clock_getres clock_nanosleep
gettimeofday time nanosleep getrandom connect bind listen accept accept4 getsockname getpeername sendto recvfrom
sendmsg recvmsg shutdown setsockopt getsockopt
"""
#: Calls that no honest submission makes: they end the process, and the record says so. CUDA's driver and Python's
#: libraries try some of them and do without, so there they only fail.
_FATAL = ("fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev")
#: libseccomp's actions, and its comparisons of an argument.
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7
_CLONE_THREAD, _SET_SIGNAL = 0x10000, 10  # CLONE_THREAD; F_SETSIG of fcntl


@cache
def filter_program(fatal: bool) -> int:
    """A descriptor of the filter as BPF; ``fatal``: forbidden calls that only attacks make end the process.

    Raises HarnessError where libseccomp is missing or fails.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        text = f"expected libseccomp, got {error}; install it (Debian: apt-get install libseccomp2)"
        raise HarnessError(text) from None
    library.seccomp_init.restype = ctypes.c_void_p
    # Unknown calls fail as on an older kernel, for which libraries are prepared.
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_FAIL | errno.ENOSYS)))
    forbidden = _KILL if fatal else _FAIL | errno.EPERM
    # Action, call, and a condition as the struct scmp_arg_cmp: the argument's number, comparison, one or two numbers.
    rules: list[tuple[int, str, tuple[int, ...]]] = [
        *((_ALLOW, name, ()) for name in _ALLOWED.split()),
        *((forbidden, name, ()) for name in _FATAL),
        # Threads, but no processes. glibc turns from clone3, whose flags no filter can read, to clone.
        (_ALLOW, "clone", (0, _MASKED, _CLONE_THREAD, _CLONE_THREAD)),
        (forbidden, "clone", (0, _MASKED, _CLONE_THREAD, 0)),
        # CUDA opens a local socket; in a network namespace of its own that leads nowhere.
        *((_ALLOW, name, (0, _EQUAL, socket.AF_UNIX, 0)) for name in ("socket", "socketpair")),
        # SIGCONT would let a stopped process run. The kernel reads 32 bits of the arguments: one of them has to differ.
        *((_ALLOW, "fcntl", (1, _MASKED, 1 << bit, ~_SET_SIGNAL & 1 << bit)) for bit in range(32)),
        *((_ALLOW, "tgkill", (2, _MASKED, 1 << bit, ~signal.SIGCONT & 1 << bit)) for bit in range(32)),
    ]
    for action, name, condition in rules:
        number = library.seccomp_syscall_resolve_name(name.encode())
        packed = struct.pack("IiQQ", *condition) if condition else None
        # A negative number is a call that this architecture lacks.
        if number >= 0 and library.seccomp_rule_add_array(
            context, ctypes.c_uint32(action), number, 0 if packed is None else 1, packed
        ):
            raise HarnessError(f"expected libseccomp to take a rule for {name}, but it failed")
    descriptor = os.memfd_create("ece408-grade-filter", os.MFD_CLOEXEC)
    if library.seccomp_export_bpf(context, descriptor):
        raise HarnessError("expected libseccomp to write its filter, but it failed")
    library.seccomp_release(context)
    return descriptor


@dataclass(eq=False)
class Process:
    """A started program."""

    process: subprocess.Popen
    control: socket.socket
    cgroup: Path | None
    user: socket.socket | None
    running: Processes
    #: "exit 0", "signal 11" and the like, once the program has ended.
    ended: str | None = None
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
        self._signal(signal.SIGSTOP)
        end = time.monotonic() + 5.0
        while self.runs():
            if time.monotonic() > end or self.wait(0):
                return False
        return not self.wait(0)

    def go(self) -> None:
        self._signal(signal.SIGCONT)

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
        self._signal(signal.SIGKILL)
        self.process.kill()

    def end(self, seconds: float = 10.0) -> str:
        """Kill everything inside and return how the program had ended: "exit N", "signal N" or "lost"."""
        self.wait(0)
        if self.ended is None and self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        if self._handle >= 0:
            select.select([self._handle], [], [], seconds)  # readable once the program has ended
        self.running.remove(self)
        self.control.close()
        self.process.wait(seconds)
        if self._handle >= 0:
            os.close(self._handle)
        for folder in [self.cgroup] * 20 if self.cgroup else ():  # a dying process is counted for a moment
            with suppress(OSError):
                folder.rmdir()
                break  # one that stays is empty and harmless
            time.sleep(0.01)
        if self.user is not None:
            self.user.close()
        return self.ended or "lost"

    def pages(self) -> tuple[int, int]:
        """Bytes of the program's memory in RAM, and bytes that it may write to and shares with no other."""
        with suppress(OSError, ValueError, IndexError):
            numbers = [int(one) * mmap.PAGESIZE for one in Path(f"/proc/{self.pid}/statm").read_text().split()]
            return numbers[1], numbers[5]
        return 0, 0

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._handle, number)


class Processes:
    """The programs that run, so that an interrupted harness can end them all; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[Process] = set()
        self.closed = False

    def add(self, process: Process) -> None:
        """Add one; it is killed at once where all have been ended."""
        with self._lock:
            self._all.add(process)
            if self.closed:
                process.kill()

    def remove(self, process: Process) -> None:
        """Remove one that has ended, before its descriptors are closed."""
        with self._lock:
            self._all.discard(process)

    def require_open(self) -> None:
        """Raise StoppedError where all have been ended; long computations of the harness call this too."""
        if self.closed:
            raise StoppedError("the grading was interrupted")

    def close(self) -> None:
        """End all of them, and let no other start."""
        with self._lock:
            self.closed = True
            for one in self._all:
                one.kill()
