"""Parameters that a GPU keeps from an update to later forward passes and updates, which need not copy them in again.

MXNet's array gets the new parameter too. What the GPU has is used while that update is the array's last write by MXNet
(``array_version``), and never where MXNet's counts cannot be read.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from ece408_op.plugin import array_version
from ece408_op.plugin.host_context import Gpu


class Kept:
    """One parameter on the GPU of its last update."""

    def __init__(self) -> None:
        #: MXNet's array, and its count of writes before the update that began last.
        self._written: tuple[Any, int] | None = None
        self._there: tuple[Gpu, Any] | None = None
        self._address = 0

    def begin(self, parameter: Any) -> tuple[Gpu, Any] | None:
        """Return the GPU and the CuPy array that are the parameter's, if there are; the caller updates them.

        The caller is a function of ``engine_queue`` that writes the parameter, MXNet's array. From here on, nothing is
        kept: an update that fails leaves nothing.
        """
        found = self._there if self._written and self._written[0] is parameter and self._is_current() else None
        readable = array_version.is_readable()
        self._written = (parameter, array_version.version(parameter)) if readable else None
        self._there = None
        return found

    def keep(self, gpu: Gpu, array: Any, address: int) -> None:
        """Keep the array, which that update has written to the parameter's address; no one else changes it."""
        if self._written:
            self._there, self._address = (gpu, array), address
            _kept[address] = self

    def at(self, address: int) -> Any | None:
        """Return the CuPy array if it has what the parameter at that address has."""
        return self._there[1] if self._there and self._address == address and self._is_current() else None

    def _is_current(self) -> bool:
        """Return whether the parameter is as the update left it; no write to it by MXNet may be pending."""
        array, count = self._written or (None, 0)
        return array is not None and array_version.version(array) == count + 1


#: By the parameter's address. MXNet's array in each one holds the memory, so that no other array has that address.
_kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()


def kept_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, that has what MXNet's parameter at that address has; None if there is none.

    Only for reading, by a function that MXNet calls to read the parameter.
    """
    found = _kept.get(address)
    return found.at(address) if found else None


__all__ = ("Kept", "kept_at")
