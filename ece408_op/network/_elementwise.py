"""Operators that compute each element by itself: activations, and arithmetic with arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any, Optional

import numpy as np

from ._definition import Arrays, Operator, Shape, Trained, Unsupported, choice, flag, number

#: f(xp, x, out) fills ``out`` from x of the same shape, by NumPy or CuPy as xp; ``out`` may be x.
Unary = Callable[[Any, Any, Any], Any]

#: Constants of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017, equation 14).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805

#: The activations that a layer can apply to its output: the types of Activation and, last, relu6.
ACTIVATIONS: dict[str, Unary] = {
    "relu": lambda xp, x, out: xp.maximum(x, np.float32(0), out=out),
    "sigmoid": lambda xp, x, out: xp.divide(np.float32(1), np.float32(1) + xp.exp(-x), out=out),
    "tanh": lambda xp, x, out: xp.tanh(x, out=out),
    "softrelu": lambda xp, x, out: xp.logaddexp(x, np.float32(0), out=out),
    "softsign": lambda xp, x, out: xp.divide(x, xp.absolute(x) + np.float32(1), out=out),
    "relu6": lambda xp, x, out: xp.clip(x, np.float32(0), np.float32(6), out=out),
}

#: f(xp, *operands, result) returns a partial derivative, by NumPy or CuPy as xp; None means 1.
Derivative = Optional[Callable[..., Any]]

#: NumPy's function of each operator, and its derivative to each operand; where operands are equal, MXNet's choice.
_FUNCTIONS: dict[str, tuple[str, Sequence[Derivative]]] = {
    "negative": ("negative", [lambda xp, x, y: np.float32(-1)]),
    "exp": ("exp", [lambda xp, x, y: y]),
    "log": ("log", [lambda xp, x, y: 1 / x]),
    "sqrt": ("sqrt", [lambda xp, x, y: np.float32(0.5) / y]),
    "square": ("square", [lambda xp, x, y: 2 * x]),
    "abs": ("absolute", [lambda xp, x, y: xp.sign(x)]),
    "add": ("add", [None, None]),
    "sub": ("subtract", [None, lambda xp, a, b, y: np.float32(-1)]),
    "mul": ("multiply", [lambda xp, a, b, y: b, lambda xp, a, b, y: a]),
    "div": ("divide", [lambda xp, a, b, y: 1 / b, lambda xp, a, b, y: -a / (b * b)]),
    "maximum": ("maximum", [lambda xp, a, b, y: a >= b, lambda xp, a, b, y: a < b]),
    "minimum": ("minimum", [lambda xp, a, b, y: a <= b, lambda xp, a, b, y: a > b]),
    "power": ("power", [lambda xp, a, b, y: b * xp.power(a, b - 1), lambda xp, a, b, y: y * xp.log(a)]),
}
_UNARY = tuple(name for name, (_, derivatives) in _FUNCTIONS.items() if len(derivatives) == 1)
_BINARY = tuple(name for name, (_, derivatives) in _FUNCTIONS.items() if len(derivatives) == 2)
#: Arithmetic with a number, by the names in operators; in those with an r, the number is the first operand.
_WITH_SCALAR = {"plus": "add", "minus": "sub"} | {name: name for name in _BINARY[2:]}
_SCALAR_FIRST = {f"r{name}": _WITH_SCALAR[name] for name in ("minus", "div", "power")}


@dataclass(frozen=True)
class Activation(Operator):
    """MXNet's Activation, and the operators that each compute one of its types."""

    names = ("Activation", "relu", "sigmoid", "softsign", "tanh")
    inplace = True
    act_type: str = choice(*list(ACTIVATIONS)[:-1])

    @property
    def activation(self) -> str:
        return self.act_type if self.op == "Activation" else self.op

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        ACTIVATIONS[self.activation](arrays.xp, inputs[0], out)


@dataclass(frozen=True)
class LeakyReLU(Operator):
    """MXNet's LeakyReLU: leaky, prelu, elu, selu, gelu, and rrelu (inference only)."""

    names = ("LeakyReLU",)
    inputs = ("data", "gamma")
    act_type: str = choice("leaky", "prelu", "elu", "selu", "gelu", "rrelu")
    slope: float = number(0.25)
    lower_bound: float = number(0.125)
    upper_bound: float = number(0.334)

    def used_inputs(self) -> tuple[str, ...]:
        return self.inputs if self.act_type == "prelu" else self.inputs[:1]

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        if self.act_type == "prelu" and shapes[1] not in ((1,), output[1:2] or output):  # MXNet checks in forward
            raise Unsupported(f"gamma: expected one slope, or one for each channel of {output}, got shape {shapes[1]}")

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x, xp = inputs[0], arrays.xp
        if self.act_type == "gelu":
            arrays.erf(x * np.float32(1 / sqrt(2)), out)
            xp.multiply(out + np.float32(1), x * np.float32(0.5), out=out)
        elif self.act_type in ("elu", "selu"):
            slope, scale = self._elu
            out[...] = xp.where(x > 0, x, xp.expm1(x) * np.float32(slope))
            if scale != 1:
                xp.multiply(out, np.float32(scale), out=out)
        else:
            out[...] = xp.where(x > 0, x, x * self._slopes(inputs))

    @property
    def _elu(self) -> tuple[float, float]:
        """The slope below zero, and the factor of all values, of elu and selu."""
        return (self.slope, 1) if self.act_type == "elu" else (_SELU_ALPHA, _SELU_SCALE)

    def _slopes(self, inputs: Sequence[Any]) -> Any:
        """Return the slopes below zero; those of prelu in a shape that broadcasts to the data's."""
        if self.act_type == "prelu":
            x, gamma = inputs
            return gamma if x.ndim < 2 else gamma.reshape(1, -1, *[1] * (x.ndim - 2))
        # At inference a random slope is the middle of its range.
        return np.float32((self.lower_bound + self.upper_bound) / 2 if self.act_type == "rrelu" else self.slope)

    def check_gradient(self, several: bool) -> None:
        if self.act_type == "rrelu":
            raise Unsupported("act_type rrelu has no gradient here, because its slopes are random in training")

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        (x, *gamma), xp = given.inputs, arrays.xp
        if self.act_type == "gelu":
            cumulative = xp.empty(x.shape, np.float32)
            arrays.erf(x * np.float32(1 / sqrt(2)), cumulative)
            density = xp.exp(x * x * np.float32(-0.5)) * np.float32(1 / sqrt(2 * pi))
            return [gradient * (np.float32(0.5) * (1 + cumulative) + x * density)]
        if self.act_type in ("elu", "selu"):
            slope, scale = self._elu
            below = xp.exp(xp.minimum(x, 0)) * np.float32(scale * slope)
            return [gradient * xp.where(x > 0, np.float32(scale), below)]
        slopes = self._slopes(given.inputs)
        found = [gradient * xp.where(x > 0, np.float32(1), slopes)]
        if gamma:
            to_slopes = reduced_to(xp, gradient * xp.where(x > 0, np.float32(0), x), slopes.shape)
            found.append(to_slopes.reshape(gamma[0].shape))
        return found


@dataclass(frozen=True)
class Clip(Operator):
    """min(max(x, a_min), a_max)."""

    names = ("clip",)
    inplace = True
    a_min: float = number()
    a_max: float = number()

    def check(self) -> None:
        if self.a_min > self.a_max:  # for which NumPy, MXNet and the kernels have different results
            raise Unsupported(f"a_min: expected at most a_max, {self.a_max}, got {self.a_min}")

    @property
    def activation(self) -> str | None:
        return "relu6" if (self.a_min, self.a_max) == (0, 6) else None

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        arrays.xp.clip(inputs[0], np.float32(self.a_min), np.float32(self.a_max), out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x = given.inputs[0]
        return [gradient * ((x >= np.float32(self.a_min)) & (x <= np.float32(self.a_max)))]


class Function(Operator):
    """An elementwise function of one array, or of two of the same shape; only ``broadcast_`` operators broadcast."""

    names = (
        *_UNARY,
        *(f"broadcast_{name}" for name in _BINARY),
        *(f"elemwise_{name}" if name in ("add", "sub", "mul", "div") else f"_{name}" for name in _BINARY),
    )
    inplace = True

    def used_inputs(self) -> tuple[str, ...]:
        return ("lhs", "rhs") if self.op.rpartition("_")[2] in _BINARY else ("data",)

    def _of(self, inputs: Sequence[Any]) -> tuple[str, Sequence[Derivative], Sequence[Any]]:
        """Return the name of NumPy's function, its derivatives to the inputs, and its operands."""
        return *_FUNCTIONS[self.op.rpartition("_")[2]], inputs

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        name, _, operands = self._of(inputs)
        getattr(arrays.xp, name)(*operands, out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        (_, derivatives, operands), xp = self._of(given.inputs), arrays.xp
        found: list[Any] = [None] * len(wanted)
        for place, (derivative, array) in enumerate(zip(derivatives, given.inputs)):
            if wanted[place]:
                product = gradient * derivative(xp, *operands, given.out) if derivative else gradient
                found[place] = reduced_to(xp, product, array.shape)
        return found


@dataclass(frozen=True)
class WithScalar(Function):
    """Arithmetic of an array and a number."""

    names = tuple(f"_{name}_scalar" for name in (*_WITH_SCALAR, *_SCALAR_FIRST))
    scalar: float = number(1.0)
    is_int: bool = flag(True)

    def _of(self, inputs: Sequence[Any]) -> tuple[str, Sequence[Derivative], Sequence[Any]]:
        (x,), key, scalar = inputs, self.op.split("_")[1], np.float32(self.scalar)
        if key in _SCALAR_FIRST:
            name, derivatives = _FUNCTIONS[_SCALAR_FIRST[key]]
            return name, derivatives[1:], (scalar, x)
        return *_FUNCTIONS[_WITH_SCALAR[key]], (x, scalar)


class Sum(Operator):
    """The sum of any number of arrays of one shape."""

    names = ("add_n",)
    variadic = inplace = True

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        # Read the first input first: the output may share its memory.
        out[...] = inputs[0]
        for more in inputs[1:]:
            arrays.xp.add(out, more, out=out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [gradient] * len(wanted)


def reduced_to(xp: Any, x: Any, shape: Shape) -> Any:
    """Return x summed in float64 over the axes along which an array of ``shape`` was broadcast."""
    if x.shape == shape:
        return x
    lengths = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, (length, whole) in enumerate(zip(lengths, x.shape)) if length != whole)
    return xp.sum(x, axis=axes, dtype=np.float64).astype(np.float32).reshape(shape)
