"""The layers with weights: Convolution and New, FullyConnected, BatchNorm; and L2Normalization.

B batch   C channels   H, W rows and columns   M filters   G groups   K, L rows and columns of a filter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import ProblemError
from ece408_op.graph import node_conversion
from ece408_op.problem import ITEM_BYTES, ConvProblem

from ._definition import (
    Arrays,
    Operator,
    Shape,
    Trained,
    Unsupported,
    axis_of,
    check_shape,
    choice,
    flag,
    integer,
    number,
    pair,
)

#: The bytes of unrolled columns in one step of the convolution by NumPy's functions, unless one image has more.
COLUMN_BYTES = 1 << 28


@dataclass(frozen=True)
class Convolution(Operator):
    """Convolution of x (B, C, H, W) with w (M, C / G, K, L), and a bias (M,); then a BatchNorm, then an addition."""

    names = ("Convolution",)
    inputs = ("data", "weight", "bias")
    auxiliary = ("moving_mean", "moving_var")
    takes_epilogue = True
    kernel: tuple[int, int] = pair()
    num_filter: int = integer()
    stride: tuple[int, int] = pair(1)
    pad: tuple[int, int] = pair(0)
    dilate: tuple[int, int] = pair(1)
    num_group: int = integer(1)
    no_bias: bool = flag(False)
    layout: str = choice("NCHW")
    #: The kernel and the precision that a ``New`` node asks for.
    impl: str = dispatch.AUTO
    precision: str = "float32"
    #: What fusion adds: a BatchNorm of the filters with stored statistics, and an array of the output's shape.
    norm: BatchNorm | None = None
    residual: bool = False

    def check(self) -> None:
        sizes = (*self.kernel, *self.stride, *self.dilate, self.num_filter, self.num_group)
        if min(sizes) < 1 or min(self.pad) < 0:
            raise Unsupported(f"expected positive sizes, got {self}")

    def used_inputs(self) -> tuple[str, ...]:
        norm = self.norm.inputs[1:] if self.norm else ()
        return (*self.inputs[: 2 if self.no_bias else 3], *norm, *(("residual",) if self.residual else ()))

    def followed_by(self, other: Operator, first: bool, constant: bool) -> Operator | None:
        if isinstance(other, BatchNorm) and first and constant and other.axis == 1 and not (self.norm or self.residual):
            return replace(self, norm=other)
        return replace(self, residual=True) if other.op == "elemwise_add" and not self.residual else None

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        x, groups = shapes[0], self.num_group
        if len(x) != 4:
            raise Unsupported(f"data: expected 4 dimensions, got shape {x}")
        if x[1] % groups or self.num_filter % groups:
            raise Unsupported(f"num_group: expected a divisor of {x[1]} channels and {self.num_filter} filters")
        check_shape("weight", (self.num_filter, x[1] // groups, *self.kernel), shapes[1])
        if not self.no_bias:
            check_shape("bias", (self.num_filter,), shapes[2])
        for name, shape in zip(self.used_inputs(), shapes):
            if self.norm and name in self.norm.inputs[1:]:
                check_shape(name, (self.num_filter,), shape)
        rows, columns = (
            (length + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1
            for length, pad, dilate, kernel, stride in zip(x[2:], self.pad, self.dilate, self.kernel, self.stride)
        )
        if rows < 1 or columns < 1:
            raise Unsupported(f"kernel: expected at most the image's {x[2]} x {x[3]} with padding, got {self.kernel}")
        output = (x[0], self.num_filter, rows, columns)
        if self.residual:
            check_shape("rhs", output, shapes[-1])
        return output

    def problem(self, x: Shape) -> ConvProblem:
        """Return the layer for our kernels, for data of shape x."""
        return _problem(x, self.num_filter, *self.kernel, self.stride, self.pad, self.dilate, self.num_group)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        """Unroll the windows of some images into columns, and multiply."""
        xp, groups = arrays.xp, self.num_group
        for part, images in self._parts(arrays, inputs[0], out.shape):
            # For each image and group (M / G, C / G K L) times (C / G K L, OH OW).
            unrolled = self._windows(arrays, part, out.shape).reshape(len(part) * groups, -1, prod(out.shape[2:]))
            target = out[images].reshape(len(part) * groups, self.num_filter // groups, -1)
            arrays.matmul(self._filters(arrays, inputs[1], len(part)), unrolled, target)
        if not self.no_bias:
            xp.add(out, inputs[2].reshape(1, -1, 1, 1), out=out)
        if self.norm:
            self.norm.compute(arrays, (out, *self.norm_inputs(inputs)), out)
        if self.residual:
            xp.add(out, inputs[-1], out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Multiply the unrolled windows, and add the products of the other multiplication to the windows."""
        (x, w, *_), xp, groups = given.inputs, arrays.xp, self.num_group
        dx, dw = xp.zeros(x.shape, np.float32), xp.zeros(w.shape, np.float32)
        (top, left), (rows, columns) = self.pad, x.shape[2:]
        for part, images in self._parts(arrays, x, gradient.shape):
            shape = (len(part) * groups, -1, prod(gradient.shape[2:]))
            windows, dy = self._windows(arrays, part, gradient.shape), gradient[images].reshape(shape)
            if wanted[1]:
                unrolled = windows.reshape(shape)
                products = xp.empty((len(unrolled), dy.shape[1], unrolled.shape[1]), np.float32)
                arrays.matmul(dy, unrolled.transpose(0, 2, 1), products)
                dw += products.reshape(len(part), *w.shape).sum(axis=0)
            if wanted[0]:
                filters = self._filters(arrays, w, len(part)).transpose(0, 2, 1)
                products = xp.empty((len(dy), filters.shape[1], dy.shape[2]), np.float32)
                arrays.matmul(filters, dy, products)
                padded = xp.zeros(part.shape, np.float32)
                taps, products = self._windows(arrays, padded, gradient.shape), products.reshape(windows.shape)
                for p, q in product(*map(range, self.kernel)):
                    taps[:, :, p, q] += products[:, :, p, q]
                dx[images] = padded[:, :, top : top + rows, left : left + columns]
        found = [dx if wanted[0] else None, dw if wanted[1] else None]
        return found if self.no_bias else [*found, self.bias_gradient(arrays, gradient, wanted)]

    @staticmethod
    def bias_gradient(arrays: Arrays, gradient: Any, wanted: Sequence[bool]) -> Any:
        """Return the gradient to the bias."""
        return _channel_sum(arrays, gradient, 1) if wanted[2] else None

    def _parts(self, arrays: Arrays, x: Any, output: Shape) -> Iterator[tuple[Any, slice]]:
        """Yield some images with zeros around them, and which these are: as many as COLUMN_BYTES allow."""
        length = x.shape[1] * prod(self.kernel)
        step = max(1, COLUMN_BYTES // (ITEM_BYTES * (length * prod(output[2:]) + length * self.num_filter)))
        (top, left), (rows, columns) = self.pad, x.shape[2:]
        for first in range(0, len(x), step):
            images = slice(first, first + step)
            part = x[images]
            if self.pad != (0, 0):
                part = arrays.xp.zeros((*part.shape[:2], rows + 2 * top, columns + 2 * left), np.float32)
                part[:, :, top : top + rows, left : left + columns] = x[images]
            yield part, images

    def _windows(self, arrays: Arrays, part: Any, output: Shape) -> Any:
        """Return every window of padded images, (b, C, K, L, OH, OW), without a copy."""
        (b, c, h, wide), (dh, dw), (sh, sw) = part.strides, self.dilate, self.stride
        shape, strides = (*part.shape[:2], *self.kernel, *output[2:]), (b, c, h * dh, wide * dw, h * sh, wide * sw)
        return arrays.xp.lib.stride_tricks.as_strided(part, shape, strides)

    def _filters(self, arrays: Arrays, w: Any, images: int) -> Any:
        """Return the filters as matrices (M / G, C / G K L), one for each image and group, or one for all."""
        groups = self.num_group
        filters = w.reshape(groups, self.num_filter // groups, -1)
        if groups == 1:
            return filters
        return arrays.xp.broadcast_to(filters, (images, *filters.shape)).reshape(-1, *filters.shape[1:])

    def folded(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Return filters and bias with the BatchNorm in them, computed in float64 and rounded once."""
        assert self.norm, "an operator that fusion gave a BatchNorm"
        scale, shift = self.norm.factors(self.norm_inputs(inputs))
        if not self.no_bias:
            shift = shift + inputs[2] * scale
        return (inputs[1] * scale.reshape(-1, 1, 1, 1)).astype(np.float32), shift.astype(np.float32)

    def norm_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return gamma, beta, mean and variance among the inputs."""
        first = 2 if self.no_bias else 3
        return inputs[first : first + 4]


class New(Convolution):
    """The package's operator, whose attributes ``plugin.attributes`` parses."""

    names = (node_conversion.NEW,)

    @classmethod
    def read(cls, op: str, attrs: Mapping[str, str]) -> Operator:
        try:
            given = node_conversion.parsed(attrs)
        except ProblemError as error:
            raise Unsupported(str(error)) from None
        if given.fuse is not None:
            raise Unsupported(f"fuse: expected none, got {given.fuse}; a network on the GPU fuses by itself")
        if "cpu" in (given.device, dispatch.device_of(given.impl, "gpu")):
            name, got = ("device", "cpu") if given.device == "cpu" else ("impl", given.impl)
            raise Unsupported(f"{name}: expected the GPU, got {got}; load or replace the layer with device='gpu'")
        own = {one.name: getattr(given, one.name) for one in fields(cls) if hasattr(given, one.name)}
        return cls(op, **own)


@dataclass(frozen=True)
class FullyConnected(Operator):
    """The product of x, flattened but for its first axis or, without ``flatten``, in its last axis, with w^T."""

    names = ("FullyConnected",)
    inputs = ("data", "weight", "bias")
    takes_epilogue = True
    num_hidden: int = integer()
    no_bias: bool = flag(False)
    flatten: bool = flag(True)

    def used_inputs(self) -> tuple[str, ...]:
        return self.inputs[: 2 if self.no_bias else 3]

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        x = shapes[0]
        if not x:
            raise Unsupported("data: expected at least one dimension, got shape ()")
        check_shape("weight", (self.num_hidden, prod(x[1:]) if self.flatten else x[-1]), shapes[1])
        if not self.no_bias:
            check_shape("bias", (self.num_hidden,), shapes[2])
        return (*(x[:1] if self.flatten else x[:-1]), self.num_hidden)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x, w = inputs[:2]
        transposed = arrays.xp.ascontiguousarray(w.T)
        arrays.matmul(x.reshape(1, -1, w.shape[1]), transposed[None], out.reshape(1, -1, self.num_hidden))
        if not self.no_bias:
            arrays.xp.add(out, inputs[2], out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        (x, w, *_), xp = given.inputs, arrays.xp
        dy = gradient.reshape(-1, self.num_hidden)
        found: list[Any] = [None] * len(wanted)
        if wanted[0]:
            found[0] = xp.empty(x.shape, np.float32)
            arrays.matmul(dy[None], w[None], found[0].reshape(1, -1, w.shape[1]))
        if wanted[1]:
            found[1] = xp.empty(w.shape, np.float32)
            arrays.matmul(dy.T[None], x.reshape(1, -1, w.shape[1]), found[1][None])
        if not self.no_bias and wanted[2]:
            found[2] = _channel_sum(arrays, dy, 1)
        return found


@dataclass(frozen=True)
class BatchNorm(Operator):
    """BatchNorm: y = gamma (x - mean) / sqrt(variance + eps) + beta along an axis.

    At inference, mean and variance are the stored ones; in training, the batch's (Ioffe and Szegedy, 2015). Fusion adds
    a relu in training, and the bias of the convolution before it as a last input: the batch's mean cancels that, so it
    changes the moving mean alone, and its gradient is zero.
    """

    names = ("BatchNorm",)
    inputs = ("data", "gamma", "beta", "moving_mean", "moving_var")
    auxiliary = ("moving_mean", "moving_var")
    inplace = takes_epilogue = True
    eps: float = number(1e-3)
    momentum: float = number(0.9)
    use_global_stats: bool = flag(False)
    fix_gamma: bool = flag(True)
    axis: int = integer(1)
    output_mean_var: str = choice("False")
    relu: bool = False
    bias: bool = False

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        channels = shapes[0][axis_of(self.axis, len(shapes[0]))]
        for name, shape in zip(self.inputs[1:], shapes[1:]):
            check_shape(name, (channels,), shape)
        return shapes[0]

    def factors(self, parameters: Sequence[Any]) -> tuple[Any, Any]:
        """Return scale and shift of each channel, in float64, from gamma, beta, mean and variance."""
        gamma, beta, mean, variance = (array.astype(np.float64) for array in parameters)
        scale = (variance + self.eps) ** -0.5
        if not self.fix_gamma:
            scale = scale * gamma
        return scale, beta - mean * scale

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        along = [1] * out.ndim
        along[self.axis] = -1
        scale, shift = (factor.astype(np.float32).reshape(along) for factor in self.factors(inputs[1:]))
        arrays.xp.multiply(inputs[0], scale, out=out)
        arrays.xp.add(out, shift, out=out)

    def train(self, arrays: Arrays, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Return the batch's mean and variance, or the stored ones with ``use_global_stats``, and new stored ones."""
        if self.use_global_stats:
            self.compute(arrays, inputs, out)
            return tuple(array.astype(np.float64) for array in inputs[3:])
        x, count = channels_second(inputs[0], self.axis), inputs[0].size // inputs[1].size
        zero = arrays.xp.zeros(inputs[1].size, np.float64)
        # In float64 the difference of squares is exact enough: float32 values have 24 bits.
        sums, squares = arrays.channel_sums(x, x, zero)
        mean = sums / count
        variance = arrays.xp.maximum(squares / count - mean * mean, 0)
        scale, shift = self.factors((*inputs[1:3], mean, variance))
        arrays.channel_mix((scale, zero, zero, shift), x, x, channels_second(out, self.axis))
        if self.relu:
            arrays.xp.maximum(out, np.float32(0), out=out)
        # The batch's count as 1 - momentum.
        keep, pairs = self.momentum, zip(inputs[3:], (mean + inputs[5] if self.bias else mean, variance))
        return mean, variance, *((keep * old + (1 - keep) * new).astype(np.float32) for old, new in pairs)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        gradient = gradient * (given.out > 0) if self.relu else gradient
        x, dy = (channels_second(array, self.axis) for array in (given.inputs[0], gradient))
        (gamma, (mean, variance, *_)), xp = (given.inputs[1], given.saved), arrays.xp
        inverse = (variance + self.eps) ** -0.5
        sums, products = arrays.channel_sums(dy, x, mean)
        dgamma = xp.zeros_like(inverse) if self.fix_gamma else products * inverse
        found = [None, dgamma.astype(np.float32), sums.astype(np.float32), None, None]
        if self.bias:
            found.append(xp.zeros(gamma.shape, np.float32))
        if wanted[0]:
            scale, zero = inverse if self.fix_gamma else inverse * gamma, xp.zeros_like(mean)
            share = 0 if self.use_global_stats else scale * (gamma.size / gradient.size)
            factors = (scale, -share * inverse**2 * products + zero, mean, -share * sums + zero)
            found[0] = xp.empty(gradient.shape, np.float32)
            arrays.channel_mix(factors, dy, x, channels_second(found[0], self.axis))
        return found

    def new_states(self, given: Trained) -> Mapping[int, Any]:
        """Return the moving mean and variance."""
        return dict(enumerate(given.saved[2:4], 3))


@dataclass(frozen=True)
class L2Normalization(Operator):
    """x / sqrt(sum x^2 + eps), summed over an image's elements (instance), its channels or its positions (spatial)."""

    names = ("L2Normalization",)
    eps: float = number(1e-10)
    mode: str = choice("instance", "channel", "spatial")

    def _sums(self, x: Any) -> Any:
        axes = {"instance": range(1, x.ndim), "channel": (1,), "spatial": range(2, x.ndim)}[self.mode]
        return x.sum(axis=tuple(axes), keepdims=True)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        arrays.xp.divide(inputs[0], arrays.xp.sqrt(self._sums(inputs[0] ** 2) + np.float32(self.eps)), out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        norms = arrays.xp.sqrt(self._sums(given.inputs[0] ** 2) + np.float32(self.eps))
        return [(gradient - given.out * self._sums(gradient * given.out)) / norms]


def channels_second(x: Any, axis: int) -> Any:
    """Return a view (n, channels, m) of a C-contiguous array with channels along an axis."""
    axis %= x.ndim
    return x.reshape(prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]))


@lru_cache(maxsize=1024)
def _problem(x: Shape, *attributes: Any) -> ConvProblem:
    batch, channels, rows, columns = x
    return ConvProblem(batch, channels, rows, columns, *attributes)


def _channel_sum(arrays: Arrays, x: Any, axis: int) -> Any:
    """Return the sums of all but one axis, summed in float64."""
    x = channels_second(x, axis)
    return arrays.channel_sums(x, x, arrays.xp.zeros(x.shape[1], np.float64))[0].astype(np.float32)
