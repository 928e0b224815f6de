"""Connect the package to MXNet, once, right after MXNet has been imported."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import mxnet as mx

from . import default_layout, executors, fast_custom_op, imperative, interrupts, mxnet_errors, operator

#: MXNet's numbers of two storage types: that of an array that does not exist, and that of a dense array.
UNDEFINED, DENSE = -1, 0

#: In seconds: the time between two checks of MXNet's threads before a fork, and the longest wait for busy threads.
_BETWEEN_CHECKS, _LONGEST_WAIT = 0.01, 0.5
#: How long a thread of Python may keep the GIL during these checks, in seconds.
_SHORT_INTERVAL = 1e-4

#: The newest shapes that stay in memory: a call of ResNet-50 returns 270.
_KEPT = 4096


@cache
def connect() -> None:
    """Register the operator, and patch MXNet for it (see each module); only once, also after a reload of MXNet."""
    mxnet_errors.install()
    _accept_absent_arrays()
    _keep_inferred_shapes()
    operator.register()
    default_layout.install()
    imperative.install()
    interrupts.install()
    executors.install()
    atexit.register(_finish_pending)
    os.register_at_fork(before=_finish_before_fork)
    if sys.version_info < (3, 10):  # subprocess forks without calling the functions registered above
        sys.addaudithook(lambda event, _: _finish_before_fork() if event == "subprocess.Popen" else None)


def _accept_absent_arrays() -> None:
    """Let a backward pass run after another Custom operator has been created.

    MXNet stores which arrays a backward pass reads only for the operator created last. For any other operator, MXNet
    may query the storage type of an array that this operator does not read and that does not exist, and fail.
    """
    original = mx.operator._ndarray_cls

    def dense_where_absent(handle: Any, writable: bool = True, stype: int = UNDEFINED) -> Any:
        if stype == UNDEFINED:
            stype = max(mx.nd.ndarray._storage_type(handle), DENSE)
        return original(handle, writable, stype)

    mx.operator._ndarray_cls = dense_where_absent


def _keep_inferred_shapes() -> None:
    """Let several threads bind one symbol, or infer its shapes.

    A Custom operator's callback keeps the shapes that it returns until it is called again, which another thread may do
    before MXNet has copied them.
    """
    original, kept = mx.operator.c_array_buf, deque[Any](maxlen=_KEPT)

    def c_array_buf(ctype: Any, buffer: Any) -> Any:
        array = original(ctype, buffer)
        kept.append(array)
        return array

    mx.operator.c_array_buf = c_array_buf


def _finish_pending() -> None:
    """Wait for all pending operators: a Custom operator that runs while the interpreter exits aborts the process."""
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        print(f"an operator failed, and no code waited for its result: {error}", file=sys.stderr)


def _finish_before_fork() -> None:
    """Wait for all pending operators before a fork, in which MXNet stops its threads while this thread holds the GIL.

    A thread of MXNet's that runs an operator, or deletes the operator of a finished call, needs the GIL: the fork would
    wait for the thread, and the thread for the fork. A thread that waits for the GIL looks asleep, but gets the GIL
    between two checks if Python's other threads release it often. So MXNet has finished when two checks in a row find
    all threads asleep.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _finish_pending()
    asleep, last, interval = 0, time.monotonic() + _LONGEST_WAIT, sys.getswitchinterval()
    sys.setswitchinterval(_SHORT_INTERVAL)
    try:
        while {*fast_custom_op.deleting} - {threading.get_ident()} or (asleep < 2 and time.monotonic() < last):
            time.sleep(_BETWEEN_CHECKS)
            asleep = 0 if _other_threads_run() else asleep + 1
    finally:
        sys.setswitchinterval(interval)


def _other_threads_run() -> bool:
    """Return whether a thread that ``threading`` did not start runs or waits for a processor; False without /proc."""
    pythons = {one.native_id for one in threading.enumerate() if not one.name.startswith("Dummy-")}
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            state = task.read_bytes().rpartition(b")")[2].split()[0]
            if state in (b"R", b"D") and int(task.parent.name) not in pythons:
                return True
    return False
