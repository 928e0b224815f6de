"""Read how often MXNet has written an array: its engine counts writes, but has no function that returns the count."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from ece408_op.runtime.bounded_dict import BoundedDict

from . import bridge

#: Byte offsets in MXNet 1.9.1's wheels for x86-64 (include/mxnet/ndarray.h and engine.h): of the variable's address in
#: a Chunk, and of the count in a variable. An NDArray begins with the address of its Chunk.
_VARIABLE, _COUNT = 72, 8


def version_of(array: Any) -> Callable[[], int]:
    """Return a function that returns a number, which increases by one with each write of MXNet to the array's memory.

    Only valid if ``is_readable``. The function keeps the array alive.

    Writes through MXNet's views of the memory count too. Writes without MXNet, such as through a NumPy array on the
    same memory, do not. No write may be pending: call the function from a function of ``engine_queue`` that writes the
    array, or from an operator that reads it.
    """
    # Each training step calls this for hundreds of arrays, so addresses that do not change are looked up once.
    chunk = _word(array.handle.value)
    first = chunk.value
    count = _word(_word(first + _VARIABLE).value + _COUNT)

    def version(array: Any = array) -> int:
        return count.value if chunk.value == first else version_of(array)()

    return version


def variable_of(array: Any) -> int:
    """Return the address of the engine's variable for the array's memory, which all views share.

    Only valid if ``is_readable``.
    """
    return _word(_word(array.handle.value).value + _VARIABLE).value


def _word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


@cache
def is_readable() -> bool:
    """Return whether the offsets above are right for this MXNet, after a trial, which waits for MXNet's engine."""
    import mxnet as mx

    # In builds without oneDNN, an NDArray has other fields.
    known = mx.__version__ == "1.9.1" and platform.machine() == "x86_64"
    if not known or not mx.runtime.Features().is_enabled("MKLDNN"):
        return False
    array = mx.nd.zeros((2, 3), mx.cpu())
    counts: list[int] = []
    with mx.autograd.pause():  # while it records, it refuses changes in place
        for change in (lambda: None, array.asnumpy, lambda: array[1:].__imul__(2), lambda: array.__iadd__(1)):
            change()
            array.wait_to_read()
            counts.append(version_of(array)())
    return [count - counts[0] for count in counts] == [0, 0, 1, 2]


#: Addresses of arrays whose writes operators want to count: the owner of such an array may make a ``Counted``.
wanted: BoundedDict[int, bool] = BoundedDict(64)


class Counted:
    """An array whose writes an operator can count by its address (``counted``): it gets another array on that memory.

    The array lives as long as this object, so that no other array has its address meanwhile. Only valid if
    ``is_readable``.
    """

    def __init__(self, address: int, array: Any) -> None:
        #: Returns the count.
        self.version = version_of(array)
        _counted[address] = self
        wanted.pop(address, None)


_counted: WeakValueDictionary[int, Counted] = WeakValueDictionary()


def counts_writes() -> bool:
    """Return whether there is a ``Counted``."""
    return bool(_counted)


def by_address(arrays: Iterable[Any]) -> dict[int, Any]:
    """Return those arrays that are not empty, dense and in ``mx.cpu()``, by address."""
    found = [array for array in arrays if array.size and array.stype == "default" and not bridge.on_gpu(array)]
    return dict(zip(bridge.addresses(found), found))


def counted(addresses: Iterable[int]) -> list[Counted | None]:
    """Return what counts MXNet's writes to the array at each address; if nothing does, somebody is wanted who does."""
    found = [(address, _counted.get(address)) for address in addresses]
    wanted.update([(address, True) for address, one in found if not one][:1])
    return [one for _, one in found]
