"""Parameters that a GPU keeps from an update to later forward passes and updates, which need not copy them in again.

MXNet's array gets the new parameter too. The GPU's copy is valid while that update is the array's last write by MXNet
(``array_version``), and never where MXNet's counts cannot be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ece408_op.plugin import array_version
from ece408_op.plugin.host_context import Gpu


class WriteCount:
    """MXNet's count of writes to an array, from update to update."""

    def __init__(self) -> None:
        self._array: Any = None
        #: Returns the count, if it can be read.
        self.version: Callable[[], int] | None = None
        #: The count at the last update.
        self.last = 0

    def is_once(self, array: Any) -> bool:
        """Return whether MXNet has written the array once since the last call, or False if that can't be known.

        The caller is a function of ``engine_queue`` that reads or writes MXNet's array.
        """
        is_same = self._array is array
        if not is_same:
            self._array, self.version = array, None
            self.version = array_version.version_of(array) if array_version.is_readable() else None
        before, self.last = self.last, self.version() if self.version else 0
        return is_same and self.last == before + 1


class Updated(NamedTuple):
    """The parameters of one update on a GPU: CuPy arrays, and the memory that all of them are packed in."""

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
    """One parameter on the GPU of its last update."""

    def __init__(self) -> None:
        self._count = WriteCount()
        #: In one object, since readers of another array may look meanwhile.
        self._copy: _Copy | None = None

    def begin(self, parameter: Any) -> _Copy | None:
        """Return the copy, if it is valid, for the caller to update, which is a function of ``engine_queue``.

        parameter: MXNet's array. From here on nothing is cached: an update that fails leaves nothing.
        """
        copy, self._copy = self._copy, None
        return copy if self._count.is_once(parameter) else None

    def keep(self, array: Any, update: Updated, address: int) -> None:
        """Cache what the update has written to the parameter's address; nobody else may write ``array``."""
        if self._count.version:
            self._copy = _Copy(array, update, address, self._count.version, self._count.last + 1)
            _caches[address] = self

    def at(self, address: int) -> Any | None:
        """Return the CuPy array if it has the values of the parameter at that address."""
        copy = self._copy
        return copy.array if copy and copy.address == address and copy.version() == copy.writes else None


#: By the parameter's address. A cached parameter's array stays, so that no other one has its address; an entry may be
#: older, which ``at`` sees.
_caches: weakref.WeakValueDictionary[int, ParameterCache] = weakref.WeakValueDictionary()


def cached_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, with the values of MXNet's parameter at that address; None if there is none.

    Only for reading, by a function that MXNet calls to read the parameter.
    """
    found = _caches.get(address)
    return found.at(address) if found else None
