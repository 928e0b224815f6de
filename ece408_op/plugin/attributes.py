"""The operator's attributes, parsed from MXNet's text or from Python values, and checked.

They have the names, values and defaults of MXNet's Convolution, except that ``no_bias`` is True by default: a node with
only ``kernel`` and ``num_filter`` is the operator of the course.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ece408_op.core import dispatch
from ece408_op.errors import ProblemError
from ece408_op.problem import ConvProblem, Pair

#: Attributes that change how MXNet computes a Convolution, but not its result. The operator ignores them.
HINTS = ("cudnn_tune", "cudnn_off", "workspace")
#: The attributes of a Convolution, and all attributes of the operator.
CONVOLUTION_ATTRIBUTES = ("kernel", "num_filter", "stride", "pad", "dilate", "num_group", "no_bias", "layout", *HINTS)
KNOWN = (*CONVOLUTION_ATTRIBUTES, "impl", "device", "precision", "tune", "fuse")
DEVICES = ("cpu", "gpu")
PRECISIONS = tuple(dispatch.SERVES)
INPUTS = ("data", "weight", "bias")
#: The values of ``fuse``: the kernel also computes the tanh of 2 x 2 maxima with stride 2, as MXNet's Pooling with the
#: convention "valid" or "full" does.
FULL = "tanh_pool_full"
FUSES = ("tanh_pool", FULL)

#: The attribute that has the layer's name, because MXNet does not pass a node's name to its operator.
LAYER = "__layer__"

#: Sizes must be smaller than this, because MXNet passes shapes to Custom operators as 32-bit integers.
SIZE_LIMIT = 2**31
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_LAYOUT = "NCHW"

#: MXNet's own attributes in the spelling of keywords and of files from before 0.9.4, for a node or one of its inputs.
OLD_HIDDEN = re.compile(r"(\w+_)?(ctx_group|lr_mult|wd_mult|force_mirroring|mirror_stage)")


@dataclass(frozen=True)
class Attributes:
    """The attributes of a node or call.

    kernel: rows and columns of a filter; num_filter: filters; stride, pad, dilate, num_group: as in ConvProblem;
    no_bias: whether there is no third input, (M,); impl: a kernel's name or "auto"; device: "cpu", "gpu", or None for
    the arrays' device; tune: whether GPU kernels time their tiles; layer: the layer's name, or None; fuse: one of
    FUSES, or None.
    """

    kernel: Pair
    num_filter: int
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilate: Pair = (1, 1)
    num_group: int = 1
    no_bias: bool = True
    impl: str = dispatch.AUTO
    device: str | None = None
    precision: str = "float32"
    tune: bool = False
    layer: str | None = None
    fuse: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether ``fuse`` supports the layer: it is like those of the course, and not fused yet."""
        square = replace(self, kernel=(self.kernel[0],) * 2, stride=(1, 1), pad=(0, 0), dilate=(1, 1), num_group=1)
        return self == replace(square, no_bias=True, fuse=None)

    @property
    def full(self) -> bool:
        """Whether the fused pooling includes incomplete windows at odd edges (MXNet's convention "full")."""
        return self.fuse == FULL

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return INPUTS[: 2 if self.no_bias else 3]

    def problem(self, x: Sequence[int], w: Sequence[int]) -> ConvProblem:
        """Return the problem for shapes of data and weight; raises ProblemError if they do not fit."""
        problem = ConvProblem.from_shapes(x, w, self.stride, self.pad, self.dilate, self.num_group)
        return problem.pooled(self.full) if self.fuse else problem

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Attributes:
        """Return the attributes from keywords or from MXNet's text; raises ProblemError for a wrong attribute.

        MXNet's own attributes are ignored, both names in double underscores and those in the old spelling.
        """
        if all(isinstance(value, str) for value in given.values()):  # MXNet's text is often the same, so it is cached
            return _parsed(tuple(given.items()))
        return cls._checked(given)

    @classmethod
    def _checked(cls, given: Mapping[str, Any]) -> Attributes:
        unknown = [name for name in given if name not in KNOWN and not is_mxnets_own(name)]
        if unknown:
            raise ProblemError(f"unknown attribute {', '.join(sorted(unknown))}: expected only {', '.join(KNOWN)}")
        # Compare the text, since a comparison of a NumPy array returns an array.
        given = {name: value for name, value in given.items() if str(value) != "None"}
        for name in ("kernel", "num_filter"):
            if name not in given:
                raise ProblemError(f"{name}: expected a value, got none; New needs kernel=(K, L) and num_filter=M")
        found = cls(
            kernel=_pair("kernel", given, 1),
            num_filter=_integer("num_filter", given["num_filter"]),
            stride=_pair("stride", given, 1, (1, 1)),
            pad=_pair("pad", given, 0, (0, 0)),
            dilate=_pair("dilate", given, 1, (1, 1)),
            num_group=_integer("num_group", given.get("num_group", 1)),
            no_bias=_flag("no_bias", given.get("no_bias", True)),
            impl=_one_of("impl", given.get("impl", dispatch.AUTO), (dispatch.AUTO, *dispatch.names())),
            device=_one_of("device", given["device"], DEVICES) if "device" in given else None,
            precision=_one_of("precision", given.get("precision", "float32"), PRECISIONS),
            tune=_flag("tune", given.get("tune", False)),
            layer=given.get(LAYER),
            fuse=_one_of("fuse", given["fuse"], FUSES) if "fuse" in given else None,
        )
        if given.get("layout", _LAYOUT) != _LAYOUT:
            raise ProblemError(f"layout: expected {_LAYOUT}, got {given['layout']!r}; transpose the arrays")
        if found.num_filter % found.num_group:
            raise ProblemError(f"num_group: expected a divisor of {found.num_filter} filters, got {found.num_group}")
        if found.fuse and not replace(found, fuse=None).is_plain:
            raise ProblemError(
                f"fuse: expected a square kernel without stride, padding, dilation, groups and bias, got {found}"
            )
        return found

    def convolution(self) -> dict[str, str]:
        """Return, as text, kernel, num_filter and Convolution's other attributes that differ from New's defaults."""
        return {name: text for name, text in self.as_text().items() if name in CONVOLUTION_ATTRIBUTES}

    def as_text(self) -> dict[str, str]:
        """Return the attributes as MXNet's text, except those that have their default value."""
        plain = Attributes(self.kernel, self.num_filter)
        values = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        values = {"kernel": self.kernel, "num_filter": self.num_filter, **values}
        return {LAYER if name == "layer" else name: str(value) for name, value in values.items()}


def is_mxnets_own(name: str) -> bool:
    """Return whether the attribute is for MXNet itself, as ``__lr_mult__`` or in the old spelling ``lr_mult``."""
    return (name.startswith("__") and name.endswith("__")) or OLD_HIDDEN.fullmatch(name) is not None


def integers(text: str) -> list[int] | None:
    """Return the numbers of a shape in MXNet's text, as "(5, 5)", "[5,5]" or Python 2's "(5L, 5L)"; None for others."""
    body = text.strip()
    if body[:1] + body[-1:] in ("()", "[]"):
        body = body[1:-1]
    parts = [part.strip() for part in body.split(",")]
    if parts[-1] == "":
        parts.pop()
    if not all(re.fullmatch(r"-?[0-9]{1,10}L?", part) for part in parts):
        return None
    return [int(part.rstrip("L")) for part in parts]


@lru_cache(maxsize=256)
def _parsed(given: tuple[tuple[str, str], ...]) -> Attributes:
    return Attributes._checked(dict(given))


def _pair(name: str, given: Mapping[str, Any], least: int, default: Pair | None = None) -> Pair:
    """Return rows and columns; an empty tuple means the default."""
    value = given.get(name, ())
    sizes = integers(value) if isinstance(value, str) else value
    if default and isinstance(sizes, (tuple, list)) and not sizes:
        return default
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or not all(_is_size(size, least) for size in sizes):
        expected = f"two {'positive' if least else 'non-negative'} integers below 2**31, for rows and columns"
        raise ProblemError(f"{name}: expected {expected}, got {value!r}; New takes 2-D convolutions only")
    return int(sizes[0]), int(sizes[1])


def _integer(name: str, value: Any) -> int:
    numbers = integers(value) if isinstance(value, str) else [value]
    if numbers is None or len(numbers) != 1 or not _is_size(numbers[0], 1):
        raise ProblemError(f"{name}: expected a positive integer below 2**31, got {value!r}")
    return int(numbers[0])


def _is_size(value: Any, least: int) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and least <= int(value) < SIZE_LIMIT


def _flag(name: str, value: Any) -> bool:
    found = _FLAGS.get(str(value).lower())
    if found is None:
        raise ProblemError(f"{name}: expected True or False, got {value!r}")
    return found


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ProblemError(f"{name}: expected one of {', '.join(known)}; got {value!r}")
    return str(value)
