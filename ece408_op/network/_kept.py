"""Parameters that a GPU keeps from an update to later forward passes and updates, which need not copy them in again.

MXNet's array gets the new parameter too. What the GPU has is used while that update is the array's last write by MXNet
(``array_version``), and never where MXNet's counts cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ece408_op.plugin import array_version
from ece408_op.plugin.host_context import Gpu


class Updated(NamedTuple):
    """The parameters of one update on a GPU: CuPy arrays, and all of them packed in the same memory."""

    gpu: Gpu
    arrays: Sequence[Any]
    packed: Sequence[Any]


class Held(NamedTuple):
    """One of an update's parameters."""

    array: Any
    update: Updated


#: The count of writes before an update that there was not.
_NEVER = -2


def _unknown() -> int:
    """Return a count of writes that is that of no update."""
    return 0


class Kept:
    """One parameter on the GPU of its last update."""

    def __init__(self) -> None:
        #: MXNet's array of the update that began last, its count of writes, and that before the update.
        self._parameter: Any = None
        self._version: Callable[[], int] = _unknown
        self._before = _NEVER
        self._there: Held | None = None
        self._address = 0

    def begin(self, parameter: Any) -> Held | None:
        """Return what is kept, if the parameter is as the last update left it; the caller updates it.

        The caller is a function of ``engine_queue`` that writes the parameter, MXNet's array. From here on, nothing is
        kept: an update that fails leaves nothing.
        """
        if self._parameter is not parameter:
            self._parameter, self._there, self._before = parameter, None, _NEVER
            self._version = array_version.version_of(parameter) if array_version.is_readable() else _unknown
        version, there = self._version(), self._there
        found = there if version == self._before + 1 else None
        self._before, self._there = version, None
        return found

    def keep(self, held: Held, address: int) -> None:
        """Keep what that update has written to the parameter's address; no one else changes it."""
        if self._version is not _unknown:
            self._there, self._address = held, address
            _kept[address] = self

    def at(self, address: int) -> Any | None:
        """Return the CuPy array if it has what the parameter at that address has."""
        there = self._there
        return there.array if there and self._address == address and self._version() == self._before + 1 else None


#: By the parameter's address. MXNet's array in each one holds the memory, so that no other array has that address.
_kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()


def kept_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, that has what MXNet's parameter at that address has; None if there is none.

    Only for reading, by a function that MXNet calls to read the parameter.
    """
    found = _kept.get(address)
    return found.at(address) if found else None


__all__ = ("Held", "Kept", "Updated", "kept_at")
