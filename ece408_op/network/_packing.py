"""Small arrays one after another in one buffer: Python takes about 50 microseconds per copy, whatever its size."""

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
    """Float32 arrays of these shapes as the large ones among them and, last, a flat one with all others."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        #: The shape of each array, and its first element's index in the flat one, -1 for a large one.
        self._offsets: list[tuple[Shape, int]] = []
        #: Views of the last flat arrays on the host, by address: to make hundreds takes as long as to fill them.
        self._views: BoundedDict[int, list[np.ndarray]] = BoundedDict(8)
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= SMALL_BYTES
            self._offsets.append((tuple(shape), size if small else -1))
            size += round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
        # Never empty, so that there is always something to copy.
        self.shapes = [*(shape for shape, offset in self._offsets if offset < 0), (max(1, size),)]

    def large(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the large ones among the arrays."""
        return [array for array, (_, offset) in zip(arrays, self._offsets) if offset < 0]

    def copy_small(self, arrays: Sequence[np.ndarray], flat: np.ndarray, out: bool = False) -> None:
        """Copy the small ones among NumPy's arrays to the flat one, or from there."""
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
        """Return the large ones among CuPy's arrays, and a flat one with copies of the others."""
        flat = cuda.cupy().zeros(self.shapes[-1], np.float32)
        small = (array for array, (_, offset) in zip(arrays, self._offsets) if offset >= 0)
        for array, view in zip(small, self._small_views(flat)):
            view[...] = array
        return [*self.large(arrays), flat]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays in their order, the small ones as views of the flat one."""
        *large, flat = packed
        rest, views = iter(large), iter(self._small_views(flat))
        return [next(rest if offset < 0 else views) for _, offset in self._offsets]

    def _small_views(self, flat: Any) -> list[Any]:
        return [flat[start : start + prod(shape)].reshape(shape) for shape, start in self._offsets if start >= 0]


packing_of_shapes = lru_cache(maxsize=64)(Packing)


def packing_of(arrays: Sequence[Any]) -> Packing:
    """Return the packing of arrays like these."""
    return packing_of_shapes(tuple(array.shape for array in arrays))
