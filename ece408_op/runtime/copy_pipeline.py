"""A call of the operator on arrays in the computer's memory, cut up so that copies and computing overlap.

    rounds    a few images each: copied in, computed by one call of the kernel, copied out; three
              rounds are on the device at a time, each in a set of buffers of its own
    pieces    what is copied at once: through a pinned staging buffer, since the GPU's copy engine cannot
              reach pageable memory at full speed, and memory registered with the driver may be freed
              and mapped anew behind its back

The pieces are worked off by several threads in the order of ``pieces_in_order``, so that a piece waits only for
pieces before it: that cannot deadlock, whatever the number of threads. Each thread waits for its own copies, which
leaves one thing to wait for on the device, a round's computing. Calls of CUDA are few on purpose: each gives up
the interpreter's lock, and with many threads it takes long to come back. Nothing here knows CUDA; the
device is asked through ``Device``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ece408_op.problem import ITEM_BYTES, ConvProblem

from .launch import ceil_div
from .thread_pool import share

#: What one round's input and output take on the device, unless one image takes more, in bytes.
ROUND_BYTES = 128 << 20

#: Rounds on the device at once: one being copied in, one computed, one copied out.
RING = 3


@dataclass(frozen=True)
class Round:
    """Images ``first`` to ``first + images`` of a batch, in the buffers ``ring``."""

    first: int
    images: int
    ring: int


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the array "x", "w" or "y", counted from the round's first element."""

    array: str
    round: int
    start: int
    stop: int


@dataclass
class Slot:
    """A staging buffer: its elements in the computer's memory, and what the device keeps beside it."""

    floats: np.ndarray
    handle: Any = None

    def __post_init__(self) -> None:
        self.address: int = self.floats.ctypes.data


class Device(Protocol):
    """What a call asks of the device, from several threads."""

    def take(self) -> Slot:
        """A staging buffer that nothing uses, for the caller alone."""

    def give(self, slot: Slot) -> None:
        """Take it back."""

    def bring(self, slot: Slot, piece: Piece, ring: int) -> None:
        """Copy the slot's elements to their place; returns when they are there."""

    def compute(self, this: Round) -> Any:
        """Start the kernel on the round's images, after those before; returns the mark of its end."""

    def fetch(self, slot: Slot, piece: Piece, ring: int, after: Any) -> None:
        """Copy elements from their place into the slot, after the mark if any; returns when they are there."""


def rounds_of(problem: ConvProblem, round_bytes: int = ROUND_BYTES) -> list[Round]:
    """The batch in rounds of equal size, but for the last, each at most ``round_bytes`` if an image is."""
    if problem.batch == 0:
        return []
    one = problem.with_batch(1)
    image = ITEM_BYTES * (elements(one.x_shape) + elements(one.y_shape))
    count = ceil_div(problem.batch, max(1, round_bytes // image))
    images = ceil_div(problem.batch, count)
    firsts = range(0, problem.batch, images)
    return [Round(first, min(images, problem.batch - first), n % RING) for n, first in enumerate(firsts)]


def pieces_in_order(problem: ConvProblem, rounds: Sequence[Round], most: int) -> list[Piece]:
    """All pieces, of at most so many elements: each round's input goes before the output of the round before it."""
    order = list(_cut("w", 0, elements(problem.w_shape), most))
    for number, this in enumerate(rounds):
        part = problem.with_batch(this.images)
        order += _cut("x", number, elements(part.x_shape), most)
        if number:
            order += _cut("y", number - 1, elements(problem.with_batch(rounds[number - 1].images).y_shape), most)
    if rounds:
        order += _cut("y", len(rounds) - 1, elements(problem.with_batch(rounds[-1].images).y_shape), most)
    return order


def elements(shape: Sequence[int]) -> int:
    """How many elements an array of that shape has, whatever their number."""
    product = 1
    for size in shape:
        product *= size
    return product


def _cut(array: str, number: int, size: int, most: int) -> Iterator[Piece]:
    for start in range(0, size, most):
        yield Piece(array, number, start, min(start + most, size))


class _Round:
    """What the threads tell each other about one round."""

    def __init__(self, this: Round) -> None:
        self.this = this
        #: Pieces that have not arrived, and that have not left.
        self.arriving = 0
        self.leaving = 0
        #: The mark of the kernel's end, until a piece has waited for it.
        self.end: Any = None
        self.computing = threading.Event()
        self.gone = threading.Event()


class _Stop(Exception):  # noqa: N818 - no error: another piece has failed, and its error is the call's
    pass


class Call:
    """One call: x (B, C, H, W) and w (M, C, K, K) through the device into y (B, M, OH, OW), all float32.

    The arrays are C-contiguous and y overlaps neither input. ``most`` is what a staging buffer holds, in
    elements; ``add``: the result is added to y. An error in one piece ends the call and is raised by ``run``.
    """

    def __init__(
        self, device: Device, problem: ConvProblem, rounds: Sequence[Round], most: int, add: bool = False
    ) -> None:
        self._device = device
        self._add = add
        self._pieces = pieces_in_order(problem, rounds, most)
        self._image = {"x": elements(problem.x_shape[1:]), "y": elements(problem.y_shape[1:]), "w": 0}
        self._lock = threading.Lock()
        self._failed = False
        self._rounds = [_Round(this) for this in rounds]
        for piece in self._pieces:
            if piece.array == "y":
                self._rounds[piece.round].leaving += 1
            else:
                self._rounds[piece.round].arriving += 1

    def run(self, x: np.ndarray, w: np.ndarray, y: np.ndarray, threads: int) -> None:
        """Work off all pieces on at most so many threads."""
        flat = {"x": x.reshape(-1), "w": w.reshape(-1), "y": y.reshape(-1)}

        def work(number: int) -> None:
            piece = self._pieces[number]
            first = self._rounds[piece.round].this.first * self._image[piece.array]
            memory = flat[piece.array][first + piece.start : first + piece.stop]
            if self._failed:
                return
            try:
                if piece.array == "y":
                    self._out(piece, memory)
                else:
                    self._in(piece, memory)
            except _Stop:
                return
            except BaseException:
                self._fail()
                raise

        share(work, len(self._pieces), threads)

    def _in(self, piece: Piece, memory: np.ndarray) -> None:
        state = self._rounds[piece.round]
        if piece.round >= RING:
            self._wait(self._rounds[piece.round - RING].gone)
        slot = self._device.take()
        try:
            np.copyto(slot.floats[: memory.size], memory)
            self._device.bring(slot, piece, state.this.ring)
        finally:
            self._device.give(slot)
        with self._lock:
            state.arriving -= 1
            last = state.arriving == 0
        if last:
            if piece.round:
                # Rounds compute in order: the weights have come with the first one.
                self._wait(self._rounds[piece.round - 1].computing)
            state.end = self._device.compute(state.this)
            state.computing.set()

    def _out(self, piece: Piece, memory: np.ndarray) -> None:
        state = self._rounds[piece.round]
        self._wait(state.computing)
        slot = self._device.take()
        try:
            self._device.fetch(slot, piece, state.this.ring, state.end)
            state.end = None
            with self._lock:
                state.leaving -= 1
                if state.leaving == 0:
                    state.gone.set()
            staged = slot.floats[: memory.size]
            if self._add:
                np.add(memory, staged, out=memory)
            else:
                np.copyto(memory, staged)
        finally:
            self._device.give(slot)

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            event.wait()
        if self._failed:
            raise _Stop

    def _fail(self) -> None:
        self._failed = True
        for state in self._rounds:
            state.computing.set()
            state.gone.set()
