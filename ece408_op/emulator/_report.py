"""The report of a run: findings, counters per line, launches, and hints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ece408_op.runtime.launch import Triple
from ece408_op.runtime.occupancy import LaunchShape

from . import _counters
from ._build import Program
from ._counters import Hint, LineCounters, add
from ._run import Outcome, source_lines


@dataclass(frozen=True)
class Finding:
    """Something wrong that the run showed.

    Attributes:
        kind: "out of bounds", "misaligned", "uninitialised", "race", "barrier", "deadlock", "input" (it writes one),
            "undefined" (a value that CUDA leaves open), "call" (a CUDA call that fails), "unsupported", "error",
            "crash" or "time".
        line: the line of the source, 0 where it is not known.
        other_line: the second access of a race, or the second barrier; 0 for none.
        message: what happened, in one sentence without the line.
        times: how often.
        block: blockIdx of the first time.
        thread: threadIdx of the first time.
        file: the name of the file of that line.
    """

    kind: str
    line: int
    other_line: int
    message: str
    times: int = 1
    block: Triple = (0, 0, 0)
    thread: Triple = (0, 0, 0)
    file: str = ""


@dataclass(frozen=True)
class Report:
    """What one run of a program did.

    Attributes:
        buffers: the outputs after the run by name; a submission's y (B, M, OH, OW) float32.
        findings: what was wrong, in the order in which it was found.
        lines: the counters per line, by file and line; none without counters.
        launches: the kernels' first launches with each size of a block.
        printed: what the program printed.
        ended: whether the run ended before its end, so that the outputs lack the rest.
    """

    buffers: dict[str, np.ndarray]
    findings: tuple[Finding, ...] = ()
    lines: tuple[LineCounters, ...] = ()
    launches: tuple[LaunchShape, ...] = ()
    printed: str = ""
    ended: bool = False

    @property
    def y(self) -> np.ndarray:
        """The buffer y; its old content where nothing was written."""
        return self.buffers["y"]

    @property
    def totals(self) -> LineCounters:
        """The sum over all lines."""
        return add(self.lines)

    def hints(self, source: str) -> tuple[Hint, ...]:
        """Return up to three hints on the source file of that name, the costliest first."""
        return _counters.hints([line for line in self.lines if line.file == source], self.totals)


def make(program: Program, outcome: Outcome) -> Report:
    """Return the report of a run."""
    tables = outcome.tables
    codes = [row["code"] for table in ("counters", "findings") for row in tables[table]]
    where = source_lines(program.executable, program.source, [*codes, *(row["other"] for row in tables["findings"])])
    rows: dict[tuple[str, int], list[LineCounters]] = {}
    for row in tables["counters"]:
        rows.setdefault(where.get(row.pop("code"), ("", 0)), []).append(LineCounters(**row))
    lines = tuple(add(rows[place], place[1], place[0]) for place in sorted(rows))
    shapes: Iterator[dict[str, Any]] = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in tables["launches"]
    )
    findings = _findings(tables["findings"], where)
    launches = tuple(LaunchShape(**shape) for shape in shapes)
    return Report(outcome.outputs, findings, lines, launches, outcome.printed, bool(tables["ended"]))


def _findings(rows: list[dict[str, Any]], where: dict[int, tuple[str, int]]) -> tuple[Finding, ...]:
    """Return one finding per kind and lines: a line of the source may be several accesses of the program."""
    found: dict[tuple[str, str, int, int], Finding] = {}
    for row in rows:
        new = _finding(row, where)
        if new.kind == "barrier" and row["other"] and new.line == new.other_line:
            continue  # one barrier of the source, which the compiler duplicated
        lines = (new.line, new.other_line)
        key = (new.kind, new.file, *(sorted(lines) if new.kind == "race" else lines))
        found[key] = replace(found[key], times=found[key].times + new.times) if key in found else new
    return tuple(found.values())


def _finding(row: dict[str, Any], where: dict[int, tuple[str, int]]) -> Finding:
    file, line = where.get(row["code"], ("", 0))
    other = where.get(row["other"], ("", 0))[1]
    block, thread = tuple(row["block"]), tuple(row["thread"])
    return Finding(row["kind"], line, other, row["message"], row["times"], block, thread, file)  # type: ignore[arg-type]
