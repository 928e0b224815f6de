"""A network tried by one worker: its layers called in the course's order, round after round, each call checked.

One process does all layers, as in the course, since files keep counters and buffers between calls. Each round calls
every layer once.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.submission.errors import EndedError, HarnessError, StoppedError
from ece408_op.submission.networks import Net
from ece408_op.submission.programs import new_folder
from ece408_op.submission.sandbox import Tools
from ece408_op.submission.worker import Program, Worker

from . import _verdict
from ._buffers import Buffers
from ._device import Device, Turns
from ._judge import PICTURE, POISON, REAL, WHOLE, WIDE
from ._real_images import CourseNet
from ._spec import Spec
from ._verdict import POISONED, TIMED, Layer, NetworkResult, Run, judge_network

#: The purposes of a try: all that a verdict needs; enough to see whether it can; times, once the verdict is known.
FULL = (_verdict.WARM_UP, POISONED, TIMED, _verdict.NEAR_DUPLICATE, _verdict.REAL_IMAGES)
BRIEF, TIMES = (_verdict.WARM_UP, TIMED), (TIMED,)
#: The data of those whose data is not whole numbers.
_KINDS = {TIMED: REAL, _verdict.NEAR_DUPLICATE: REAL, _verdict.WIDE_RANGE: WIDE}
#: Seconds for which a worker is watched after a call.
_PAUSE = 0.01
#: Honest answers that are measured for each layer, before any other and after late ones, and the seconds between these.
_TURNS, _TURNS_AGAIN, SECONDS_BETWEEN_TURNS = 5, 20, 0.1
#: How often a worker is started, and the seconds between.
STARTS, SECONDS_BETWEEN_STARTS = 3, 1.0


@dataclass(frozen=True)
class Bench:
    """What every try needs: the tools, the grader's file, and the device."""

    tools: Tools
    spec: Spec
    device: Device = field(default_factory=Device)
    #: Timed runs where the grader's file does not say. A file that fails in one run of five should be caught.
    runs: int = 3
    #: Where submissions share a processor, and their times are to be right.
    turns: Turns | None = None
    #: Shows the current step to people.
    progress: Callable[[str], None] = lambda text: None
    #: Seconds of this package's kernel, by problem and device.
    own: dict[tuple[ConvProblem, str], float | None] = field(default_factory=dict)


def try_network(
    bench: Bench,
    program: Program,
    net: Net,
    images: int,
    seconds: float,
    plan: Sequence[str] = FULL,
    course_nets: Sequence[CourseNet] = (),
) -> NetworkResult:
    """Call the program's forward on the network's layers, in order, for the purposes of the plan.

    No call may take longer than ``seconds``. ``course_nets`` are trained networks of these layers, whose accuracy is
    measured.
    """
    result = NetworkResult(net, images, [Layer(problem) for problem in net.problems(images)])
    bench.device.check()
    with new_folder("case") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        made = (Buffers(one.problem, bench.device, bench.tools.processes.require_open) for one in result.layers)
        buffers = [stack.enter_context(one) for one in made]
        trial = Trial(bench, result, buffers, seconds, _steps(plan, course_nets, bench.spec.runs or bench.runs))
        done, failures = False, 0
        while not done:
            try:
                with Worker(bench.tools, program, buffers, folder, bench.spec.limits) as worker:
                    done = trial.go_through(worker, program)
            except HarnessError as error:
                # A machine under load may fail to start a process or a GPU's context once.
                failures += 1
                if failures == STARTS or isinstance(error, StoppedError):
                    raise
                time.sleep(SECONDS_BETWEEN_STARTS)
        result.printed = program.shown(worker.printed)
    return result


#: One round: its purpose, and the trained network where it is for one.
Step = tuple[str, Optional[CourseNet]]


def _steps(plan: Sequence[str], nets: Sequence[CourseNet], runs: int) -> deque[Step]:
    once: list[CourseNet | None] = [None]
    rounds = {_verdict.REAL_IMAGES: nets, TIMED: once * runs if plan in (FULL, TIMES) else once}
    return deque((purpose, net) for purpose in plan for net in rounds.get(purpose, once))


class Trial:
    """The rounds on one network, by one worker or, where that used up its memory round by round, by several."""

    worker: Worker

    def __init__(
        self, bench: Bench, result: NetworkResult, buffers: Sequence[Buffers], seconds: float, steps: deque[Step]
    ) -> None:
        self.bench, self.result, self.buffers, self.seconds, self._steps = bench, result, buffers, seconds, steps
        #: The layer and the round at which it is, and the rounds that this worker has ended.
        self._layer = self._round = self._ended = 0
        #: Digests of right outputs, per layer.
        self._right: list[set[int]] = [set() for _ in buffers]
        #: Seconds in which a GPU usually turns to the harness after an honest answer.
        self._turn = 0.0
        #: Were all answers late? Then honest ones are measured again.
        self._late = False

    def go_through(self, worker: Worker, program: Program) -> bool:
        """Let the worker do what is left; False where another one should go on."""
        self.worker, self._source, self._ended = worker, program.source, 0
        end = None
        try:
            worker.begin()
            if self.bench.device.gpu:
                self._measure_turns()
            if self._steps:
                worker.load(self.bench.spec.limits.load_seconds)
                worker.note_size()
            if not self._finish(program):
                return False
        except MemoryError as error:
            end = EndedError(
                "crashed", f"the grader found no memory for itself next to what the file had taken: {error}"
            )
        except EndedError as ended:
            end = EndedError(ended.status, program.shown(ended.reason))
        # Each call took memory and freed none: in the course there was one call.
        if end and end.status == "crashed" and self._ended and (worker.outgrown or self.bench.device.exhausted()):
            self.result.leaks = True
            return False
        judge_network(self.result.layers, self.bench.spec.half, end, self._layer)
        return True

    def _measure_turns(self) -> None:
        """Measure how soon a GPU turns to the harness after honest answers: of a worker that has loaded nothing."""
        seconds = []
        for layer, buffers in [*enumerate(self.buffers)] * (_TURNS_AGAIN if self._late else _TURNS):
            time.sleep(SECONDS_BETWEEN_TURNS if self._late else 0)  # other programs work by fits and starts
            self.worker.zero(layer)
            seconds.append(buffers.turn_seconds())
        if not self._late:
            self._turn = statistics.median(seconds)
            return
        # The process that gave late answers has ended: what holds the GPU up now is another program's work.
        for one in self.result.layers:
            one.held_up = max(0.0, statistics.quantiles(seconds, n=4)[-1] - self._turn)

    def _finish(self, program: Program) -> bool:
        """All rounds that are left; False where another worker has to show whether the GPU is held up by others."""
        layers = self.result.layers
        for layer in layers:
            layer.overhead = self.worker.overhead
            layer.roofline = self.bench.device.roofline_seconds(layer.problem, program.arithmetic)
        while self._steps and not any(layer.certainly_wrong for layer in layers):
            purpose, net = self._steps[0]
            self.bench.progress(f"{self.result.net.name}, {self.result.images} images: {purpose}")
            if net is None:
                self._all_layers(purpose)
            else:
                self._real_images(net)
            self._ended += 1
            self.worker.note_size()
            self._steps.popleft()
            if not self._steps and purpose != _verdict.WIDE_RANGE and any(layer.reduced for layer in layers):
                self._steps.append((_verdict.WIDE_RANGE, None))
            # A near-duplicate is one for the worker that had the timed inputs.
            over = not {TIMED, _verdict.NEAR_DUPLICATE} & {purpose for purpose, _ in self._steps}
            if over and not self._late and any(layer.late_by for layer in layers):
                self._late = True
                return False
        return True

    def _all_layers(self, purpose: str) -> None:
        self._round += 1
        for number, (layer, buffers) in enumerate(zip(self.result.layers, self.buffers)):
            self._layer, problem = number, layer.problem
            rng = np.random.default_rng([self.bench.spec.seed, *problem.x_shape, *problem.w_shape, self._round])
            kind = _KINDS.get(purpose, WHOLE)
            if purpose == _verdict.NEAR_DUPLICATE:
                buffers.draw_near_duplicate(rng)
            else:
                buffers.draw(kind, rng)
            layer.runs.append(self._run(purpose, kind, buffers))
            digest = buffers.digest()
            if not layer.runs[-1].wrong:
                self._right[number].add(digest)
            elif digest in self._right[number]:
                raise EndedError(*_verdict.VIOLATIONS["replayed"])

    def _run(self, purpose: str, kind: str, buffers: Buffers) -> Run:
        """Call the current layer with the inputs that are drawn; raises EndedError for a violation."""
        before, timed, bench = POISON if purpose == POISONED else 0.0, purpose == TIMED, self.bench
        with bench.turns.timing() if timed and bench.turns else nullcontext():
            if timed:
                key = buffers.problem, bench.device.name
                if key not in bench.own:
                    bench.own[key] = buffers.own_seconds()
                self.result.layers[self._layer].own = bench.own[key]
                bench.device.wake()
            buffers.clear(before)
            if timed:
                # Processes long asleep take half a millisecond to wake, and the inputs must not be there meanwhile.
                self.worker.ping()
            buffers.present(flush=timed)
            call = self.worker.call(self._layer, self.seconds)
            late = buffers.turn_seconds() - self._turn if bench.device.gpu else 0.0
            late = late if late > _verdict.LATE_SECONDS else 0.0
            buffers.take_output()
            self.worker.idle(_PAUSE, self.seconds)
            for name in buffers.violations():
                raise EndedError(*_verdict.VIOLATIONS[name])
        outcome = buffers.outcome(kind, before)
        wrong = outcome.precision == _verdict.WRONG
        explanation = buffers.explanation(before, outcome.index[0], self._source) if wrong else None
        return Run(purpose, call.seconds + late, call.worker_seconds, outcome, call.note, late, explanation)

    def _real_images(self, net: CourseNet) -> None:
        """The course's own measure: the network's labels, layer by layer through the worker, and by exact sums."""
        x = exact = net.test.images
        for number, (layer, buffers) in enumerate(zip(self.result.layers, self.buffers)):
            self._layer, w = number, net.filters[number]
            buffers.set_inputs(x, w)
            layer.runs.append(self._run(_verdict.REAL_IMAGES, PICTURE, buffers))
            y, true = buffers.copied, buffers.exact(exact, w)
            if number + 1 < len(self.buffers):
                x, exact = net.between(y, buffers.xp), net.between(true, buffers.xp)
        self.result.accuracy.append(net.compare(net.labels(y, buffers.xp), net.labels(true, buffers.xp)))
