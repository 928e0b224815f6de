"""Operators that move, join or sum what is there: Flatten, Reshape, transpose, Concat, Dropout, mean, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._op_attributes import Refused, Settings
from ._op_definition import Arrays, Kind, Shape, axis_of, nothing, same, size


def _copy(arrays: Arrays, settings: Any, inputs: Sequence[Any], out: Any) -> None:
    out[...] = inputs[0].reshape(out.shape)


def _flat(settings: None, shapes: Sequence[Shape]) -> Shape:
    return shapes[0][0], size(shapes[0][1:])


@dataclass(frozen=True)
class Reshape:
    """Settings of Reshape: MXNet's codes, read from the back where ``reverse``."""

    codes: tuple[int, ...]
    reverse: bool


def _read_reshape(settings: Settings) -> Reshape:
    codes = settings.shape("shape")
    settings.only("target_shape", "()")
    settings.only("keep_highest", "False")
    if not codes:
        raise Refused(f"shape: expected a shape, got {codes}")
    return Reshape(codes, settings.flag("reverse", False))


def reshaped(codes: Sequence[int], source: Shape, reverse: bool) -> Shape:
    """The shape that MXNet's codes make of another.

    n > 0: that length; 0: the source's; -1: what is left; -2: all further ones; -3: two of the source's in one;
    -4 a b: one of the source's as a x b, of which one may be -1. (MXNet, src/operator/tensor/matrix_op-inl.h.)
    """
    # MXNet reads all codes from the back, so that the two lengths of a -4 stand before it there.
    units = _units(codes[::-1] if reverse else codes)
    left = source[::-1] if reverse else source
    target: list[int] = []
    for code, *factors in units:
        lengths, taken = _lengths(code, factors, left)
        target += lengths
        left = left[taken:]
    if target.count(-1) > 1:
        raise Refused(f"shape: expected at most one -1, got {tuple(codes)}")
    if -1 in target:
        others = -size(target)
        if not others or size(source) % others:
            raise Refused(f"shape: expected {tuple(codes)} to divide the {size(source)} elements of {source}")
        target[target.index(-1)] = size(source) // others
    if size(target) != size(source):
        raise Refused(f"shape: expected {size(source)} elements, as {source} has, got {tuple(target)}")
    return tuple(target[::-1] if reverse else target)


def _units(codes: Sequence[int]) -> list[list[int]]:
    """The codes one by one, a -4 together with its two lengths."""
    units: list[list[int]] = []
    position = 0
    while position < len(codes):
        length = 3 if codes[position] == -4 else 1
        units.append(list(codes[position : position + length]))
        position += length
    return units


def _lengths(code: int, factors: list[int], source: Shape) -> tuple[list[int], int]:
    """What one code makes of what is left of the source: lengths, -1 standing for what is left, and those taken."""
    if code > 0 or code == -1:
        return [code], 1
    if code == -2:
        return list(source), len(source)
    needed = 2 if code == -3 else 1
    if len(source) < needed or code not in (0, -3, -4) or len(factors) != (2 if code == -4 else 0):
        raise Refused(f"shape: expected MXNet's codes and dimensions for them, got {code} where {source} are left")
    if code == 0:
        return [source[0]], 1
    if code == -3:
        return [source[0] * source[1]], 2
    first, second = factors
    first = source[0] // second if first == -1 else first
    second = source[0] // first if second == -1 else second
    if first * second != source[0]:
        raise Refused(f"shape: expected two factors of {source[0]}, got {tuple(factors)}")
    return [first, second], 1


def _axes(settings: tuple[int, ...], dimensions: int) -> tuple[int, ...]:
    axes = tuple(axis_of(axis, dimensions) for axis in settings) or tuple(reversed(range(dimensions)))
    if sorted(axes) != list(range(dimensions)):
        raise Refused(f"axes: expected each of {dimensions} dimensions once, got {settings}")
    return axes


def _transposed(settings: tuple[int, ...], shapes: Sequence[Shape]) -> Shape:
    return tuple(shapes[0][axis] for axis in _axes(settings, len(shapes[0])))


def _transpose(arrays: Arrays, settings: tuple[int, ...], inputs: Sequence[Any], out: Any) -> None:
    out[...] = inputs[0].transpose(_axes(settings, inputs[0].ndim))


def _joined(settings: int, shapes: Sequence[Shape]) -> Shape:
    axis = axis_of(settings, len(shapes[0]))
    for shape in shapes[1:]:
        if len(shape) != len(shapes[0]) or any(shape[i] != length for i, length in enumerate(shapes[0]) if i != axis):
            raise Refused(f"data: expected shapes that differ in axis {axis} alone, got {shapes[0]} and {shape}")
    return tuple(sum(s[axis] for s in shapes) if i == axis else n for i, n in enumerate(shapes[0]))


def _join(arrays: Arrays, settings: int, inputs: Sequence[Any], out: Any) -> None:
    axis, first = settings % out.ndim, 0
    for part in inputs:
        where = (slice(None),) * axis + (slice(first, first + part.shape[axis]),)
        out[where] = part
        first += part.shape[axis]


def _read_dropout(settings: Settings) -> None:
    settings.number("p", 0.5)
    settings.shape("axes")
    if settings.text("mode", "training") != "training":
        raise Refused("mode: expected training, which does nothing at inference, got always")


@dataclass(frozen=True)
class Mean:
    """Settings of mean: the axes that are averaged, all where there are none, or all others."""

    axes: tuple[int, ...]
    exclude: bool
    keep: bool

    def of(self, dimensions: int) -> tuple[int, ...]:
        """The axes, counted from the front."""
        named = {axis_of(axis, dimensions) for axis in self.axes}
        if self.exclude:
            return tuple(axis for axis in range(dimensions) if axis not in named)
        return tuple(sorted(named)) or tuple(range(dimensions))


def _read_mean(settings: Settings) -> Mean:
    return Mean(settings.shape("axis") or (), settings.flag("exclude", False), settings.flag("keepdims", False))


def _averaged(settings: Mean, shapes: Sequence[Shape]) -> Shape:
    axes = settings.of(len(shapes[0]))
    if settings.keep:
        return tuple(1 if i in axes else n for i, n in enumerate(shapes[0]))
    return tuple(n for i, n in enumerate(shapes[0]) if i not in axes) or (1,)


def _average(arrays: Arrays, settings: Mean, inputs: Sequence[Any], out: Any) -> None:
    x = inputs[0]
    out[...] = arrays.xp.mean(x, axis=settings.of(x.ndim), dtype=np.float32).reshape(out.shape)


@dataclass(frozen=True)
class Softmax:
    """Settings of softmax and log_softmax along an axis."""

    axis: int
    temperature: float
    logarithm: bool


def _read_softmax(settings: Settings, logarithm: bool) -> Softmax:
    settings.only("dtype", "float32")
    settings.only("use_length", "False")
    return Softmax(settings.integer("axis", -1), settings.number("temperature", 1.0), logarithm)


def _on_axis(settings: Softmax, shapes: Sequence[Shape]) -> Shape:
    axis_of(settings.axis, len(shapes[0]))
    return shapes[0]


def _softmax(arrays: Arrays, settings: Softmax, inputs: Sequence[Any], out: Any) -> None:
    x, xp, axis = inputs[0], arrays.xp, settings.axis
    xp.subtract(x, x.max(axis=axis, keepdims=True), out=out)
    if settings.temperature != 1:
        xp.divide(out, np.float32(settings.temperature), out=out)
    if settings.logarithm:
        xp.subtract(out, xp.log(xp.exp(out).sum(axis=axis, keepdims=True)), out=out)
    else:
        xp.exp(out, out=out)
        xp.divide(out, out.sum(axis=axis, keepdims=True), out=out)


def _read_output(settings: Settings) -> str:
    """Over what SoftmaxOutput sums: "channels", "last" axis, or all but the "batch"."""
    for name, default in (("grad_scale", 1.0), ("ignore_label", -1.0), ("smooth_alpha", 0.0)):
        settings.number(name, default)
    settings.flag("use_ignore", False)
    settings.flag("out_grad", False)
    settings.text("normalization", "null")
    channels, last = settings.flag("multi_output", False), settings.flag("preserve_shape", False)
    return "channels" if channels else "last" if last else "batch"


def _infer_output(settings: str, shapes: Sequence[Shape]) -> Shape:
    if settings == "batch" and len(shapes[0]) != 2:
        raise Refused(
            f"data: expected two dimensions, got shape {shapes[0]}: for others MXNet's builds disagree; flatten it, or "
            "use multi_output or preserve_shape"
        )
    return shapes[0]


def _output(arrays: Arrays, settings: str, inputs: Sequence[Any], out: Any) -> None:
    x = inputs[0]
    shape = (len(x), -1) if settings == "batch" else x.shape
    _softmax(arrays, Softmax(1 if settings == "channels" else -1, 1.0, False), [x.reshape(shape)], out.reshape(shape))


def _label(settings: str, shape: Shape) -> Shape:
    if settings == "channels":
        return (shape[0], *shape[2:])
    return shape[:-1] if settings == "last" else shape[:1]


def _softmax_kind(name: str, logarithm: bool) -> Kind:
    return Kind(
        (name,),
        ("data",),
        lambda settings: _read_softmax(settings, logarithm),
        _on_axis,
        _softmax,
        mixes=lambda settings, dimensions: settings.axis % dimensions == 0,
    )


SOFTMAX = _softmax_kind("softmax", logarithm=False)
LOG_SOFTMAX = _softmax_kind("log_softmax", logarithm=True)
SOFTMAX_OUTPUT = Kind(
    ("SoftmaxOutput",), ("data", "label"), _read_output, _infer_output, _output, ignored=("label",), label=_label
)

SHAPING = (
    Kind(("Flatten",), ("data",), nothing, _flat, _copy, view=True),
    Kind(
        ("Reshape",),
        ("data",),
        _read_reshape,
        lambda settings, shapes: reshaped(settings.codes, shapes[0], settings.reverse),
        _copy,
        view=True,
    ),
    Kind(("transpose",), ("data",), lambda settings: settings.shape("axes") or (), _transposed, _transpose),
    Kind(("Concat",), ("data*",), lambda settings: settings.integer("dim", 1), _joined, _join),
    Kind(("Dropout",), ("data",), _read_dropout, same, _copy, view=True),
    Kind(("_copy", "BlockGrad"), ("data",), nothing, same, _copy, view=True),
    Kind(
        ("mean",),
        ("data",),
        _read_mean,
        _averaged,
        _average,
        mixes=lambda settings, dimensions: 0 in settings.of(dimensions),
    ),
    SOFTMAX,
    LOG_SOFTMAX,
    SOFTMAX_OUTPUT,
)
