"""Sums and exchange of arrays on several GPUs of this host by NCCL, in one process.

The library is the system's, or that of the wheels nvidia-nccl-cu12 and -cu13, by its C interface (NCCL's user guide,
API reference).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from ece408_op.errors import DeviceError

from . import cuda
from .shared_libraries import load_libraries

_NAME = "libnccl.so.2"
#: NCCL's numbers: the types float32 and float64, and the sum.
_FLOAT, _DOUBLE, _SUM = 7, 8, 0
#: Seconds between two questions whether the sums are complete, and CUDA's answer that they are not (cudaErrorNotReady).
_POLL, _NOT_READY = 1e-4, 600
#: Seconds between two questions of ``watch``, and those that ``abort`` waits.
WATCH_SECONDS = 0.01
ABORT_SECONDS = 1

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclCommInitAll": [_POINTER, _INT, _POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllGather": [_POINTER, _POINTER, ctypes.c_size_t, _INT, _POINTER, _POINTER],
    "ncclReduce": [_POINTER, _POINTER, ctypes.c_size_t, _INT, _INT, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


class Communicator:
    """GPUs of different numbers, its ranks in that order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._lock, self._numbers = threading.Lock(), tuple(numbers)
        self._ranks = (_POINTER * len(numbers))()
        #: Whether it can do nothing more, nor can CUDA graphs that have captured what it queued.
        self.aborted = False
        _call("ncclCommInitAll", self._ranks, len(numbers), (_INT * len(numbers))(*numbers))

    def reduce(self, sources: Sequence[Sequence[Any]], sums: Sequence[tuple[int, Any]], streams: Sequence[Any]) -> None:
        """Fill the array of sums[n], on the rank of its number, with the sum of sources[rank][n] of all ranks.

        All are CuPy's C-contiguous float32 arrays; the work is put on the ranks' streams, which have ended when it
        returns. Raises DeviceError, the first one, if NCCL or a GPU fails: no other GPU waits for its share, and
        ``communicator`` makes a new one.
        """
        try:
            self._queue(
                ("ncclReduce", array.data.ptr, total.data.ptr, array.size, _FLOAT, _SUM, root, rank, stream.ptr)
                for rank, arrays, stream in zip(self._ranks, sources, streams)
                for array, (root, total) in zip(arrays, sums)
            )
            _wait(streams)
        except DeviceError:
            self.abort()
            for stream in streams:
                with suppress(DeviceError):
                    cuda.wait("NCCL", stream)
            raise

    def all_gather(self, arrays: Sequence[Any], streams: Sequence[Any]) -> None:
        """Queue the exchange of rows: each rank has filled the row of its number, and gets the others'.

        arrays: each rank's, (ranks, ...), CuPy's C-contiguous float64. The ranks' streams may be captured, all of
        them. Raises DeviceError if NCCL fails; then some streams may wait for others until ``abort``.
        """
        count, row_bytes = arrays[0].size // len(arrays), arrays[0].nbytes // len(arrays)
        self._queue(
            ("ncclAllGather", array.data.ptr + number * row_bytes, array.data.ptr, count, _DOUBLE, rank, stream.ptr)
            for number, (rank, array, stream) in enumerate(zip(self._ranks, arrays, streams))
        )

    def watch(self, event: Any) -> None:
        """Abort if the GPU fails before this event is reached: others would wait for it. Returns at once."""

        def poll() -> None:
            query = cuda.cupy().cuda.runtime.eventQuery
            while not self.aborted and (state := query(event.ptr)):
                if state != _NOT_READY:
                    self.abort()
                time.sleep(WATCH_SECONDS)

        threading.Thread(target=poll, daemon=True).start()

    def abort(self) -> None:
        """End the ranks' kernels, which would wait for each other; ``communicator`` makes a new one.

        Any thread may call it, while others wait for streams. NCCL frees the memory when all CUDA graphs are gone that
        have captured what the communicator queued.
        """
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
        with _lock:
            if _communicators.get(self._numbers) is self:
                del _communicators[self._numbers]

        def abort(rank: int) -> None:
            with suppress(DeviceError):
                _call("ncclCommAbort", self._ranks[rank])

        # A thread for each: NCCL may wait until all ranks are aborted, and for the graphs.
        threads = [threading.Thread(target=abort, args=(n,), daemon=True) for n in range(len(self._ranks))]
        for thread in threads:
            thread.start()
        end = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))

    def _queue(self, calls: Iterable[tuple[Any, ...]]) -> None:
        """Call NCCL's functions, each with its name in front of the arguments, as one group."""
        with self._lock:
            if self.aborted:
                raise DeviceError("NCCL: expected a communicator, got one that is aborted")
            _call("ncclGroupStart")
            try:
                for call in calls:
                    _call(*call)
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


_communicators: dict[tuple[int, ...], Communicator] = {}
_lock = threading.Lock()


def communicator(numbers: tuple[int, ...]) -> Communicator:
    """Return the communicator of these GPUs, which stays until it fails; raises DeviceError without NCCL."""
    with _lock:
        if numbers not in _communicators:
            _communicators[numbers] = Communicator(numbers)
        return _communicators[numbers]


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
