"""Pack small arrays into one buffer, because Python takes about 50 microseconds per copy, whatever the size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.bounded_dict import BoundedDict
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, round_up
from ece408_op.runtime.memory import address

from ._definition import Shape

#: The most bytes of a small array.
SMALL_BYTES = 256 << 10


class Packing:
    """The packed form of float32 arrays of these shapes: the large arrays and, last, a flat array with all others.

    shapes: those of the packed arrays.
    """

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        #: The shape of each array, and the index of its first element in the flat array, -1 for a large array.
        self._offsets: list[tuple[Shape, int]] = []
        #: Views of the last flat host arrays, by address, cached because making hundreds takes as long as filling them.
        self._views: BoundedDict[int, list[np.ndarray]] = BoundedDict(8)
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= SMALL_BYTES
            self._offsets.append((tuple(shape), size if small else -1))
            size += round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
        # The flat array is never empty, so that callers can always copy it.
        self.shapes = [*(shape for shape, offset in self._offsets if offset < 0), (max(1, size),)]

    def large(self, arrays: Sequence[Any]) -> list[Any]:
        """Return those of the arrays that count as large."""
        return [array for array, (_, offset) in zip(arrays, self._offsets) if offset < 0]

    def copy_small(self, arrays: Sequence[np.ndarray], flat: np.ndarray, out: bool = False) -> None:
        """Copy the small ones of the NumPy arrays to the flat array, or with ``out`` from the flat array."""
        views = self._views.get(address(flat))
        if views is None:
            views = self._views[address(flat)] = self._small_views(flat)
        small = (array for array, (_, offset) in zip(arrays, self._offsets) if offset >= 0)
        for array, view in zip(small, views):
            if out:
                array[...] = view
            else:
                view[...] = array

    def packed(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the large ones of the CuPy arrays, and a flat array with copies of the others."""
        flat = cuda.cupy().zeros(self.shapes[-1], np.float32)
        small = (array for array, (_, offset) in zip(arrays, self._offsets) if offset >= 0)
        for array, view in zip(small, self._small_views(flat)):
            view[...] = array
        return [*self.large(arrays), flat]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays in their original order, the small ones as views of the flat array."""
        *large, flat = packed
        rest, views = iter(large), iter(self._small_views(flat))
        return [next(rest if offset < 0 else views) for _, offset in self._offsets]

    def _small_views(self, flat: Any) -> list[Any]:
        return [flat[start : start + prod(shape)].reshape(shape) for shape, start in self._offsets if start >= 0]


packing_of_shapes = lru_cache(maxsize=64)(Packing)


def packing_of(arrays: Sequence[Any]) -> Packing:
    """Return the packing for arrays of these arrays' shapes."""
    return packing_of_shapes(tuple(array.shape for array in arrays))
