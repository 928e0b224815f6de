"""Joins the package to MXNet, once, right after MXNet has been imported."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from functools import cache
from typing import Any

import mxnet as mx

from . import default_layout, fast_custom_op, imperative, mxnet_errors, operator, pinned_arguments

#: MXNet's numbers of storage types: of an array that does not exist, and of a dense one.
UNDEFINED, DENSE = -1, 0

#: In which MXNet's threads, which need Python's lock for it, begin to free the operators of calls that have ended.
_FREEING_SECONDS = 0.02


@cache
def connect() -> None:
    """Register the operator, and change what of MXNet has to know of it; the modules say what. A reload calls again."""
    mxnet_errors.install()
    _accept_absent_arrays()
    operator.register()
    default_layout.install()
    imperative.install()
    pinned_arguments.install()
    atexit.register(_finish_pending)
    os.register_at_fork(before=_finish_before_fork)


def _accept_absent_arrays() -> None:
    """Let a backward pass run after another Custom operator has been created.

    MXNet remembers for the last created one alone which arrays the backward pass reads. For each other operator, it may
    ask an array that this one does not read, and that does not exist, for its storage type, and fail.
    """
    original = mx.operator._ndarray_cls

    def dense_where_absent(handle: Any, writable: bool = True, stype: int = UNDEFINED) -> Any:
        if stype == UNDEFINED:
            stype = max(mx.nd.ndarray._storage_type(handle), DENSE)
        return original(handle, writable, stype)

    mx.operator._ndarray_cls = dense_where_absent


def _finish_pending() -> None:
    """Wait for what is still pending: Custom operators that run while the interpreter ends abort the process."""
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        print(f"an operator failed and nobody looked at its result: {error}", file=sys.stderr)


def _finish_before_fork() -> None:
    """Wait for what is pending, as at exit: MXNet stops its threads before a fork, while this thread has Python's lock.

    A thread of MXNet's runs an operator itself, and would wait for itself.
    """
    if threading.current_thread() is threading.main_thread():
        _finish_pending()
        time.sleep(_FREEING_SECONDS)
        fast_custom_op.deleting.wait_for_others(_FREEING_SECONDS)
