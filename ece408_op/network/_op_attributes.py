"""Attributes of MXNet's operators, which are text, as Python values."""

from __future__ import annotations

from collections.abc import Mapping

from ece408_op.graph.symbol_graph import integers, is_mxnets_own

#: Attributes that change how MXNet computes, not what.
_HINTS = {"workspace", "cudnn_tune", "cudnn_off", "min_calib_range", "max_calib_range", "num_args"}


class Refused(Exception):  # noqa: N818 - the reason of a refusal, which names its node where it is caught
    """Why a node cannot be taken, in words."""


class Settings:
    """A node's attributes, each asked for by its type; ``done`` refuses those that nobody asked for."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._left = {key: text for key, text in attributes.items() if key not in _HINTS and not is_mxnets_own(key)}

    def text(self, name: str, default: str) -> str:
        """A word, by default that one."""
        return self._left.pop(name, default)

    def one_of(self, name: str, known: tuple[str, ...], default: str) -> str:
        """A word of those known."""
        value = self.text(name, default)
        if value not in known:
            raise Refused(f"{name}: expected one of {', '.join(known)}; got {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth; None counts as the default."""
        value = self._left.pop(name, "None")
        if value == "None":
            return default
        if value in ("True", "true", "1"):
            return True
        if value in ("False", "false", "0"):
            return False
        raise Refused(f"{name}: expected True or False, got {value}")

    def number(self, name: str, default: float | None = None) -> float:
        """A number; refused where there is none and no default."""
        value = self._left.pop(name, "None")
        if value == "None" and default is not None:
            return default
        try:
            return float(value)
        except ValueError:
            raise Refused(f"{name}: expected a number, got {value}") from None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.number(name, default)
        if value != int(value):
            raise Refused(f"{name}: expected a whole number, got {value}")
        return int(value)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Whole numbers, one or several; None where there are none."""
        value = self._left.pop(name, "None")
        if value == "None":
            return None
        numbers = integers(value)
        if numbers is None:
            raise Refused(f"{name}: expected whole numbers, got {value}")
        return tuple(numbers)

    def pair(self, name: str, default: int | None = None) -> tuple[int, int]:
        """Rows and columns; the default stands for both."""
        numbers = self.shape(name)
        if not numbers and default is not None:
            return default, default
        if numbers is None or len(numbers) != 2:
            raise Refused(f"{name}: expected rows and columns, two dimensions, got {numbers}")
        return numbers[0], numbers[1]

    def only(self, name: str, expected: str) -> None:
        """Refuse any value but that one (None counts as it)."""
        value = self._left.pop(name, "None")
        if value not in ("None", expected):
            raise Refused(f"{name}: expected {expected}, got {value}")

    def done(self) -> None:
        """Refuse attributes that were not asked for."""
        if self._left:
            raise Refused(f"attributes not known here: {', '.join(sorted(self._left))}")
