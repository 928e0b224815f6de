"""Host memory that is copied many times, pinned (page-locked) so that the GPU's copy engines reach it at full speed.

Pinning memory takes two to three times as long as copying it, and memory must not stay pinned when it is freed: the GPU
would reach the old pages. So this module holds the memory's owner, and each copy marks the memory as used.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import cuda
from .bounded_dict import BoundedDict
from .memory import address

#: The fewest bytes that are pinned: staging buffers are fast enough for less.
LEAST_BYTES = 256 << 10

#: cudaHostRegisterPortable: for all GPUs.
_PORTABLE = 1

#: The bytes of memory that calls have copied without being pinned, by address: whoever owns it may pin it.
wanted: BoundedDict[int, int] = BoundedDict(64)


@dataclass(eq=False)
class _Range:
    """Pinned memory, what keeps it alive, how many calls use it, and whether it has to be unpinned after them."""

    owner: Any
    address: int
    size: int
    users: int = 0
    ended: bool = False


#: By address. The lock is one that a finalizer can take while its thread has it.
_pinned: dict[int, _Range] = {}
_lock = threading.RLock()


class Pinned:
    """Memory that is pinned while this object lives, and then until nobody uses it.

    owner: keeps the memory alive, and is held as long. Little memory, what CUDA cannot pin, and what is pinned already
    is left as it is.
    """

    def __init__(self, owner: Any, address: int, size: int) -> None:
        if size < LEAST_BYTES:
            return
        one = _Range(owner, address, size)
        runtime = cuda.cupy().cuda.runtime
        with _lock, suppress(runtime.CUDARuntimeError):
            runtime.hostRegister(address, size, _PORTABLE)
            _pinned[address] = one
            # At the process's end, other parts of it are gone.
            weakref.finalize(self, _end, one, runtime).atexit = False


def _end(one: _Range, runtime: Any) -> None:
    with _lock:
        one.ended = True
    _unpin_unused([one], runtime)


def _unpin_unused(ones: Sequence[_Range], runtime: Any) -> None:
    for one in ones:
        with _lock:
            if one.ended and not one.users and _pinned.get(one.address) is one:
                del _pinned[one.address]
                with suppress(runtime.CUDARuntimeError):  # after an error of the GPU, all calls fail
                    runtime.hostUnregister(one.address)


@contextmanager
def using(arrays: Sequence[np.ndarray], wants: bool = False) -> Iterator[list[bool]]:
    """A context manager whose value is whether each array is pinned, and stays so until the end.

    wants: others come again; see ``wanted``.
    """
    with _lock:
        found = [_pinned.get(address(array)) if array.nbytes >= LEAST_BYTES else None for array in arrays]
        found = [one if one and one.size >= array.nbytes else None for one, array in zip(found, arrays)]
        used = [one for one in found if one]
        for one in used:
            one.users += 1
    for array, known in zip(arrays, found):
        if wants and not known and array.nbytes >= LEAST_BYTES:
            wanted[address(array)] = array.nbytes
    try:
        yield [one is not None for one in found]
    finally:
        with _lock:
            for one in used:
                one.users -= 1
        if used:
            _unpin_unused(used, cuda.cupy().cuda.runtime)
