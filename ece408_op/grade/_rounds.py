"""A network tried by one worker: its layers called in the course's order, round after round, each call checked.

One process does all layers, as in the course, since files keep counters and buffers between calls.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Callable

import numpy as np

from ece408_op.problem import ConvProblem, Net
from ece408_op.submission import EndedError, HarnessError, StoppedError
from ece408_op.submission.build import new_folder
from ece408_op.submission.sandbox import Tools
from ece408_op.submission.worker import BEGIN_SECONDS, Program, Worker

from . import _verdict
from ._buffers import Buffers, Device
from ._judge import POISON
from ._real_images import CourseNet
from ._spec import Spec
from ._verdict import NEAR_DUPLICATE, POISONED, REAL_IMAGES, TIMED, VIOLATIONS, WIDE_RANGE, Layer, NetworkResult, Run

#: The beginning of the reason where the grader itself, in the file's presence, gets no memory.
NO_MEMORY = "the grader found no memory for itself"
_PAUSE = 0.01  # seconds for which a worker is watched after a call
#: Honest answers that are measured for each layer, before any other and after late ones, and the seconds between these.
_TURNS, _TURNS_AGAIN, SECONDS_BETWEEN_TURNS = 5, 20, 0.1
STARTS, SECONDS_BETWEEN_STARTS = 3, 1.0  # how often a worker is started, and the seconds between


class Turns:
    """Lets ``jobs`` threads compile and check at the same time, and one thread alone time a call."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._alone = jobs, threading.Lock()
        self.working = threading.Semaphore(jobs)  # held by a thread that works; by one that times, all

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within ``working``: no other thread works."""
        self.working.release()
        with self._alone:  # two that have half of all each would wait for each other
            for _ in range(self._jobs):
                self.working.acquire()
        try:
            yield
        finally:
            for _ in range(self._jobs - 1):
                self.working.release()


@dataclass(frozen=True)
class Bench:
    """What every try needs: the tools, the grader's file, and the device.

    ``turns`` are for submissions that share a processor, ``progress`` shows the current step to people, and ``own`` has
    the seconds of this package's kernel.
    """

    tools: Tools
    spec: Spec
    device: Device = field(default_factory=Device)
    turns: Turns | None = None
    progress: Callable[[str], None] = lambda text: None
    own: dict[ConvProblem, float | None] = field(default_factory=dict)


class Trial:
    """A network tried with a number of images, by one worker or, where that uses up its memory, by several.

    The program's forward is called on all layers, in order, for each of the purposes, and for the accuracy of each of
    the trained networks, which have these layers. No call may take longer than ``seconds``.
    """

    worker: Worker

    def __init__(
        self, bench: Bench, program: Program, net: Net, images: int, seconds: float, purposes: Iterable[str],
        trained: Sequence[CourseNet] = (),
    ) -> None:  # fmt: skip
        self.bench, self.program, self.seconds, self._trained = bench, program, seconds, trained
        self._folder = f"{Path(program.what).parent}/"  # the harness's, which says nothing to the author
        self._left = deque([*purposes, *[REAL_IMAGES] * len(trained)])
        self.buffers: list[Buffers] = []
        self.result = NetworkResult(net, images, [Layer(problem) for problem in net.problems(images)])
        self._layer = self._ended = 0  # the layer at which it is, and the rounds that this worker has ended
        self._right: list[set[int]] = [set() for _ in net.layers]  # digests of right outputs, per layer
        # One generator for all calls: equal layers, and a call that a crash repeats, have other inputs each time.
        self._rng = np.random.default_rng((bench.spec.seed, images, *chain(*net.layers)))
        self._turn = 0.0  # seconds in which a GPU usually turns to the harness after an honest answer
        self._late = False  # were all answers late? Then honest ones are measured again

    def run(self) -> NetworkResult:
        """Start workers until the verdict is known; raises HarnessError where none can begin."""
        bench = self.bench
        bench.device.check()
        with new_folder("case") as folder, ExitStack() as stack:
            for layer in self.result.layers:
                buffers = Buffers(layer.problem, bench.device, bench.tools.processes)
                self.buffers.append(stack.enter_context(buffers))
            done, failures = False, 0
            while not done:
                try:
                    with Worker(bench.tools, self.program, self.buffers, folder, bench.spec.limits) as worker:
                        done = self.go_through(worker)
                except HarnessError as error:
                    # A machine under load may fail to start a process or a GPU's context once.
                    failures += 1
                    if failures == STARTS or isinstance(error, StoppedError):
                        raise
                    time.sleep(SECONDS_BETWEEN_STARTS)
            self.result.printed = worker.printed.replace(self._folder, "")
        return self.result

    def go_through(self, worker: Worker) -> bool:
        """Let the worker do what is left; False where another one should go on."""
        self.worker, self._ended, end = worker, 0, None
        try:
            worker.begin()
            if self.bench.device.gpu:
                self._measure_turns()
            if self._left:
                worker.call(0, self.bench.spec.limits.load_seconds, "load")
                worker.note_size()
            if not self._finish():
                return False
        except MemoryError as error:
            end = EndedError("crashed", f"{NO_MEMORY} next to what the file had taken: {error}")
        except EndedError as ended:
            end = EndedError(ended.status, ended.reason.replace(self._folder, ""))
        # Each call took memory and freed none: in the course there was one call.
        if end and end.status == "crashed" and self._ended and (worker.outgrown or self.bench.device.exhausted()):
            self.result.leaks = True
            return False
        _verdict.judge_network(self.result.layers, self.bench.spec.half, end, self._layer)
        return True

    def _measure_turns(self) -> None:
        """Measure how soon a GPU turns to the harness after honest answers: of a worker that has loaded nothing."""
        seconds = []
        for layer, buffers in [*enumerate(self.buffers)] * (_TURNS_AGAIN if self._late else _TURNS):
            time.sleep(SECONDS_BETWEEN_TURNS if self._late else 0)  # other programs work by fits and starts
            self.worker.call(layer, BEGIN_SECONDS, "zero")
            seconds.append(buffers.turn_seconds())
        if not self._late:
            self._turn = statistics.median(seconds)
            return
        # The process that gave late answers has ended: what holds the GPU up now is another program's work. It holds up
        # some calls and not others, and nobody is accused for that; late seconds count as the submission's in any case.
        for one in self.result.layers:
            one.held_up_seconds = max(0.0, max(seconds) - self._turn)

    def _finish(self) -> bool:
        """All rounds that are left; False where another worker has to show whether the GPU is held up by others."""
        layers, device = self.result.layers, self.bench.device
        for layer in layers:
            layer.overhead_seconds = self.worker.overhead
            layer.roofline_seconds = device.roofline_seconds(layer.problem, self.program.arithmetic)
        while self._left and not any(layer.certainly_wrong for layer in layers):
            purpose = self._left[0]
            self.bench.progress(f"{self.result.net.name}, {self.result.images} images: {purpose}")
            if purpose == REAL_IMAGES:
                self._real_images(self._trained[len(self.result.accuracy)])
            else:
                self._drawn_inputs(purpose)
            self._ended += 1
            self.worker.note_size()
            self._left.popleft()
            if not self._left and purpose != WIDE_RANGE and any(layer.reduced for layer in layers):
                self._left.append(WIDE_RANGE)
            # A near-duplicate is one for the worker that had the timed inputs.
            over = not {TIMED, NEAR_DUPLICATE} & {*self._left}
            if over and not self._late and any(layer.late_by for layer in layers):
                self._late = True
                return False
        return True

    def _drawn_inputs(self, purpose: str) -> None:
        for number, (buffers, right) in enumerate(zip(self.buffers, self._right)):
            self._layer = number
            if purpose == NEAR_DUPLICATE:
                buffers.draw_near_duplicate(self._rng)
            else:
                buffers.draw(_verdict.KINDS[purpose], self._rng)
            run, digest = self._run(purpose), buffers.digest()
            if not run.wrong:
                right.add(digest)
            elif digest in right:
                raise EndedError(*VIOLATIONS["replayed"])

    def _real_images(self, net: CourseNet) -> None:
        """The course's own measure: the network's labels, layer by layer through the worker, and by exact sums."""
        x = exact = net.test.images
        for number, (buffers, w) in enumerate(zip(self.buffers, net.filters)):
            self._layer = number
            buffers.set_inputs(x, w)
            self._run(REAL_IMAGES)
            x, exact = net.after(number, buffers.copied), net.after(number, buffers.exact(exact, w))
        self.result.accuracy.append(net.compare(*(net.labels(one, buffers.xp) for one in (x, exact))))

    def _run(self, purpose: str) -> Run:
        """Call the current layer with the inputs that are drawn; raises EndedError for a violation."""
        bench, layer, buffers = self.bench, self.result.layers[self._layer], self.buffers[self._layer]
        before, timed = POISON if purpose == POISONED else 0.0, purpose == TIMED
        with bench.turns.timing() if timed and bench.turns else nullcontext():
            if timed:
                if layer.problem not in bench.own:
                    bench.own[layer.problem] = buffers.own_seconds()
                layer.own_kernel_seconds = bench.own[layer.problem]
                bench.device.wake()
            buffers.clear(before)
            if timed:
                # Those long asleep take 0.5 ms to wake, without inputs. A submission can only make empty calls slower.
                layer.overhead_seconds = min(layer.overhead_seconds, self.worker.ping())
            buffers.present(flush=timed)
            call = self.worker.call(self._layer, self.seconds)
            late = buffers.turn_seconds() - self._turn if bench.device.gpu else 0.0
            late = late if late > _verdict.LATE_SECONDS else 0.0
            buffers.take_output()
            self.worker.idle(_PAUSE, self.seconds)
            for name in buffers.violations():
                raise EndedError(*VIOLATIONS[name])
        outcome = buffers.outcome(_verdict.KINDS[purpose], before)
        wrong = outcome.precision == _verdict.WRONG
        why = buffers.explanation(before, outcome.index[0], self.program.source) if wrong else None
        layer.runs.append(Run(purpose, call.seconds + late, call.worker_seconds, outcome, call.note, late, why))
        return layer.runs[-1]
