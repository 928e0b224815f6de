"""Copies of updated parameters on a GPU, so that later forward passes and updates need not copy them in again.

An update also writes the new parameter to MXNet's array. The GPU's copy is valid while that is MXNet's last write to
the array (``array_version``). If MXNet's write counts cannot be read, no copy is valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ece408_op.plugin import array_version
from ece408_op.plugin.host_context import Gpu


class WriteCount:
    """MXNet's count of writes to an array, compared from one update to the next."""

    def __init__(self) -> None:
        self._array: Any = None
        #: Returns the count; None if it cannot be read.
        self.version: Callable[[], int] | None = None
        #: The count at the last update.
        self.last = 0

    def is_once(self, array: Any) -> bool:
        """Return whether MXNet has written the array exactly once since the last call; False if that cannot be known.

        The caller is a function of ``engine_queue`` that reads or writes MXNet's array.
        """
        is_same = self._array is array
        if not is_same:
            self._array, self.version = array, None
            self.version = array_version.version_of(array) if array_version.is_readable() else None
        before, self.last = self.last, self.version() if self.version else 0
        return is_same and self.last == before + 1


class Updated(NamedTuple):
    """The parameters of one update on a GPU: CuPy arrays, and the packed arrays that hold their memory."""

    gpu: Gpu
    arrays: Sequence[Any]
    packed: Sequence[Any]


class _Copy(NamedTuple):
    """The GPU's copy of a parameter: valid while the count of writes to the host's array is ``writes``."""

    array: Any
    update: Updated
    address: int
    version: Callable[[], int]
    writes: int


class ParameterCache:
    """The cached copy of one parameter, on the GPU of its last update."""

    def __init__(self) -> None:
        self._count = WriteCount()
        #: All fields in one object, which other threads read meanwhile (``cached_at``).
        self._copy: _Copy | None = None

    def begin(self, parameter: Any) -> _Copy | None:
        """Return the copy, if it is valid, for the caller to update, and clear the cache until ``keep``.

        So a failed update leaves no copy. parameter: MXNet's array. The caller is a function of ``engine_queue``.
        """
        copy, self._copy = self._copy, None
        return copy if self._count.is_once(parameter) else None

    def keep(self, array: Any, update: Updated, address: int) -> None:
        """Cache ``array``, whose values the update writes to the parameter's address; only updates may change it."""
        if self._count.version:
            self._copy = _Copy(array, update, address, self._count.version, self._count.last + 1)
            _caches[address] = self

    def at(self, address: int) -> Any | None:
        """Return the CuPy array if it has the values of the parameter at that address, else None."""
        copy = self._copy
        return copy.array if copy and copy.address == address and copy.version() == copy.writes else None


#: Caches by the parameter's address. A cache keeps MXNet's array alive, so that no other array gets its address. An
#: entry may be outdated; ``at`` checks that.
_caches: weakref.WeakValueDictionary[int, ParameterCache] = weakref.WeakValueDictionary()


def cached_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, with the values of MXNet's parameter at that address; None if there is none.

    The caller may only read the array, and is a function that MXNet's engine runs to read the parameter.
    """
    found = _caches.get(address)
    return found.at(address) if found else None
