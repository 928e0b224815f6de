"""A network tried by one worker: its layers called in the course's order, round after round, each call checked.

One process does all layers, as the course's did, since files keep counters and buffers between calls. In each round
every layer is called once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from ece408_op.problem import ConvProblem

from . import _sandbox
from ._buffers import GUARD
from ._case import AGAIN, FULL, MARKED, PASSED, PICTURES, STOPPED, TIMED, Case, Plan, Run
from ._errors import HarnessError
from ._health import Thermometer
from ._host_side import HostSide
from ._judge import PATTERN, PICTURE, REAL, WHOLE, WRONG, Judged
from ._real_images import CourseNet, Labels
from ._spec import Spec
from ._worker import Call, EndedError, Program, Worker, kept

#: Seconds for which a worker is watched after a call.
_PAUSE = 0.01
#: A GPU takes its time to turn from the worker to the parent, 0.2 ms an H200, up to 0.2 ms more behind long kernels.
#: Where it takes by so much longer than behind the runner's own zeros, it did the worker's work first, and that was not
#: done when the answer came.
_LATE_SECONDS = 3e-4
#: Honest answers that are looked at for each layer.
_TURNS = 5
#: How often a worker is begun, and seconds between.
_BEGINNINGS, _AGAIN_SECONDS = 3, 1.0


@dataclass(frozen=True)
class Bench:
    """What every try needs: the tools, the grader's file, and how a problem's buffers are made."""

    tools: _sandbox.Tools
    spec: Spec
    side: Callable[[ConvProblem, int], Any] = HostSide
    slot: int = 0
    #: The number of the GPU.
    device: int = 0
    #: Timed runs where the grader's file does not say. A file that fails in one run of five should be caught.
    runs: int = 3
    gpu: bool = False
    #: How many disturbed rounds are repeated.
    repeats: int = 3
    #: The least seconds that the device of a number needs for a problem.
    floor: Callable[[ConvProblem, int], float] | None = None
    #: Raises HarnessError where the device of a number is no longer well; returns its free bytes.
    check: Callable[[int], int] | None = None
    thermometer: Thermometer = field(default_factory=Thermometer)


@dataclass
class Tried:
    """What came of a network: of each layer, of its accuracy, and what the worker printed and was contained by."""

    cases: list[Case]
    labels: list[Labels] = field(default_factory=list)
    printed: str = ""
    had: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    #: Did it keep memory from call to call, until there was none?
    leaks: bool = False


def try_network(
    bench: Bench,
    program: Program,
    problems: Sequence[ConvProblem],
    seconds: float,
    plan: Plan = FULL,
    nets: Sequence[CourseNet] = (),
) -> Tried:
    """Call the program's forward on the layers, in order and for these purposes, no call longer than so many seconds.

    ``nets`` are trained networks of these layers, whose accuracy is measured.
    """
    tried = Tried([Case(problem) for problem in problems])
    limits = bench.spec.limits
    inside = _sandbox.Limits(
        memory=limits.memory_bytes + sum(problem.bytes for problem in problems),
        reserved=3 * 2 * GUARD * len(problems),
        cpu_seconds=int(seconds * 64 * len(problems)) + 60,
        file_bytes=limits.output_bytes,
        tmp_bytes=limits.disk_bytes,
        processes=limits.processes,
    )
    if bench.check is not None:
        bench.check(bench.device)
    with tempfile.TemporaryDirectory(prefix="ece408-case-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        sides = [stack.enter_context(bench.side(problem, bench.device)) for problem in problems]
        trial = _Trial(bench, tried, sides, seconds, _steps(plan, nets, bench.spec.runs or bench.runs))
        places = [side.handles for side in sides]
        over, failures = False, 0
        while not over:
            try:
                with Worker(
                    *(bench.tools, program, problems, places, folder, inside),
                    descriptors=[number for side in sides for number in side.descriptors],
                    guard=sides[0].guard,
                    slot=bench.slot,
                    device=bench.device if bench.gpu else None,
                ) as worker:
                    over = trial.goes_through(worker, program)
                    tried.had, tried.lacks = worker.inside.had, worker.inside.lacks
            except HarnessError:
                # A machine under load may fail to start a process or a GPU's context once.
                failures += 1
                if failures == _BEGINNINGS:
                    raise
                time.sleep(_AGAIN_SECONDS)
        tried.printed = program.shown(kept(worker.printed))
    return tried


#: One round: what for, and the trained network where it is for one.
Step = tuple[str, Optional[CourseNet]]


def _steps(plan: Plan, nets: Sequence[CourseNet], runs: int) -> deque[Step]:
    steps: deque[Step] = deque()
    for purpose in plan:
        if purpose == PICTURES:
            steps.extend((PICTURES, net) for net in nets)
        else:
            steps.extend([(purpose, None)] * (runs if purpose == TIMED and plan == FULL else 1))
    return steps


class _Trial:
    """The rounds on one network, by one worker or, where that ate up its memory round by round, by several."""

    worker: Worker

    def __init__(self, bench: Bench, tried: Tried, sides: list[Any], seconds: float, steps: deque[Step]) -> None:
        self.bench, self.tried, self.sides, self.seconds, self._steps = bench, tried, sides, seconds, steps
        self._layer = 0
        self._round = 0
        #: Rounds that this worker ended, and how many more may be repeated.
        self._ended, self._spare = 0, bench.repeats
        #: Digests of right outputs, of each layer.
        self._right: list[set[str]] = [set() for _ in sides]
        #: Seconds in which a GPU turns to the parent behind an honest answer, as a rule.
        self._turn = 0.0

    def goes_through(self, worker: Worker, program: Program) -> bool:
        """Let the worker do what is left; False where another one should go on."""
        self.worker, self._ended = worker, 0
        try:
            try:
                worker.begin()
                if self.bench.gpu:
                    self._turn = self._honest_turn()
                worker.load(self.bench.spec.limits.load_seconds)
                worker.note_size()
                self._finish()
            except MemoryError as error:
                text = f"the grader found no room for itself beside what the file had taken: {error}"
                raise EndedError("crashed", text) from None
        except EndedError as ended:
            # Each call took memory and gave none back: in the course there was one call.
            full = worker.outgrown or any(side.exhausted() for side in self.sides)
            if ended.status == "crashed" and self._ended and full:
                self.tried.leaks = True
                return False
            self._bury(ended, program)
        return True

    def _honest_turn(self) -> float:
        seconds = []
        for layer, side in [*enumerate(self.sides)] * _TURNS:
            self.worker.touch(layer)
            seconds.append(side.turn())
        return statistics.median(seconds)

    def _finish(self) -> None:
        """All rounds that are left, and the verdicts; raises EndedError where the worker may not go on."""
        cases = self.tried.cases
        for case in cases:
            case.overhead = self.worker.overhead
            case.floor = self.bench.floor(case.problem, self.bench.device) if self.bench.floor else None
        while self._steps and not any(self._hopeless(case) for case in cases):
            purpose, net = self._steps[0]
            disturbed = False
            if net is not None:
                self._pictures(net)
            else:
                disturbed = self._all_layers(purpose)
            self._ended += 1
            self.worker.note_size()
            if disturbed and self._spare:
                self._spare -= 1
            else:
                self._steps.popleft()
        for case in cases:
            case.settle(self.bench.spec.half)

    def _bury(self, ended: EndedError, program: Program) -> None:
        """The worker is no more: the layer it was at bears the reason."""
        cases = self.tried.cases
        reason = program.shown(ended.reason)
        for case in cases:
            if any(run.judged.verdict == WRONG for run in case.runs):
                case.settle(self.bench.spec.half)
            if case.status == PASSED:
                case.end(STOPPED, "")
        if ended.status == "tampered" or all(case.status == STOPPED for case in cases):
            cases[self._layer].end(ended.status, f"{reason} ({cases[self._layer].problem})")

    def _all_layers(self, purpose: str) -> bool:
        """Call each layer once; whether one of them was disturbed."""
        self._round += 1
        disturbed = False
        for layer, (case, side) in enumerate(zip(self.tried.cases, self.sides)):
            self._layer, problem = layer, case.problem
            rng = np.random.default_rng([self.bench.spec.seed, *problem.x_shape, *problem.w_shape, self._round])
            kind = REAL if purpose in (TIMED, AGAIN) else WHOLE
            if purpose == AGAIN:
                side.load_nearly_the_same(rng)
            else:
                side.load(kind, rng)
            if purpose == MARKED:
                self._call(side, PATTERN)
                self._marked(case, side)
                continue
            run = self._timed_run(kind, side) if purpose == TIMED else self._run(purpose, kind, side)
            case.runs.append(run)
            disturbed |= run.disturbed
            mark = side.fingerprint()
            if run.judged.verdict != WRONG:
                self._right[layer].add(mark)
            elif mark in self._right[layer]:
                text = "it gave the output of an earlier run again, though its inputs were others"
                raise EndedError("tampered", text)
        return disturbed

    def _run(self, purpose: str, kind: str, side: Any) -> Run:
        call = self._call(side)
        return Run(purpose, call.seconds, call.claimed, side.judged(kind), note=call.note)

    def _timed_run(self, kind: str, side: Any) -> Run:
        thermometer = self.bench.thermometer
        before = thermometer.steady(side)
        clocks = side.clocks()
        call = self._call(side, timed=True)
        after = thermometer.read(side)
        disturbed = thermometer.disturbed(side, before, after)
        readings = (before, after)
        judged = side.judged(kind)
        return Run(TIMED, call.seconds, call.claimed, judged, readings, clocks, disturbed, call.note, call.late)

    def _call(self, side: Any, fill: float = 0.0, timed: bool = False) -> Call:
        side.clear(fill)
        if timed:
            # Processes long asleep take half a millisecond to come back, and the inputs must not be there meanwhile.
            self.worker.ping()
        side.present(flush=timed)
        call = self.worker.call(self._layer, self.seconds)
        if self.bench.gpu:
            late = side.turn() - self._turn
            if late > _LATE_SECONDS:
                call = replace(call, seconds=call.seconds + late, late=late)
        side.snapshot()
        self.worker.idle(_PAUSE, self.seconds)
        if side.changed_late():
            raise EndedError("tampered", "the output changed after forward had returned: work was left behind")
        if side.touched():
            raise EndedError("out_of_bounds", "it wrote beside its arrays, next to a first or last element")
        if side.inputs_changed():
            raise EndedError("tampered", "it changed its input, which is const")
        return call

    @staticmethod
    def _marked(case: Case, side: Any) -> None:
        """After a run whose output held a pattern: elements not written, though they were in the run before."""
        found = side.traces()
        case.accumulates = found.accumulated > found.written
        if found.skipped and case.runs and case.runs[-1].judged.verdict != WRONG:
            raise EndedError("unstable", f"a further run left {found.skipped} elements unwritten that one had written")

    def _pictures(self, net: CourseNet) -> None:
        """The course's own measure: the network's labels, layer by layer through the worker, and by exact sums."""
        x = net.images(len(self.sides[0].output()))
        exact = x
        for layer, side in enumerate(self.sides):
            self._layer, w = layer, net.filters[layer]
            side.load_given(x, w)
            call = self._call(side)
            judged: Judged = side.judged(PICTURE)
            self.tried.cases[layer].runs.append(Run(PICTURES, call.seconds, call.claimed, judged, note=call.note))
            y, true = side.output(), side.exact(exact, w)
            if layer + 1 < len(self.sides):
                x, exact = net.between(y), net.between(true)
        self.tried.labels.append(net.compare(net.labels(y), net.labels(true)))

    @staticmethod
    def _hopeless(case: Case) -> bool:
        """Was it wrong on both kinds of data? Then no further run can change the verdict."""
        purposes = {run.purpose for run in case.runs}
        return TIMED in purposes and all(run.judged.verdict == WRONG for run in case.runs)
