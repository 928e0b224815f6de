"""The one pipeline of copies between host and device: they overlap with each other and with computing.

    chunk     the images of one launch: copied in, computed, copied out. Each chunk uses the device buffers of its
              pipeline stage; ``STAGES`` chunks, or as many as the caller asks for, are on the device at a time
    transfer  the elements that one copy moves, through a pinned staging buffer: the GPU's copy engine cannot reach
              pageable memory at full speed

Several threads work through the transfers in order: the input of chunk n, then the output of chunk n - 1. A transfer
waits only for earlier ones, so the pipeline cannot deadlock, whatever the number of threads. Each thread waits for its
own copies, and CUDA calls are few on purpose: each one releases the interpreter's lock, and with many threads it takes
long to get it back. Nothing here knows CUDA; the pipeline calls the device through ``Device``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from .launch import ceil_div
from .thread_pool import parallel_for

#: Chunks on the device at a time: one is copied in, one computed, one copied out.
STAGES = 3

#: The role of an array in the pipeline. A constant is copied in once, before the first chunk.
CONSTANT, INPUT, OUTPUT = "constant", "input", "output"


@dataclass(frozen=True)
class Chunk:
    """Images ``first`` to ``first + images`` of a batch. The chunk before it has the first ``overlap`` of them."""

    first: int
    images: int
    stage: int = 0
    overlap: int = 0


def chunks_of(batch: int, images: int, stages: int = STAGES) -> list[Chunk]:
    """The batch in chunks of exactly ``images`` images, at most ``batch``: the last one may overlap the one before.

    All chunks have one size, so that one plan serves all of them. stages: at least 2; a chunk is copied in before the
    one before it is copied out.
    """
    firsts = [min(start, batch - images) for start in range(0, batch, max(1, images))]
    return [Chunk(first, images, n % stages, n * images - first) for n, first in enumerate(firsts)]


def images_per_chunk(batch: int, image_bytes: int, chunk_bytes: int) -> int:
    """The images of one of equally large chunks: their bytes are at most ``chunk_bytes``, unless one image has more."""
    return ceil_div(batch, ceil_div(batch, max(1, chunk_bytes // image_bytes))) if batch else 0


@dataclass
class StagingBuffer:
    """A pinned staging buffer: its elements on the host, and the CUDA stream of its copies."""

    floats: np.ndarray
    stream: Any = None

    def __post_init__(self) -> None:
        self.address: int = self.floats.ctypes.data


@dataclass(frozen=True, eq=False)
class Transfer:
    """What one copy moves: ``host``, flat float32, and on the device as many elements of a buffer from ``start`` on.

    The buffer is that of the constant, input or output number ``array``, in the set of buffers ``stage``.
    """

    role: str
    array: int
    stage: int
    start: int
    host: np.ndarray


class Device(Protocol):
    """The device, which several threads use; ``staging`` has the buffers that no thread uses."""

    staging: SimpleQueue[StagingBuffer]

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        """Copy from the buffer to the device, or an output to the buffer, once the event ``after``, if any, is reached.

        Returns when the copy is done.
        """

    def compute(self, chunk: Chunk) -> Any:
        """Queue the chunk's computation behind earlier ones; return the event of its end."""


class _State:
    """How far the threads are with one chunk: its transfers that are not yet copied in, and not yet copied out."""

    def __init__(self) -> None:
        self.to_copy_in = self.to_copy_out = 0
        #: The event of the computation's end, until a copy has waited for it.
        self.end: Any = None
        self.launched, self.copied_out = threading.Event(), threading.Event()


class _StopError(Exception):
    """Another transfer has failed, and its error ends the call."""


class Pipeline:
    """One call: inputs through the device into outputs, whose first axis counts images.

    All arrays are C-contiguous float32; outputs share no memory with the others. staging_elements: the elements of a
    staging buffer. constants: arrays that every chunk reads. checks: functions for the threads to call while the device
    computes the last chunk. An error in any transfer ends the call, and ``run`` raises it.
    """

    def __init__(
        self,
        device: Device,
        chunks: Sequence[Chunk],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        staging_elements: int,
        constants: Sequence[np.ndarray] = (),
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._device, self._chunks, self._staging_elements = device, chunks, staging_elements
        self._stages = 1 + max((chunk.stage for chunk in chunks), default=0)
        self._states = [_State() for _ in chunks]
        self._lock = threading.Lock()
        self._failed = False
        self._work: list[Callable[[], None]] = []
        for number, chunk in enumerate(chunks):
            given = [array[chunk.first : chunk.first + chunk.images] for array in inputs]
            transfers = [*self._transfers(CONSTANT, () if number else constants, chunk.stage)]
            transfers += self._transfers(INPUT, given, chunk.stage)
            self._states[number].to_copy_in = len(transfers)
            self._work += [partial(self._copy_in, number, transfer) for transfer in transfers]
            self._work += [] if transfers else [partial(self._compute, number)]
            if number:
                self._work += self._copies_out(number - 1, outputs)
        self._work += checks
        if chunks:
            self._work += self._copies_out(len(chunks) - 1, outputs)

    def run(self, threads: int) -> None:
        """Do all copies, computations and checks on at most ``threads`` threads."""

        def work(number: int) -> None:
            if self._failed:
                return
            try:
                self._work[number]()
            except _StopError:
                return
            except BaseException:
                self._failed = True
                for state in self._states:
                    state.launched.set()
                    state.copied_out.set()
                raise

        # Threads that wake up while the caller launches kernels would take the interpreter's lock at each CUDA call.
        alone = int(bool(self._states) and not self._states[0].to_copy_in)
        try:
            for number in range(alone):
                work(number)
            parallel_for(lambda number: work(alone + number), len(self._work) - alone, threads)
        finally:
            # It refers to the pipeline: a cycle would keep the device's memory until the next garbage collection.
            self._work.clear()

    def _transfers(self, role: str, arrays: Sequence[np.ndarray], stage: int, skipped: int = 0) -> Iterator[Transfer]:
        """The arrays without their first ``skipped`` images, in transfers that fit a staging buffer."""
        most = self._staging_elements
        for number, array in enumerate(arrays):
            flat = array.reshape(-1)
            for start in range(skipped * (array.size // max(1, len(array))), array.size, most):
                yield Transfer(role, number, stage, start, flat[start : start + most])

    def _copies_out(self, number: int, outputs: Sequence[np.ndarray]) -> list[Callable[[], None]]:
        chunk = self._chunks[number]
        parts = [array[chunk.first : chunk.first + chunk.images] for array in outputs]
        transfers = list(self._transfers(OUTPUT, parts, chunk.stage, chunk.overlap))
        self._states[number].to_copy_out = len(transfers)
        if not transfers:
            self._states[number].copied_out.set()
        return [partial(self._copy_out, number, transfer) for transfer in transfers]

    def _before(self, number: int) -> _State | None:
        """Return the state of the chunk that used this chunk's device buffers before it."""
        return self._states[number - self._stages] if number >= self._stages else None

    def _copy_in(self, number: int, transfer: Transfer) -> None:
        before = self._before(number)
        if before is not None:
            self._wait(before.launched)
        buffer = self._device.staging.get()
        try:
            np.copyto(buffer.floats[: transfer.host.size], transfer.host)
            self._device.copy(buffer, transfer, before.end if before else None)
        finally:
            self._device.staging.put(buffer)
        state = self._states[number]
        with self._lock:
            state.to_copy_in -= 1
            last = state.to_copy_in == 0
        if last:
            self._compute(number)

    def _compute(self, number: int) -> None:
        if number:
            self._wait(self._states[number - 1].launched)  # chunks compute in order, and constants come first
        before = self._before(number)
        if before is not None:
            self._wait(before.copied_out)
        self._states[number].end = self._device.compute(self._chunks[number])
        self._states[number].launched.set()

    def _copy_out(self, number: int, transfer: Transfer) -> None:
        state = self._states[number]
        self._wait(state.launched)
        buffer = self._device.staging.get()
        try:
            self._device.copy(buffer, transfer, state.end)
            state.end = None
            with self._lock:
                state.to_copy_out -= 1
                if state.to_copy_out == 0:
                    state.copied_out.set()
            np.copyto(transfer.host, buffer.floats[: transfer.host.size])
        finally:
            self._device.staging.put(buffer)

    def _wait(self, event: threading.Event) -> None:
        if not event.is_set():
            event.wait()
        if self._failed:
            raise _StopError
