"""Queue Python functions in MXNet's engine, which runs them in its threads when their arrays are ready."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from . import mxnet_errors

_queued: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)

#: MXNet's Context of mx.cpu(): the device's kind and number.
_CPU = (ctypes.c_int32 * 2)(1, 0)
#: MXNet calls this with its own context and the number of a queued function.
_run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda context, number: _queued.pop(number)())


def queue(work: Callable[[], None], reads: Sequence[Any], writes: Sequence[Any], name: str) -> None:
    """Queue a call of ``work`` after all pending operations on these NDArrays; later readers of ``writes`` wait for it.

    All arrays are in mx.cpu(), and none is passed twice. ``work`` must not call functions of MXNet that wait. If
    ``work`` raises, a wait for the first of ``writes`` raises the error. name: for MXNet's profiler.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            try:
                mxnet_errors.fail(writes[0], error)
            except Exception as reason:  # the NaiveEngine runs in the caller's thread
                failed.append(reason)

    number = next(_numbers)
    _queued[number] = run
    handles = ((ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)) for arrays in (reads, writes))
    read, written = handles
    mx.base.check_call(
        mx.base._LIB.MXEnginePushSyncND(
            _run, ctypes.c_void_p(number), None, ctypes.byref(_CPU),
            read, len(reads), written, len(writes), None, 0, name.encode(),
        )
    )  # fmt: skip
    if failed:
        raise failed[0]
