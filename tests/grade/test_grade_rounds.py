"""Rounds without a worker: what is disturbed is repeated, what eats up memory is begun anew, verdicts from runs."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from ece408_op.core import reference
from ece408_op.core.check import Comparison
from ece408_op.grade import _rounds, _sandbox
from ece408_op.grade._case import AGAIN, TIMED, WARM, Case, Run
from ece408_op.grade._errors import HarnessError
from ece408_op.grade._health import Thermometer
from ece408_op.grade._host_side import HostSide
from ece408_op.grade._judge import FLOAT32, HALF, PICTURE, REAL, WRONG, Judged, judge
from ece408_op.grade._rounds import Bench, Tried, _Trial
from ece408_op.grade._spec import Spec
from ece408_op.grade._worker import Call, EndedError, Program
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem(3, 2, 7, 6, 3, 3)
TOOLS = _sandbox.Tools(Path("/"), Path("/"), Path("/"))
PROGRAM = Program((), ())


class Worker:
    """In the worker's place: it computes in this process, and ends where it is told to."""

    def __init__(self, side: HostSide, ends_at: int | None = None) -> None:
        self.side, self.ends_at, self.calls = side, ends_at, 0

    overhead = 1e-5
    outgrown = False

    def note_size(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def touch(self, layer: int) -> None:
        pass

    def load(self, seconds: float) -> None:
        pass

    def ping(self) -> float:
        return self.overhead

    def idle(self, pause: float, seconds: float) -> None:
        pass

    def call(self, layer: int, seconds: float, word: str = "run") -> Call:
        self.calls += 1
        if self.calls == self.ends_at:
            raise EndedError("crashed", "the GPU reported out of memory")
        buffers = self.side._buffers
        buffers.y.array[...] = reference.convolve(buffers.x.array, buffers.w.array)
        return Call(1e-3, 0.9e-3)


def trial(bench: Bench, side: HostSide, steps: list[str]) -> tuple[_Trial, Tried]:
    tried = Tried([Case(PROBLEM)])
    return _Trial(bench, tried, [side], 1.0, deque((step, None) for step in steps)), tried


def test_a_disturbed_round_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostSide(PROBLEM) as side:
        readings = iter([1.0, 1.0, 1.0, 9.0, 1.0, 1.0])  # the second round's second reading is slow
        monkeypatch.setattr(side, "thermometer", lambda: next(readings))
        this, tried = trial(Bench(TOOLS, Spec(), thermometer=Thermometer()), side, [TIMED, TIMED])
        assert this.goes_through(Worker(side), PROGRAM)
    runs = tried.cases[0].runs
    assert [run.disturbed for run in runs] == [False, True, False]
    assert len(tried.cases[0].times) == 2
    assert tried.cases[0].passed


def test_what_ate_up_the_memory_is_begun_anew_where_it_had_got(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostSide(PROBLEM) as side:
        this, tried = trial(Bench(TOOLS, Spec(), repeats=0), side, [WARM, TIMED, TIMED, AGAIN])
        monkeypatch.setattr(side, "exhausted", lambda: True)
        assert not this.goes_through(Worker(side, ends_at=3), PROGRAM)
        assert this.goes_through(Worker(side), PROGRAM)
    assert [run.purpose for run in tried.cases[0].runs] == [WARM, TIMED, TIMED, AGAIN]
    assert tried.leaks and tried.cases[0].passed


def test_a_crash_with_memory_left_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostSide(PROBLEM) as side:
        this, tried = trial(Bench(TOOLS, Spec()), side, [WARM, TIMED])
        assert this.goes_through(Worker(side, ends_at=2), PROGRAM)
    assert tried.cases[0].status == "crashed" and not tried.leaks


@pytest.mark.parametrize("failures", [2, 3])
def test_a_worker_that_cannot_begin_is_begun_again(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    begun = []

    def never(*arguments: object, **named: object) -> None:
        begun.append(1)
        if len(begun) <= failures:
            raise HarnessError("expected the worker to begin")
        raise EndedError("crashed", "it did begin")

    monkeypatch.setattr(_rounds, "Worker", never)
    monkeypatch.setattr(_rounds, "_AGAIN_SECONDS", 0.0)
    with pytest.raises(EndedError if failures == 2 else HarnessError):
        _rounds.try_network(Bench(TOOLS, Spec()), PROGRAM, [PROBLEM], 1.0)
    assert len(begun) == 3


def judged(verdict: str) -> Judged:
    return Judged(verdict, Comparison(0.5, 1e-8, (0, 0, 0, 0), 1.0, 1.0, int(verdict == WRONG), 9, 0))


@pytest.mark.parametrize(
    ("verdicts", "status", "precision"),
    [
        ([FLOAT32, FLOAT32, FLOAT32], "passed", FLOAT32),
        ([FLOAT32, HALF, HALF], "passed", HALF),
        ([WRONG, WRONG, WRONG], "wrong", None),
        ([FLOAT32, WRONG, FLOAT32], "unstable", None),
        ([FLOAT32, WRONG, WRONG], "wrong", None),
        ([WRONG, FLOAT32, FLOAT32], "unstable", None),
        ([WRONG, HALF, HALF], "wrong", None),  # coarser than half precision: wrong on whole numbers
    ],
)
def test_the_verdict_on_all_runs(verdicts: list[str], status: str, precision: str | None) -> None:
    case = Case(PROBLEM)
    purposes = (WARM, TIMED, TIMED)
    case.runs = [Run(purpose, 1e-3, 1e-3, judged(verdict)) for purpose, verdict in zip(purposes, verdicts)]
    case.settle(half_passes=True)
    assert (case.status, case.precision) == (status, precision)
    # What was kept from call to call, or an integer for a sum, is wrong from the second call on.
    later = verdicts[0] != WRONG and verdicts[1:] == [WRONG, WRONG]
    assert ("its first call, on whole numbers, was right" in case.reason) == later


def test_a_transforms_errors_on_an_empty_background_are_no_mistake() -> None:
    rng = np.random.default_rng(5)
    x = np.zeros((2, 1, 28, 28), np.float32)
    x[:, :, :9, :9] = rng.integers(0, 256, (2, 1, 9, 9))
    w = rng.standard_normal((4, 1, 5, 5)).astype(np.float32)
    transformed = np.fft.irfft2(np.fft.rfft2(x[:, :1], (28, 28)) * np.conj(np.fft.rfft2(w[:, 0], (28, 28))), (28, 28))[
        :, :, :24, :24
    ].astype(np.float32)
    assert (transformed[:, :, 12:, 12:] != 0).any()
    assert judge(transformed, x, w, REAL).verdict == WRONG
    assert judge(transformed, x, w, PICTURE).verdict == FLOAT32
    garbage = reference.convolve(x, w).astype(np.float32)
    garbage[1, 2, 20, 20] = 5  # where every pixel is zero
    assert judge(garbage, x, w, REAL).verdict == judge(garbage, x, w, PICTURE).verdict == WRONG
    one_less = w.copy()
    one_less[2, 0, 4, 4] = 0
    assert judge(reference.convolve(x, one_less).astype(np.float32), x, w, PICTURE).verdict == WRONG


@pytest.mark.parametrize(("claimed", "status"), [(1.9, "passed"), (0.2, "tampered"), (2.1, "tampered")])
def test_a_clock_that_cannot_be_right_fails_the_runs(claimed: float, status: str) -> None:
    case = Case(PROBLEM)
    case.runs = [Run(TIMED, 2.0, claimed, judged(FLOAT32))]
    case.settle(half_passes=True)
    assert case.status == status


@pytest.mark.parametrize(
    ("took", "late", "status"),
    [
        ([1.2, 1.4, 1.4], [0, 0, 0], "passed"),
        ([3.0, 1.2, 1.2], [1.8, 0, 0], "passed"),  # once is no proof, and costs the time
        ([3.0, 1.7, 3.0], [1.8, 0.5, 1.8], "tampered"),
        ([3.0], [1.8], "passed"),
    ],
)
def test_a_gpus_work_behind_the_answer(
    took: list[float], late: list[float], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostSide(PROBLEM) as side:
        this, tried = trial(Bench(TOOLS, Spec(), gpu=True, repeats=0), side, [WARM, *[TIMED] * len(took)])
        # Five behind honest answers, the one that warms up, those that are timed; milliseconds.
        turns = [1.2, 1.1, 1.3, 1.2, 1.2, 1.2, *took]
        monkeypatch.setattr(side, "turn", lambda: 1e-3 * turns.pop(0))
        monkeypatch.setattr(side, "thermometer", lambda: 1e-3)  # whatever else this machine does
        assert this.goes_through(Worker(side), PROGRAM)
    runs = tried.cases[0].runs[1:]
    assert [run.late for run in runs] == pytest.approx([1e-3 * one for one in late])
    assert [run.seconds for run in runs] == pytest.approx([1e-3 + 1e-3 * one for one in late])
    assert tried.cases[0].status == status
