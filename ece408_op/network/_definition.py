"""What an operator is to a network: a class with its attributes, its computation and its gradient.

MXNet infers the shapes. To add an attribute, add a field. To add an operator, add a class to ``_layers``,
``_elementwise`` or ``_shaping``. To add a property that operators have, add a method to ``Operator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

from ece408_op.plugin.attributes import integers, is_mxnets_own

Shape = tuple[int, ...]

#: The attribute that stores a parameter's shape in the graph of a network's node.
SHAPE = "__shape__"

#: Attributes that change how MXNet computes, not the result.
_HINTS = {"workspace", "cudnn_tune", "cudnn_off", "min_calib_range", "max_calib_range", "num_args"}
_FLAGS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}


class Unsupported(Exception):  # noqa: N818 - a reason; the caller adds the node's name and raises GraphError
    """Why a network cannot contain a node: what was expected, and what came."""


class Arrays:
    """A library of arrays on the current device and stream: ``xp`` is NumPy, or CuPy as far as both agree."""

    xp: Any

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Multiply two stacks of matrices, float32 and C-contiguous; a stack of one is used for all."""
        raise NotImplementedError

    def erf(self, x: Any, out: Any) -> None:
        """Compute the error function of each element."""
        raise NotImplementedError


def _attribute(expected: str, convert: Callable[[str], Any], *default: Any) -> Any:
    """Return the dataclass field of an attribute; it is required if it has no default.

    ``convert`` makes the value of a text, or raises ValueError or KeyError; None stands for the default.
    """
    return field(default=default[0] if default else MISSING, metadata={"expected": expected, "convert": convert})


def choice(*words: str) -> Any:
    """Return the field of an attribute that is one of these words, the first by default."""
    expected = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    return _attribute(expected, dict(zip(words, words)).__getitem__, words[0])


#: The fields of a truth value, a number and a whole number; an argument is the default.
flag = partial(_attribute, "True or False", _FLAGS.__getitem__)
number = partial(_attribute, "a number", float)
integer = partial(_attribute, "a whole number", int)
#: The field of a truth value that has to be False.
disabled = partial(_attribute, "False", {text: value for text, value in _FLAGS.items() if not value}.__getitem__, False)


def sizes() -> Any:
    """Return the field of any number of whole numbers, none by default."""
    return _attribute("whole numbers", lambda text: tuple(_integers(text)), ())


def pair(*default: int) -> Any:
    """Return the field of two whole numbers, for rows and columns; the default is for both."""

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
    """One node's forward pass in training: its inputs, ignored ones too, its output, and what ``train`` returned."""

    inputs: Sequence[Any]
    out: Any
    saved: Any = None


@dataclass(frozen=True)
class Operator:
    """One operator, with its attributes: ``op`` is its name in the graph.

    The fields that the functions above make are attributes of the node. The class variables are:

    names: the ops that the class computes. inputs: the names of its inputs; variadic: it has any number of the first.
    auxiliary: inputs that MXNet counts as states. ignored: inputs that inference does not read. accepted: attributes
    that have no effect at inference. view: the output is the first input's memory. inplace: the output may overwrite
    the first input, if both have one size. takes_epilogue: on the GPU, the operator can apply an activation to its
    output.
    """

    names: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]] = ("data",)
    variadic: ClassVar[bool] = False
    auxiliary: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    accepted: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[bool] = False
    inplace: ClassVar[bool] = False
    takes_epilogue: ClassVar[bool] = False

    op: str

    @classmethod
    def read(cls, op: str, attrs: Mapping[str, str]) -> Operator:
        """Return the operator with a node's attributes; raises Unsupported, which names the attribute."""
        known = {one.name: one for one in fields(cls) if one.metadata}
        given = {name: text for name, text in attrs.items() if name not in _HINTS and not is_mxnets_own(name)}
        unknown = sorted(given.keys() - known.keys() - set(cls.accepted))
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
        """Raise Unsupported if attributes have values that the operator does not compute."""

    def check_shapes(self, shapes: Sequence[Shape], output: Shape) -> None:
        """Raise Unsupported for inputs that MXNet's operator takes and this one does not."""

    def compute(self, arrays: Arrays, inputs: Sequence[Any], out: Any) -> None:
        """Fill ``out``, C-contiguous float32, from the inputs; an ignored one may be None.

        Not for operators that kernels compute: ``_gpu`` and ``_training_gpu`` say which. So are their gradients.
        """
        raise NotImplementedError

    def check_gradient(self, several: bool) -> None:
        """Raise Unsupported if the operator with these attributes has no gradient, or none on ``several`` GPUs."""

    def train(self, arrays: Arrays, inputs: Sequence[Any], out: Any, seed: int) -> Any:
        """Fill ``out`` as in training, and return what ``gradients`` needs besides inputs and output.

        seed: a number of this call's alone, for random numbers.
        """
        self.compute(arrays, inputs, out)

    def gradients(self, arrays: Arrays, given: Trained, gradient: Any, wanted: Sequence[bool]) -> Sequence[Any]:
        """Return the gradient to each input, float32 of its shape; None for one that is not wanted, or is zero.

        gradient: to the output, float32 of its shape, which nobody changes; None for a loss whose output nobody reads.
        An array that is returned may be ``gradient`` itself, or a view of it.
        """
        raise NotImplementedError

    def new_states(self, given: Trained) -> Mapping[int, Any]:
        """Return the new values of the inputs, by number, that a step of training changes: a BatchNorm's statistics."""
        return {}

    def used_inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that these attributes ask for."""
        return self.inputs

    def input_names(self, count: int) -> tuple[str, ...]:
        """Return the name of each of a node's inputs; raises Unsupported if ``count`` is not their number."""
        names = self.inputs * count if self.variadic else self.used_inputs()
        if len(names) != count:
            raise Unsupported(f"expected {len(names)} inputs, {', '.join(names)}; got {count}")
        return names

    def mixes_images(self, dimensions: int) -> bool:
        """Return whether an image of the output depends on several images of an input of ``dimensions`` dimensions."""
        return False

    @property
    def activation(self) -> str | None:
        """The type of activation that this operator is, if it is one."""
        return None

    @property
    def view_in_training(self) -> bool:
        """Whether ``train`` would copy the first input: ``view``, unless training computes something else."""
        return self.view and type(self).train is Operator.train

    @property
    def is_loss(self) -> bool:
        """Whether the gradient does not read the gradient to the output."""
        return False
