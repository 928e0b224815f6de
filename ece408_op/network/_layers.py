"""The layers with weights: Convolution and New, FullyConnected, BatchNorm.

B batch   C channels   H, W rows and columns   M filters   G groups   K, L rows and columns of a filter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES

from ._op_attributes import Refused, Settings
from ._op_definition import Arrays, Kind, Shape, agree, rank, size

#: Bytes of columns that one step of the convolution unrolls at most, unless one image takes more.
COLUMN_BYTES = 1 << 28


@dataclass(frozen=True)
class Convolution:
    """Settings of Convolution; ``New`` has stride 1, no padding, one group and no bias."""

    kernel: tuple[int, int]
    filters: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilate: tuple[int, int] = (1, 1)
    groups: int = 1
    bias: bool = False
    #: The kernel and precision that the layer asks for by itself.
    impl: str = "auto"
    precision: str = "float32"

    def output(self, axis: int, length: int) -> int:
        """Rows (axis 0) or columns (1) of the output, of so many of the input."""
        reach = self.dilate[axis] * (self.kernel[axis] - 1) + 1
        return (length + 2 * self.pad[axis] - reach) // self.stride[axis] + 1


def _read_convolution(settings: Settings) -> Convolution:
    settings.only("layout", "NCHW")
    found = Convolution(
        kernel=settings.pair("kernel"),
        filters=settings.integer("num_filter"),
        stride=settings.pair("stride", 1),
        pad=settings.pair("pad", 0),
        dilate=settings.pair("dilate", 1),
        groups=settings.integer("num_group", 1),
        bias=not settings.flag("no_bias", False),
    )
    if min(*found.kernel, *found.stride, *found.dilate, found.filters, found.groups) < 1 or min(found.pad) < 0:
        raise Refused(f"expected positive sizes, got {found}")
    return found


def _read_new(settings: Settings) -> Convolution:
    settings.text("op_type", "New")
    settings.text("device", "gpu")
    return Convolution(
        settings.pair("kernel"),
        settings.integer("num_filter"),
        impl=settings.text("impl", "auto"),
        precision=settings.text("precision", "float32"),
    )


def _infer_convolution(settings: Convolution, shapes: Sequence[Shape]) -> Shape:
    x = shapes[0]
    rank("data", 4, x)
    if x[1] % settings.groups or settings.filters % settings.groups:
        raise Refused(f"num_group: expected a divisor of {x[1]} channels and {settings.filters} filters")
    agree("weight", (settings.filters, x[1] // settings.groups, *settings.kernel), shapes[1])
    if settings.bias:
        agree("bias", (settings.filters,), shapes[2])
    rows, columns = settings.output(0, x[2]), settings.output(1, x[3])
    if rows < 1 or columns < 1:
        raise Refused(f"kernel: expected at most the image's {x[2]} x {x[3]} with its padding, got {settings.kernel}")
    return x[0], settings.filters, rows, columns


def _bordered(arrays: Arrays, x: Any, pad: tuple[int, int]) -> Any:
    """x (B, C, H, W) with zeros around it: (B, C, H + 2 pad, W + 2 pad)."""
    if pad == (0, 0):
        return x
    (top, left), (rows, columns) = pad, x.shape[2:]
    whole = arrays.xp.zeros((*x.shape[:2], rows + 2 * top, columns + 2 * left), np.float32)
    whole[:, :, top : top + rows, left : left + columns] = x
    return whole


def _convolve(arrays: Arrays, settings: Convolution, inputs: Sequence[Any], out: Any) -> None:
    """Unroll the windows into columns, some images at a time, and multiply: correct for every Convolution."""
    xp, x, groups, pixels = arrays.xp, inputs[0], settings.groups, size(out.shape[2:])
    w = inputs[1].reshape(groups, settings.filters // groups, -1)
    products = w.shape[2]
    step = max(1, COLUMN_BYTES // (ITEM_BYTES * products * (groups * pixels + settings.filters)))
    for first in range(0, len(x), step):
        part = _bordered(arrays, x[first : first + step], settings.pad)
        b, c, h, wide = part.strides
        # (b, C, K, L, OH, OW): every window, without a copy.
        shape = (len(part), x.shape[1], *settings.kernel, *out.shape[2:])
        (dh, dw), (sh, sw) = settings.dilate, settings.stride
        windows = xp.lib.stride_tricks.as_strided(part, shape, (b, c, h * dh, wide * dw, h * sh, wide * sw))
        # For each image and group (M / G, C / G K L) times (C / G K L, OH OW).
        columns = windows.reshape(len(part) * groups, products, pixels)
        target = out[first : first + step].reshape(len(part) * groups, settings.filters // groups, pixels)
        filters = w if groups == 1 else xp.broadcast_to(w, (len(part), *w.shape)).reshape(-1, *w.shape[1:])
        arrays.matmul(filters, columns, target)
    if settings.bias:
        xp.add(out, inputs[2].reshape(1, -1, 1, 1), out=out)


@dataclass(frozen=True)
class FullyConnected:
    """Settings of FullyConnected: flatten (all but the first axis), or the last axis alone."""

    hidden: int
    bias: bool
    flatten: bool


def _read_connected(settings: Settings) -> FullyConnected:
    bias = not settings.flag("no_bias", False)
    return FullyConnected(settings.integer("num_hidden"), bias, settings.flag("flatten", True))


def _infer_connected(settings: FullyConnected, shapes: Sequence[Shape]) -> Shape:
    x = shapes[0]
    if not x:
        raise Refused("data: expected at least one dimension, got shape ()")
    before = x[:1] if settings.flatten else x[:-1]
    agree("weight", (settings.hidden, size(x[1:]) if settings.flatten else x[-1]), shapes[1])
    if settings.bias:
        agree("bias", (settings.hidden,), shapes[2])
    return (*before, settings.hidden)


def _connect(arrays: Arrays, settings: FullyConnected, inputs: Sequence[Any], out: Any) -> None:
    x, w = inputs[:2]
    transposed = arrays.xp.ascontiguousarray(w.T)
    arrays.matmul(x.reshape(1, -1, w.shape[1]), transposed[None], out.reshape(1, -1, settings.hidden))
    if settings.bias:
        arrays.xp.add(out, inputs[2], out=out)


@dataclass(frozen=True)
class BatchNorm:
    """Settings of BatchNorm at inference: y = gamma (x - mean) / sqrt(variance + eps) + beta along an axis."""

    eps: float
    fixed: bool
    axis: int

    def factors(self, xp: Any, parameters: Sequence[Any]) -> tuple[Any, Any]:
        """Scale and shift of each channel, from gamma, beta, mean and variance: float32, computed in float64."""
        gamma, beta, mean, variance = (array.astype(np.float64) for array in parameters)
        scale = 1 / xp.sqrt(variance + self.eps)
        if not self.fixed:
            scale = scale * gamma
        return scale.astype(np.float32), (beta - mean * scale).astype(np.float32)


def _read_norm(settings: Settings) -> BatchNorm:
    settings.number("momentum", 0.9)
    settings.flag("use_global_stats", False)
    settings.only("output_mean_var", "False")
    return BatchNorm(settings.number("eps", 1e-3), settings.flag("fix_gamma", True), settings.integer("axis", 1))


def _infer_norm(settings: BatchNorm, shapes: Sequence[Shape]) -> Shape:
    x = shapes[0]
    if not -len(x) <= settings.axis < len(x):
        raise Refused(f"axis: expected one of {len(x)} dimensions, got {settings.axis}")
    for name, shape in zip(("gamma", "beta", "moving_mean", "moving_var"), shapes[1:]):
        agree(name, (x[settings.axis],), shape)
    return x


def _normalise(arrays: Arrays, settings: BatchNorm, inputs: Sequence[Any], out: Any) -> None:
    x = inputs[0]
    along = [1] * x.ndim
    along[settings.axis] = -1
    scale, shift = (factor.reshape(along) for factor in settings.factors(arrays.xp, inputs[1:]))
    arrays.xp.multiply(x, scale, out=out)
    arrays.xp.add(out, shift, out=out)


_WEIGHTED = ("data", "weight", "bias")


def _with_bias(settings: Any) -> int:
    return 3 if settings.bias else 2


CONVOLUTION = Kind(("Convolution",), _WEIGHTED, _read_convolution, _infer_convolution, _convolve, count=_with_bias)
NEW = Kind(("New",), _WEIGHTED[:2], _read_new, _infer_convolution, _convolve)
FULLY_CONNECTED = Kind(("FullyConnected",), _WEIGHTED, _read_connected, _infer_connected, _connect, count=_with_bias)
BATCH_NORM = Kind(
    ("BatchNorm",),
    ("data", "gamma", "beta", "moving_mean", "moving_var"),
    _read_norm,
    _infer_norm,
    _normalise,
    inplace=True,
    auxiliary=("moving_mean", "moving_var"),
)

LAYERS = (CONVOLUTION, NEW, FULLY_CONNECTED, BATCH_NORM)
