"""Indices beyond a function's own arrays. g++ may keep these in registers, where the emulator sees no access.

Its option -fsanitize=bounds checks every array of known size. This module leaves out arrays in shared, constant and GPU
memory, whose accesses the emulator checks itself: there, an index beyond a row is right if the next row has it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ece408_op.runtime.source_text import mask

from ._build import Program
from ._report import Finding
from ._run import Outcome

_OTHER_SPACES = r"\b__(?:shared|constant|device|managed)__\b[^;{{}}]*\b{}\s*\["
#: A line that may declare an array in a function.
_DECLARED = re.compile(
    r"^(?!.*\b(?:__\w+__|extern)\b).*?\b(?!(?:return|else)\b)[A-Za-z_]\w*[ \t>]+\w+[ \t]*\[[^\]\n]", re.M
)


def has_arrays(text: str) -> bool:
    """Return whether the source may have an array in a function."""
    return _DECLARED.search(mask(text)) is not None


def findings(program: Program, outcome: Outcome) -> tuple[Finding, ...]:
    """Return what the program's ``indices`` found: the first index beyond each such array, by line."""
    found: dict[tuple[str, int, str], Finding] = {}
    for what, message, _, _, times in outcome.rows["finding"]:
        if what != "index":
            continue
        path, line, column, index, kind = message.split("|", 4)
        file, size = Path(path).name, re.search(r"\[(\d+)\]", kind)
        name = _name(_line(program.text, file, int(line)), int(column))
        # A member may be in any memory.
        if name[:1] in (".", "-") or re.search(_OTHER_SPACES.format(re.escape(name) if name else r"\w+"), program.text):
            continue
        said = f"index {index} is beyond {name or 'an array'}, which has {size[1] if size else 'fewer'} elements"
        place = (file, int(line), name)
        found.setdefault(place, Finding("out of bounds", int(line), 0, said, int(times), file))
    return tuple(found.values())


def _line(text: str, file: str, number: int) -> str:
    """Return a line of a file in the text, whose #line directives say where each file's lines are."""
    now, at = "", 0
    for line in text.splitlines():
        directive = re.match(r'#line (\d+) "(.*)"', line)
        if directive:
            now, at = directive[2], int(directive[1])
            continue
        if (now, at) == (file, number):
            return line
        at += 1
    return ""


def _name(line: str, column: int) -> str:
    """Return a of ``a[i][j]``, or .a of ``b.a[i]``, given the column of a closing bracket, from 1; or nothing.

    In a template, g++ gives the opening one.
    """
    depth = 0
    for i in range(min(column, len(line)) - 1, -1, -1):
        depth += (line[i] == "]") - (line[i] == "[")
        if depth <= 0:
            name = re.search(r"((?:\.|->)?\w+)\s*((?:\[[^\[\]]*\]\s*)*)$", line[:i])
            return name[1] if name else ""
    return ""
