"""Small arrays one after another in one buffer: Python takes about 50 microseconds per copy, whatever its size."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import c_calls
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, round_up
from ece408_op.runtime.memory import address
from ece408_op.runtime.recent import Recent

from ._definition import Shape

#: The most bytes of a small array.
SMALL_BYTES = 256 << 10
_NONE = np.empty((0, c_calls.ARGUMENTS), np.int64)


class Packing:
    """Float32 arrays of these shapes as the large ones among them and, last, a flat one with all others."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        #: The shape of each array, and where it begins in the flat one, -1 for a large one.
        self._places: list[tuple[Shape, int]] = []
        #: The arguments of memcpy for the last arrays, and these, by the flat array's address and the direction.
        self._copies: Recent[tuple[int, bool], tuple[list[np.ndarray], np.ndarray]] = Recent(8)
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= SMALL_BYTES
            self._places.append((tuple(shape), size if small else -1))
            size += round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
        # Never empty, so that there is always something to copy.
        self.shapes = [*(shape for shape, start in self._places if start < 0), (max(1, size),)]

    def large(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the large ones among the arrays."""
        return [array for array, (_, start) in zip(arrays, self._places) if start < 0]

    def copy_small(self, arrays: Sequence[np.ndarray], flat: np.ndarray, out: bool = False) -> None:
        """Copy the small ones among NumPy's C-contiguous arrays to the flat one, or from there.

        In one call of machine code: NumPy would take a millisecond for hundreds of copies.
        """
        key, small = (address(flat), out), [array for array, (_, start) in zip(arrays, self._places) if start >= 0]
        known, rows = self._copies.get(key) or ([], _NONE)
        if len(known) != len(small) or not all(map(operator.is_, known, small)):
            places = [key[0] + ITEM_BYTES * start for _, start in self._places if start >= 0]
            pairs = [places, list(map(address, small))]
            sizes = [ITEM_BYTES * prod(shape) for shape, start in self._places if start >= 0]
            rows = np.array([*reversed(pairs), sizes] if out else [*pairs, sizes], np.int64).T.copy()
            self._copies[key] = small, rows
        c_calls.any_nonzero(_memcpy(), rows)

    def packed(self, arrays: Sequence[Any], flat: Any) -> list[Any]:
        """Return the large arrays, and the flat one, filled with copies of the others."""
        for array, part in zip(arrays, self._views([None] * len(self._places), flat)):
            if part is not None:
                part[...] = array
        return [*self.large(arrays), flat]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays in their order, the small ones as views of the flat one."""
        *large, flat = packed
        rest = iter(large)
        return self._views([next(rest) if start < 0 else None for _, start in self._places], flat)

    def _views(self, large: Sequence[Any], flat: Any) -> list[Any]:
        """Return the arrays in their order: the large ones as given, the others as views of the flat one."""
        return [
            array if start < 0 else flat[start : start + prod(shape)].reshape(shape)
            for array, (shape, start) in zip(large, self._places)
        ]


@cache
def _memcpy() -> int:
    return c_calls.address_of(ctypes.CDLL(None).memcpy)


@lru_cache(maxsize=64)
def packing_of(shapes: tuple[Shape, ...]) -> Packing:
    """Return the packing of arrays of these shapes."""
    return Packing(shapes)


__all__ = ("SMALL_BYTES", "packing_of")
