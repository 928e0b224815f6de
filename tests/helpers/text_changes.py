"""The changes that a page of the documentation shows, applied to a text."""

from __future__ import annotations


def changed(text: str, difference: str) -> str:
    """The text with the lines of a difference, "-", "+" or between them, in place of what they name."""
    lines = difference.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    assert text.count(before) == 1, f"expected these lines once:\n{before}"
    return text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
