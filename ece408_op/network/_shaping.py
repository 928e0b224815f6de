"""Operators that reshape, move, join, slice, resample or reduce values, and Dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, choice, flag, integer, number, pair, sizes
from ._elementwise import reduced_to


class Identity(Operator):
    """The same elements in the same memory; BlockGrad has the gradient zero."""

    names: ClassVar[tuple[str, ...]] = ("_copy", "BlockGrad", "Flatten")
    view = True

    @property
    def is_loss(self) -> bool:
        return self.op == "BlockGrad"

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [None if self.is_loss else gradient.reshape(given.inputs[0].shape)]


@dataclass(frozen=True)
class Dropout(Identity):
    """Dropout (Srivastava et al., 2014): in training, 0 with probability p, else x / (1 - p); x at inference.

    All elements along ``axes`` share one random number.
    """

    names = ("Dropout",)
    p: float = number(0.5)
    axes: tuple[int, ...] = sizes()
    mode: str = choice("training")

    def train(self, arrays: Arrays, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill ``out``, and return the factors, 0 or 1 / (1 - p)."""
        xp, keep = arrays.xp, 1 - self.p
        shape = tuple(1 if axis in self.axes else length for axis, length in enumerate(out.shape))
        kept = random_bits(xp, prod(shape), seed) < np.float64(keep * 2**32)
        mask = kept.reshape(shape) * np.float32(1 / keep if keep > 0 else 0)
        xp.multiply(inputs[0], mask, out=out)
        return mask

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [gradient * given.saved]


def random_bits(xp: Any, count: int, seed: int) -> Any:
    """Return ``count`` uint32 random numbers, which depend only on the seed.

    Murmur3's finalizer (A. Appleby) is applied twice to an element's number, each time after an xor with half the seed.
    """
    bits = xp.arange(count, dtype=np.uint32)
    for key in (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF):
        bits = bits ^ np.uint32(key)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
        bits = bits ^ (bits >> np.uint32(16))
    return bits


@dataclass(frozen=True)
class Reshape(Identity):
    """The same elements in another shape, which MXNet infers: from codes such as 0 and -1, or from a second input."""

    names = ("Reshape", "reshape_like")
    variadic = True
    accepted = ("order", "target_shape", "keep_highest", "lhs_begin", "lhs_end", "rhs_begin", "rhs_end")
    shape: tuple[int, ...] = sizes()
    reverse: bool = flag(False)

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if prod(output) != prod(shapes[0]):
            raise Unsupported(f"shape: expected {prod(shapes[0])} elements, as {shapes[0]} has, got {output}")


@dataclass(frozen=True)
class ExpandOrSqueeze(Identity):
    """expand_dims: insert an axis of length 1. squeeze: remove axes of length 1, by default all of them."""

    names = ("expand_dims", "squeeze")
    axis: tuple[int, ...] = sizes()

    def mixes_images(self, dimensions: int) -> bool:
        return not self.axis  # which axes have length 1 depends on the number of images


@dataclass(frozen=True)
class Transpose(Operator):
    """transpose: the axes in another order, by default reversed. SwapAxis: two axes exchanged."""

    names = ("transpose", "SwapAxis")
    moves = True
    axes: tuple[int, ...] = sizes()
    dim1: int = integer(0)
    dim2: int = integer(0)

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if len(set(self._order(len(output)))) != len(output):
            raise Unsupported(f"axes: expected each of {len(output)} dimensions once, got {self.axes}")

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out[...] = inputs[0].transpose(self._order(out.ndim))

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [arrays.xp.ascontiguousarray(gradient.transpose(np.argsort(self._order(gradient.ndim)).tolist()))]

    def _order(self, dimensions: int) -> tuple[int, ...]:
        if self.op == "SwapAxis":
            one, other = self.dim1 % dimensions, self.dim2 % dimensions
            return tuple({one: other, other: one}.get(axis, axis) for axis in range(dimensions))
        return tuple(axis % dimensions for axis in self.axes) or tuple(reversed(range(dimensions)))


@dataclass(frozen=True)
class Concat(Operator):
    """Arrays joined along an axis."""

    names = ("Concat",)
    variadic = moves = True
    dim: int = integer(1)

    def _parts(self, whole: Any, inputs: Sequence[Any]) -> Iterator[Any]:
        """Yield, for each input, the view of its part of ``whole``, an array of the output's shape."""
        start = 0
        for one in inputs:
            stop = start + one.shape[self.dim]
            yield whole.swapaxes(0, self.dim)[start:stop].swapaxes(0, self.dim)
            start = stop

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        for part, one in zip(self._parts(out, inputs), inputs):
            part[...] = one

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [arrays.xp.ascontiguousarray(part) for part in self._parts(gradient, given.inputs)]


class Part(Operator):
    """The base class of operators that return a part of the first input; the second may have the shape of the part."""

    moves = True

    @property
    def variadic(self) -> bool:  # type: ignore[override] # a class variable of Operator
        return self.op in ("Crop", "slice_like")

    def part(self, x: Shape, out: Shape) -> tuple[slice, ...]:
        """Return the index of the part, of shape ``out``, in an array of shape x."""
        raise NotImplementedError

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        part = inputs[0][self.part(inputs[0].shape, out.shape)]
        out.reshape(part.shape)[...] = part

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        found = arrays.xp.zeros(given.inputs[0].shape, np.float32)
        part = found[self.part(found.shape, gradient.shape)]
        part[...] = gradient.reshape(part.shape)
        return [found, *[None] * (len(wanted) - 1)]


@dataclass(frozen=True)
class Slice(Part):
    """slice_axis: elements ``begin`` to before ``end`` along an axis. SliceChannel: part ``index`` of ``num_outputs``.

    ``squeeze_axis`` removes the axis, along which each part must have the length 1. Crop: rows and columns from
    ``offset`` on, or the middle ones, as many as ``h_w`` says or the second input has.
    """

    names = ("slice_axis", "SliceChannel", "Crop")
    accepted = ("h_w",)
    axis: int = integer(1)
    begin: int = integer(0)
    end: int | None = integer(None)
    num_outputs: int = integer(1)
    squeeze_axis: bool = flag(False)
    offset: tuple[int, int] = pair(0)
    center_crop: bool = flag(False)
    index: int = 0

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if self.op == "Crop":  # MXNet checks this only in its forward pass
            for part, length in zip(self.part(shapes[0], output)[2:], shapes[0][2:]):
                if not 0 <= part.start <= part.stop <= length:
                    raise Unsupported(f"expected rows and columns inside {shapes[0]}, got {part.start} to {part.stop}")

    def part(self, x: Shape, out: Shape) -> tuple[slice, ...]:
        if self.op == "Crop":
            starts = [(n - m) // 2 for n, m in zip(x[2:], out[2:])] if self.center_crop else self.offset
            return slice(None), slice(None), *(slice(start, start + n) for start, n in zip(starts, out[2:]))
        axis = self.axis % len(x)
        start, stop, _ = slice(self.begin, self.end).indices(x[axis])
        if self.op == "SliceChannel":
            length = x[axis] // self.num_outputs
            start, stop = self.index * length, (self.index + 1) * length
        return *(slice(None) for _ in range(axis)), slice(start, stop)


@dataclass(frozen=True)
class Slices(Part):
    """slice: every ``step``-th element from ``begin`` to before ``end`` of each axis. slice_like: the first elements.

    The second input of slice_like has the shape of the part, or its lengths along some axes.
    """

    names = ("slice", "slice_like")
    accepted = ("axes",)
    begin: tuple[int | None, ...] = sizes("None")
    end: tuple[int | None, ...] = sizes("None")
    step: tuple[int | None, ...] = sizes("None")

    def part(self, x: Shape, out: Shape) -> tuple[slice, ...]:
        if self.op == "slice_like":
            return tuple(slice(length) for length in out)
        return tuple(slice(*one) for one in zip(self.begin, self.end, self.step or [None] * len(self.begin)))

    def mixes_images(self, dimensions: int) -> bool:
        return self.step[:1] == (-1,)


@dataclass(frozen=True)
class Pad(Operator):
    """Elements added before and after each axis: a constant, the edge's element, or the elements next to it mirrored.

    ``pad_width`` has their numbers: before and after the first axis, and so on.
    """

    names = ("Pad",)
    moves = True
    mode: str = choice("constant", "edge", "reflect")
    pad_width: tuple[int, ...] = sizes()
    constant_value: float = number(0.0)

    def check(self) -> None:
        # MXNet takes negative numbers, but its gradient then reads outside its array.
        if len(self.pad_width) not in (8, 10) or min(self.pad_width) < 0:
            raise Unsupported(f"pad_width: expected 8 or 10 whole numbers of at least 0, got {self.pad_width}")

    def _parts(self, x: Shape) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the indices of parts of the output, and those of the parts of an array of shape x that fill them."""
        axes, edge = [], self.mode == "edge"
        for n, before, after in zip(x, self.pad_width[::2], self.pad_width[1::2]):
            axes.append([(slice(before, before + n), slice(None))])
            if before and self.mode != "constant":
                axes[-1].append((slice(before), slice(1) if edge else slice(before, 0, -1)))
            if after and self.mode != "constant":
                mirrored = slice(before + n + after - 1, before + n - 1, -1)
                axes[-1].append((mirrored, slice(n - 1, n) if edge else slice(n - 1 - after, n - 1)))
        for parts in product(*axes):
            yield tuple(part for part, _ in parts), tuple(source for _, source in parts)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        if self.mode == "constant":
            out[...] = np.float32(self.constant_value)
        for part, source in self._parts(inputs[0].shape):
            out[part] = inputs[0][source]

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        found = arrays.xp.zeros(given.inputs[0].shape, np.float32)
        for part, source in self._parts(found.shape):
            place = found[source]
            place += reduced_to(arrays.xp, gradient[part], place.shape)
        return [found]


@dataclass(frozen=True)
class Repeat(Operator):
    """Elements repeated along axes, to a shape that MXNet infers: along one, rows and columns, or by broadcasting."""

    names = ("repeat", "UpSampling", "broadcast_like", "broadcast_to", "broadcast_axis")
    moves = True
    accepted = ("scale", "num_filter", "multi_input_mode", "repeats", "axis", "size", "shape", "lhs_axes", "rhs_axes")
    sample_type: str = choice("nearest")

    def used_inputs(self) -> tuple[str, ...]:
        return ("lhs", "rhs") if self.op == "broadcast_like" else self.inputs

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if len(output) != len(shapes[0]):
            raise Unsupported("axis: expected a whole number, got none")

    def _split(self, x: Shape, out: Shape) -> Shape:
        """Return the length of each axis of x, and the repeats along it."""
        return tuple(length for n, m in zip(x, out) for length in (n, m // max(n, 1)))

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x = inputs[0]
        out.reshape(self._split(x.shape, out.shape))[...] = x.reshape(self._split(x.shape, x.shape))

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x = given.inputs[0].shape
        found = reduced_to(arrays.xp, gradient.reshape(self._split(x, gradient.shape)), self._split(x, x))
        return [found.reshape(x), *[None] * (len(wanted) - 1)]


@dataclass(frozen=True)
class Resampling(Operator):
    """Adaptive average pooling, or bilinear interpolation, to another image size: one matrix product per axis.

    In the mode "like", a second input has the size.
    """

    names = ("_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D")
    variadic = True
    accepted = ("scale_height", "scale_width")
    output_size: tuple[int, ...] = sizes()
    height: int = integer(1)
    width: int = integer(1)
    mode: str = choice("size", "like")
    align_corners: bool = flag(True)

    def _factors(self, xp: Any, length: int, outputs: int) -> Any:
        """Return the matrix (outputs, length), float32 and made on the GPU, that resamples an axis."""
        places, elements = xp.arange(outputs).reshape(-1, 1), xp.arange(length)
        if "Resize" not in self.op:
            inside = (elements >= places * length // outputs) & (elements * outputs < (places + 1) * length)
            return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)
        whole, parts, middle = (length - 1, outputs - 1, 0.0) if self.align_corners else (length, outputs, 0.5)
        # As in MXNet, positions are rounded to float32, and a single output is the first element.
        step = float(np.float32(whole) / np.float32(parts)) if outputs > 1 else 0.0
        positions = xp.clip(((places + middle) * step - middle).astype(np.float32), 0, length - 1)
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
        return [found, *[None] * (len(wanted) - 1)]


@dataclass(frozen=True)
class Reduction(Operator):
    """The mean, sum, maximum or minimum over ``axis``, or with ``exclude`` over all other axes; all by default."""

    names = ("mean", "sum", "max", "min")
    axis: tuple[int, ...] = sizes()
    exclude: bool = flag(False)
    keepdims: bool = flag(False)

    def _axes(self, dimensions: int) -> tuple[int, ...]:
        named = {axis % dimensions for axis in self.axis}
        if self.exclude:
            return tuple(axis for axis in range(dimensions) if axis not in named)
        return tuple(sorted(named)) or tuple(range(dimensions))

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out[...] = getattr(arrays.xp, self.op)(inputs[0], axis=self._axes(inputs[0].ndim)).reshape(out.shape)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x, axes = given.inputs[0], self._axes(given.inputs[0].ndim)
        lengths = [1 if axis in axes else length for axis, length in enumerate(x.shape)]
        if self.op in ("max", "min"):  # as in MXNet, all elements equal to the result get the gradient
            return [gradient.reshape(lengths) * (x == given.out.reshape(lengths))]
        shares = gradient.reshape(lengths) * np.float32(gradient.size / x.size if self.op == "mean" else 1)
        return [arrays.xp.ascontiguousarray(arrays.xp.broadcast_to(shares, x.shape))]

    def mixes_images(self, dimensions: int) -> bool:
        return 0 in self._axes(dimensions)
