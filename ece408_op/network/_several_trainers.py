"""Training steps of a network on several GPUs of one host: their shares differ by at most one image.

Data parallel training: every GPU gets all parameters, each in a thread of its own, and NCCL sums their gradients on the
first GPU, which hands them to MXNet or to the update. BatchNorm normalizes each GPU's share by itself, and its running
statistics become the mean of the GPUs' new ones, as MXNet's Module averages them. When NCCL is called, all GPUs have
completed their backward passes: one that fails stops the step, and no other waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from ece408_op.runtime import nccl

from . import _training
from ._packing import packing_of
from ._several_gpus import on_each, shares
from .engine import Engine
from .trainer import Trainer

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

    def forward(
        self,
        data: Sequence[np.ndarray],
        parameters: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        states: Mapping[int, np.ndarray],
        seed: int,
    ) -> list[_Part]:
        """Fill outputs and states as ``Trainer.forward``; the states change when all GPUs have computed.

        Raises ProblemError if the network does not compute each image by itself, but for BatchNorm, and DeviceError,
        with the GPU's number, if one fails.
        """
        parts = shares(self._engine, data, len(self._trainers))
        new = [{number: np.empty_like(array) for number, array in states.items()} for _ in parts]
        found: dict[int, _Part] = {}

        def work(part: int) -> None:
            gpu, mine = parts[part]
            images, results = [x[mine] for x in data], [y[mine] for y in outputs]
            own_seed = seed + (gpu << _SEED_SHIFT)
            passed = self._trainers[gpu].forward(images, parameters, results, new[part], own_seed)
            found[part] = _Part(gpu, mine, passed)

        on_each(work, [self._numbers[gpu] for gpu, _ in parts])
        for number, array in states.items():
            array[...] = sum(one[number] for one in new) / np.float32(len(new))
        return [found[part] for part in range(len(parts))]

    def backward(
        self,
        before: Sequence[_Part],
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
        left: Mapping[int, tuple[int, np.ndarray]],
    ) -> None:
        """Fill and leave gradients as ``Trainer.backward``: those to parameters are the sums over all GPUs."""
        images, numbers = before[-1].images.stop, [self._numbers[one.gpu] for one in before]
        trainers = [self._trainers[one.gpu] for one in before]
        parameters = {number: targets[number] for number in targets if number in trainers[0].network.parameters}
        summed = {**parameters, **{number: array for number, (_, array) in left.items()}}
        # Gradients to data and labels, whose images each GPU has its share of.
        divided = {number: _rows(targets[number], images) for number in targets if number not in parameters}
        labels = [_rows(array, images) for array in labels]
        found: dict[int, tuple[Mapping[int, Any], list[Any], list[Any]]] = {}

        def differentiate(part: int) -> None:
            mine = before[part].images
            wanted = {**summed, **{number: array[mine] for number, array in divided.items()}}
            heads = {position: array[mine] for position, array in gradients.items()}
            given = [array[mine] for array in labels], heads, wanted, tuple(summed) * (len(before) > 1), part == 0
            found[part] = trainers[part].differentiate(before[part].passed, *given)

        on_each(differentiate, numbers)
        total = found[0][0]
        if summed and len(before) > 1:
            sources, sums = [found[part][1] for part in range(len(before))], found[0][2]
            with ExitStack() as locks:
                # In one order, for networks whose lists of GPUs have others.
                for _, part in sorted((number, part) for part, number in enumerate(numbers)):
                    locks.enter_context(trainers[part].lock)
                nccl.group(tuple(numbers)).add(sources, sums, [trainer.stream for trainer in trainers])
            packing = packing_of(tuple(array.shape for array in summed.values()))
            total = {**total, **dict(zip(summed, packing.unpacked(sums)))}

        def copy_out(part: int) -> None:
            to = {number: array[before[part].images] for number, array in divided.items()}
            mine = found[part][0]
            if part == 0:
                to, mine = {**to, **parameters}, total
            trainers[part].copy_out([mine[number] for number in to], list(to.values()))

        on_each(copy_out, numbers)
        trainers[0].leave(before[0].passed, total, left)


def _rows(array: np.ndarray, images: int) -> np.ndarray:
    """Return a view of an array whose first axis counts images."""
    return array if len(array) == images else array.reshape(images, -1)
