"""One layer tried: its runs, every one of them checked, its figures, and the verdict on them all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime import timing

from ._judge import FLOAT32, HALF, WRONG, Judged, describe

#: What a run is for.
WARM, MARKED, TIMED, AGAIN, PICTURES = "warm-up", "marked", "timed", "again", "pictures"
#: All that a verdict takes; enough to see whether it can; the least.
FULL, BRIEF, PROBE = (WARM, MARKED, TIMED, AGAIN, PICTURES), (WARM, TIMED), (WARM,)
Plan = tuple[str, ...]

PASSED = "passed"
#: A layer that nothing speaks against, in a network that ended at another layer.
STOPPED = "stopped"

#: The worker's clock may be behind the parent's by so many seconds, and more than half of the run, by chance.
_CLOCKS_APART = 0.25
#: By so much it may be ahead, which two readings of one clock cannot be.
_CLOCK_STEP = 1e-3


@dataclass(frozen=True)
class Run:
    """One call: what for, seconds by the parent's clock and by the worker's, and the output's class.

    ``thermometer`` has the seconds of a fixed computation before and after, ``clocks`` what the driver says of the
    chip; a disturbed run counts for the verdict and not for the times. ``note`` is CUDA's error that went unread.
    ``late`` is the part of the seconds in which a GPU did the worker's work after the answer.
    """

    purpose: str
    seconds: float
    claimed: float
    judged: Judged
    thermometer: tuple[float, ...] = ()
    clocks: dict[str, int] | None = None
    disturbed: bool = False
    note: str = ""
    late: float = 0.0

    @property
    def clocks_disagree(self) -> bool:
        """Can the worker's clock not have seen what the parent's saw?"""
        behind = self.seconds - self.claimed
        return behind > max(_CLOCKS_APART, self.seconds / 2) or behind < -_CLOCK_STEP

    def as_data(self) -> dict[str, Any]:
        """For the record."""
        data = {"purpose": self.purpose, "seconds": self.seconds, "worker_seconds": self.claimed}
        data.update(verdict=self.judged.verdict, error=_finite(self.judged.comparison.scaled))
        if self.purpose == TIMED:
            data.update(thermometer_seconds=list(self.thermometer), clocks=self.clocks, disturbed=self.disturbed)
            data.update(late_seconds=self.late)
        if self.note:
            data["unread_cuda_error"] = self.note
        return data


@dataclass
class Case:
    """What came of one layer. ``overhead`` is the parent's clock around a call that does nothing, in seconds."""

    problem: ConvProblem
    status: str = STOPPED
    reason: str = ""
    precision: str | None = None
    runs: list[Run] = field(default_factory=list)
    overhead: float = 0.0
    accumulates: bool = False
    #: The least seconds that the device could take for it, where that is known.
    floor: float | None = None

    @property
    def passed(self) -> bool:
        """Was every run right?"""
        return self.status == PASSED

    @property
    def times(self) -> list[float]:
        """Seconds of the timed runs, the clock's own overhead taken off.

        The undisturbed ones, unless there are fewer than two: one run alone has no interval.
        """
        timed = [run for run in self.runs if run.purpose == TIMED]
        steady = [run for run in timed if not run.disturbed]
        return [self._net(run) for run in (steady if len(steady) > 1 else timed)]

    def end(self, status: str, reason: str) -> None:
        """Let that be the verdict."""
        self.status, self.reason = status, reason

    def settle(self, half_passes: bool) -> None:
        """Reach the verdict from all runs."""
        wrong = [run for run in self.runs if run.judged.verdict == WRONG]
        if wrong:
            text = describe(wrong[0].judged, self.problem)
            if wrong[0].note:
                text += f"; CUDA had reported {wrong[0].note}, which the file did not look at"
            if self._unstable(wrong):
                self.end("unstable", f"{len(wrong)} of {len(self.runs)} runs are wrong: {text}")
            else:
                first = self.runs[0].purpose == WARM and wrong[0] is not self.runs[0]
                self.end("wrong", f"{text}; its first call, on whole numbers, was right" if first else text)
            return
        self.precision = HALF if any(run.judged.verdict == HALF for run in self.runs) else FLOAT32
        self.end(PASSED, "")
        if self.precision == HALF and not half_passes:
            self.end("wrong", "it is right in half precision only, which this grader's file forbids")
        timed = [run for run in self.runs if run.purpose == TIMED]
        if timed and all(run.clocks_disagree for run in timed):
            text = f"its process's clock says {timed[0].claimed:.3g} s where {timed[0].seconds:.3g} s went by"
            self.end("tampered", text)
            return
        steady = [run for run in timed if not run.disturbed]
        # Once is no proof: the parent may have been held up itself.
        if len(steady) > 1 and all(run.late for run in steady):
            least = 1e3 * min(run.late for run in steady)
            self.end(
                "tampered", f"in every run its answer came {least:.3g} ms and more before the GPU had done its work"
            )

    def _unstable(self, wrong: list[Run]) -> bool:
        """Are runs of the same kind of data right and wrong?"""
        others = [run for run in self.runs if run.purpose != WARM]
        bad = [run for run in wrong if run.purpose != WARM]
        right = [run for run in self.runs if run.judged.verdict != WRONG]
        if len(bad) < len(wrong) and right and all(run.judged.verdict == HALF for run in right):
            return False  # wrong on whole numbers, and elsewhere within half's rounding at best: the same each time
        if bad:
            return len(bad) < len(others)
        # Wrong on whole numbers alone: too coarse a precision, unless the others are float32's.
        return bool(others) and all(run.judged.verdict == FLOAT32 for run in others)

    def as_data(self) -> dict[str, Any]:
        """For the record."""
        p = self.problem
        data: dict[str, Any] = {
            "layer": [p.channels, p.height, p.width, p.filters, p.kernel],
            "images": p.batch,
            "status": self.status,
            "reason": self.reason,
            "precision": self.precision,
            "accumulates": self.accumulates,
            "overhead_seconds": self.overhead,
            "roofline_seconds": self.floor,
            "runs": [run.as_data() for run in self.runs],
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
            data["seconds"] = asdict(timing.summary(self.times))
            # In the course forward was called once in a process, cold.
            data["first_call_seconds"] = self._net(self.runs[0])
        return data

    def _net(self, run: Run) -> float:
        return max(0.0, run.seconds - self.overhead)


def _finite(value: float) -> float | str:
    """JSON has no NaN or infinity."""
    return float(value) if np.isfinite(value) else str(value)
