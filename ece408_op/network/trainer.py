"""Training steps of a network on one GPU: each copies in, computes, and copies out.

The forward pass copies data, parameters and states to the GPU, where it keeps all values, and outputs and new states
back. The backward pass copies the outputs' gradients and the labels in, and the gradients out. So each parameter
crosses the bus once per step in each direction, through the pipeline's pinned buffers and several threads.

Gradients to parameters can stay on the GPU for an optimiser there, ``update``. MXNet's arrays for them then have a
signalling NaN in each element: results computed from them are NaN, and arithmetic in place changes their bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import DeviceError, ProblemError
from ece408_op.plugin import host_context
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import INPUT, Chunk, Pipeline, StagingBuffer, Transfer
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.memory import address
from ece408_op.runtime.recent import Recent

from . import _repeated, _training
from ._definition import Shape
from ._gpu import Chooser
from ._network import parse
from ._packing import packing_of
from ._repeated import Pass, Passes, Repeated
from ._training_gpu import GpuOperators
from ._updates import Adam, Sgd, Update
from .engine import Engine, copying_threads, engines

Result = TypeVar("Result")

#: The most threads that copy, and the fewest and most bytes of a transfer: other settings took longer on the 2018 fall
#: network (ece408-bench networks --training). A step copies all at once, so threads pass the interpreter's lock less
#: often than those of ``engine``.
_THREADS, _LEAST_TRANSFER, _MOST_TRANSFER = 12, 2 << 20, 4 << 20

#: The bits of the NaN in gradients that are on a GPU, and of any NaN that arithmetic makes of it.
_LEFT, _CHANGED = 0x7FA0E408, 0x7FE0E408

#: Numbers forward passes and updates in the order in which they access parameters.
moments = itertools.count(1)


class _Left(NamedTuple):
    """A parameter, as the forward pass read it, and its gradient, on a GPU."""

    gpu: Gpu
    operators: GpuOperators
    parameter: Any
    gradient: Any
    before: _training.Forward | None
    began: int


#: Where a parameter and its gradient are on the host.
Places = tuple[int, int]

#: Gradients on a GPU that wait for an update, of each of the last backward passes by the places of all its parameters:
#: networks whose update never comes do not keep the GPU's memory.
waiting: Recent[tuple[Places, ...], dict[Places, _Left]] = Recent(16)


class Trainer:
    """The training steps of one network; ``text`` is its graph, which ``engine`` infers."""

    def __init__(self, text: str, engine: Engine) -> None:
        self.network = _training.fused(parse(text))
        self._gpu = engine.gpu
        self._operators = GpuOperators(engine.chooser)
        #: The GPU's stream of all steps.
        self.stream = engine.gpu.stream
        #: Whoever puts work on the stream has this lock.
        self.lock = engine.gpu.lock
        #: The shapes of all values, by those of the data.
        self._shapes: Recent[tuple[Shape, ...], Mapping[int, Shape]] = Recent(64)
        self._repeated = None if _training.is_random(self.network) else Repeated()

    def forward(
        self,
        data: Sequence[np.ndarray],
        parameters: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        states: Mapping[int, np.ndarray],
        seed: int,
    ) -> _training.Forward:
        """Fill the outputs and the new states, and return what the backward pass needs, in GPU memory.

        The arrays are in the network's order, states by number, C-contiguous float32; outputs share no memory with the
        others. Raises DeviceError if the GPU fails or has no memory.
        """
        network, began = self.network, next(moments)

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], _training.Forward]:
            given = dict(zip((*network.data, *network.parameters), arrays))
            shapes = tuple(array.shape for array in data)
            if shapes not in self._shapes:
                self._shapes[shapes] = network.infer(dict(zip(network.names(network.data), shapes)))
            found = _training.forward(network, self._operators, given, self._shapes[shapes], seed)
            new = [found.states.get(number, given[number]) for number in states]
            return [*(found.values[value] for value in network.outputs), *new], found

        inputs, results, passes = [*data, *parameters], [*outputs, *states.values()], None
        if self._repeated:
            with self._gpu.device:
                passes = self._repeated.take(tuple(array.shape for array in data))
        try:
            found = _step(self._gpu, inputs, results, compute, passes, tuple(states))
        except BaseException:
            if self._repeated:
                self._repeated.clear()
            raise
        found = replace(found, began=began)
        return passes.holds(found) if passes else found

    def backward(
        self,
        before: _training.Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
        left: Mapping[int, tuple[int, np.ndarray]],
    ) -> None:
        """Fill the gradients to variables, ``targets`` by number, and leave others on the GPU for ``update``.

        labels: in the network's order. gradients: to the outputs, by position. left: by number, the parameter's address
        on the host and the gradient's array. A variable that no gradient reaches gets zeros. Raises DeviceError as
        ``forward``.
        """
        wanted = {**targets, **{number: array for number, (_, array) in left.items()}}

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], Mapping[int, Any]]:
            found = self._differentiated(before, arrays, gradients, wanted)
            return [found[number] for number in targets], found

        inputs, kind = [*labels, *gradients.values()], (tuple(gradients), tuple(targets), tuple(wanted))
        found = _step(self._gpu, inputs, list(targets.values()), compute, before.passes, kind)
        self.leave(before, found, left)

    def differentiate(
        self,
        before: _training.Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        wanted: Mapping[int, np.ndarray],
        summed: Sequence[int] = (),
        receives: bool = False,
    ) -> tuple[Mapping[int, Any], list[Any], list[Any]]:
        """Return the gradients to variables on the GPU, of the shapes of ``wanted``, and those of ``summed`` packed.

        With ``receives``, the last result is memory for the sums. Otherwise as ``backward``. All gradients are complete
        on return.
        """
        packing = packing_of(tuple(wanted[number].shape for number in summed))

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], tuple[Mapping[int, Any], list[Any], list[Any]]]:
            found, xp = self._differentiated(before, arrays, gradients, wanted), self._operators.arrays.xp
            packed = packing.packed([found[number] for number in summed], xp.zeros(packing.shapes[-1], np.float32))
            sums = [xp.empty(shape, np.float32) for shape in packing.shapes if receives]
            return [], (found, packed, sums)

        kind = (tuple(gradients), tuple(wanted), tuple(summed), receives, "differentiated")
        return _step(self._gpu, [*labels, *gradients.values()], [], compute, before.passes, kind)

    def copy_out(self, arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> None:
        """Wait for the GPU, and copy arrays from there."""
        _step(self._gpu, [], targets, lambda _: (list(arrays), None))

    def leave(
        self, before: _training.Forward, found: Mapping[int, Any], left: Mapping[int, tuple[int, np.ndarray]]
    ) -> None:
        """Leave gradients for ``update``, and mark their arrays: see ``backward``."""
        # A gradient may be in memory of repeated passes, which is theirs while ``before`` lives.
        ones, used = {}, before if before.passes else None
        for number, (at, array) in left.items():
            bits = array.reshape(-1).view(np.uint32)
            if not bits[0] == bits[-1] == _LEFT:
                bits.fill(_LEFT)
            arrays = before.values[number], found[number]
            ones[at, address(array)] = _Left(self._gpu, self._operators, *arrays, used, before.began)
        if ones:
            waiting.pop(tuple(ones), None)
            waiting[tuple(ones)] = ones

    def _differentiated(
        self,
        before: _training.Forward,
        arrays: Sequence[Any],
        gradients: Mapping[int, np.ndarray],
        wanted: Mapping[int, np.ndarray],
    ) -> dict[int, Any]:
        """Return the gradients, C-contiguous; ``arrays``: labels and gradients to the outputs, on the GPU."""
        network, xp = self.network, self._operators.arrays.xp
        given = dict(zip(network.labels, arrays))
        seeds = dict(zip(gradients, arrays[len(network.labels) :]))
        found = _training.backward(network, self._operators, before, given, seeds, wanted)
        return {
            number: xp.ascontiguousarray(found[number]) if number in found else xp.zeros(array.shape, np.float32)
            for number, array in wanted.items()
        }


_trainers: WeakKeyDictionary[Engine, Trainer] = WeakKeyDictionary()


def trainer_of(text: str, engine: Engine) -> Trainer:
    """Return the trainer of the network that ``engine`` infers; Gluon asks for it at each call."""
    if engine not in _trainers:
        _trainers[engine] = Trainer(text, engine)
    return _trainers[engine]


def update(
    rule: Sgd | Adam,
    parameters: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    states: Sequence[Callable[[Gpu], Sequence[Any]]],
    rates: Sequence[float],
    decays: Sequence[float],
    since: Sequence[int | None],
    once: Sequence[bool],
) -> None:
    """Update parameters on the GPUs that have their gradients, the others on the first GPU.

    parameters, gradients: views of MXNet's arrays. states: functions that return the state's arrays on a GPU. rates,
    decays: see ``_updates.Update``. since: the moment of each parameter's last change, or None. What may have changed
    since its forward pass began is copied to the GPU again. once: whether a gradient's array has been written only once
    since the last update; of others, all elements are checked.

    Raises ProblemError, before anything changes, if a gradient that was left on a GPU has been changed or was used
    before. Raises DeviceError if a GPU fails. Parameters of GPUs before it are then new, those of GPUs after it as they
    were. So are its own, and their states, if it had no room; otherwise both may have changed, even in part.
    """
    taken = [_taken((address(parameter), address(one))) for parameter, one in zip(parameters, gradients)]
    found = [one if _is_left(one, array, known) else None for one, array, known in zip(taken, gradients, once)]
    there = [
        (one.parameter if moment is not None and moment < one.began else None, one.gradient) if one else (None, None)
        for one, moment in zip(found, since)
    ]
    first = host_context.gpu(0)
    for gpu in dict.fromkeys(one.gpu if one else first for one in found):
        mine = [place for place, one in enumerate(found) if (one.gpu if one else first) is gpu]
        pairs = ((parameters[place], gradients[place], there[place]) for place in mine)
        given = [array for *arrays, copies in pairs for array, copy in zip(arrays, copies) if copy is None]
        operators = next((one.operators for one in found if one and one.gpu is gpu), None)
        if not operators:
            with gpu.device, gpu.stream:
                operators = GpuOperators(Chooser(dispatch.AUTO, "float32", 0, cuda.chip(0)))

        def compute(
            arrays: Sequence[Any], mine: Sequence[int] = mine, gpu: Gpu = gpu, operators: GpuOperators = operators
        ) -> tuple[list[Any], None]:
            rest, updates = iter(arrays), []
            for place in mine:
                parameter, gradient = (next(rest) if copy is None else copy for copy in there[place])
                updates.append(Update(parameter, gradient, states[place](gpu), rates[place], decays[place]))
            operators.update(rule, updates)
            return [one.parameter for one in updates], None

        _step(gpu, given, [parameters[place] for place in mine], compute)


def _taken(place: Places) -> _Left | None:
    """Take all gradients for a parameter and its gradient's array out of those that wait; return the newest."""
    found: _Left | None = None
    for key, left in list(waiting.items()):
        found = left.pop(place, None) or found
        if not left:
            waiting.pop(key, None)
    return found


def _is_left(one: _Left | None, gradient: np.ndarray, once: bool) -> bool:
    """Return whether a gradient is on a GPU in place of its array; raises ProblemError for an array partly changed."""
    bits = gradient.reshape(-1).view(np.uint32)
    if one and once and bits[0] == bits[-1] == _LEFT:
        return True
    left = bits == _LEFT if one else bits[:1] == _LEFT
    if one and left.all():
        return True
    if left.any() or (bits[: left.size] == _CHANGED).any():
        raise ProblemError(
            "gradients='gpu': expected gradients as the network's last backward pass left them, got others: it ran "
            "twice before this update or not at all, or something changed the arrays; pass gradients='cpu'"
        )
    return False


def _step(
    gpu: Gpu,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    compute: Callable[[Sequence[Any]], tuple[list[Any], Result]],
    passes: Passes | None = None,
    kind: Hashable = (),
) -> Result:
    """Copy the inputs to the GPU, compute arrays and a result there, and copy the arrays to the outputs.

    passes: has the pass of that kind, if a CUDA graph repeats it.
    """
    packings = [packing_of(tuple(array.shape for array in arrays)) for arrays in (inputs, outputs)]
    given = packings[0].packed_on_host(inputs)
    targets = [*packings[1].large(outputs), np.empty(packings[1].shapes[-1], np.float32)]

    def attempt(passes: Passes | None) -> Result:
        xp = cuda.cupy()
        with gpu.stream:
            outputs_room = None if passes else xp.empty(packings[1].shapes[-1], np.float32)

        def packed(arrays: Sequence[Any]) -> tuple[list[Any], Result]:
            # A repeated pass changes no state, so that it can be computed again where there is no room for its outputs.
            room = xp.empty(packings[1].shapes[-1], np.float32) if passes else outputs_room
            found, result = compute(packings[0].unpacked(arrays))
            return packings[1].packed(found, room), result

        try:
            device = _Device(gpu, given, packed, passes.of(kind, packings[0].shapes) if passes else None)
            device.run(given, targets)
            # What is free then may be the next step's, whose copies run on other streams.
            cuda.wait("training", gpu.stream)
        except BaseException:
            gpu.wait()
            raise
        for target, found in zip(outputs, packings[1].unpacked(targets)):
            if found is not target:
                target[...] = found
        return device.result

    with gpu.lock, gpu.device, cuda.reported("training"):
        no_room = cuda.cupy().cuda.memory.OutOfMemoryError
        with suppress(no_room):
            return attempt(passes)
        # Here, since the error's traceback has kept the arrays of the first attempt.
        _make_room(gpu, passes)
        try:
            return attempt(None)
        except no_room as error:
            raise DeviceError(
                f"the GPU's memory: expected room for a training step, got {error}; use a smaller batch"
            ) from error
    raise AssertionError("the last attempt returns or raises")


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

    def __init__(self, gpu: Gpu, inputs: Sequence[np.ndarray], compute: Callable[..., Any], one: Pass | None) -> None:
        self._gpu, self._compute, self._pass, self.staging = gpu, compute, one, gpu.staging
        with gpu.stream:
            self._inputs = one.inputs if one else [cuda.cupy().empty(array.shape, np.float32) for array in inputs]
        self._outputs: list[Any] = []
        self.result: Any = None

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Copy the inputs, compute, and copy the outputs."""
        copied = sum(array.nbytes for array in (*inputs, *outputs))
        threads = copying_threads(self._gpu, copied, _THREADS, _LEAST_TRANSFER)
        # An equal part for each thread, in as few transfers as may be.
        part = ceil_div(copied, threads)
        most = max(_LEAST_TRANSFER, ceil_div(part, ceil_div(part, _MOST_TRANSFER)))
        inputs, outputs = ([array.reshape(1, -1) for array in arrays] for arrays in (inputs, outputs))
        Pipeline(self, [Chunk(0, 1)], inputs, outputs, most // ITEM_BYTES).run(threads)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        arrays = self._inputs if transfer.role == INPUT else self._outputs
        self._gpu.copy(buffer, arrays[transfer.array].data.ptr, transfer, after)

    def compute(self, this: Chunk) -> Any:
        with self._gpu.device, self._gpu.stream:
            run = self._pass and self._pass.run(self._compute, self._gpu.stream)
            self._outputs, self.result = run or self._compute(self._inputs)
            return self._gpu.stream.record()


__all__ = ("Trainer", "moments", "trainer_of", "update", "waiting")
