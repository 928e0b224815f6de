"""How threads of a pass on several GPUs wait for each other, and what stops them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from ece408_op.errors import DeviceError
from ece408_op.network import _meeting
from ece408_op.network._meeting import Meeting, Member, StoppedError
from ece408_op.runtime import nccl


class Group:
    """NCCL's group as the meeting uses it."""

    aborted = False

    def __init__(self):
        self.gathered = []

    def gather(self, arrays, streams):
        self.gathered.append((arrays, streams))

    def abort(self):
        self.aborted = True


def members(images=(2, 3, 3), group=None):
    gpus = [SimpleNamespace(device=Device(number), stream=f"stream {number}") for number in range(len(images))]
    meeting = Meeting(gpus, images, group or Group())
    return [Member(meeting, part) for part in range(len(images))]


class Device(nullcontext):
    def __init__(self, number):
        super().__init__()
        self.id = number


def run(work, several):
    """Return what work(member) returned or raised, by part; all run at the same time."""

    def found(member):
        try:
            return work(member)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(several)) as pool:
        return list(pool.map(found, several))


def test_all_wait_and_get_one_result():
    several = members()
    found = run(lambda member: [member.least(number + member.part) for number in range(50)], several)
    assert found == [list(range(50))] * 3
    assert [member.of_batch(10 * images) for member, images in zip(several, (2, 3, 3))] == [80] * 3
    assert len({member.key for member in several}) == 1


def test_arrays_are_exchanged_and_graphs_launched_by_one_thread():
    several, launched = members(), []
    run(lambda member: member.gather(f"array {member.part}"), several)
    assert several[0].meeting.group.gathered == [
        (["array 0", "array 1", "array 2"], ["stream 0", "stream 1", "stream 2"])
    ]
    graphs = [SimpleNamespace(launch=lambda stream: launched.append((stream, threading.get_ident()))) for _ in several]
    run(lambda member: member.launch(graphs[member.part]), several)
    assert [stream for stream, _ in launched] == ["stream 0", "stream 1", "stream 2"]
    assert len({thread for _, thread in launched}) == 1


def test_one_that_fails_stops_the_others_for_good():
    several = members()

    def work(member):
        member.least()
        if member.part == 1:
            member.meeting.fail()
            raise ValueError
        try:
            member.least()
        except StoppedError:
            member.begin_again()

    assert [type(one) for one in run(work, several)] == [StoppedError, ValueError, StoppedError]
    assert several[0].meeting.group.aborted


def test_all_begin_again_at_one_place():
    """Where one stops the others, again and again; those that have met before go on."""
    several = members()

    def work(member):
        reached = []
        for number in range(60):
            try:
                member.least()
                reached.append(number)
                if number % 3 == member.part:
                    raise StoppedError
                member.least()
                reached.append(-1)
            except StoppedError:
                member.stop()
                member.begin_again()
        return reached

    assert run(work, several) == [list(range(60))] * 3
    assert not several[0].meeting.group.aborted


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_launch_that_fails_aborts_the_group(begins_again, monkeypatch):
    """Another GPU's graph may run already, and wait."""
    several, new, old = members(), Group(), None
    old = several[0].meeting.group
    monkeypatch.setattr(nccl, "group", lambda numbers: new if numbers == (0, 1, 2) else None)

    def fails(stream):
        raise DeviceError("no launch")

    graphs = [SimpleNamespace(launch=one) for one in (lambda stream: None, fails, fails)]

    def work(member):
        try:
            member.launch(graphs[member.part])
        except (DeviceError, StoppedError) as error:
            assert old.aborted
            if not begins_again:
                member.meeting.fail()
                return error
            member.stop()
            member.begin_again()
        return member.least(7)

    found = run(work, several)
    if begins_again:
        assert found == [7] * 3
        assert several[0].meeting.group is new
    else:
        assert sorted(type(one).__name__ for one in found) == ["DeviceError", "StoppedError", "StoppedError"]


def test_a_thread_that_never_comes(monkeypatch):
    monkeypatch.setattr(_meeting, "MOST_SECONDS", 0.01)
    with pytest.raises(DeviceError, match="expected all GPUs' threads within 0.01 seconds, got some of them"):
        members()[0].least()
