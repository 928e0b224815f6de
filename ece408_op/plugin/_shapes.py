"""Inference of the operator's shapes from partly known shapes: -1 is an unknown size, () an unknown rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ece408_op.errors import ProblemError

from .attributes import SIZE_LIMIT, Attributes

_UNKNOWN = -1
_SIZES = {
    "data": "4 dimensions (batch, channels, height, width)",
    "weight": "4 dimensions (filters, channels, rows, columns)",
    "bias": "1 dimension (filters)",
}

Shape = list[int]


@lru_cache(maxsize=1024)
def infer(attributes: Attributes, known: tuple[tuple[int, ...], ...]) -> tuple[tuple[Shape, ...], Shape]:
    """Return the shapes of the inputs and of the output, as far as the known shapes of the inputs determine them.

    Raises ProblemError if the shapes are not those of a convolution with these attributes.
    """
    given = dict(zip(attributes.inputs, map(list, known)))
    for name, shape in given.items():
        if shape and len(shape) != _SIZES[name].count(",") + 1:
            raise ProblemError(f"{name}: expected {_SIZES[name]}, got shape {_text(shape)}")
    # Return a shape of rank 4 for unknown data, because MXNet would read () as the known rank 0.
    data, groups = given["data"] or [_UNKNOWN] * 4, attributes.num_group
    if data[1] != _UNKNOWN and data[1] % groups:
        raise ProblemError(f"num_group: expected a divisor of {data[1]} channels, got {groups}")
    channels = _UNKNOWN if data[1] == _UNKNOWN else data[1] // groups
    group = f" / {groups} groups" if groups > 1 else ""
    weight = _completed(
        "weight",
        [attributes.num_filter, channels, *attributes.kernel],
        given["weight"],
        f"(num_filter, data's channels{group}, kernel)",
    )
    if channels == _UNKNOWN and weight[1] != _UNKNOWN:
        data[1] = weight[1] * groups
    shapes = [data, weight]
    if not attributes.no_bias:
        shapes.append(_completed("bias", [attributes.num_filter], given["bias"], "(num_filter)"))
    return tuple(shapes), [data[0], attributes.num_filter, *_output_sizes(attributes, data)]


def _completed(name: str, expected: Shape, got: Shape, words: str) -> Shape:
    """Return the expected shape with unknown sizes filled in from ``got``; raises ProblemError if sizes differ."""
    if any(_UNKNOWN not in pair and pair[0] != pair[1] for pair in zip(expected, got)):
        raise ProblemError(f"{name}: expected shape {_text(expected)} {words}, got {_text(got)}")
    return [want if want != _UNKNOWN else have for want, have in zip(expected, got or expected)]


def _output_sizes(attributes: Attributes, data: Shape) -> list[int]:
    """Return the output's rows and columns; each depends only on the image's rows or columns."""
    # An unknown size is replaced by a valid one.
    fitting = [kernel * dilate + 1 for kernel, dilate in zip(attributes.kernel, attributes.dilate)]
    image = [other if size == _UNKNOWN else size for size, other in zip(data[2:], fitting)]
    filters, groups = attributes.num_filter, attributes.num_group
    problem = attributes.problem((1, groups, *image), (filters, 1, *attributes.kernel))
    for words, size in zip(("rows", "columns"), problem.y_shape[2:]):
        if size >= SIZE_LIMIT:
            raise ProblemError(f"output: expected fewer than {SIZE_LIMIT} {words}, got {size}; use less padding")
    return [_UNKNOWN if size == _UNKNOWN else out for size, out in zip(data[2:], problem.y_shape[2:])]


def _text(shape: Sequence[int]) -> str:
    return "(" + ", ".join("?" if size == _UNKNOWN else str(size) for size in shape) + ")"
