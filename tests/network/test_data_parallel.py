"""How the ranks of a pass on several GPUs wait for each other, and what stops them."""

import threading
import time
from types import SimpleNamespace

import pytest
from network_fake import Communicator, Device

from ece408_op.errors import DeviceError
from ece408_op.network import _data_parallel
from ece408_op.network._data_parallel import RankGroup, RetryError


class Noted(Communicator):
    """NCCL's communicator, which notes what the ranks exchange."""

    def __init__(self):
        self.gathered = []

    def all_gather(self, arrays, streams):
        self.gathered.append((list(arrays), streams))


@pytest.fixture
def group():
    """Three ranks with 2, 3 and 3 images."""
    gpus = [SimpleNamespace(device=Device(number), stream=f"stream {number}") for number in range(3)]
    return RankGroup(gpus, [slice(0, 2), slice(2, 5), slice(5, 8)], Noted())


def test_a_share_has_the_batchs_number_of_elements_and_results_the_order_of_the_ranks(group):
    assert group.run(lambda rank: rank.of_batch(10)) == [40, 24, 24]


def test_arrays_are_exchanged_and_graphs_launched_by_one_thread(group):
    launched = []
    graphs = [SimpleNamespace(launch=lambda stream: launched.append((stream, threading.get_ident()))) for _ in range(3)]

    def work(rank):
        for step in range(20):
            rank.all_gather((step, rank.number))
            rank.launch(graphs[rank.number])

    group.run(work)
    streams = ["stream 0", "stream 1", "stream 2"]
    expected = [([(step, number) for number in range(3)], streams) for step in range(20)]
    assert group.communicator.gathered == expected
    assert [stream for stream, _ in launched] == streams * 20
    assert all(len({thread for _, thread in launched[step : step + 3]}) == 1 for step in range(0, 60, 3))


@pytest.mark.parametrize(("error", "aborted"), [(DeviceError, True), (RetryError, False)])
@pytest.mark.parametrize("where", ["between", "launch"])
def test_a_rank_that_fails_stops_the_others(group, error, aborted, where):
    """A launch may have begun on another GPU, and wait: the communicator ends it in any case."""
    reached = []

    def fails(stream):
        raise error("out of order")

    def work(rank):
        rank.all_gather(None)
        if rank.number == 1 and where == "between":
            fails("stream 1")
        rank.launch(SimpleNamespace(launch=fails if where == "launch" else lambda stream: None))
        reached.append(rank)

    with pytest.raises(error, match="out of order"):
        group.run(work)
    assert not reached
    assert group.communicator.aborted == (aborted or where == "launch")


def test_a_rank_that_never_comes(group, monkeypatch):
    monkeypatch.setattr(_data_parallel, "BARRIER_SECONDS", 0.01)
    group = RankGroup(group.gpus, group.shares, None)
    with pytest.raises(DeviceError, match=r"expected all GPUs' threads within 0.01 seconds, got only some"):
        group.run(lambda rank: time.sleep(0.2) if rank.number else rank.launch(None))
