"""Images to the GPU and outputs back while it computes, cut up as ``copy_pipeline.py`` does for one convolution.

    rounds   equal numbers of images; the last begins early enough to be whole, so that one plan serves all
    pieces   what is copied at once, through a pinned staging buffer, by several threads in the order below

A piece waits only for pieces before it, so nothing deadlocks: a round's input, then the output of the round
before it; in front of the last round's output, the checks, which need no GPU and so pass its time. Nothing here
knows CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ece408_op.runtime.copy_pipeline import Slot
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.thread_pool import share

#: Rounds whose data and outputs are on the device at once.
RING = 2


@dataclass(frozen=True)
class Round:
    """Images from ``first`` on, in the buffers ``ring``; the first ``known`` outputs are another round's."""

    first: int
    images: int
    known: int
    ring: int


def rounds_of(batch: int, images: int) -> list[Round]:
    """The batch in rounds of so many images, at most the batch."""
    rounds = []
    for number in range(ceil_div(batch, images)):
        first = min(number * images, batch - images)
        rounds.append(Round(first, images, number * images - first, number % RING))
    return rounds


class Device(Protocol):
    """What the pipeline asks of the device, from several threads."""

    def take(self) -> Slot:
        """A staging buffer that nothing uses."""

    def give(self, slot: Slot) -> None:
        """Take it back."""

    def bring(self, slot: Slot, number: int, ring: int, start: int, count: int, after: Any) -> None:
        """Copy so many elements to data ``number``, from element ``start`` on, after the mark; returns when there."""

    def compute(self, this: Round) -> Any:
        """Start the network on the round's images; returns the mark of its end."""

    def fetch(self, slot: Slot, number: int, ring: int, start: int, count: int, after: Any) -> None:
        """Copy elements of output ``number`` into the slot, after the mark; returns when they are there."""


class _State:
    """What the threads tell each other about one round."""

    def __init__(self) -> None:
        self.arriving = self.leaving = 0
        self.end: Any = None
        self.launched, self.gone = threading.Event(), threading.Event()


class _Stop(Exception):  # noqa: N818 - no error: another piece has failed, and its error is the call's
    pass


class Pipeline:
    """One call: data through the device into outputs, whose first axis is the images'.

    All arrays are C-contiguous float32; outputs share no memory with data. ``most``: elements of a staging buffer.
    checks: work for the threads while the device computes. An error in one piece ends the call.
    """

    def __init__(
        self,
        device: Device,
        rounds: Sequence[Round],
        data: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        most: int,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._device, self._rounds, self._data, self._outputs, self._most = device, rounds, data, outputs, most
        self._states = [_State() for _ in rounds]
        self._lock = threading.Lock()
        self._failed = False
        self._work: list[Callable[[], None]] = []
        for number in range(len(rounds)):
            self._work += self._bringing(number)
            if number:
                self._work += self._fetching(number - 1)
        self._work += checks
        self._work += self._fetching(len(rounds) - 1)

    def run(self, threads: int) -> None:
        """Work off all pieces on at most so many threads."""

        def work(number: int) -> None:
            if self._failed:
                return
            try:
                self._work[number]()
            except _Stop:
                return
            except BaseException:
                self._failed = True
                for state in self._states:
                    state.launched.set()
                    state.gone.set()
                raise

        share(work, len(self._work), threads)

    def _pieces(self, arrays: Sequence[np.ndarray], first: int, end: int) -> list[tuple[int, int, int]]:
        """Array, start and count of floats, at most as many as a slot holds, of a round's images from first to end."""
        return [
            (array, start, min(self._most, whole[0].size * end - start))
            for array, whole in enumerate(arrays)
            for start in range(whole[0].size * first, whole[0].size * end, self._most)
        ]

    def _bringing(self, number: int) -> list[Callable[[], None]]:
        pieces = self._pieces(self._data, 0, self._rounds[number].images)
        self._states[number].arriving = len(pieces)
        return [lambda piece=piece: self._bring(number, *piece) for piece in pieces]  # type: ignore[misc]

    def _fetching(self, number: int) -> list[Callable[[], None]]:
        this = self._rounds[number]
        pieces = self._pieces(self._outputs, this.known, this.images)
        self._states[number].leaving = len(pieces)
        return [lambda piece=piece: self._fetch(number, *piece) for piece in pieces]  # type: ignore[misc]

    def _bring(self, number: int, array: int, start: int, count: int) -> None:
        this, state = self._rounds[number], self._states[number]
        before = self._states[number - RING] if number >= RING else None
        if before is not None:
            self._wait(before.launched)
        slot = self._device.take()
        try:
            np.copyto(slot.floats[:count], self._part(self._data[array], this, start, count))
            self._device.bring(slot, array, this.ring, start, count, before.end if before else None)
        finally:
            self._device.give(slot)
        with self._lock:
            state.arriving -= 1
            last = state.arriving == 0
        if last:
            if number:
                self._wait(self._states[number - 1].launched)
            if before is not None:
                self._wait(before.gone)
            state.end = self._device.compute(this)
            state.launched.set()

    def _fetch(self, number: int, array: int, start: int, count: int) -> None:
        this, state = self._rounds[number], self._states[number]
        self._wait(state.launched)
        slot = self._device.take()
        try:
            self._device.fetch(slot, array, this.ring, start, count, state.end)
            with self._lock:
                state.leaving -= 1
                last = state.leaving == 0
            if last:
                state.gone.set()
            np.copyto(self._part(self._outputs[array], this, start, count), slot.floats[:count])
        finally:
            self._device.give(slot)

    @staticmethod
    def _part(whole: np.ndarray, this: Round, start: int, count: int) -> np.ndarray:
        first = this.first * whole[0].size + start
        return whole.reshape(-1)[first : first + count]

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            event.wait()
        if self._failed:
            raise _Stop
