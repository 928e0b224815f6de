"""The operator's attributes, parsed from MXNet's text or from Python values, and checked."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ece408_op.core import dispatch
from ece408_op.errors import ProblemError

KNOWN = ("kernel", "num_filter", "impl", "device", "precision", "fuse")
DEVICES = ("cpu", "gpu")
PRECISIONS = tuple(dispatch.SERVES)
#: What the kernel computes in the same pass: tanh of 2 x 2 max-pooling with stride 2, as MXNet's Pooling with the
#: convention "valid" or "full".
FULL = "tanh_pool_full"
FUSES = ("tanh_pool", FULL)

#: Sizes are smaller than this: MXNet passes shapes to Custom operators in 32 bits.
_END = 2**31

#: The attribute with the layer's name, which MXNet does not pass to the operator.
LAYER = "__layer__"


@dataclass(frozen=True)
class Attributes:
    """The attributes of a node or call.

    kernel: rows and columns of a filter; num_filter: filters; impl: a kernel's name or "auto"; device: "cpu", "gpu", or
    None for the arrays' device; layer: the layer's name, or None; fuse: one of FUSES, or None.
    """

    kernel: int
    num_filter: int
    impl: str = dispatch.AUTO
    device: str | None = None
    precision: str = "float32"
    layer: str | None = None
    fuse: str | None = None

    @property
    def full(self) -> bool:
        """Whether pooling includes the maxima at odd edges."""
        return self.fuse == FULL

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Attributes:
        """Return the attributes from keywords or from MXNet's text; raises ProblemError for a wrong one.

        Names in double underscores are MXNet's own and are ignored.
        """
        if all(isinstance(value, str) for value in given.values()):  # MXNet's text, which repeats
            return _parsed(tuple(given.items()))
        return cls._checked(given)

    @classmethod
    def _checked(cls, given: Mapping[str, Any]) -> Attributes:
        unknown = [name for name in given if name not in KNOWN and not _is_mxnets_own(name)]
        if unknown:
            raise ProblemError(
                f"unknown attribute {', '.join(sorted(unknown))}: expected only {', '.join(KNOWN)} "
                "(New has stride 1, no padding, no dilation, one group and no bias)"
            )
        for name in ("kernel", "num_filter"):
            if given.get(name) is None:
                raise ProblemError(f"{name}: expected a value, got none; New needs kernel=(K, K) and num_filter=M")
        device = _one_of("device", given["device"], DEVICES) if _is_given(given.get("device")) else None
        fuse = _one_of("fuse", given["fuse"], FUSES) if _is_given(given.get("fuse")) else None
        return cls(
            kernel=_kernel(given["kernel"]),
            num_filter=_num_filter(given["num_filter"]),
            impl=_one_of("impl", given.get("impl", dispatch.AUTO), (dispatch.AUTO, *dispatch.names())),
            device=device,
            precision=_one_of("precision", given.get("precision", "float32"), PRECISIONS),
            layer=given.get(LAYER),
            fuse=fuse,
        )

    def as_text(self) -> dict[str, str]:
        """Return the attributes as MXNet's text, without those that have their default value."""
        text = {"kernel": f"({self.kernel}, {self.kernel})", "num_filter": str(self.num_filter)}
        optional = {"impl": self.impl, "device": self.device, "precision": self.precision, "fuse": self.fuse}
        optional[LAYER] = self.layer
        defaults = {"impl": dispatch.AUTO, "precision": "float32"}
        return {**text, **{key: value for key, value in optional.items() if value not in (None, defaults.get(key))}}


@lru_cache(maxsize=256)
def _parsed(given: tuple[tuple[str, str], ...]) -> Attributes:
    return Attributes._checked(dict(given))


def _is_mxnets_own(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_given(value: Any) -> bool:
    return value not in (None, "None")


def _kernel(value: Any) -> int:
    expected = "expected two equal positive integers such as (5, 5)"
    sizes = _literal(value)
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 2 or not all(_is_count(size) for size in sizes):
        raise ProblemError(f"kernel: {expected}, got {value!r}")
    if sizes[0] != sizes[1]:
        raise ProblemError(f"kernel: {expected}, got {value!r}; New takes square kernels only")
    return int(sizes[0])


def _num_filter(value: Any) -> int:
    number = _literal(value)
    if not _is_count(number):
        raise ProblemError(f"num_filter: expected a positive integer below 2**31, got {value!r}")
    return int(number)


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and 0 < int(value) < _END


def _literal(value: Any) -> Any:
    """Return the number or tuple in a text; any other text is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ProblemError(f"{name}: expected one of {', '.join(known)}; got {value!r}")
    return str(value)
