"""The base class of a network's operators. Each class has the attributes, the computation and the gradient.

MXNet infers the shapes. To add an attribute, add a field. To add an operator, add a class to ``_layers``,
``_elementwise``, ``_shaping`` or ``_softmax``. To add a property of operators, add a method to ``Operator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from math import erf, inf
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ece408_op.plugin.attributes import integers, is_mxnets_own

Shape = tuple[int, ...]

#: The attribute that stores a parameter's shape in the graph of a network's node.
SHAPE = "__shape__"

#: Attributes that change how MXNet computes, not the result.
_HINTS = {"workspace", "cudnn_tune", "cudnn_off", "min_calib_range", "max_calib_range", "num_args"}
_FLAGS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


class Unsupported(Exception):  # noqa: N818 - a reason; the caller adds the node's name and raises GraphError
    """The reason why a network cannot contain a node: the expected and the given value."""


class Bounds(NamedTuple):
    """What is known of a function v of x, but for rounding and overflow: low <= v <= high and |v| <= gain |x|."""

    low: float
    high: float
    gain: float = inf

    @property
    def largest(self) -> float:
        """The upper bound of |v|."""
        return max(-self.low, self.high)


#: The bounds of any value, and those of an input itself.
UNBOUNDED, INPUT = Bounds(-inf, inf), Bounds(-inf, inf, 1)
#: A bound that is at most this is one, but for rounding.
ONE = 1 + 1e-6


class Arrays:
    """NumPy; a subclass has CuPy on the current device and stream. ``xp``'s functions are those common to both."""

    xp: Any = np

    def matmul(self, a: Any, b: Any, out: Any, transposed: bool = False) -> None:
        """Multiply two stacks of float32 matrices, or a and the transposed b; a stack of one matrix is broadcast."""
        np.matmul(a, b.swapaxes(1, 2) if transposed else b, out=out)

    def erf(self, x: Any, out: Any) -> None:
        """Compute the error function of each element."""
        out[...] = np.frompyfunc(erf, 1, 1)(x)


def _attribute(expected: str, convert: Callable[[str], Any], *default: Any) -> Any:
    """Return the dataclass field of an attribute, which is required if there is no default.

    ``convert`` parses the attribute's text, and raises ValueError or KeyError; its result None means the default.
    """
    return field(default=default[0] if default else MISSING, metadata={"expected": expected, "convert": convert})


def choice(*words: str) -> Any:
    """Return the field of an attribute that is one of these words, the first by default."""
    expected = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    return _attribute(expected, dict(zip(words, words)).__getitem__, words[0])


#: Each makes the field of a truth value, a number or a whole number; an argument is the default.
flag = partial(_attribute, "True or False", _FLAGS.__getitem__)
number = partial(_attribute, "a number", float)
integer = partial(_attribute, "a whole number", int)
#: Makes the field of a truth value that has to be False.
disabled = partial(_attribute, "False", {text: value for text, value in _FLAGS.items() if not value}.__getitem__, False)


def sizes(*none: str) -> Any:
    """Return the field of a tuple of whole numbers of any length, empty by default; the words ``none`` are None."""

    def convert(text: str) -> tuple[int | None, ...]:
        words = [word.strip() for word in text.strip("()[], ").split(",")]
        return tuple(None if word in none else _integers(word)[0] for word in words if word)

    return _attribute(" or ".join(("whole numbers", *none)), convert, ())


def pair(*default: int) -> Any:
    """Return the field of two whole numbers, for rows and columns; one default stands for both."""

    def convert(text: str) -> tuple[int, int] | None:
        numbers = _integers(text)
        if default and not numbers:
            return None
        rows, columns = numbers
        return rows, columns

    return _attribute("rows and columns, two whole numbers", convert, *((n, n) for n in default))


def _integers(text: str) -> list[int]:
    numbers = integers(text)
    if numbers is None:
        raise ValueError
    return numbers


@dataclass(frozen=True)
class Trained:
    """One node's forward pass in training: all its inputs, even ignored ones, its output, and ``train``'s result."""

    inputs: Sequence[Any]
    out: Any
    saved: Any = None


@dataclass(frozen=True)
class Operator:
    """One operator, with its attributes: ``op`` is its name in the graph.

    The fields that the functions above make are attributes of the node. The class variables are:

    names: the ops that the class computes. inputs: the names of its inputs; variadic: the first one may repeat any
    number of times. auxiliary: inputs that are MXNet's auxiliary states. ignored: inputs that inference does not read.
    accepted: attributes that have no effect at inference. view: the output shares the first input's memory, in
    training only if the class has no ``train`` method. inplace: the output may overwrite the first input, if both have
    the same size. moves: ``compute`` only copies elements or fills arrays. takes_epilogue: on the GPU, the operator can
    apply an elementwise operator to its output.
    """

    names: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]] = ("data",)
    variadic: ClassVar[bool] = False
    auxiliary: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    accepted: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[bool] = False
    inplace: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    takes_epilogue: ClassVar[bool] = False

    op: str

    @classmethod
    def read(cls, op: str, attrs: Mapping[str, str]) -> Operator:
        """Return the operator with a node's attributes; raises Unsupported, which names the attribute."""
        known = {one.name: one for one in fields(cls) if one.metadata}
        given = {key: text for key, text in attrs.items() if text != "None" and not is_mxnets_own(key)}
        unknown = sorted(given.keys() - known.keys() - _HINTS - set(cls.accepted))
        if unknown:
            raise Unsupported(f"{', '.join(unknown)}: unsupported attribute")
        values = {}
        for name, one in known.items():
            text = given.get(name, "None")
            try:
                value = None if text == "None" else one.metadata["convert"](text)
            except (ValueError, KeyError):
                raise Unsupported(f"{name}: expected {one.metadata['expected']}, got {text}") from None
            if value is not None:
                values[name] = value
            elif one.default is MISSING:
                raise Unsupported(f"{name}: expected {one.metadata['expected']}, got none")
        found = cls(op, **values)
        found.check()
        return found

    def check(self) -> None:
        """Raise Unsupported if an attribute has an unsupported value."""

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        """Raise Unsupported for inputs that MXNet's operator takes and this class does not."""

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        """Fill ``out``, C-contiguous float32, from the inputs; an ignored input may be None.

        Operators that have kernels in ``_gpu`` and ``_training_gpu`` need neither this method nor ``gradients``.
        """
        raise NotImplementedError

    def check_gradient(self, several: bool) -> None:
        """Raise Unsupported if the operator with these attributes has no gradient, or none on ``several`` GPUs."""

    def train(self, arrays: Arrays, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill ``out`` as in training, and return the data that ``gradients`` needs besides inputs and output.

        seed: the seed of the random numbers, different in each call.
        """
        self.compute(arrays, inputs, out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return the gradient to each input, float32 of its shape; None for a gradient that is not wanted or is zero.

        gradient: to the output, float32 of its shape, read only; None for a loss whose output has no reader. A returned
        array may be ``gradient`` itself or a view of it.
        """
        raise NotImplementedError

    def new_states(self, saved: Any) -> Mapping[int, Any]:
        """Return the new values of the inputs that a training step changes, by position: a BatchNorm's statistics.

        saved: the result of ``train``.
        """
        return {}

    def used_inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that the operator has with these attributes."""
        return self.inputs

    def input_names(self, count: int) -> tuple[str, ...]:
        """Return the names of a node's inputs; raises Unsupported if the operator does not have ``count`` inputs."""
        names = self.inputs * count if self.variadic else self.used_inputs()
        if len(names) != count:
            raise Unsupported(f"expected {len(names)} inputs, {', '.join(names)}; got {count}")
        return names

    def mixes_images(self, dimensions: int) -> bool:
        """Return whether an image of the output depends on several images of an input of ``dimensions`` dimensions."""
        return False

    @property
    def is_loss(self) -> bool:
        """Whether the gradient does not read the gradient to the output."""
        return False
