"""More operators that move values: expand_dims and squeeze, slice_axis and SliceChannel (split), UpSampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, choice, integer, sizes
from ._shaping import View


@dataclass(frozen=True)
class OneLong(View):
    """expand_dims: one more axis, of length 1. squeeze: the array without some of those, by default without all."""

    names = ("expand_dims", "squeeze")
    axis: tuple[int, ...] = sizes()

    def mixes_images(self, dimensions: int) -> bool:
        return not self.axis  # which axes have length 1 depends on the number of images


@dataclass(frozen=True)
class Part(Operator):
    """A part along an axis: ``begin`` to before ``end``, or of ``num_outputs`` parts that of the node's ``index``."""

    names = ("slice_axis", "SliceChannel")
    axis: int = integer(1)
    begin: int = integer(0)
    end: int | None = integer(None)
    num_outputs: int = integer(1)
    squeeze_axis: str = choice("False")
    index: int = 0

    def _of(self, x: Shape) -> tuple[slice, ...]:
        """Return the part of an array of shape x, the axis last."""
        axis = self.axis % len(x)
        start, stop, _ = slice(self.begin, self.end).indices(x[axis])
        if self.op == "SliceChannel":
            length = x[axis] // self.num_outputs
            start, stop = self.index * length, (self.index + 1) * length
        return *(slice(None) for _ in range(axis)), slice(start, stop)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out[...] = inputs[0][self._of(inputs[0].shape)]

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        found = arrays.xp.zeros(given.inputs[0].shape, np.float32)
        found[self._of(found.shape)] = gradient
        return [found]


@dataclass(frozen=True)
class UpSampling(Operator):
    """Each element as ``scale`` x ``scale`` equal ones."""

    names = ("UpSampling",)
    accepted = ("num_filter", "multi_input_mode")
    scale: int = integer()
    sample_type: str = choice("nearest")

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out[...] = inputs[0].repeat(self.scale, axis=2).repeat(self.scale, axis=3)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x = given.inputs[0].shape
        return [gradient.reshape(*x[:3], self.scale, x[3], self.scale).sum(axis=(3, 5))]
