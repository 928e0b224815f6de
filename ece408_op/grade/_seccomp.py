"""The system calls that a submission may make: a list for libseccomp, which turns it into a filter for the kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from functools import cache

from ._errors import HarnessError

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
_CLONE_THREAD, _SET_SIGNAL = 0x10000, 10  # CLONE_THREAD; F_SETSIG of fcntl
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_UNEQUAL, _EQUAL, _MASKED = 1, 4, 7


class _Condition(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp; for _MASKED, ``a`` is the mask."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise HarnessError(
            f"expected libseccomp, got {error}; install it (Debian: apt-get install libseccomp2)"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add_array.argtypes = [ctypes.c_void_p, ctypes.c_uint32, *[ctypes.c_int] * 2, ctypes.c_void_p]
    library.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    return library


@cache
def program(fatal: bool) -> int:
    """A descriptor of the filter as BPF; ``fatal``: forbidden calls that only attacks make end the process.

    Raises HarnessError where libseccomp is missing or fails.
    """
    library = _library()
    # Unknown calls fail as on an older kernel, for which libraries are prepared.
    context = library.seccomp_init(ctypes.c_uint32(_FAIL | errno.ENOSYS))
    descriptor = os.memfd_create("ece408-grade-filter", os.MFD_CLOEXEC)

    def add(action: int, name: str, condition: _Condition | None = None) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        count = 0 if condition is None else 1
        # A negative number is a call that this architecture lacks.
        if number >= 0 and library.seccomp_rule_add_array(
            context, action, number, count, None if condition is None else ctypes.byref(condition)
        ):
            raise HarnessError(f"expected libseccomp to take a rule for {name}, but it failed")

    for name in _ALLOWED.split():
        add(_ALLOW, name)
    forbidden = _KILL if fatal else _FAIL | errno.EPERM
    for name in _FATAL:
        add(forbidden, name)
    # Threads, but no processes. glibc turns from clone3, whose flags no filter can read, to clone.
    add(_ALLOW, "clone", _Condition(0, _MASKED, _CLONE_THREAD, _CLONE_THREAD))
    add(forbidden, "clone", _Condition(0, _MASKED, _CLONE_THREAD, 0))
    # CUDA opens a local socket; in a network namespace of its own that leads nowhere.
    for name in ("socket", "socketpair"):
        add(_ALLOW, name, _Condition(0, _EQUAL, socket.AF_UNIX))
    # SIGCONT would let a stopped process run.
    add(_ALLOW, "fcntl", _Condition(1, _UNEQUAL, _SET_SIGNAL))
    add(_ALLOW, "tgkill", _Condition(2, _UNEQUAL, signal.SIGCONT))
    if library.seccomp_export_bpf(context, descriptor):
        raise HarnessError("expected libseccomp to write its filter, but it failed")
    library.seccomp_release(context)
    return descriptor
