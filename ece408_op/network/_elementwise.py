"""MXNet's operators that compute each element by itself: activations, and arithmetic with arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, pi, sqrt
from typing import Any

import numpy as np

from ._definition import UNBOUNDED, Arrays, Bounds, Operator, Shape, Trained, Unsupported, choice, flag, number


class Elementwise(Operator):
    """An operator that computes each element of its output from one element of each input."""

    inplace = True

    def text(self, *operands: str) -> str:
        """Return one element of the output in CUDA C++, given those of the inputs, which are names of floats."""
        raise NotImplementedError

    def operand_shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shapes in which the inputs broadcast to the output."""
        return shapes

    def bounds(self, *operands: Bounds) -> Bounds:
        """Return what is known of the output, given the bounds of the inputs."""
        return UNBOUNDED


#: Constants of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017, equation 14).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805

#: For each type of Activation: f(xp, x, out), which fills ``out``, maybe x itself, by NumPy or CuPy as xp; the result
#: in CUDA C++ for a float {0}, where a NaN stays a NaN; and the bounds for any x.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], str, Bounds]] = {
    "relu": (lambda xp, x, out: xp.maximum(x, np.float32(0), out=out), "({0} < 0.f ? 0.f : {0})", Bounds(0, inf, 1)),
    "sigmoid": (
        lambda xp, x, out: xp.divide(np.float32(1), np.float32(1) + xp.exp(-x), out=out),
        "__fdividef(1.f, 1.f + expf(-{0}))",  # two units in the last place more, and 0 below -87
        Bounds(0, 1),
    ),
    "tanh": (lambda xp, x, out: xp.tanh(x, out=out), "tanhf({0})", Bounds(-1, 1, 1)),
    "softrelu": (
        lambda xp, x, out: xp.logaddexp(x, np.float32(0), out=out),
        "({0} > 20.f ? {0} : log1pf(expf({0})))",
        Bounds(0, inf),
    ),
    "softsign": (
        lambda xp, x, out: xp.divide(x, xp.absolute(x) + np.float32(1), out=out),
        "({0} / (1.f + fabsf({0})))",
        Bounds(-1, 1, 1),
    ),
}

#: For each function: NumPy's name, the result in CUDA C++ for floats {0} and {1}, where a NaN stays a NaN, and the
#: derivatives to the operands. A derivative is f(xp, *operands, result), and None means 1; where operands are equal,
#: the derivatives are MXNet's.
_FUNCTIONS: dict[str, tuple[str, str, Sequence[Callable[..., Any] | None]]] = {
    "negative": ("negative", "-{0}", [lambda xp, x, y: np.float32(-1)]),
    "exp": ("exp", "expf({0})", [lambda xp, x, y: y]),
    "log": ("log", "logf({0})", [lambda xp, x, y: 1 / x]),
    "sqrt": ("sqrt", "sqrtf({0})", [lambda xp, x, y: np.float32(0.5) / y]),
    "square": ("square", "{0} * {0}", [lambda xp, x, y: 2 * x]),
    "abs": ("absolute", "fabsf({0})", [lambda xp, x, y: xp.sign(x)]),
    "add": ("add", "{0} + {1}", [None, None]),
    "sub": ("subtract", "{0} - {1}", [None, lambda xp, a, b, y: np.float32(-1)]),
    "mul": ("multiply", "{0} * {1}", [lambda xp, a, b, y: b, lambda xp, a, b, y: a]),
    "div": ("divide", "{0} / {1}", [lambda xp, a, b, y: 1 / b, lambda xp, a, b, y: -a / (b * b)]),
    "maximum": (
        "maximum",
        "({0} > {1} || {0} != {0} ? {0} : {1})",
        [lambda xp, a, b, y: a >= b, lambda xp, a, b, y: a < b],
    ),
    "minimum": (
        "minimum",
        "({0} < {1} || {0} != {0} ? {0} : {1})",
        [lambda xp, a, b, y: a <= b, lambda xp, a, b, y: a > b],
    ),
    "power": (
        "power",
        "powf({0}, {1})",
        [lambda xp, a, b, y: b * xp.power(a, b - 1), lambda xp, a, b, y: y * xp.log(a)],
    ),
}
_UNARY = tuple(name for name, (_, _, derivatives) in _FUNCTIONS.items() if len(derivatives) == 1)
_BINARY = tuple(name for name in _FUNCTIONS if name not in _UNARY)
_SHORT = {"add": "plus", "sub": "minus"}
#: The operators of an array and a number: the function, and whether the number is its first operand.
_WITH_SCALAR = {f"_{_SHORT.get(name, name)}_scalar": (name, False) for name in _BINARY}
_WITH_SCALAR |= {f"_r{_SHORT.get(name, name)}_scalar": (name, True) for name in ("sub", "div", "power")}


@dataclass(frozen=True)
class Activation(Elementwise):
    """MXNet's Activation, and the operators that each compute one of its types."""

    names = ("Activation", "relu", "sigmoid", "softsign", "tanh")
    act_type: str = choice(*_ACTIVATIONS)

    @property
    def activation(self) -> str:
        return self.act_type if self.op == "Activation" else self.op

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        _ACTIVATIONS[self.activation][0](arrays.xp, inputs[0], out)

    def text(self, *operands: str) -> str:
        return _ACTIVATIONS[self.activation][1].format(*operands)

    def bounds(self, *operands: Bounds) -> Bounds:
        low, high, gain = _ACTIVATIONS[self.activation][2]
        return Bounds(low, high, gain * operands[0].gain)


@dataclass(frozen=True)
class LeakyReLU(Elementwise):
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
            half = x * np.float32(0.5)  # before x is overwritten
            arrays.erf(x * np.float32(1 / sqrt(2)), out)
            xp.multiply(out + np.float32(1), half, out=out)
        elif self.act_type in ("elu", "selu"):
            slope, scale = self._elu
            out[...] = xp.where(x > 0, x, xp.expm1(x) * np.float32(slope))
            if scale != 1:
                xp.multiply(out, np.float32(scale), out=out)
        else:
            out[...] = xp.where(x > 0, x, x * self._slopes(inputs))

    def text(self, *operands: str) -> str:
        x = operands[0]
        if self.act_type == "gelu":
            return f"(0.5f * {x} * (1.f + erff({x} * {_literal(1 / sqrt(2))})))"
        if self.act_type in ("elu", "selu"):
            slope, scale = self._elu
            return f"({_literal(scale)} * ({x} > 0.f ? {x} : {_literal(slope)} * expm1f({x})))"
        slopes = operands[1] if self.act_type == "prelu" else _literal(self._slopes([]))
        return f"({x} > 0.f ? {x} : {x} * {slopes})"

    def operand_shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        x, *gamma = shapes
        return [x, *((*one, *[1] * (len(x) - 2)) if len(x) > 2 else one for one in gamma)]

    def bounds(self, *operands: Bounds) -> Bounds:
        slope = {"gelu": 1, "prelu": inf, "selu": inf, "elu": self.slope}.get(self.act_type) or self._slopes([])
        return Bounds(-inf, inf, operands[0].gain * max(1, abs(slope)))

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
class Clip(Elementwise):
    """min(max(x, a_min), a_max)."""

    names = ("clip",)
    a_min: float = number()
    a_max: float = number()

    def check(self) -> None:
        if not self.a_min <= self.a_max:  # for which NumPy, MXNet and the kernels have different results; or NaN
            raise Unsupported(f"a_min: expected at most a_max, {self.a_max}, got {self.a_min}")

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        arrays.xp.clip(inputs[0], np.float32(self.a_min), np.float32(self.a_max), out=out)

    def text(self, *operands: str) -> str:
        (x,), low, high = operands, _literal(self.a_min), _literal(self.a_max)
        return f"({x} < {low} ? {low} : {x} > {high} ? {high} : {x})"

    def bounds(self, *operands: Bounds) -> Bounds:
        return Bounds(self.a_min, self.a_max, operands[0].gain if self.a_min <= 0 <= self.a_max else inf)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        x = given.inputs[0]
        return [gradient * ((x >= np.float32(self.a_min)) & (x <= np.float32(self.a_max)))]


class Function(Elementwise):
    """An elementwise function of one array, or of two of the same shape; only ``broadcast_`` operators broadcast."""

    names = (
        *_UNARY,
        *(f"broadcast_{name}" for name in _BINARY),
        *(f"elemwise_{name}" if name in ("add", "sub", "mul", "div") else f"_{name}" for name in _BINARY),
    )

    def used_inputs(self) -> tuple[str, ...]:
        return ("lhs", "rhs") if self.op.rpartition("_")[2] in _BINARY else ("data",)

    def _applied(self, inputs: Sequence[Any], literal: Callable[[float], Any]) -> tuple[str, Sequence[Any], int]:
        """Return the function, its operands, and the place of the first input; ``literal`` converts a number."""
        return self.op.rpartition("_")[2], inputs, 0

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        name, operands, _ = self._applied(inputs, np.float32)
        getattr(arrays.xp, _FUNCTIONS[name][0])(*operands, out=out)

    def text(self, *operands: str) -> str:
        name, given, _ = self._applied(operands, _literal)
        return _FUNCTIONS[name][1].format(*given)

    def bounds(self, *operands: Bounds) -> Bounds:
        name = self.op.rpartition("_")[2]
        if name in ("negative", "abs"):
            return Bounds(-inf, inf, operands[0].gain)
        if name == "mul":
            a, b = operands
            return Bounds(-inf, inf, min(a.gain * b.largest, a.largest * b.gain))
        return UNBOUNDED

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        (name, operands, first), xp = self._applied(given.inputs, np.float32), arrays.xp
        found: list[Any] = [None] * len(wanted)
        for place, (derivative, array) in enumerate(zip(_FUNCTIONS[name][2][first:], given.inputs)):
            if wanted[place]:
                product = gradient * derivative(xp, *operands, given.out) if derivative else gradient
                found[place] = reduced_to(xp, product, array.shape)
        return found


@dataclass(frozen=True)
class WithScalar(Function):
    """Arithmetic of an array and a number."""

    names = tuple(_WITH_SCALAR)
    scalar: float = number(1.0)
    is_int: bool = flag(True)

    def _applied(self, inputs: Sequence[Any], literal: Callable[[float], Any]) -> tuple[str, Sequence[Any], int]:
        (name, number_first), scalar = _WITH_SCALAR[self.op], literal(self.scalar)
        return (name, (scalar, *inputs), 1) if number_first else (name, (*inputs, scalar), 0)

    def bounds(self, *operands: Bounds) -> Bounds:
        (x,), scalar, (name, number_first) = operands, self.scalar, _WITH_SCALAR[self.op]
        if number_first:
            return UNBOUNDED
        if name in ("add", "sub"):
            shift = scalar if name == "add" else -scalar
            return Bounds(x.low + shift, x.high + shift)
        if name == "maximum":
            return Bounds(max(x.low, scalar), max(x.high, scalar), x.gain if scalar <= 0 else inf)
        if name == "minimum":
            return Bounds(min(x.low, scalar), min(x.high, scalar), x.gain if scalar >= 0 else inf)
        if name in ("mul", "div") and 0 < scalar < inf:
            factor = scalar if name == "mul" else 1 / scalar
            return Bounds(x.low * factor, x.high * factor, x.gain * factor)
        return UNBOUNDED


class Constant(Operator):
    """An array of zeros or of ones, with the input's shape."""

    names = ("zeros_like", "ones_like")
    moves = True

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        out.fill(np.float32(self.op == "ones_like"))

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [None]


class Sum(Elementwise):
    """The sum of any number of arrays of one shape."""

    names = ("add_n",)
    variadic = True

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        # Read the first input first: the output may share its memory.
        out[...] = inputs[0]
        for more in inputs[1:]:
            arrays.xp.add(out, more, out=out)

    def text(self, *operands: str) -> str:
        return " + ".join(operands)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        return [gradient] * len(wanted)


def is_prelu(operator: Operator | None) -> bool:
    """Return whether an operator is a LeakyReLU whose slopes are an input."""
    return isinstance(operator, LeakyReLU) and operator.act_type == "prelu"


def _literal(value: Any) -> str:
    """Return a float32 in CUDA C++."""
    number = np.float32(value)
    # As a number where it is one: the compiler finds no minimum or maximum in a clip to __int_as_float.
    return f"({float(number)!r}f)" if np.isfinite(number) else f"__int_as_float(0x{number.view(np.uint32):08x})"


def reduced_to(xp: Any, x: Any, shape: Shape) -> Any:
    """Return x summed in float64 over the axes along which an array of ``shape`` was broadcast."""
    if x.shape == shape:
        return x
    lengths = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, (length, whole) in enumerate(zip(lengths, x.shape)) if length != whole)
    return xp.sum(x, axis=axes, dtype=np.float64).astype(np.float32).reshape(shape)
