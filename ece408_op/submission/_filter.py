"""The system calls that a submission may make: a list, which libseccomp turns into a filter for the kernel."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
from functools import cache

from . import HarnessError

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek open openat creat close close_range
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64
getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
truncate ftruncate fsync fdatasync fadvise64 dup dup2 dup3 pipe pipe2 flock umask chmod fchmod fchmodat
utimensat copy_file_range sendfile poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd eventfd2 brk munmap mprotect mremap madvise mincore msync mlock mlock2
munlock mlockall munlockall membarrier pkey_alloc pkey_free pkey_mprotect get_mempolicy set_mempolicy mbind execve
exit exit_group wait4 waitid futex futex_waitv set_robust_list get_robust_list set_tid_address rseq restart_syscall
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_setscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval sched_getattr sched_setattr getpriority
setpriority getrlimit setrlimit prlimit64 getrusage times sysinfo uname getcpu prctl arch_prctl capget gettid getpid
getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid getresgid getgroups rt_sigaction
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait sigaltstack signalfd signalfd4 pause alarm
setitimer getitimer timerfd_create timerfd_settime timerfd_gettime clock_gettime clock_getres clock_nanosleep
gettimeofday time nanosleep getrandom connect bind listen accept accept4 getsockname getpeername sendto recvfrom
sendmsg recvmsg shutdown getsockopt
"""
#: Calls that end the process of a C++ file for the CPU, and the record says so: only attacks make them. CUDA's driver
#: and Python's libraries try some and do without, so in their processes the calls fail with EPERM.
_FORBIDDEN = ("fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev")
#: libseccomp's actions, and its comparisons of an argument.
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7
_CONNECTED = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
_CLONE_THREAD = 0x10000
#: Commands of fcntl.
_COMMANDS = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL)
_LOCKS = (fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW)


@cache
def filter_program(fatal: bool, gpu: bool) -> int:
    """A descriptor of the filter as BPF, to be read from its beginning. fatal: forbidden calls end the process.

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
    # Action, call, and conditions as the struct scmp_arg_cmp: an argument's number, comparison, two numbers.
    rules: list[tuple[int, str, tuple[int, ...]]] = [
        *((_ALLOW, name, ()) for name in _ALLOWED.split()),
        *((forbidden, name, ()) for name in _FORBIDDEN),
        # Threads, but no processes. Without clone3, whose flags no filter can read, glibc calls clone.
        (_ALLOW, "clone", (0, _MASKED, _CLONE_THREAD, _CLONE_THREAD)),
        (forbidden, "clone", (0, _MASKED, _CLONE_THREAD, 0)),
        # CUDA opens a local socket, which reaches only what lies in the sandbox's own namespaces. Elsewhere there are
        # pairs of streams alone: a socket that listens or receives datagrams keeps, for one descriptor, the data of
        # thousands that were closed, which counts as no process's memory.
        *((_ALLOW, name, (0, _EQUAL, socket.AF_UNIX, 0)) for name in ("socket", "socketpair") if gpu),
        *((_ALLOW, "socketpair", (0, _EQUAL, socket.AF_UNIX, 0, 1, _MASKED, 15, kind)) for kind in _CONNECTED),
        # The printed text is a file on the harness's disk. Linux applies the limit of a file's size to fallocate in
        # mode 0 alone: other modes, and the ioctl calls of type X (FS_IOC_RESVSP), reserve blocks without a limit.
        (_ALLOW, "fallocate", (1, _EQUAL, 0, 0)),
        *((_ALLOW, "ioctl", (1, _MASKED, 1 << bit, ~(ord("X") << 8) & 1 << bit)) for bit in range(8, 16)),
        # Shared memory without a file stays when all but a page is unmapped, and no limit counts it. CUDA needs it.
        *((_ALLOW, "mmap", () if gpu else (3, _MASKED, flag, 0)) for flag in (mmap.MAP_SHARED, mmap.MAP_ANONYMOUS)),
        # Other commands send signals, or lock parts of files, which takes the kernel's memory; CUDA's cache locks.
        *((_ALLOW, "fcntl", (1, _EQUAL, command, 0)) for command in (*_COMMANDS, *(_LOCKS if gpu else ()))),
        # A larger SO_SNDBUF lets each socket hold megabytes of the kernel's memory, which counts as no process's.
        # One rule per bit: a call is allowed if any of the 32 bits that the kernel reads is another.
        *((_ALLOW, "setsockopt", (2, _MASKED, 1 << bit, ~socket.SO_SNDBUF & 1 << bit)) for bit in range(32)),
        # SIGCONT would let a stopped process run.
        *((_ALLOW, "tgkill", (2, _MASKED, 1 << bit, ~signal.SIGCONT & 1 << bit)) for bit in range(32)),
    ]
    for action, name, condition in rules:
        number = library.seccomp_syscall_resolve_name(name.encode())
        conditions = len(condition) // 4
        packed = struct.pack("IiQQ" * conditions, *condition) if condition else None
        # A negative number is a call that this architecture lacks, or libseccomp does not know.
        if number >= 0 and library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, conditions, packed):
            raise HarnessError(f"expected libseccomp to take a rule for {name}, but it failed")
    descriptor = os.memfd_create("ece408-grade-filter", os.MFD_CLOEXEC)
    if library.seccomp_export_bpf(context, descriptor):
        raise HarnessError("expected libseccomp to write its filter, but it failed")
    library.seccomp_release(context)
    return descriptor
