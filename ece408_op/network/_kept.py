"""Parameters that a GPU keeps from an update to later forward passes and updates, which need not copy them in again.

MXNet's array gets the new parameter too. What the GPU has is used while that update is the array's last write by MXNet
(``array_version``), and never where MXNet's counts cannot be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ece408_op.plugin import array_version
from ece408_op.plugin.host_context import Gpu

from ._updates import Update


@dataclass
class Operands:
    """The operands of an update's kernel but its parameters, and ``rows``, its array of all addresses and factors.

    The next update of the same parameters often has the same ones, since repeated passes leave gradients at the same
    addresses.
    """

    gradients: Sequence[Callable[[], Any]]
    others: Sequence[Any]
    rows: Any = None

    @classmethod
    def of(cls, updates: Sequence[Update]) -> Operands:
        """Return those of these updates. Gradients are not kept for it."""
        return cls([weakref.ref(one.gradient) for one in updates], [one[2:] for one in updates])

    def are_of(self, updates: Sequence[Update]) -> bool:
        """Return whether these updates of the same parameters have the same operands."""
        return all(
            gradient() is one.gradient and states is one.states and (rate, decay) == (one.rate, one.decay)
            for gradient, (states, rate, decay), one in zip(self.gradients, self.others, updates)
        )


class Updated(NamedTuple):
    """The parameters of one update on a GPU: CuPy arrays, all of them packed in the same memory, and its operands."""

    gpu: Gpu
    arrays: Sequence[Any]
    packed: Sequence[Any]
    operands: Operands


class Held(NamedTuple):
    """One of an update's parameters."""

    array: Any
    update: Updated


class _Left(NamedTuple):
    """What an update has left: its parameter's address, MXNet's count of writes to it then, and what holds it."""

    address: int
    version: Callable[[], int]
    writes: int
    held: Held


class Kept:
    """One parameter on the GPU of its last update."""

    def __init__(self) -> None:
        #: MXNet's array of the update that began last, and its count of writes, if that can be read.
        self._parameter: Any = None
        self._version: Callable[[], int] | None = None
        #: The count once that update has written the parameter.
        self._count = 0
        #: In one object, since readers of another array may look meanwhile.
        self._left: _Left | None = None

    def begin(self, parameter: Any) -> Held | None:
        """Return what is kept, if the parameter is as the last update left it; the caller updates it.

        The caller is a function of ``engine_queue`` that writes the parameter, MXNet's array. From here on, nothing is
        kept: an update that fails leaves nothing.
        """
        left, self._left = self._left, None
        if self._parameter is not parameter:
            left, self._parameter, self._version = None, None, None
            self._version = array_version.version_of(parameter) if array_version.is_readable() else None
            self._parameter = parameter
        if self._version:
            self._count = self._version() + 1
        return left.held if left and left.writes == self._count - 1 else None

    def keep(self, held: Held, address: int) -> None:
        """Keep what that update has written to the parameter's address; nobody else may write ``held.array``."""
        if self._version:
            self._left = _Left(address, self._version, self._count, held)
            _kept[address] = self

    def at(self, address: int) -> Any | None:
        """Return the CuPy array if it has what the parameter at that address has."""
        left = self._left
        return left.held.array if left and left.address == address and left.version() == left.writes else None


#: By the parameter's address. The array of an update that is kept stays, so that no other one has its address; an entry
#: may be older, which ``at`` sees.
_kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()


def kept_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, that has what MXNet's parameter at that address has; None if there is none.

    Only for reading, by a function that MXNet calls to read the parameter.
    """
    found = _kept.get(address)
    return found.at(address) if found else None


__all__ = ("Held", "Kept", "Operands", "Updated", "kept_at")
