"""One copy in, computation and copy out on a GPU: a pass of a training step, or an update.

All of it is one chunk of the copy pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
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
from ._training import Forward
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
    behind: Callable[[], None] = lambda: None,
) -> Result:
    """Copy the inputs to the GPU, compute arrays and a result there, and copy the arrays to the outputs.

    passes: has the pass of that kind, if a CUDA graph repeats it. there: asked for each large input, returns a CuPy
    array on any GPU that is copied in its place, or None. packs: pack the arrays for the outputs; otherwise ``compute``
    does that, as ``packing_of``. meanwhile: functions to call while the GPU computes, again if there was no room.
    pinned: as for the pipeline. member: of the GPUs that compute at the same time, whose locks the caller has; if one
    has no room, all compute again. behind: queues something on the stream behind a repeated pass.
    """
    packings = [packing_of(tuple(array.shape for array in arrays)) for arrays in (inputs, outputs)]
    copies = list(map(there, packings[0].large(inputs)))
    sides = {INPUT: (packings[0], inputs), OUTPUT: (packings[1], outputs)}
    # The flat arrays of small ones are pinned memory.
    pinned = {
        role: [*side.large(pinned.get(role, [False] * len(arrays))), True] for role, (side, arrays) in sides.items()
    }

    def attempt(passes: Passes | None) -> Result:
        xp = cuda.cupy()
        flat = _memory(gpu, "inputs", packings[0].shapes[-1])
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
            one = passes.of(kind, packings[0].shapes) if passes else None
            device = _Device(gpu, given, packed, one, member, behind)
            given = [*device.begin(given[:-1], copies, pinned[INPUT]), flat]
            packings[0].copy_small(inputs, flat)
            # On return, the computation has ended too: memory that is free then may be the next step's, whose copies
            # run on other streams.
            device.run(given, targets, pinned[OUTPUT], meanwhile)
            if member:
                member.least()
        except BaseException:
            gpu.wait()
            raise
        packings[1].copy_small(outputs, targets[-1], out=True)
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


#: Pinned memory on the host, by GPU and use.
_memories: WeakKeyDictionary[Gpu, dict[str, np.ndarray]] = WeakKeyDictionary()


def _memory(gpu: Gpu, use: str, shape: Shape) -> np.ndarray:
    """Return a flat array on the host, which stays until the next call for that use; the caller has the GPU's lock."""
    known = _memories.setdefault(gpu, {})
    if use not in known or known[use].size < shape[0]:
        known[use] = _pinned(gpu, shape)
    return known[use][: shape[0]]


def _pinned(gpu: Gpu, shape: Shape) -> np.ndarray:
    return np.frombuffer(gpu.pinned(ITEM_BYTES * prod(shape)), np.float32, prod(shape)).reshape(shape)


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
        behind: Callable[[], None],
    ) -> None:
        self._gpu, self._compute, self._pass, self._member, self.staging = gpu, compute, one, member, gpu.staging
        self._behind = behind
        with gpu.stream:
            self._inputs = one.inputs if one else [cuda.cupy().empty(array.shape, np.float32) for array in inputs]
        self._outputs: list[Any] = []
        #: The events of copies from pinned arrays.
        self._begun: list[Any] = []
        #: Pinned arrays for outputs, None for others.
        self._pinned: list[Any] = []
        self.result: Any = None

    def begin(self, inputs: Sequence[np.ndarray], there: Sequence[Any], pinned: Sequence[bool]) -> list[np.ndarray]:
        """Queue the copies of inputs that are on a GPU or pinned; return the inputs, empty in place of these.

        Before threads copy, which makes CUDA's calls longer; and the link is busy while the caller packs the others.
        """
        left = list(inputs)
        with self._gpu.device, self._gpu.stream:
            for number, (array, target, copy, flag) in enumerate(zip(inputs, self._inputs, there, pinned)):
                if copy is not None:
                    target.data.copy_from_device_async(copy.data, copy.nbytes, self._gpu.stream)
                elif flag:
                    self._begun.append(self._gpu.copy_pinned(array, target.data.ptr))
                if copy is not None or flag:
                    left[number] = array[:0]
        return left

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        pinned: Sequence[bool],
        meanwhile: Sequence[Callable[[], None]],
    ) -> None:
        """Copy the other inputs, compute, and copy the outputs; the last input and output are pinned.

        pinned: whether each output is. Copies to these are queued at once, on one stream, as no thread can be as fast.
        """
        flags = [*(not array.size for array in inputs[:-1]), True]
        self._pinned = [array if flag else None for array, flag in zip(outputs, pinned)]
        outputs = [array[:0] if flag else array for array, flag in zip(outputs, pinned)]
        copied = sum(array.nbytes for array in (*unpinned(inputs, flags), *outputs))
        threads = copying_threads(self._gpu, copied, _THREADS, _LEAST_TRANSFER)
        # An equal part for each thread, in as few transfers as may be.
        part = ceil_div(copied, threads)
        most = max(_LEAST_TRANSFER, ceil_div(part, ceil_div(max(1, part), _MOST_TRANSFER))) // ITEM_BYTES
        inputs, outputs = ([array.reshape(1, array.size) for array in arrays] for arrays in (inputs, outputs))
        Pipeline(self, [Chunk(0, 1)], inputs, outputs, most, checks=meanwhile, pinned={INPUT: flags}).run(threads)
        cuda.wait("training", self._gpu.pinned_stream)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> Any:
        arrays = self._inputs if transfer.role == INPUT else self._outputs
        return self._gpu.copy(buffer, arrays[transfer.array].data.ptr, transfer, after)

    def compute(self, this: Chunk, copied: Sequence[Any]) -> Any:
        with self._gpu.device, self._gpu.stream:
            self._gpu.behind([*self._begun, *copied])
            stage = self._pass.stage if self._pass else 0
            if self._member:
                # Either all repeat the pass or none does.
                stage = self._member.least(stage)
            run = self._pass.run(self._compute, self._gpu.stream, stage, self._member) if self._pass and stage else None
            self._outputs, self.result = run or self._compute(self._inputs)
            end = self._gpu.stream.record()
            for source, target in zip(self._outputs, self._pinned):
                if target is not None:
                    self._gpu.copy_pinned(target, source.data.ptr, end, out=True)
            if run:
                self._behind()
            return end


class Ahead(NamedTuple):
    """A backward pass that is queued behind its forward pass: its kind, the labels, and what it computes."""

    kind: Hashable
    labels: Sequence[np.ndarray]
    found: tuple[list[Any], Any]

    def is_for(self, kind: Hashable, labels: Sequence[np.ndarray]) -> bool:
        """Return whether it computes what a backward pass of that kind, with these labels, does."""
        return self.kind == kind and all(map(np.array_equal, self.labels, labels))


def queue_backward(
    gpu: Gpu, passes: Passes, labels: Callable[[], Sequence[np.ndarray]], member: Member | None
) -> Ahead | None:
    """Queue the backward pass that the last step has repeated, for these labels, behind a forward pass.

    Before MXNet asks for it: the GPU need not wait for MXNet and Python between the passes. Returns None if the last
    step had no backward pass that depends on labels alone. The GPU and its stream are the current ones.
    """
    kind, passes.backward, stage = passes.backward, None, 0
    if kind is not None:
        given = [array.copy() for array in labels()]
        packing = packing_of(tuple(array.shape for array in given))
        one = passes.of(kind, packing.shapes)
        stage = one.stage
    if (member.least(stage) if member else stage) < 2:
        return None
    if not one.pinned:
        one.pinned = [_pinned(gpu, shape) for shape in packing.shapes]
    for array, label in zip(one.pinned, packing.large(given)):
        array[...] = label
    packing.copy_small(given, one.pinned[-1])
    for target, array in zip(one.inputs, one.pinned):
        target.set(array)
    return Ahead(kind, given, one.again(gpu.stream, member))


def backward_step(
    gpu: Gpu,
    before: Forward,
    labels: Sequence[np.ndarray],
    gradients: Mapping[int, np.ndarray],
    outputs: Sequence[np.ndarray],
    compute: Callable[[Sequence[Any]], tuple[list[Any], Result]],
    kind: Hashable,
    meanwhile: Sequence[Callable[[], None]],
    member: Member | None = None,
) -> Result:
    """Do the backward pass of that kind as ``step``, or wait for it if it is queued, and return its result."""
    ahead = before.ahead
    is_queued = int(bool(ahead and not gradients and ahead.is_for(kind, labels)))
    if member.least(is_queued) if member else is_queued:
        options: dict[str, Any] = {"packs": False, "meanwhile": meanwhile, "member": member}
        found: Result = step(gpu, [], outputs, lambda _: ahead.found, **options)
    else:
        if ahead:
            # Both would use the same memory at the same time.
            cuda.wait("training", gpu.stream)
        given = [*labels, *gradients.values()]
        found = step(gpu, given, outputs, compute, before.passes, kind, meanwhile=meanwhile, member=member)
    if before.passes:
        before.passes.backward = None if gradients else kind
    return found


__all__ = ("Ahead", "backward_step", "queue_backward", "step")
