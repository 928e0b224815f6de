"""Python functions in MXNet's engine: they run in one of its threads when the arrays that they use are ready."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

from . import mxnet_errors

_works: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


class _Context(ctypes.Structure):
    """MXNet's Context: the device's kind and number; the default is the CPU."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int32))


#: What MXNet calls, with its own context and the number of the work.
_run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda context, number: _works.pop(number)())


def queue(work: Callable[[], None], reads: Sequence[Any], writes: Sequence[Any], name: str) -> None:
    """Have MXNet call ``work`` after all that is pending on these NDArrays; later readers of ``writes`` wait for it.

    The arrays are different ones in mx.cpu(). ``work`` calls nothing of MXNet's that waits. If it raises, whoever waits
    for the first of ``writes`` gets the error.
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
    _works[number] = run
    handles = ((ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)) for arrays in (reads, writes))
    read, written = handles
    mx.base.check_call(
        mx.base._LIB.MXEnginePushSyncND(
            _run, ctypes.c_void_p(number), None, ctypes.byref(_Context(1, 0)),
            read, len(reads), written, len(writes), None, 0, name.encode(),
        )
    )  # fmt: skip
    if failed:
        raise failed[0]
