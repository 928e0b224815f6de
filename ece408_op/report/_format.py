"""Tables, and figures as text: times, ratios, shares and bytes with three digits and a unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Stands in a table where no run gave a figure.
NONE = "–"

_NUMBER = r"[<~]?-?[\d.,]+(e-?\d+)?( ?(%|x|s|ms|us|ns|GB|MB|KB|B))?"
_FIGURE = re.compile(rf"{NONE}|{_NUMBER}( [+/] {_NUMBER})*( \({_NUMBER}\))?|not supported|wrong")


@dataclass(frozen=True)
class Table:
    """A table with a caption; folded: the page shows it on demand."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False

    @property
    def numeric(self) -> list[bool]:
        """For each column whether all of its cells are figures, which are aligned to the right."""
        return [all(_FIGURE.fullmatch(cell) for cell in cells) for cells in zip(*self.rows)]


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], folded: bool = False) -> Table:
    """A table of the columns that have a figure or a word."""
    shown = [n for n in range(len(head)) if any(set(row[n]) - set(f"{NONE} +") for row in rows)]
    return Table(caption, [head[n] for n in shown], [[row[n] for n in shown] for row in rows], folded)


def seconds(value: float | None) -> str:
    """A time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if value is not None and (value >= size or unit == "ns"):
            return f"{digits(value / size)} {unit}"
    return NONE


def amount(value: float | None) -> str:
    """Bytes, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value is not None and value >= size:
            return f"{digits(value / size)} {unit}"
    return NONE if value is None else f"{value:.0f} B"


def ratio(a: float | None, b: float | None) -> str:
    """a / b, how many times as fast b is."""
    return f"{digits(a / b)} x" if a and b else NONE


def percent(value: float | None) -> str:
    """A share from 0 to 1."""
    return NONE if value is None else f"{100 * value:.0f} %"


def rate(value: float) -> str:
    """Per second, in units of 10**12."""
    return digits(value / 1e12)


def digits(value: float) -> str:
    return f"{value:.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
