"""A report as data: sections of paragraphs, lists, tables and figures, which page and Markdown show alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Union

#: What stands in a table where no run gave a figure.
NONE = "–"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with a caption; columns of figures stand to the right. folded: shown when asked for."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{self.caption}: expected {len(self.head)} cells, got {len(row)}: {list(row)}")

    @property
    def numeric(self) -> list[bool]:
        """For each column whether all of its cells are figures."""
        return [all(map(is_figure, cells)) for cells in zip(*self.rows)]


@dataclass(frozen=True)
class Figure:
    """A picture: SVG whose ink is ``currentColor``; alt says what is to be seen. name: its file's, for Markdown."""

    name: str
    caption: str
    alt: str
    svg: str


Block = Union[Text, Items, Table, Figure]


@dataclass
class Section:
    """A heading, blocks, and sections below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The heading as the end of an address."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


_NUMBER = r"[<~]?-?[\d.,]+(e-?\d+)?( ?(%|x|s|ms|us|ns|GB|MB|KB|B))?"
_FIGURE = re.compile(rf"{NONE}|{_NUMBER}( [+] {_NUMBER})*( \({_NUMBER}\))?|not supported|wrong")


def is_figure(cell: str) -> bool:
    """Whether a cell is a number, with or without a unit, a sum of such, or what stands in their place."""
    return bool(_FIGURE.fullmatch(cell))


def seconds(value: float | None) -> str:
    """A time with the unit that suits it, three digits."""
    if value is None:
        return NONE
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e-9)} ns"


def ratio(value: float | None) -> str:
    """How many times as fast."""
    return NONE if value is None else f"{digits(value)} x"


def percent(value: float | None) -> str:
    """A share from 0 to 1."""
    return NONE if value is None else f"{100 * value:.0f} %"


def amount(value: float | None) -> str:
    """Bytes, in powers of ten."""
    if value is None:
        return NONE
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def digits(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None where one is missing or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def over(a: float | None, b: float | None) -> float | None:
    """a / b; None where one is missing or zero."""
    return a / b if a and b else None
