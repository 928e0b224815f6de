"""One copy in, computation and copy out on a GPU: a pass of a training step, or an update.

All of it is one chunk of the copy pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import INPUT, OUTPUT, Chunk, Pipeline, StagingBuffer, Transfer, unpinned
from ece408_op.runtime.launch import ceil_div

from . import _repeated
from ._definition import Shape
from ._meeting import Member, StoppedError
from ._packing import packing_of
from ._repeated import Pass, Passes
from .engine import copying_threads, engines

Result = TypeVar("Result")

#: The most threads that copy, and the fewest and most bytes of a transfer: other settings took longer on the 2018 fall
#: network (ece408-bench networks --training). A step copies all at once, so threads pass the interpreter's lock less
#: often than those of ``engine``.
_THREADS, _LEAST_TRANSFER, _MOST_TRANSFER = 12, 2 << 20, 4 << 20


def step(
    gpu: Gpu,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    compute: Callable[[Sequence[Any]], tuple[list[Any], Result]],
    passes: Passes | None = None,
    kind: Hashable = (),
    there: Callable[[np.ndarray], Any] = lambda _: None,
    packs: bool = True,
    meanwhile: Sequence[Callable[[], None]] = (),
    pinned: Mapping[str, Sequence[bool]] = MappingProxyType({}),
    member: Member | None = None,
) -> Result:
    """Copy the inputs to the GPU, compute arrays and a result there, and copy the arrays to the outputs.

    passes: has the pass of that kind, if a CUDA graph repeats it. there: asked for each large input, returns a CuPy
    array on any GPU that is copied in its place, or None. packs: pack the arrays for the outputs; otherwise ``compute``
    does that, as ``packing_of``. meanwhile: functions to call while the GPU computes, again if there was no room.
    pinned: as for the pipeline. member: of the GPUs that compute at the same time, whose locks the caller has; if one
    has no room, all compute again.
    """
    packings = [packing_of(tuple(array.shape for array in arrays)) for arrays in (inputs, outputs)]
    copies = [*map(there, packings[0].large(inputs)), None]
    sides = dict(zip((INPUT, OUTPUT), packings))
    pinned = {role: [*sides[role].large(flags), False] for role, flags in pinned.items()}

    def attempt(passes: Passes | None) -> Result:
        xp = cuda.cupy()
        flat = _memory(gpu, "inputs", packings[0].shapes[-1])
        packings[0].pack_on_host(inputs, flat)
        given = [*packings[0].large(inputs), flat]
        targets = [*packings[1].large(outputs), _memory(gpu, "outputs", packings[1].shapes[-1])]
        with gpu.stream:
            outputs_room = None if passes or not packs else xp.empty(packings[1].shapes[-1], np.float32)

        def packed(arrays: Sequence[Any]) -> tuple[list[Any], Result]:
            # A repeated pass changes no state, so that it can be computed again where there is no room for its outputs.
            room = xp.empty(packings[1].shapes[-1], np.float32) if passes and packs else outputs_room
            found, result = compute(packings[0].unpacked(arrays))
            return packings[1].packed(found, room) if packs else found, result

        try:
            device = _Device(gpu, given, packed, passes.of(kind, packings[0].shapes) if passes else None, member)
            device.run(given, targets, copies, pinned, meanwhile)
            # What is free then may be the next step's, whose copies run on other streams.
            cuda.wait("training", gpu.stream)
            if member:
                member.least()
        except BaseException:
            gpu.wait()
            raise
        for target, found in zip(outputs, packings[1].unpacked(targets)):
            if found is not target:
                target[...] = found
        return device.result

    with nullcontext() if member else gpu.lock, gpu.device, cuda.reported("training"):
        no_room = cuda.cupy().cuda.memory.OutOfMemoryError
        try:
            return attempt(passes)
        except (no_room, StoppedError):
            if member:
                member.stop()
        # Here, since the error's traceback has kept the arrays of the first attempt.
        _make_room(gpu, passes)
        if member:
            member.begin_again()
        try:
            return attempt(None)
        except no_room as error:
            raise DeviceError(
                f"the GPU's memory: expected room for a training step, got {error}; use a smaller batch"
            ) from error


#: Memory on the host, by GPU and use: fresh memory takes longer to fill than to copy.
_memories: WeakKeyDictionary[Gpu, dict[str, np.ndarray]] = WeakKeyDictionary()


def _memory(gpu: Gpu, use: str, shape: Shape) -> np.ndarray:
    """Return a flat array on the host, which stays until the next call for that use; the caller has the GPU's lock."""
    known = _memories.setdefault(gpu, {})
    if use not in known or known[use].size < shape[0]:
        known[use] = np.empty(shape, np.float32)
    return known[use][: shape[0]]


def _make_room(gpu: Gpu, passes: Passes | None) -> None:
    """Free what a GPU, the current one, has for steps and inference; the caller has its lock."""
    if passes:
        passes.refused = True
        passes.pool.free_all_blocks()
    _repeated.clear()
    # Other networks on this GPU wait for its lock.
    for other in engines():
        if other.gpu is gpu:
            other.batches.clear()
    cuda.cupy().get_default_memory_pool().free_all_blocks()


class _Device:
    """The GPU as the copy pipeline asks for it, for one step: all of it is one chunk."""

    def __init__(
        self,
        gpu: Gpu,
        inputs: Sequence[np.ndarray],
        compute: Callable[..., Any],
        one: Pass | None,
        member: Member | None,
    ) -> None:
        self._gpu, self._compute, self._pass, self._member, self.staging = gpu, compute, one, member, gpu.staging
        with gpu.stream:
            self._inputs = one.inputs if one else [cuda.cupy().empty(array.shape, np.float32) for array in inputs]
        self._outputs: list[Any] = []
        self.result: Any = None

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        there: Sequence[Any],
        pinned: Mapping[str, Sequence[bool]],
        meanwhile: Sequence[Callable[[], None]],
    ) -> None:
        """Copy the inputs, or what of them is on a GPU, compute, and copy the outputs."""
        # Before threads copy, which makes CUDA's calls longer.
        with self._gpu.device, self._gpu.stream:
            for target, copy in zip(self._inputs, there):
                if copy is not None:
                    target.data.copy_from_device_async(copy.data, copy.nbytes, self._gpu.stream)
        inputs = [array if copy is None else array[:0] for array, copy in zip(inputs, there)]
        staged = unpinned(inputs, pinned.get(INPUT, ())) + unpinned(outputs, pinned.get(OUTPUT, ()))
        copied = sum(array.nbytes for array in staged)
        threads = copying_threads(self._gpu, copied, _THREADS, _LEAST_TRANSFER)
        # An equal part for each thread, in as few transfers as may be.
        part = ceil_div(copied, threads)
        most = max(_LEAST_TRANSFER, ceil_div(part, ceil_div(part, _MOST_TRANSFER))) // ITEM_BYTES
        inputs, outputs = ([array.reshape(1, array.size) for array in arrays] for arrays in (inputs, outputs))
        Pipeline(self, [Chunk(0, 1)], inputs, outputs, most, checks=meanwhile, pinned=pinned).run(threads)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> Any:
        arrays = self._inputs if transfer.role == INPUT else self._outputs
        return self._gpu.copy(buffer, arrays[transfer.array].data.ptr, transfer, after)

    def compute(self, this: Chunk, copied: Sequence[Any]) -> Any:
        with self._gpu.device, self._gpu.stream:
            self._gpu.behind(copied)
            stage = self._pass.stage if self._pass else 0
            if self._member:
                # Either all repeat the pass or none does.
                stage = self._member.least(stage)
            run = self._pass.run(self._compute, self._gpu.stream, stage, self._member) if self._pass and stage else None
            self._outputs, self.result = run or self._compute(self._inputs)
            return self._gpu.stream.record()


__all__ = ("step",)
