"""One submission on one problem: its runs, every one of them checked, and the verdict on them all."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ece408_op.problem import ConvProblem

from . import jail
from .host_side import HostSide
from .judge import FLOAT32, HALF, PATTERN, REAL, WHOLE, WRONG, Judged, describe
from .spec import Spec
from .worker import EndedError, Worker, kept

#: The worker's clock may be behind the parent's by so many seconds, and more than half of the run, by chance.
_CLOCKS_APART = 0.25

#: Seconds for which a worker is watched after a call.
_PAUSE = 0.01

#: What a run is for.
WARM, MARKED, TIMED, AGAIN = "warm-up", "marked", "timed", "again"
#: All that a verdict takes; enough to see whether it can; the least.
FULL, BRIEF, PROBE = (WARM, MARKED, TIMED, AGAIN), (WARM, TIMED), (WARM,)
Plan = tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One call: what for, seconds by the parent's clock and by the worker's, and the output's class."""

    purpose: str
    seconds: float
    claimed: float
    judged: Judged


@dataclass
class Case:
    """What came of one problem. ``overhead`` is the parent's clock around a call that does nothing, in seconds."""

    problem: ConvProblem
    status: str = "passed"
    reason: str = ""
    precision: str | None = None
    runs: list[Run] = field(default_factory=list)
    overhead: float = 0.0
    accumulates: bool = False
    printed: str = ""
    had: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Was every run right?"""
        return self.status == "passed"

    @property
    def times(self) -> list[float]:
        """Seconds of the timed runs, the clock's own overhead taken off."""
        return [max(0.0, run.seconds - self.overhead) for run in self.runs if run.purpose == TIMED]

    def as_data(self) -> dict[str, Any]:
        """For the record."""
        data: dict[str, Any] = {
            "layer": [self.problem.channels, self.problem.height, self.problem.width, self.problem.filters]
            + [self.problem.kernel],
            "images": self.problem.batch,
            "status": self.status,
            "reason": self.reason,
            "precision": self.precision,
            "accumulates": self.accumulates,
            "overhead_seconds": self.overhead,
            "runs": [
                {"purpose": run.purpose, "seconds": run.seconds, "worker_seconds": run.claimed}
                | {"verdict": run.judged.verdict, "error": _finite(run.judged.comparison.scaled)}
                for run in self.runs
            ],
        }
        if self.runs:
            worst = max((run.judged for run in self.runs), key=lambda one: one.comparison.worst).comparison
            data["worst"] = {
                "error_of_bound": _finite(worst.worst),
                "index": list(worst.index),
                "got": _finite(worst.got),
                "expected": _finite(worst.expected),
                "wrong": worst.wrong,
                "compared": worst.compared,
            }
        if self.passed and self.times:
            data["seconds"] = {
                "median": statistics.median(self.times),
                "fastest": min(self.times),
                "slowest": max(self.times),
            }
        return data


@dataclass(frozen=True)
class Bench:
    """What every case needs: the tools, the grader's file, and how a problem's buffers are made."""

    tools: jail.Tools
    spec: Spec
    side: Callable[[ConvProblem], Any] = HostSide
    seen: tuple[Path, ...] = ()
    slot: int = 0
    #: Timed runs where the grader's file does not say. A file that fails in one run of five should be caught.
    runs: int = 3
    gpu: bool = False


def try_case(bench: Bench, library: Path, problem: ConvProblem, seconds: float, purposes: Plan = FULL) -> Case:
    """Run the library on the problem for these purposes, no call longer than so many seconds."""
    case = Case(problem)
    limits = bench.spec.limits
    inside = jail.Limits(
        memory=limits.memory_bytes + problem.bytes,
        cpu_seconds=int(seconds * 64) + 60,
        file_bytes=limits.output_bytes,
        tmp_bytes=limits.disk_bytes,
        processes=limits.processes,
    )
    with tempfile.TemporaryDirectory(prefix="ece408-case-") as name, bench.side(problem) as side:
        folder = Path(name)
        folder.chmod(0o755)
        with Worker(
            *(bench.tools, library, problem, side.handles, folder, inside),
            descriptors=side.descriptors,
            seen=bench.seen,
            gpu=side.gpu,
            guard=side.guard,
            slot=bench.slot,
        ) as worker:
            try:
                worker.open(limits.load_seconds)
                case.overhead = statistics.median(worker.call(10.0, empty=True).seconds for _ in range(5))
                _runs(case, side, worker, bench, seconds, purposes)
                _verdict(case, bench.spec)
            except EndedError as ended:
                reason = ended.reason.replace(f"{library.parent.parent}/src/", "")
                case.status, case.reason = ended.status, f"{reason} ({problem})"
            case.had, case.lacks = worker.inside.had, worker.inside.lacks
        case.printed = kept(worker.printed)
    return case


def _plan(runs: int, purposes: Plan) -> Iterator[tuple[str, str]]:
    for purpose in purposes:
        if purpose == TIMED:
            yield from ((TIMED, REAL) for _ in range(runs if purposes == FULL else 1))
        else:
            yield purpose, REAL if purpose == AGAIN else WHOLE


def _runs(case: Case, side: Any, worker: Worker, bench: Bench, seconds: float, purposes: Plan) -> None:
    right: set[str] = set()
    for number, (purpose, kind) in enumerate(_plan(bench.spec.runs or bench.runs, purposes)):
        rng = np.random.default_rng([bench.spec.seed, *case.problem.x_shape, *case.problem.w_shape, number])
        if purpose == AGAIN:
            side.load_nearly_the_same(rng)
        else:
            side.load(kind, rng, PATTERN if purpose == MARKED else 0.0)
        if purpose == TIMED:
            side.flush()
        call = worker.call(seconds)
        side.snapshot()
        worker.idle(_PAUSE, seconds)
        if side.changed_late():
            raise EndedError("tampered", "the output changed after forward had returned: work was left behind")
        if side.inputs_changed():
            raise EndedError("tampered", "it changed its input, which is const")
        if side.touched():
            raise EndedError("out_of_bounds", "it wrote beside the output y, next to its first or last element")
        if purpose == MARKED:
            _marked(case, side)
            continue
        judged = side.judged(kind)
        case.runs.append(Run(purpose, call.seconds, call.claimed, judged))
        mark = side.fingerprint()
        if judged.verdict == WRONG and mark in right:
            raise EndedError("tampered", "it gave the output of an earlier run again, though its inputs were others")
        if judged.verdict != WRONG:
            right.add(mark)


def _marked(case: Case, side: Any) -> None:
    """After a run whose output held a pattern: elements never written, unless the file accumulates."""
    found = side.traces()
    case.accumulates = found.accumulated > found.written
    if found.never_written and case.runs and case.runs[-1].judged.verdict != WRONG:
        raise EndedError("wrong", f"{found.never_written} elements of the output are never written")


def _verdict(case: Case, spec: Spec) -> None:
    wrong = [run for run in case.runs if run.judged.verdict == WRONG]
    if wrong and len(wrong) < len(case.runs) and len({run.purpose for run in wrong} & {WARM}) == 0:
        same_kind = [run for run in case.runs if run.purpose != WARM]
        if len(wrong) < len(same_kind):
            case.status = "unstable"
            case.reason = f"{len(wrong)} of {len(case.runs)} runs are wrong: {describe(wrong[0].judged, case.problem)}"
            return
    if wrong:
        case.status, case.reason = _wrong(case, wrong)
        return
    case.precision = HALF if any(run.judged.verdict == HALF for run in case.runs) else FLOAT32
    if case.precision == HALF and not spec.half:
        case.status, case.reason = "wrong", "it is right in half precision only, which this grader's file forbids"
    timed = [run for run in case.runs if run.purpose == TIMED]
    if timed and all(_clocks_disagree(run) for run in timed):
        case.status = "tampered"
        case.reason = f"its process's clock says {timed[0].claimed:.3g} s where {timed[0].seconds:.3g} s went by"


def _wrong(case: Case, wrong: list[Run]) -> tuple[str, str]:
    text = describe(wrong[0].judged, case.problem)
    if len(wrong) < len(case.runs) and wrong[0].purpose == WARM:
        others = [run for run in case.runs if run.purpose != WARM]
        if all(run.judged.verdict == FLOAT32 for run in others):
            return "unstable", f"{len(wrong)} of {len(case.runs)} runs are wrong: {text}"
    return "wrong", text


def _clocks_disagree(run: Run) -> bool:
    return run.seconds - run.claimed > max(_CLOCKS_APART, run.seconds / 2)


def _finite(value: float) -> float | str:
    """JSON has no NaN or infinity."""
    return float(value) if np.isfinite(value) else str(value)
