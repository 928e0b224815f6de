"""How the threads of a training pass on several GPUs wait for each other; each computes one GPU's share of the batch.

NCCL's kernels on a GPU wait for those on all others. The last thread that comes to a meeting therefore puts them on
all streams, or on none if it fails: a thread that fails between meetings stops the others, whose GPUs run to the end.
If kernels still wait, because a GPU has failed or only some were launched, NCCL's group is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import nccl

#: A thread that does not come within these seconds never will: compiling all kernels of a network takes less.
MOST_SECONDS = 600


class StoppedError(Exception):
    """Another thread has stopped, and its error ends the pass."""


class _Point:
    """Where ``parties`` threads wait until all have come, again and again."""

    def __init__(self, parties: int) -> None:
        self._condition, self._parties = threading.Condition(), parties
        self._items: dict[int, Any] = {}
        self._stopped, self._number = False, 0
        self._result: Any = None

    def meet(self, part: int, item: Any, action: Callable[[list[Any]], Any]) -> Any:
        """Wait for all; the last one calls the action for all parts' items, and all return its result.

        Raises StoppedError in threads that wait, and in those that come, after ``stop``.
        """
        with self._condition:
            number = self._number
            if not self._stopped:
                self._items[part] = item
                if len(self._items) == self._parties:
                    self._result = action([self._items.pop(each) for each in range(self._parties)])
                    self._number += 1
                    self._condition.notify_all()
                elif not self._condition.wait_for(lambda: self._stopped or self._number != number, MOST_SECONDS):
                    raise DeviceError(f"expected all GPUs' threads within {MOST_SECONDS} seconds, got some of them")
            # Those that have met go on, so that all are stopped at the same meeting.
            if self._number == number:
                raise StoppedError
            return self._result

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def begin_again(self) -> None:
        """Let threads meet after ``stop``; none waits."""
        with self._condition:
            self._items.clear()
            self._stopped = False


class Meeting:
    """The threads of one pass. images: in each GPU's share. group: NCCL's, if they exchange arrays."""

    def __init__(self, gpus: Sequence[Gpu], images: Sequence[int], group: nccl.Group | None) -> None:
        self.gpus, self.images, self.group = gpus, images, group
        #: Where they meet while they compute, and where they begin again after one of them has stopped the others.
        self.points = _Point(len(gpus)), _Point(len(gpus))

    def fail(self) -> None:
        """Stop all threads for good, and what waits on their GPUs."""
        for point in self.points:
            point.stop()
        self._abort()

    def act(self, action: Callable[[list[Any]], Any], items: list[Any]) -> Any:
        """Call the action; where it fails, only some of the streams may have what it puts on all."""
        try:
            return action(items)
        except BaseException:
            self._abort()
            raise

    def begin_again(self) -> None:
        """Let all threads meet after one has stopped the others."""
        if self.group and self.group.aborted:
            self.group = nccl.group(tuple(gpu.device.id for gpu in self.gpus))
        self.points[0].begin_again()

    def _abort(self) -> None:
        if self.group:
            self.group.abort()


class Member(NamedTuple):
    """One thread's part in a meeting, whose methods all threads call in the same order; the caller has all GPUs' locks.

    Each may raise StoppedError.
    """

    meeting: Meeting
    part: int

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return len(self.meeting.gpus)

    @property
    def key(self) -> Hashable:
        """What a captured pass depends on besides the shapes of its share."""
        return tuple(gpu.device.id for gpu in self.meeting.gpus), sum(self.meeting.images)

    def of_batch(self, count: int) -> int:
        """Return how many elements the whole batch has where this share has ``count``."""
        return count // self.meeting.images[self.part] * sum(self.meeting.images)

    def least(self, number: int = 0) -> int:
        """Wait for all, and return the least of their numbers."""
        found: int = self.meet(number, min)
        return found

    def gather(self, array: Any) -> None:
        """Queue the exchange of arrays (gpus, ...), float64: each thread has filled the row of its part."""

        def gather(arrays: list[Any]) -> None:
            assert self.meeting.group, "the group of a network that exchanges arrays"
            self.meeting.group.gather(arrays, [gpu.stream for gpu in self.meeting.gpus])

        self.meet(array, gather)

    def launch(self, graph: Any) -> None:
        """Launch the CUDA graphs of all."""

        def launch(graphs: list[Any]) -> None:
            for gpu, one in zip(self.meeting.gpus, graphs):
                with gpu.device:
                    one.launch(gpu.stream)

        self.meet(graph, launch)

    def stop(self) -> None:
        """Stop the others at their next meeting; all have to call ``begin_again``, also if they are stopped."""
        self.meeting.points[0].stop()

    def begin_again(self) -> None:
        """Wait until all have stopped."""
        self.meeting.points[1].meet(self.part, None, lambda _: self.meeting.begin_again())

    def meet(self, item: Any, action: Callable[[list[Any]], Any]) -> Any:
        """Wait for all; the last one calls its action for all members' items, and all return its result."""
        return self.meeting.points[0].meet(self.part, item, lambda items: self.meeting.act(action, items))


__all__ = ("Meeting", "Member", "StoppedError")
