"""Operators that compute each element by itself: activations, and arithmetic with arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from ._definition import Arrays, Operator, Shape, Unsupported, check_shape, choice, flag, number

#: Fill the output from an array of the same shape, which may be the output itself.
Unary = Callable[[Arrays, Any, Any], None]

#: Constants of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017, equation 14).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _sigmoid(arrays: Arrays, x: Any, out: Any) -> None:
    xp = arrays.xp
    xp.negative(x, out=out)
    xp.exp(out, out=out)
    xp.add(out, np.float32(1), out=out)
    xp.divide(np.float32(1), out, out=out)


#: The types of Activation.
_TYPES: dict[str, Unary] = {
    "relu": lambda arrays, x, out: arrays.xp.maximum(x, np.float32(0), out=out),
    "sigmoid": _sigmoid,
    "tanh": lambda arrays, x, out: arrays.xp.tanh(x, out=out),
    "softrelu": lambda arrays, x, out: arrays.xp.logaddexp(x, np.float32(0), out=out),
    "softsign": lambda arrays, x, out: arrays.xp.divide(x, arrays.xp.absolute(x) + np.float32(1), out=out),
}

#: What a layer can apply to its output.
ACTIVATIONS: dict[str, Unary] = {
    **_TYPES,
    "relu6": lambda arrays, x, out: arrays.xp.clip(x, np.float32(0), np.float32(6), out=out),
}

#: Operators and NumPy's functions.
_FUNCTIONS = {name: name for name in ("negative", "exp", "log", "sqrt", "square")} | {"abs": "absolute"}
_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"} | {
    name: name for name in ("maximum", "minimum", "power")
}
_WITH_SCALAR = {"plus": "add", "minus": "subtract"} | {key: _ARITHMETIC[key] for key in list(_ARITHMETIC)[2:]}


@dataclass(frozen=True)
class Activation(Operator):
    """Activation, and the operators that are one type of it."""

    names = ("Activation", "relu", "sigmoid", "softsign", "tanh")
    inplace = monotonic = True
    act_type: str = choice(*_TYPES)

    @property
    def activation(self) -> str:
        return self.act_type if self.op == "Activation" else self.op

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        ACTIVATIONS[self.activation](arrays, inputs[0], out)


class Function(Operator):
    """A function of one array."""

    names = tuple(_FUNCTIONS)
    inplace = True

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        getattr(arrays.xp, _FUNCTIONS[self.op])(inputs[0], out=out)


@dataclass(frozen=True)
class LeakyReLU(Operator):
    """LeakyReLU and its relatives."""

    names = ("LeakyReLU",)
    inputs = ("data", "gamma")
    act_type: str = choice("leaky", "prelu", "elu", "selu", "gelu", "rrelu")
    slope: float = number(0.25)
    lower_bound: float = number(0.125)
    upper_bound: float = number(0.334)

    def used_inputs(self) -> tuple[str, ...]:
        return self.inputs if self.act_type == "prelu" else self.inputs[:1]

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        x = shapes[0]
        if self.act_type == "prelu" and shapes[1] not in ((1,), x[1:2] or x[:1]):
            raise Unsupported(f"gamma: expected one slope or one for each of {x[1:2]} channels, got shape {shapes[1]}")
        return x

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        x, xp = inputs[0], arrays.xp
        if self.act_type == "gelu":
            half = x * np.float32(0.5)
            arrays.erf(x * np.float32(1 / sqrt(2)), out)
            xp.add(out, np.float32(1), out=out)
            xp.multiply(out, half, out=out)
            return
        if self.act_type == "prelu":
            negative = x * (inputs[1] if x.ndim < 2 else inputs[1].reshape(1, -1, *[1] * (x.ndim - 2)))
        elif self.act_type in ("elu", "selu"):
            negative = xp.expm1(x) * np.float32(self.slope if self.act_type == "elu" else _SELU_ALPHA)
        else:
            # At inference a random slope is the middle of its range.
            middle = (self.lower_bound + self.upper_bound) / 2
            negative = x * np.float32(middle if self.act_type == "rrelu" else self.slope)
        out[...] = xp.where(x > 0, x, negative)
        if self.act_type == "selu":
            xp.multiply(out, np.float32(_SELU_SCALE), out=out)


@dataclass(frozen=True)
class Clip(Operator):
    """The values between two numbers, and the nearer number for the others."""

    names = ("clip",)
    inplace = monotonic = True
    a_min: float = number()
    a_max: float = number()

    @property
    def activation(self) -> str | None:
        return "relu6" if (self.a_min, self.a_max) == (0, 6) else None

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        arrays.xp.clip(inputs[0], np.float32(self.a_min), np.float32(self.a_max), out=out)


@dataclass(frozen=True)
class WithScalar(Operator):
    """Arithmetic with a number, which is the first operand in the operators with an r."""

    names = (*(f"_{name}_scalar" for name in _WITH_SCALAR), "_rminus_scalar", "_rdiv_scalar", "_rpower_scalar")
    inplace = True
    scalar: float = number(1.0)
    is_int: bool = flag(True)

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        operands, name = [inputs[0], np.float32(self.scalar)], self.op.split("_")[1]
        if name not in _WITH_SCALAR:
            operands.reverse()
        getattr(arrays.xp, _WITH_SCALAR.get(name) or _WITH_SCALAR[name[1:]])(*operands, out=out)


class Arithmetic(Operator):
    """Arithmetic with two arrays, of one shape or, for the operators that say so, of shapes that broadcast."""

    names = tuple(
        f"{'broadcast' if broadcast else 'elemwise' if name in ('add', 'sub', 'mul', 'div') else ''}_{name}"
        for broadcast in (True, False)
        for name in _ARITHMETIC
    )
    inputs = ("lhs", "rhs")
    inplace = True

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        if not self.op.startswith("broadcast"):
            check_shape("rhs", *shapes)
            return shapes[0]
        try:
            return tuple(np.broadcast_shapes(*shapes))
        except ValueError:
            raise Unsupported(f"expected shapes that broadcast, got {shapes[0]} and {shapes[1]}") from None

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        getattr(arrays.xp, _ARITHMETIC[self.op.rpartition("_")[2]])(*inputs, out=out)


class Sum(Operator):
    """The sum of any number of arrays of one shape."""

    names = ("add_n",)
    variadic = inplace = True

    def infer(self, shapes: Sequence[Shape]) -> Shape:
        for other in shapes[1:]:
            check_shape("data", shapes[0], other)
        return shapes[0]

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        # The output may be the memory of the first input, which is read first.
        out[...] = inputs[0]
        for more in inputs[1:]:
            arrays.xp.add(out, more, out=out)
