"""Small arrays one after another in one buffer: Python takes about 50 microseconds per copy, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime.launch import SCRATCH_ALIGNMENT, round_up

from ._definition import Shape

#: The most bytes of a small array.
SMALL_BYTES = 256 << 10


class Packing:
    """Float32 arrays of these shapes as the large ones among them and, last, a flat one with all others."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        #: The shape of each array, and where it begins in the flat one, -1 for a large one.
        self._places: list[tuple[Shape, int]] = []
        #: What fills the flat array between the small ones.
        self._gaps: list[np.ndarray] = []
        size = 0
        for shape in shapes:
            small = ITEM_BYTES * prod(shape) <= SMALL_BYTES
            self._places.append((tuple(shape), size if small else -1))
            room = round_up(prod(shape), SCRATCH_ALIGNMENT // ITEM_BYTES) if small else 0
            self._gaps.append(np.zeros(max(0, room - prod(shape)), np.float32))
            size += room
        # Never empty, so that there is always something to copy.
        self.shapes = [*(shape for shape, start in self._places if start < 0), (max(1, size),)]

    def large(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the large ones among the arrays."""
        return [array for array, (_, start) in zip(arrays, self._places) if start < 0]

    def pack_on_host(self, arrays: Sequence[np.ndarray], flat: np.ndarray) -> None:
        """Fill the flat array with copies of the small ones."""
        small = [(array, gap) for array, gap, (_, start) in zip(arrays, self._gaps, self._places) if start >= 0]
        pieces = [piece for array, gap in small for piece in (array.reshape(-1), gap)]
        if self.shapes[-1] != (1,):
            np.concatenate(pieces, out=flat)
        else:
            flat[...] = 0

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


@lru_cache(maxsize=64)
def packing_of(shapes: tuple[Shape, ...]) -> Packing:
    """Return the packing of arrays of these shapes."""
    return Packing(shapes)


__all__ = ("SMALL_BYTES", "packing_of")
