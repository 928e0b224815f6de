"""Operators that compute each element by itself: activations, arithmetic with arrays and with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from ._op_attributes import Refused, Settings
from ._op_definition import Arrays, Kind, Shape, agree, nothing, same

#: Fill the output from an array of the same shape, which may be the output itself.
Unary = Callable[[Arrays, Any, Any], None]

#: Constants of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017, equation 14).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _relu(arrays: Arrays, x: Any, out: Any) -> None:
    arrays.xp.maximum(x, np.float32(0), out=out)


def _sigmoid(arrays: Arrays, x: Any, out: Any) -> None:
    xp = arrays.xp
    xp.negative(x, out=out)
    xp.exp(out, out=out)
    xp.add(out, np.float32(1), out=out)
    xp.divide(np.float32(1), out, out=out)


def _softrelu(arrays: Arrays, x: Any, out: Any) -> None:
    arrays.xp.logaddexp(x, np.float32(0), out=out)


def _softsign(arrays: Arrays, x: Any, out: Any) -> None:
    xp = arrays.xp
    xp.divide(x, xp.absolute(x) + np.float32(1), out=out)


def _ufunc(name: str) -> Unary:
    def unary(arrays: Arrays, x: Any, out: Any) -> None:
        getattr(arrays.xp, name)(x, out=out)

    return unary


#: The kinds of Activation.
ACTIVATIONS: dict[str, Unary] = {
    "relu": _relu,
    "sigmoid": _sigmoid,
    "tanh": _ufunc("tanh"),
    "softrelu": _softrelu,
    "softsign": _softsign,
}


def _apply(function: Unary) -> Callable[[Arrays, Any, Sequence[Any], Any], None]:
    return lambda arrays, settings, inputs, out: function(arrays, inputs[0], out)


def _one(names: tuple[str, ...], function: Unary, grows: bool = False) -> Kind:
    return Kind(names, ("data",), nothing, same, _apply(function), inplace=True, grows=lambda settings: grows)


def _activate(arrays: Arrays, settings: str, inputs: Sequence[Any], out: Any) -> None:
    ACTIVATIONS[settings](arrays, inputs[0], out)


@dataclass(frozen=True)
class Leaky:
    """Settings of LeakyReLU; ``slope`` is that of the negative side, where the kind has one."""

    kind: str
    slope: float


def _read_leaky(settings: Settings) -> Leaky:
    kind = settings.one_of("act_type", ("leaky", "prelu", "elu", "selu", "gelu", "rrelu"), "leaky")
    slope = settings.number("slope", 0.25)
    bounds = settings.number("lower_bound", 0.125), settings.number("upper_bound", 0.334)
    # At inference a random slope is the middle of its range.
    return Leaky(kind, sum(bounds) / 2 if kind == "rrelu" else slope)


def _infer_leaky(settings: Leaky, shapes: Sequence[Shape]) -> Shape:
    x = shapes[0]
    if settings.kind == "prelu" and shapes[1] not in ((1,), x[1:2] or x[:1]):
        raise Refused(f"gamma: expected one slope or one for each of {x[1:2]} channels, got shape {shapes[1]}")
    return x


def _leak(arrays: Arrays, settings: Leaky, inputs: Sequence[Any], out: Any) -> None:
    x, xp, kind = inputs[0], arrays.xp, settings.kind
    if kind == "gelu":
        half = x * np.float32(0.5)
        arrays.erf(x * np.float32(1 / sqrt(2)), out)
        xp.add(out, np.float32(1), out=out)
        xp.multiply(out, half, out=out)
        return
    if kind == "prelu":
        slope = inputs[1] if x.ndim < 2 else inputs[1].reshape(1, -1, *[1] * (x.ndim - 2))
        negative = x * slope
    elif kind in ("elu", "selu"):
        negative = xp.expm1(x) * np.float32(settings.slope if kind == "elu" else _SELU_ALPHA)
    else:
        negative = x * np.float32(settings.slope)
    out[...] = xp.where(x > 0, x, negative)
    if kind == "selu":
        xp.multiply(out, np.float32(_SELU_SCALE), out=out)


def _read_clip(settings: Settings) -> tuple[float, float]:
    return settings.number("a_min"), settings.number("a_max")


def _clip(arrays: Arrays, settings: tuple[float, float], inputs: Sequence[Any], out: Any) -> None:
    arrays.xp.clip(inputs[0], np.float32(settings[0]), np.float32(settings[1]), out=out)


def _scalar(settings: Settings) -> np.float32:
    settings.flag("is_int", True)
    return np.float32(settings.number("scalar", 1.0))


def _with_scalar(names: tuple[str, ...], ufunc: str, reverse: bool = False) -> Kind:
    def compute(arrays: Arrays, scalar: np.float32, inputs: Sequence[Any], out: Any) -> None:
        pair = (scalar, inputs[0]) if reverse else (inputs[0], scalar)
        getattr(arrays.xp, ufunc)(*pair, out=out)

    return Kind(names, ("data",), _scalar, same, compute, inplace=True)


def _equal(settings: Any, shapes: Sequence[Shape]) -> Shape:
    for shape in shapes[1:]:
        agree("rhs", shapes[0], shape)
    return shapes[0]


def _broadcast(settings: Any, shapes: Sequence[Shape]) -> Shape:
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise Refused(f"expected shapes that broadcast, got {shapes[0]} and {shapes[1]}") from None


def _with_array(names: tuple[str, ...], ufunc: str, broadcast: bool) -> Kind:
    def compute(arrays: Arrays, settings: None, inputs: Sequence[Any], out: Any) -> None:
        getattr(arrays.xp, ufunc)(*inputs, out=out)

    infer = _broadcast if broadcast else _equal
    return Kind(names, ("lhs", "rhs"), nothing, infer, compute, inplace=not broadcast)


def _sum(arrays: Arrays, settings: None, inputs: Sequence[Any], out: Any) -> None:
    # The first input may be the output's memory: it is read first.
    out[...] = inputs[0]
    for more in inputs[1:]:
        arrays.xp.add(out, more, out=out)


ACTIVATION = Kind(
    ("Activation",),
    ("data",),
    lambda settings: settings.one_of("act_type", tuple(ACTIVATIONS), "relu"),
    same,
    _activate,
    inplace=True,
    grows=lambda settings: True,
)
LEAKY = Kind(
    ("LeakyReLU",),
    ("data", "gamma"),
    _read_leaky,
    _infer_leaky,
    _leak,
    count=lambda settings: 2 if settings.kind == "prelu" else 1,
)

ELEMENTWISE = (
    ACTIVATION,
    LEAKY,
    Kind(("clip",), ("data",), _read_clip, same, _clip, inplace=True, grows=lambda settings: True),
    _one(("relu",), _relu, grows=True),
    _one(("sigmoid",), _sigmoid, grows=True),
    _one(("softsign",), _softsign, grows=True),
    _one(("tanh",), _ufunc("tanh"), grows=True),
    _one(("negative",), _ufunc("negative")),
    _one(("abs",), _ufunc("absolute")),
    _one(("exp",), _ufunc("exp")),
    _one(("log",), _ufunc("log")),
    _one(("sqrt",), _ufunc("sqrt")),
    _one(("square",), _ufunc("square")),
    *(
        _with_array((name,), ufunc, broadcast=False)
        for name, ufunc in (
            ("elemwise_add", "add"),
            ("elemwise_sub", "subtract"),
            ("elemwise_mul", "multiply"),
            ("elemwise_div", "divide"),
            ("_maximum", "maximum"),
            ("_minimum", "minimum"),
            ("_power", "power"),
        )
    ),
    *(
        _with_array((f"broadcast_{name}",), ufunc, broadcast=True)
        for name, ufunc in (
            ("add", "add"),
            ("sub", "subtract"),
            ("mul", "multiply"),
            ("div", "divide"),
            ("maximum", "maximum"),
            ("minimum", "minimum"),
            ("power", "power"),
        )
    ),
    _with_scalar(("_plus_scalar",), "add"),
    _with_scalar(("_minus_scalar",), "subtract"),
    _with_scalar(("_rminus_scalar",), "subtract", reverse=True),
    _with_scalar(("_mul_scalar",), "multiply"),
    _with_scalar(("_div_scalar",), "divide"),
    _with_scalar(("_rdiv_scalar",), "divide", reverse=True),
    _with_scalar(("_maximum_scalar",), "maximum"),
    _with_scalar(("_minimum_scalar",), "minimum"),
    _with_scalar(("_power_scalar",), "power"),
    _with_scalar(("_rpower_scalar",), "power", reverse=True),
    Kind(("add_n",), ("data*",), nothing, _equal, _sum, inplace=True),
)
