"""The GPUs of a data-parallel pass: one thread per GPU, a rank, computes that GPU's share of the batch.

NCCL's kernels on a GPU wait for NCCL's kernels on all other GPUs. So the last rank that reaches a barrier queues them
on all streams, or on none: if a rank fails between two barriers, the other ranks stop at the next one, and their GPUs
complete the queued work. If kernels still wait, because a GPU failed or only some kernels were launched, NCCL's
communicator is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import nccl

from ._inference import on_each

#: The timeout of a barrier in seconds: longer than compiling all kernels of a network takes.
BARRIER_SECONDS = 600


class RetryError(Exception):
    """A pass lacks memory or cannot be captured. Without CUDA graphs, whose memory is then free, it may succeed."""


def share_of(array: np.ndarray, shares: Sequence[slice], number: int) -> np.ndarray:
    """Return a view of one GPU's images of a C-contiguous array whose elements are in the images' order."""
    if len(shares) == 1:
        return array
    images = shares[-1].stop
    return array.reshape(array.shape if len(array) == images else (images, -1))[shares[number]]


class RankGroup:
    """The ranks of one pass. shares: each GPU's images. communicator: NCCL's, if the ranks exchange arrays."""

    def __init__(self, gpus: Sequence[Gpu], shares: Sequence[slice], communicator: nccl.Communicator | None) -> None:
        self.gpus, self.shares, self.communicator = gpus, shares, communicator
        self._barrier = threading.Barrier(len(shares), self._act, BARRIER_SECONDS)
        self._items: list[Any] = [None] * len(shares)
        self._action: Callable[[list[Any]], Any] = len

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """Run work(rank) for all ranks at the same time, and return the results; the caller holds the GPUs' locks.

        Raises the error of one of the ranks; a DeviceError names its GPU.
        """
        results = dict[int, Any]()

        def on_rank(number: int) -> None:
            try:
                results[number] = work(Rank(self, number))
            except threading.BrokenBarrierError:
                pass  # the error of another rank has stopped this one
            except BaseException as error:
                self._barrier.abort()
                if isinstance(error, RetryError):
                    error.args = (f"GPU {self.gpus[number].device.id}: {error}",)
                else:
                    self._abort()
                raise

        try:
            on_each(on_rank, self.gpus)
        finally:
            # The barrier and the group are a reference cycle, which would keep items until the next garbage collection.
            self._items, self._action = [], len
        if len(results) < len(self.gpus):
            raise DeviceError(f"expected all GPUs' threads within {BARRIER_SECONDS} seconds, got only some of them")
        return [results[number] for number in range(len(self.gpus))]

    def barrier(self, rank: int, item: Any, action: Callable[[list[Any]], Any]) -> None:
        """Wait for all ranks; the last one calls ``action`` with the list of all ranks' items.

        Raises BrokenBarrierError if another rank failed or the barrier timed out.
        """
        self._items[rank], self._action = item, action
        self._barrier.wait()

    def _act(self) -> None:
        try:
            self._action(self._items)
        except BaseException:
            self._abort()  # the action may have queued kernels on only some of the streams
            raise

    def _abort(self) -> None:
        """End the kernels that wait for other GPUs."""
        if self.communicator:
            self.communicator.abort()


class Rank:
    """One thread of a group of ``size`` ranks; all ranks call ``all_gather`` and ``launch`` in the same order."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self.group, self.number, self.size, self.gpu = group, number, len(group.shares), group.gpus[number]

    def share_of(self, array: np.ndarray) -> np.ndarray:
        """Return this rank's share of an array: see the function of that name."""
        return share_of(array, self.group.shares, self.number)

    def of_batch(self, count: int) -> int:
        """Return the whole batch's number of elements, given the number ``count`` of this rank's share."""
        share, images = self.group.shares[self.number], self.group.shares[-1].stop
        return count // (share.stop - share.start) * int(images)

    def all_gather(self, array: Any) -> None:
        """Queue NCCL's all-gather on float64 arrays (ranks, ...); each rank has filled the row of its number."""

        def gather(arrays: list[Any]) -> None:
            assert self.group.communicator, "the communicator of a network that exchanges arrays"
            self.group.communicator.all_gather(arrays, [gpu.stream for gpu in self.group.gpus])

        self.group.barrier(self.number, array, gather)

    def launch(self, graph: Any) -> None:
        """Launch this rank's CUDA graph together with those of all other ranks."""

        def launch(graphs: list[Any]) -> None:
            for gpu, one in zip(self.group.gpus, graphs):
                with gpu.device:
                    one.launch(gpu.stream)

        self.group.barrier(self.number, graph, launch)
