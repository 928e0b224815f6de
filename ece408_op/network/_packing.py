"""Small arrays one after another in one buffer: Python takes about 50 microseconds per copy, whatever its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, round_up

from ._definition import Shape

#: The most bytes of a small array.
_SMALL = 256 << 10


class Packing:
    """Float32 arrays of these shapes as the large ones among them and, last, a flat one with all others."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        #: The shape of each array, and where it begins in the flat one, -1 for a large one.
        self._places: list[tuple[Shape, int]] = []
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= _SMALL
            self._places.append((tuple(shape), size if small else -1))
            size += round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
        # Never empty, so that there is always something to copy.
        self.shapes = [*(shape for shape, start in self._places if start < 0), (max(1, size),)]

    def packed(self, arrays: Sequence[Any], empty: Callable[[Shape, Any], Any]) -> list[Any]:
        """Return the large arrays and a flat copy of the others, which ``empty`` allocates."""
        flat = empty(self.shapes[-1], np.float32)
        for array, part in zip(arrays, self.views([None] * len(self._places), flat)):
            if part is not None:
                part[...] = array
        return [*(array for array, (_, start) in zip(arrays, self._places) if start < 0), flat]

    def unpacked(self, packed: Sequence[Any]) -> list[Any]:
        """Return the arrays in their order, the small ones as views of the flat one."""
        *large, flat = packed
        rest = iter(large)
        return self.views([next(rest) if start < 0 else None for _, start in self._places], flat)

    def views(self, large: Sequence[Any], flat: Any) -> list[Any]:
        """Return the arrays in their order: the large ones as given, the others as views of the flat one."""
        return [
            array if start < 0 else flat[start : start + prod(shape)].reshape(shape)
            for array, (shape, start) in zip(large, self._places)
        ]


__all__ = ("Packing",)
