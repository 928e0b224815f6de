"""What an operator is to a network: one record, and what its functions are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from ._op_attributes import Refused, Settings

Shape = tuple[int, ...]


class Arrays(Protocol):
    """A library of arrays: NumPy, or CuPy on the current device and stream."""

    #: The module, as far as NumPy and CuPy agree.
    xp: Any

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """The product of two stacks of matrices, float32 and C-contiguous; a stack of one serves all."""

    def erf(self, x: Any, out: Any) -> None:
        """The error function of each element."""


#: Fill the output from the inputs; an input that the operator ignores may be None.
Compute = Callable[[Arrays, Any, Sequence[Any], Any], None]


@dataclass(frozen=True)
class Kind:
    """One operator at inference.

    names: what MXNet's graphs call it. inputs: its inputs' names; with a "*" behind the last, any number of them.
    read: the attributes' settings, or Refused. infer: the output's shape from those of the inputs, or Refused.
    compute: fills the output, C-contiguous float32, with a library's functions. view: the output is the first
    input's memory. inplace: the output may take the place of the first input. auxiliary: inputs that MXNet
    counts as states. ignored: inputs that inference does not read.
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    read: Callable[[Settings], Any]
    infer: Callable[[Any, Sequence[Shape]], Shape]
    compute: Compute
    view: bool = False
    inplace: bool = False
    auxiliary: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    #: Whether the settings, for an input of so many dimensions, mix what lies along the first one.
    mixes: Callable[[Any, int], bool] = lambda settings, dimensions: False
    #: The label's shape that MXNet infers from the data's, for the ignored inputs.
    label: Callable[[Any, Shape], Shape] | None = None
    #: How many of the inputs the settings ask for, where some may be left out.
    count: Callable[[Any], int] | None = None
    #: For elementwise operators of one input that grow with it: they may go behind a maximum.
    grows: Callable[[Any], bool] = lambda settings: False


def nothing(settings: Settings) -> None:
    """No attributes."""


def same(settings: Any, shapes: Sequence[Shape]) -> Shape:
    """The first input's shape."""
    return shapes[0]


def agree(name: str, expected: Sequence[int], got: Sequence[int]) -> None:
    """Refuse an input of another shape."""
    if tuple(expected) != tuple(got):
        raise Refused(f"{name}: expected shape {tuple(expected)}, got {tuple(got)}")


def rank(name: str, expected: int, got: Shape) -> None:
    """Refuse an input of another number of dimensions."""
    if len(got) != expected:
        raise Refused(f"{name}: expected {expected} dimensions, got shape {got}")


def axis_of(axis: int, dimensions: int) -> int:
    """The axis counted from the front; refused where there is none."""
    if not -dimensions <= axis < dimensions:
        raise Refused(f"axis: expected one of {dimensions} dimensions, got {axis}")
    return axis % dimensions


def size(shape: Sequence[int]) -> int:
    """Elements of an array of that shape."""
    return prod(shape)


def by_name(kinds: Sequence[Kind]) -> Mapping[str, Kind]:
    """The records by each of their names."""
    return {name: kind for kind in kinds for name in kind.names}
