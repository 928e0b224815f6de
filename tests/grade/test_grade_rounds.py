"""Rounds without a worker: a submission that uses up its memory is restarted, and late work on a GPU is timed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from ece408_op.core import reference
from ece408_op.grade import _rounds
from ece408_op.grade._buffers import Buffers, Device
from ece408_op.grade._rounds import Bench, Trial, Turns
from ece408_op.grade._spec import Spec
from ece408_op.grade._verdict import NEAR_DUPLICATE, TIMED, WARM_UP
from ece408_op.problem import Net
from ece408_op.submission import EndedError, HarnessError
from ece408_op.submission.sandbox import Tools
from ece408_op.submission.worker import Call, Program

NET = Net("own", ((2, 7, 6, 3, 3),))
PROBLEM = NET.problems(3)[0]


class Worker:
    """In the worker's place: it computes in this process, and ends where it is told to."""

    overhead = empty = 1e-5
    outgrown = False

    def __init__(self, buffers: Buffers, ends_at: int | None = None) -> None:
        self.buffers, self.ends_at, self.inputs = buffers, ends_at, []

    def idle(self, *arguments: object) -> None:
        pass

    note_size = begin = idle

    def ping(self) -> float:
        return self.empty

    def call(self, layer: int, seconds: float, word: str = "run") -> Call:
        if word != "run":
            return Call(0.0, 0.0)
        one = self.buffers
        self.inputs.append(one.x.array.tobytes())
        if len(self.inputs) == self.ends_at:
            raise EndedError("crashed", "the GPU reported out of memory")
        one.y.array[...] = reference.convolve(one.x.array, one.w.array)
        return Call(1e-3, 0.9e-3)


@pytest.fixture
def buffers():
    with Buffers(PROBLEM) as found:
        yield found


def trial(buffers: Buffers, steps: list[str], device: Device | None = None, net: Net = NET) -> Trial:
    one = Trial(Bench(Tools(Path("/")), Spec(), device or Device()), Program(""), net, 3, 1.0, steps)
    one.buffers += [buffers] * len(net.layers)
    return one


@pytest.mark.parametrize("later", [1e-6, 5e-3])
def test_the_least_time_of_an_empty_call_is_subtracted(later, buffers):
    this, worker = trial(buffers, [TIMED, TIMED]), Worker(buffers)
    worker.empty = later  # a busy machine has become free; or the submission slows it down
    assert this.go_through(worker)
    data = this.result.layers[0].as_data()
    assert data["overhead_seconds"] == min(later, worker.overhead)
    assert data["seconds"]["median"] == pytest.approx(1e-3 - min(later, worker.overhead))


def test_a_submission_that_used_up_its_memory_continues_in_a_new_worker(buffers, monkeypatch):
    this = trial(buffers, [WARM_UP, TIMED, TIMED, NEAR_DUPLICATE])
    monkeypatch.setattr(this.bench.device, "exhausted", lambda: True)
    assert not this.go_through(Worker(buffers, ends_at=3))
    assert this.go_through(Worker(buffers))
    assert [run.purpose for run in this.result.layers[0].runs] == [WARM_UP, TIMED, TIMED, NEAR_DUPLICATE]
    assert this.result.leaks and this.result.status == "passed"


def test_a_crash_with_memory_left_is_a_crash(buffers):
    this = trial(buffers, [WARM_UP, TIMED])
    assert this.go_through(Worker(buffers, ends_at=2))
    assert this.result.status == "crashed" and not this.result.leaks


def test_what_leaves_the_grader_no_memory_has_crashed(buffers, monkeypatch):
    this = trial(buffers, [WARM_UP, TIMED])
    monkeypatch.setattr(buffers, "outcome", mock.Mock(side_effect=MemoryError("Out of memory")))
    assert this.go_through(Worker(buffers))
    assert this.result.status == "crashed" and "no memory for itself" in this.result.verdict.reason


def test_no_call_has_the_inputs_of_another(buffers, monkeypatch):
    this = trial(buffers, [WARM_UP, TIMED, TIMED], net=Net("own", NET.layers * 2))
    monkeypatch.setattr(this.bench.device, "exhausted", lambda: True)
    workers = Worker(buffers, ends_at=5), Worker(buffers)  # the second repeats a call for which the first had inputs
    assert [this.go_through(worker) for worker in workers] == [False, True]
    assert len({*workers[0].inputs, *workers[1].inputs}) == 5 + 2


@pytest.mark.parametrize("failures", [2, 3])
def test_a_worker_that_cannot_begin_is_started_again(failures, monkeypatch):
    begun = []

    def never(*arguments: object) -> None:
        begun.append(1)
        if len(begun) <= failures:
            raise HarnessError("expected the worker to begin")
        raise EndedError("crashed", "it did begin")

    monkeypatch.setattr(_rounds, "Worker", never)
    monkeypatch.setattr(_rounds, "SECONDS_BETWEEN_STARTS", 0.0)
    with pytest.raises(EndedError if failures == 2 else HarnessError):
        trial(mock.Mock(), [TIMED]).run()
    assert len(begun) == 3


@pytest.mark.parametrize(
    ("took", "late", "again", "status"),
    [
        ([3.0, 1.7, 1.2], [1.8, 0.5, 0], [], "passed"),
        ([3.0, 1.7, 2.2], [1.8, 0.5, 1.0], [1.2] * 20, "tampered"),
        ([3.0, 1.7, 2.2], [1.8, 0.5, 1.0], [1.2] * 19 + [9.0], "passed"),  # another program's work
    ],
)
def test_a_gpus_work_after_the_answer_is_added_to_its_time(took, late, again, status, buffers, monkeypatch):
    monkeypatch.setattr(_rounds, "SECONDS_BETWEEN_TURNS", 0.0)
    device = Device(0)
    this = trial(buffers, [WARM_UP, *[TIMED] * len(took), NEAR_DUPLICATE], device)
    # Five after honest answers, the warm-up's, those that are timed, the last round's; milliseconds.
    turns = [1.2, 1.1, 1.3, 1.2, 1.2, 1.2, *took, 1.2, *again]
    monkeypatch.setattr(buffers, "turn_seconds", lambda: 1e-3 * turns.pop(0))
    monkeypatch.setattr(device, "wake", lambda: None)
    monkeypatch.setattr(device, "roofline_seconds", lambda problem, arithmetic: 1e-6)
    # The worker that gave late answers goes before honest ones are measured again.
    assert this.go_through(Worker(buffers)) == (not again)
    assert not again or this.go_through(Worker(buffers))
    assert not turns and this.result.status == status
    runs = this.result.layers[0].runs[1:-1]
    assert [run.late_seconds for run in runs] == pytest.approx([1e-3 * one for one in late])
    assert [run.seconds for run in runs] == pytest.approx([1e-3 + 1e-3 * one for one in late])


def test_a_call_is_timed_alone():
    turns, lock = Turns(4), threading.Lock()
    working: list[int] = []
    alone: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            # A call may end in an error.
            with suppress(EndedError), turns.working:
                with lock:
                    working.append(number)
                time.sleep(1e-4)
                with lock:
                    working.remove(number)
                with turns.timing():
                    alone.append(number)
                    assert working == [] and alone == [number]
                    time.sleep(1e-4)
                    assert working == []
                    alone.remove(number)
                    raise EndedError("crashed", "")

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, number) for number in range(4)]:
            future.result()
