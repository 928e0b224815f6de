"""The layers: Convolution and New, Deconvolution, FullyConnected, BatchNorm, Pooling, L2Normalization and InstanceNorm.

B batch   C channels   H, W rows and columns   M filters   G groups   K, L rows and columns of a filter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import ProblemError
from ece408_op.graph import node_conversion
from ece408_op.problem import ConvProblem

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, choice, disabled, flag, integer, number, pair

_problem = lru_cache(maxsize=1024)(ConvProblem)


class Weighted(Operator):
    """A layer with weights and, unless ``no_bias``, a bias. Fusion can add a BatchNorm and a sum to a Convolution."""

    inputs = ("data", "weight", "bias")
    takes_epilogue = True
    no_bias: bool = False
    #: The implementation that a ``New`` node names.
    impl: str = dispatch.AUTO
    #: Added by fusion: a BatchNorm of the filters with stored statistics, and an array of the output's shape.
    norm: BatchNorm | None = None
    residual: bool = False

    def used_inputs(self) -> tuple[str, ...]:
        norm = self.norm.inputs[1:] if self.norm else ()
        return (*self.inputs[: 2 if self.no_bias else 3], *norm, *(("residual",) if self.residual else ()))

    def folded(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Return weights and bias (or None), with the BatchNorm folded in, computed in float64 and rounded once."""
        w, bias = inputs[1], None if self.no_bias else inputs[2]
        if self.norm is None:
            return w, bias
        scale, shift = self.norm.factors(self.norm_inputs(inputs))
        shift = shift if bias is None else shift + bias * scale
        return self._scaled(w, scale).astype(np.float32), shift.astype(np.float32)

    def _scaled(self, w: Any, scale: Any) -> Any:
        """Return the filters times the factor of each channel of the output."""
        return w * scale.reshape(-1, 1, 1, 1)

    def norm_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return gamma, beta, mean and variance among the inputs."""
        first = 2 if self.no_bias else 3
        return inputs[first : first + 4]


@dataclass(frozen=True)
class Convolution(Weighted):
    """Convolution of x (B, C, H, W) with w (M, C / G, K, L), and a bias (M,); fusion can add a BatchNorm and a sum."""

    names = ("Convolution",)
    auxiliary = ("moving_mean", "moving_var")
    kernel: tuple[int, int] = pair()
    num_filter: int = integer()
    stride: tuple[int, int] = pair(1)
    pad: tuple[int, int] = pair(0)
    dilate: tuple[int, int] = pair(1)
    num_group: int = integer(1)
    no_bias: bool = flag(False)
    layout: str = choice("NCHW")
    #: The implementation and the precision that a ``New`` node names.
    impl: str = dispatch.AUTO
    precision: str = "float32"
    norm: BatchNorm | None = None
    residual: bool = False

    def check(self) -> None:
        sizes = (*self.kernel, *self.stride, *self.dilate, self.num_filter, self.num_group)
        if min(sizes) < 1 or min(self.pad) < 0:
            raise Unsupported(f"expected positive sizes, got {self}")

    def multiply(self, arrays: Arrays, x: Any, w: Any, out: Any) -> None:
        """Fill ``out`` for 1 x 1 filters and no other attributes: per image, filters (M, C) times pixels (C, H W)."""
        batch, filters = out.shape[:2]
        arrays.matmul(w.reshape(1, filters, -1), x.reshape(batch, x.shape[1], -1), out.reshape(batch, filters, -1))

    def problem(self, x: Shape) -> ConvProblem:
        """Return the convolution problem for the package's kernels, for data of shape x."""
        return _problem(*x, self.num_filter, *self.kernel, self.stride, self.pad, self.dilate, self.num_group)


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
class Deconvolution(Convolution):
    """The data gradient of a Convolution with w (C, M / G, K, L), given x as the gradient to its output; then a bias.

    This is MXNet's Deconvolution, Gluon's Conv2DTranspose. ``adj`` rows and columns are added at the output's end. A
    given ``target_shape`` is the output's rows and columns, and determines ``pad`` and ``adj``.
    """

    names = ("Deconvolution",)
    no_bias: bool = flag(True)
    adj: tuple[int, int] = pair(0)
    target_shape: tuple[int, int] = pair(0)

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if not all(output[1:]):
            raise Unsupported(f"pad, target_shape: expected at least one row and column of output, got {output[2:]}")

    def problem(self, x: Shape) -> ConvProblem:
        axes = zip(x[2:], self.stride, self.dilate, self.kernel)
        covered = [(length - 1) * stride + dilate * (size - 1) + 1 for length, stride, dilate, size in axes]
        pad: Shape = self.pad
        image: Shape = self.target_shape
        if any(image):
            pad = tuple((whole - inner + 1) // 2 for whole, inner in zip(covered, image))
        else:
            image = tuple(whole - 2 * outer + added for whole, outer, added in zip(covered, pad, self.adj))
        y = (x[0], self.num_filter, *image)
        return _problem(*y, x[1], *self.kernel, self.stride, pad, self.dilate, self.num_group).data_gradient

    def _scaled(self, w: Any, scale: Any) -> Any:
        grouped = w.reshape(self.num_group, -1, *w.shape[1:])
        return (grouped * scale.reshape(self.num_group, 1, -1, 1, 1)).reshape(w.shape)


@dataclass(frozen=True)
class FullyConnected(Weighted):
    """x w^T + bias; ``flatten`` reshapes x to (B, length), else w^T applies to the last axis of x."""

    names = ("FullyConnected",)
    num_hidden: int = integer()
    no_bias: bool = flag(False)
    flatten: bool = flag(True)

    def multiply(self, arrays: Arrays, x: Any, w: Any, out: Any) -> None:
        """Fill ``out`` with the output before the bias."""
        arrays.matmul(x.reshape(1, -1, w.shape[1]), w[None], out.reshape(1, -1, self.num_hidden), transposed=True)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        self.multiply(arrays, inputs[0], inputs[1], out)
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
            found[2] = xp.sum(dy, axis=0, dtype=np.float64).astype(np.float32)
        return found


@dataclass(frozen=True)
class BatchNorm(Operator):
    """BatchNorm: y = gamma (x - mean) / sqrt(variance + eps) + beta along an axis.

    At inference, mean and variance are the stored ones; in training, the batch's (Ioffe and Szegedy, 2015). Fusion in
    training adds the preceding convolution's bias as a last input: subtracting the batch's mean cancels the bias, which
    therefore changes only the moving mean, and its gradient is zero.
    """

    names = ("BatchNorm", "_contrib_SyncBatchNorm")
    accepted = ("ndev", "key")
    inputs = ("data", "gamma", "beta", "moving_mean", "moving_var")
    auxiliary = ("moving_mean", "moving_var")
    inplace = takes_epilogue = True
    eps: float = number(1e-3)
    momentum: float = number(0.9)
    use_global_stats: bool = flag(False)
    fix_gamma: bool = flag(True)
    axis: int = integer(1)
    output_mean_var: bool = disabled()
    bias: bool = False

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

    def new_states(self, saved: Any) -> Mapping[int, Any]:
        """Return the moving mean and variance, unless the statistics are the stored ones."""
        return dict(enumerate(saved[2:4], 3)) if saved else {}


@dataclass(frozen=True)
class Pooling(Operator):
    """Pooling of x (B, C, H, W).

    With the convention ``full``, the number of outputs is rounded up: the last window may reach over the edge.
    """

    names = ("Pooling",)
    accepted = ("p_value",)
    takes_epilogue = True
    kernel: tuple[int, int] = pair(1)
    pool_type: str = choice("max", "avg", "sum")
    stride: tuple[int, int] = pair(1)
    pad: tuple[int, int] = pair(0)
    pooling_convention: str = choice("valid", "full")
    global_pool: bool = flag(False)
    count_include_pad: bool = flag(True)
    layout: str = choice("NCHW")

    @property
    def is_maximum(self) -> bool:
        """Whether each output is a maximum of elements of the input."""
        return self.pool_type == "max"

    def check(self) -> None:
        if min(*self.kernel, *self.stride) < 1 or min(self.pad) < 0:
            raise Unsupported(f"expected positive sizes, got {self}")
        if not self.global_pool and any(pad >= size for pad, size in zip(self.pad, self.kernel)):
            raise Unsupported(f"pad: expected less than the window's {self.kernel}, got {self.pad}")

    def fitted(self, x: Sequence[int]) -> Pooling:
        """Return this pooling with an explicit window: the whole image (B, C, H, W) if it is global."""
        if not self.global_pool:
            return self
        whole = (x[2], x[3])
        return replace(self, kernel=whole, stride=(1, 1), pad=(0, 0), pooling_convention="valid", global_pool=False)

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        x = shapes[0]
        if len(x) != 4:
            raise Unsupported(f"data: expected 4 dimensions, got shape {x}")
        fitted = self.fitted(x)
        # For a window outside the image, MXNet returns the lowest float32.
        lasts = [(count - 1) * s - pad for count, s, pad in zip(output[2:], fitted.stride, fitted.pad)]
        if any(last >= length for last, length in zip(lasts, x[2:])):
            raise Unsupported(f"pooling_convention: expected windows that touch the image, got one at {tuple(lasts)}")


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


@dataclass(frozen=True)
class InstanceNorm(Operator):
    """gamma (x - mean) / sqrt(variance + eps) + beta with the statistics of each channel of each image."""

    names = ("InstanceNorm",)
    inputs = ("data", "gamma", "beta")
    eps: float = number(1e-3)

    def _normalized(self, xp: Any, x: Any) -> tuple[Any, Any]:
        """Return x (B, C, H W) without gamma and beta, and 1 / sqrt(variance + eps)."""
        x = x.reshape(*x.shape[:2], -1)
        centered = x - x.mean(axis=2, keepdims=True)
        scale = 1 / xp.sqrt((centered * centered).mean(axis=2, keepdims=True) + np.float32(self.eps))
        return centered * scale, scale

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        (x, gamma, beta), xp = inputs, arrays.xp
        y, _ = self._normalized(xp, x)
        xp.add(y * gamma[:, None], beta[:, None], out=out.reshape(y.shape))

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        (x, gamma, _), xp = given.inputs, arrays.xp
        y, scale = self._normalized(xp, x)
        gradient = gradient.reshape(y.shape)
        dy = gradient * gamma[:, None]
        to_x = (dy - dy.mean(axis=2, keepdims=True) - y * (dy * y).mean(axis=2, keepdims=True)) * scale
        sums = (xp.sum(one, axis=(0, 2), dtype=np.float64) for one in (gradient * y, gradient))
        return [to_x.reshape(x.shape), *(one.astype(np.float32) for one in sums)]


def channels_second(x: Any, axis: int) -> Any:
    """Return a view (n, channels, m) of a C-contiguous array with channels along an axis."""
    axis %= x.ndim
    return x.reshape(prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :]))
