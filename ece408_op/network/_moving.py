"""More operators that move values: expand_dims and squeeze, slice_axis and SliceChannel (split), UpSampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, axis_of, choice, integer, sizes
from ._shaping import View


@dataclass(frozen=True)
class OneLong(View):
    """expand_dims: one more axis, of length 1. squeeze: the array without some of those, by default without all."""

    names = ("expand_dims", "squeeze")
    axis: tuple[int, ...] = sizes()

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        x = shapes[0]
        if self.op == "expand_dims":
            axis = axis_of(self.axis[0], len(x) + 1)
            return *x[:axis], 1, *x[axis:]
        axes = [axis_of(axis, len(x)) for axis in self.axis] or [axis for axis, length in enumerate(x) if length == 1]
        if any(x[axis] != 1 for axis in axes):
            raise Unsupported(f"axis: expected axes of length 1 of {x}, got {self.axis}")
        return tuple(length for axis, length in enumerate(x) if axis not in axes) or (1,)

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
        axis = axis_of(self.axis, len(x))
        start, stop, _ = slice(self.begin, self.end).indices(x[axis])
        if self.op == "SliceChannel":
            length = x[axis] // self.num_outputs
            start, stop = self.index * length, (self.index + 1) * length
        if start >= stop or x[axis] % self.num_outputs:
            raise Unsupported(f"axis: expected a length with such a part, got {x[axis]}")
        return *(slice(None) for _ in range(axis)), slice(start, stop)

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        part = self._of(shapes[0])
        return *shapes[0][: len(part) - 1], part[-1].stop - part[-1].start, *shapes[0][len(part) :]

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

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        if len(shapes[0]) != 4:
            raise Unsupported(f"data: expected 4 dimensions, got shape {shapes[0]}")
        return *shapes[0][:2], *(length * self.scale for length in shapes[0][2:])

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out[...] = inputs[0].repeat(self.scale, axis=2).repeat(self.scale, axis=3)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x = given.inputs[0].shape
        return [gradient.reshape(*x[:3], self.scale, x[3], self.scale).sum(axis=(3, 5))]
