"""Sums of arrays on several GPUs of this host by NCCL, in one process.

The library is the system's, or that of the wheels nvidia-nccl-cu12 and -cu13, by its C interface (NCCL's user guide,
API reference).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from ece408_op.errors import DeviceError

from . import cuda
from .shared_libraries import load_libraries
from .thread_pool import share

_NAME = "libnccl.so.2"
#: NCCL's numbers: the type float32, and the sum.
_FLOAT, _SUM = 7, 0
#: Seconds between two questions whether the sums are complete, and CUDA's answer that they are not (cudaErrorNotReady).
_POLL, _NOT_READY = 1e-4, 600

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclCommInitAll": [_POINTER, _INT, _POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclReduce": [_POINTER, _POINTER, ctypes.c_size_t, _INT, _INT, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


class Group:
    """GPUs of different numbers, its members in that order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._lock, self._numbers = threading.Lock(), tuple(numbers)
        self._members = (_POINTER * len(numbers))()
        _call("ncclCommInitAll", self._members, len(numbers), (_INT * len(numbers))(*numbers))

    def add(self, sources: Sequence[Sequence[Any]], sums: Sequence[tuple[int, Any]], streams: Sequence[Any]) -> None:
        """Fill the array of sums[n], on the member of its number, with the sum of sources[member][n] of all members.

        All are CuPy's C-contiguous float32 arrays; the work is put on the members' streams, which have ended when it
        returns. Raises DeviceError, the first one, if NCCL or a GPU fails: no other GPU waits for its share, and
        ``group`` makes a new group.
        """
        try:
            with self._lock:
                self._queue(sources, sums, streams)
            _wait(streams)
        except DeviceError:
            self._abort()
            for stream in streams:
                with suppress(DeviceError):
                    cuda.wait("NCCL", stream)
            raise

    def _abort(self) -> None:
        """End the members' kernels: each would wait for the arrays of all others."""
        _forget(self._numbers, self)

        def abort(member: int) -> None:
            with suppress(DeviceError):
                _call("ncclCommAbort", self._members[member])

        # A thread for each: NCCL may wait until all members are aborted.
        share(abort, len(self._members), len(self._members))

    def _queue(self, sources: Sequence[Sequence[Any]], sums: Sequence[tuple[int, Any]], streams: Sequence[Any]) -> None:
        _call("ncclGroupStart")
        try:
            for member, arrays, stream in zip(self._members, sources, streams):
                for array, (root, total) in zip(arrays, sums):
                    addresses = array.data.ptr, total.data.ptr
                    _call("ncclReduce", *addresses, array.size, _FLOAT, _SUM, root, member, stream.ptr)
        except DeviceError:
            # It fails too, with a less precise reason.
            with suppress(DeviceError):
                _call("ncclGroupEnd")
            raise
        _call("ncclGroupEnd")


def _wait(streams: Sequence[Any]) -> None:
    """Wait until all streams have ended; if one fails, raise its error, a DeviceError, while others still run."""
    left = list(streams)
    while left:
        states = [cuda.cupy().cuda.runtime.streamQuery(stream.ptr) for stream in left]
        for stream, state in zip(left, states):
            if state != _NOT_READY:
                cuda.wait("NCCL", stream)
        left = [stream for stream, state in zip(left, states) if state == _NOT_READY]
        time.sleep(_POLL if left else 0)


_groups: dict[tuple[int, ...], Group] = {}
_lock = threading.Lock()


def group(numbers: tuple[int, ...]) -> Group:
    """Return the group of these GPUs, which stays until it fails; raises DeviceError without NCCL, or if that fails."""
    with _lock:
        if numbers not in _groups:
            _groups[numbers] = Group(numbers)
        return _groups[numbers]


def _forget(numbers: tuple[int, ...], failed: Group) -> None:
    with _lock:
        if _groups.get(numbers) is failed:
            del _groups[numbers]


@cache
def _library() -> ctypes.CDLL:
    load_libraries([_NAME])
    try:
        library = ctypes.CDLL(_NAME)
    except OSError as error:
        raise DeviceError(
            f"several GPUs: expected NCCL, which sums their gradients, got {error}; install nvidia-nccl-cu12 or "
            "nvidia-nccl-cu13, for your CUDA, or pass one GPU"
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        reason = _library().ncclGetErrorString(status).decode()
        raise DeviceError(f"{name}: expected success, got {reason}; NCCL_DEBUG=WARN in the environment says more")


__all__ = ("Group", "group")
