"""The one pipeline of copies between host and device: they overlap with each other and with computing.

    round    the images of one launch: copied in, computed, copied out. Each round has the device buffers of its
             ring index; ``RING`` rounds, or as many as the caller asks for, are on the device at a time
    piece    the elements that one copy moves, through a pinned staging buffer: the GPU's copy engine cannot reach
             pageable memory at full speed, and the driver must not keep pages registered that MXNet may free

Several threads work through the pieces in order: the input of round n, then the output of round n - 1. A piece waits
only for earlier pieces, so the pipeline cannot deadlock, whatever the number of threads. Each thread waits for its own
copies, and CUDA calls are few on purpose: each one releases the interpreter's lock, and with many threads it takes
long to get it back. Nothing here knows CUDA; the pipeline calls the device through ``Device``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from .launch import ceil_div
from .thread_pool import share

#: Rounds on the device at a time: one is copied in, one computed, one copied out.
RING = 3

#: What an array is to the pipeline. A constant is copied in once, before the first round.
CONSTANT, INPUT, OUTPUT = "constant", "input", "output"


@dataclass(frozen=True)
class Round:
    """Images ``first`` to ``first + images`` of a batch. The round before it copies out the first ``known`` outputs."""

    first: int
    images: int
    ring: int = 0
    known: int = 0


def rounds_of(batch: int, images: int, ring: int = RING) -> list[Round]:
    """The batch in rounds of exactly ``images`` images, at most ``batch``: the last one may overlap the one before.

    All rounds have one size, so that one plan serves all of them. ring: at least 2; a round is copied in before the one
    before it is copied out.
    """
    firsts = [min(start, batch - images) for start in range(0, batch, max(1, images))]
    return [Round(first, images, n % ring, n * images - first) for n, first in enumerate(firsts)]


def images_per_round(batch: int, image_bytes: int, round_bytes: int) -> int:
    """The images of one of equally large rounds: their bytes are at most ``round_bytes``, unless one image has more."""
    return ceil_div(batch, ceil_div(batch, max(1, round_bytes // image_bytes))) if batch else 0


@dataclass
class Slot:
    """A pinned staging buffer: its elements on the host, and the ``handle`` that the device keeps for it."""

    floats: np.ndarray
    handle: Any = None

    def __post_init__(self) -> None:
        self.address: int = self.floats.ctypes.data


@dataclass(frozen=True, eq=False)
class Piece:
    """What one copy moves: ``host``, flat float32, and on the device as many elements of a buffer from ``start`` on.

    The buffer is that of the constant, input or output number ``array``, in the set of buffers ``ring``.
    """

    role: str
    array: int
    ring: int
    start: int
    host: np.ndarray


class Device(Protocol):
    """What the pipeline asks of the device, from several threads."""

    def take(self) -> Slot:
        """Return a staging buffer for the caller alone."""

    def give(self, slot: Slot) -> None:
        """Take a staging buffer back."""

    def copy_in(self, slot: Slot, piece: Piece, after: Any) -> None:
        """Copy from the slot to the device once the mark ``after``, if any, is reached; return when it is done."""

    def compute(self, this: Round) -> Any:
        """Queue the round's computation behind earlier ones; return the mark of its end."""

    def copy_out(self, slot: Slot, piece: Piece, after: Any) -> None:
        """Copy from the device to the slot once the mark ``after``, if any, is reached; return when it is done."""


class _State:
    """How far the threads are with one round: the pieces that are not yet copied in, and those not yet copied out."""

    def __init__(self) -> None:
        self.arriving = self.leaving = 0
        #: The mark of the computation's end, until a copy has waited for it.
        self.end: Any = None
        self.launched, self.copied_out = threading.Event(), threading.Event()


class _Stop(Exception):  # noqa: N818 - not an error: another piece has failed, and its error ends the call
    pass


class Pipeline:
    """One call: inputs through the device into outputs, whose first axis counts images.

    All arrays are C-contiguous float32; outputs share no memory with the others. slot_elements: the elements of a
    staging buffer. constants: arrays that every round reads. checks: functions for the threads to call while the device
    computes the last round. add: add results to the outputs. An error in any piece ends the call, and ``run`` raises
    it.
    """

    def __init__(
        self,
        device: Device,
        rounds: Sequence[Round],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        slot_elements: int,
        constants: Sequence[np.ndarray] = (),
        checks: Sequence[Callable[[], None]] = (),
        add: bool = False,
    ) -> None:
        self._device, self._rounds, self._slot_elements, self._add = device, rounds, slot_elements, add
        self._ring = 1 + max((this.ring for this in rounds), default=0)
        self._states = [_State() for _ in rounds]
        self._lock = threading.Lock()
        self._failed = False
        self._work: list[Callable[[], None]] = []
        for number, this in enumerate(rounds):
            self._work += self._copies_in(number, CONSTANT, constants) if not number else []
            self._work += self._copies_in(number, INPUT, [a[this.first : this.first + this.images] for a in inputs])
            if number:
                self._work += self._copies_out(number - 1, outputs)
        self._work += checks
        if rounds:
            self._work += self._copies_out(len(rounds) - 1, outputs)

    def run(self, threads: int) -> None:
        """Do all copies, computations and checks on at most ``threads`` threads."""

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
                    state.copied_out.set()
                raise

        share(work, len(self._work), threads)

    def _pieces(self, role: str, arrays: Sequence[np.ndarray], ring: int, skipped: int = 0) -> Iterator[Piece]:
        """The arrays without their first ``skipped`` images, in pieces that fit a slot."""
        for number, array in enumerate(arrays):
            flat = array.reshape(-1)
            for start in range(skipped * (array.size // max(1, len(array))), array.size, self._slot_elements):
                yield Piece(role, number, ring, start, flat[start : start + self._slot_elements])

    def _copies_in(self, number: int, role: str, arrays: Sequence[np.ndarray]) -> list[Callable[[], None]]:
        pieces = list(self._pieces(role, arrays, self._rounds[number].ring))
        self._states[number].arriving += len(pieces)
        return [partial(self._copy_in, number, piece) for piece in pieces]

    def _copies_out(self, number: int, outputs: Sequence[np.ndarray]) -> list[Callable[[], None]]:
        this = self._rounds[number]
        parts = [array[this.first : this.first + this.images] for array in outputs]
        pieces = list(self._pieces(OUTPUT, parts, this.ring, this.known))
        self._states[number].leaving = len(pieces)
        return [partial(self._copy_out, number, piece) for piece in pieces]

    def _copy_in(self, number: int, piece: Piece) -> None:
        state = self._states[number]
        #: The round that has had this round's buffers before it.
        before = self._states[number - self._ring] if number >= self._ring else None
        if before is not None:
            self._wait(before.launched)
        slot = self._device.take()
        try:
            np.copyto(slot.floats[: piece.host.size], piece.host)
            self._device.copy_in(slot, piece, before.end if before else None)
        finally:
            self._device.give(slot)
        with self._lock:
            state.arriving -= 1
            last = state.arriving == 0
        if last:
            if number:
                self._wait(self._states[number - 1].launched)  # rounds compute in order, and constants come first
            if before is not None:
                self._wait(before.copied_out)
            state.end = self._device.compute(self._rounds[number])
            state.launched.set()

    def _copy_out(self, number: int, piece: Piece) -> None:
        state = self._states[number]
        self._wait(state.launched)
        slot = self._device.take()
        try:
            self._device.copy_out(slot, piece, state.end)
            state.end = None
            with self._lock:
                state.leaving -= 1
                if state.leaving == 0:
                    state.copied_out.set()
            staged = slot.floats[: piece.host.size]
            if self._add:
                np.add(piece.host, staged, out=piece.host)
            else:
                np.copyto(piece.host, staged)
        finally:
            self._device.give(slot)

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            event.wait()
        if self._failed:
            raise _Stop
