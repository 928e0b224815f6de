"""More operators that move values: expand_dims and squeeze, slice_axis and SliceChannel (split), resampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, choice, flag, integer, sizes
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


@dataclass(frozen=True)
class Resampling(Operator):
    """Other numbers of rows and columns, by a matrix for each axis: means of windows, or linear interpolation."""

    names = ("_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D")
    output_size: tuple[int, ...] = sizes()
    height: int = integer(1)
    width: int = integer(1)
    mode: str = choice("size")
    align_corners: bool = flag(True)

    def _factors(self, xp: Any, length: int, outputs: int) -> Any:
        """Return the factor of each element of an axis for each output, (outputs, length), made on the GPU."""
        places, elements = xp.arange(outputs).reshape(-1, 1), xp.arange(length)
        if "Resize" not in self.op:
            inside = (elements >= places * length // outputs) & (elements * outputs < (places + 1) * length)
            return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)
        if self.align_corners:
            positions = places * ((length - 1) / max(1, outputs - 1))
        else:
            step = length / outputs if outputs > 1 else 0  # as in MXNet: a single output is the first element
            positions = xp.clip((places + 0.5) * step - 0.5, 0, length - 1)
        return xp.maximum(1 - xp.absolute(elements - positions), 0).astype(np.float32)

    def _resample(self, arrays: Arrays, x: Any, out: Any, rows: Any, columns: Any) -> None:
        """Fill out with rows (p, h) times x (n, c, h, w) times columns (w, q)."""
        between = arrays.xp.empty((x.shape[0] * x.shape[1], x.shape[2], out.shape[3]), np.float32)
        arrays.matmul(x.reshape(-1, *x.shape[2:]), columns[None], between)
        arrays.matmul(rows[None], between, out.reshape(-1, *out.shape[2:]))

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        rows, columns = (self._factors(arrays.xp, *pair) for pair in zip(inputs[0].shape[2:], out.shape[2:]))
        self._resample(arrays, inputs[0], out, rows, columns.T)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x, found = given.inputs[0], arrays.xp.empty(given.inputs[0].shape, np.float32)
        rows, columns = (self._factors(arrays.xp, *pair) for pair in zip(x.shape[2:], gradient.shape[2:]))
        self._resample(arrays, gradient, found, rows.T, columns)
        return [found]
