"""Training steps of a network on several GPUs of one host: their shares differ by at most one image.

Data parallel training: every GPU gets all parameters, each in a thread of its own. NCCL sums each parameter's gradients
on one GPU, which hands the sum to MXNet or to the update: all GPUs get about equally many bytes, since to copy new
parameters or gradients out takes long. BatchNorm exchanges its sums within the passes, and normalizes with the mean and
variance of the whole batch, so that results do not depend on the number of GPUs. The threads of a pass wait for each
other, see ``_meeting``: if a GPU fails, all stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

from ece408_op.runtime import nccl

from . import _training
from ._layers import BatchNorm
from ._meeting import Meeting, Member, StoppedError
from ._several_gpus import on_each, shares
from .engine import Engine
from .trainer import Addresses, Deferred, Differentiated, Trainer, defer

#: The seeds of the GPUs' random numbers differ in these bits, which the seed of a step leaves free.
_SEED_SHIFT = 56


class _Part(NamedTuple):
    """One GPU's share of a forward pass: its place among the GPUs, its images, and the pass."""

    gpu: int
    images: slice
    passed: _training.Forward


class SeveralTrainers:
    """Trainers of one network on different GPUs, in the order in which they share the images; ``engine`` infers it."""

    def __init__(self, engine: Engine, trainers: Sequence[Trainer], numbers: Sequence[int]) -> None:
        self._engine, self._trainers, self._numbers = engine, trainers, numbers
        operators = [node.operator for _, node in trainers[0].network.operators]
        self._exchanges = any(isinstance(one, BatchNorm) and not one.use_global_stats for one in operators)

    def forward(
        self,
        data: Sequence[np.ndarray],
        parameters: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        states: Mapping[int, np.ndarray],
        seed: int,
        pinned: Sequence[bool],
        labels: Callable[[], Sequence[np.ndarray]],
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> list[_Part]:
        """Fill outputs and states as ``Trainer.forward``; the states change when all GPUs have computed.

        Raises ProblemError if the network does not compute each image by itself, but for BatchNorm, and DeviceError,
        with the GPU's number, if one fails, or if there is no NCCL.
        """
        parts = shares(self._engine, data, len(self._trainers))
        new = {number: np.empty_like(array) for number, array in states.items()}
        found: dict[int, _Part] = {}

        def work(part: int, member: Member | None) -> None:
            gpu, mine = parts[part]
            images, results = [x[mine] for x in data], [y[mine] for y in outputs]
            # All GPUs compute the same new states.
            own_states, own_seed = {} if part else new, seed + (gpu << _SEED_SHIFT)
            own_labels = lambda: [_rows(array, parts[-1][1].stop)[mine] for array in labels()]  # noqa: E731
            given = images, parameters, results, own_states, own_seed, pinned, own_labels
            passed = self._trainers[gpu].forward(*given, () if part else meanwhile, member)
            found[part] = _Part(gpu, mine, passed)

        with self._locked([gpu for gpu, _ in parts]):
            self._compute(work, parts)
        for number, array in states.items():
            array[...] = new[number]
        return [found[part] for part in range(len(parts))]

    def backward(
        self,
        before: Sequence[_Part],
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
        deferred: Mapping[int, tuple[int, np.ndarray]],
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Fill and defer gradients as ``Trainer.backward``: those to parameters are the sums over all GPUs."""
        images, numbers = before[-1].images.stop, [self._numbers[one.gpu] for one in before]
        trainers = [self._trainers[one.gpu] for one in before]
        parameters = {number: targets[number] for number in targets if number in trainers[0].network.parameters}
        summed = {**parameters, **{number: array for number, (_, array) in deferred.items()}}
        # Gradients to data and labels, whose images each GPU has its share of.
        divided = {number: _rows(targets[number], images) for number in targets if number not in parameters}
        labels = [_rows(array, images) for array in labels]
        parts = range(len(before))
        owned = _owned({number: array.nbytes for number, array in summed.items()}, len(parts))
        found: dict[int, Differentiated] = {}

        def differentiate(part: int, member: Member | None) -> None:
            mine = before[part].images
            wanted = {**summed, **{number: array[mine] for number, array in divided.items()}}
            heads = {position: array[mine] for position, array in gradients.items()}
            own = {number: deferred[number] for number in owned[part] if number in deferred}
            given = [array[mine] for array in labels], heads, wanted, own, owned if member else ()
            options = () if part else meanwhile, member
            found[part] = trainers[part].differentiate(before[part].passed, *given, *options)

        with self._locked([one.gpu for one in before]):
            self._compute(differentiate, [(one.gpu, one.images) for one in before])
            if summed and len(parts) > 1:
                sums = [(part, total) for part in parts for total in found[part].sums]
                sources = [found[part].packed for part in parts]
                nccl.group(tuple(numbers)).add(sources, sums, [trainer.gpu.stream for trainer in trainers])

        def copy_out(part: int) -> None:
            to = {number: array[before[part].images] for number, array in divided.items()}
            to.update((number, parameters[number]) for number in owned[part] if number in parameters)
            trainers[part].copy_out([found[part].gradients[number] for number in to], list(to.values()))

        if divided or parameters:
            on_each(copy_out, numbers)
        ones: dict[Addresses, Deferred] = {}
        for part, trainer in enumerate(trainers):
            ones.update(trainer.deferred(before[part].passed, found[part].gradients, found[part].marked))
        defer(ones)

    @contextmanager
    def _locked(self, gpus: Sequence[int]) -> Iterator[None]:
        """Keep other calls from the GPUs, if there are several."""
        with ExitStack() as locks:
            # In one order, for networks whose lists of GPUs have others.
            for _, gpu in sorted((self._numbers[gpu], gpu) for gpu in gpus if len(gpus) > 1):
                locks.enter_context(self._trainers[gpu].gpu.lock)
            yield

    def _compute(self, work: Callable[[int, Member | None], None], parts: Sequence[tuple[int, slice]]) -> None:
        """Run work(0, ...), work(1, ...), ..., in a thread for each part, as members of a meeting if they are several.

        The caller has the GPUs' locks.
        """
        numbers = [self._numbers[gpu] for gpu, _ in parts]
        meeting: Meeting | None = None
        if len(parts) > 1:
            gpus, images = [self._trainers[gpu].gpu for gpu, _ in parts], [mine.stop - mine.start for _, mine in parts]
            meeting = Meeting(gpus, images, nccl.group(tuple(numbers)) if self._exchanges else None)

        def attend(part: int) -> None:
            try:
                work(part, Member(meeting, part) if meeting else None)
            except StoppedError:
                # What has stopped it is the error of another part.
                pass
            except BaseException:
                if meeting:
                    meeting.fail()
                raise

        on_each(attend, numbers)


def _owned(sizes: Mapping[int, int], parts: int) -> list[list[int]]:
    """Return the numbers of the arrays of each part: about equally many bytes."""
    owned, loads = [list[int]() for _ in range(parts)], [0] * parts
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        part = loads.index(min(loads))
        owned[part].append(number)
        loads[part] += sizes[number]
    return owned


def _rows(array: np.ndarray, images: int) -> np.ndarray:
    """Return a view of an array whose first axis counts images."""
    return array if len(array) == images else array.reshape(images, -1)
