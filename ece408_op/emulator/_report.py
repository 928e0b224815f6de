"""The report of a run: findings, counters per line, launches, and hints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ece408_op.runtime.occupancy import LaunchShape

from . import _counters
from ._build import Program
from ._counters import COUNTED, Hint, LineCounters, add
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
        file: the name of the file of that line.
    """

    kind: str
    line: int
    other_line: int
    message: str
    times: int = 1
    file: str = ""


@dataclass(frozen=True)
class Report:
    """What one run of a program did.

    Attributes:
        buffers: the outputs after the run by name; a submission's y (B, M, OH, OW) float32.
        findings: what was wrong, in the order in which it was found; memory without a value comes last.
        lines: the counters per line, by file and line; none without counters.
        launches: each kernel's first launch with each block size.
        printed: what the program printed.
        ended: whether the run stopped early, so that the outputs are incomplete.
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
    findings, counters = outcome.rows["finding"], outcome.rows["counters"]
    codes = [int(code) for row in findings for code in row[2:4]] + [int(row[0]) for row in counters]
    where = source_lines(program.executable, program.source, codes)
    by_place: dict[tuple[str, int], list[LineCounters]] = {}
    for code, *numbers in counters:
        values = dict(zip(COUNTED, map(int, numbers)))
        by_place.setdefault(where.get(int(code), ("", 0)), []).append(LineCounters(line=0, file="", **values))
    lines = tuple(add(by_place[place], place[1], place[0]) for place in sorted(by_place))
    launches = []
    for name, *words in outcome.rows["launch"]:
        gx, gy, gz, bx, by, bz, static, dynamic = map(int, words)
        launches.append(LaunchShape(name, (gx, gy, gz), (bx, by, bz), static, dynamic))
    found = _findings(findings, where)
    return Report(outcome.outputs, found, lines, tuple(launches), outcome.printed, "ended" in outcome.rows)


def _findings(rows: list[list[str]], where: dict[int, tuple[str, int]]) -> tuple[Finding, ...]:
    """Return one finding per kind and lines: a line of the source may be several accesses of the program."""
    found: dict[tuple[str, str, int, int], Finding] = {}
    for kind, message, code, other_code, times in rows:
        file, line = where.get(int(code), ("", 0))
        other = where.get(int(other_code), ("", 0))[1]
        if kind == "barrier" and int(other_code) and line == other:
            continue  # one barrier of the source, which the compiler duplicated
        key = (kind, file, *(sorted((line, other)) if kind == "race" else (line, other)))
        before = found[key].times if key in found else 0
        new = Finding(kind, line, other, message, int(times), file)
        found[key] = replace(found.get(key, new), times=before + int(times))
    # A thread that reads too early reads what is not written yet: the race, which comes later, is the cause.
    return tuple(sorted(found.values(), key=lambda one: one.kind == "uninitialised"))
