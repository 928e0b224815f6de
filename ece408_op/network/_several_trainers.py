"""Training steps of a network on several GPUs of one host: their shares differ by at most one image.

Data parallel training: every GPU gets all parameters, each in a thread of its own. NCCL sums each parameter's gradients
on one GPU, which hands the sum to MXNet or to the update: all GPUs get about equally many bytes, since to copy new
parameters or gradients out takes long. BatchNorm normalizes each GPU's share by itself, and its running statistics
become the mean of the GPUs' new ones, as MXNet's Module averages them. When NCCL is called, all GPUs have completed
their backward passes: one that fails stops the step, and no other waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from ece408_op.runtime import nccl

from . import _training
from ._several_gpus import on_each, shares
from .engine import Engine
from .trainer import Addresses, Differentiated, Left, Trainer, leave

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
        pinned: Sequence[bool],
    ) -> list[_Part]:
        """Fill outputs and states as ``Trainer.forward``; the states change when all GPUs have computed.

        Raises ProblemError if the network does not compute each image by itself, but for BatchNorm, and DeviceError,
        with the GPU's number, if one fails.
        """
        parts = shares(self._engine, data, len(self._trainers))
        flat = np.empty((len(parts), sum(array.size for array in states.values())), np.float32)
        new = [_like(states, own) for own in flat]
        found: dict[int, _Part] = {}

        def work(part: int) -> None:
            gpu, mine = parts[part]
            images, results = [x[mine] for x in data], [y[mine] for y in outputs]
            own_seed = seed + (gpu << _SEED_SHIFT)
            passed = self._trainers[gpu].forward(images, parameters, results, new[part], own_seed, pinned)
            found[part] = _Part(gpu, mine, passed)

        on_each(work, [self._numbers[gpu] for gpu, _ in parts])
        mean = _like(states, sum(flat[1:], flat[0]) / np.float32(len(flat)))
        for number, array in states.items():
            array[...] = mean[number]
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
        parts = range(len(before))
        owned = _owned({number: array.nbytes for number, array in summed.items()}, len(parts))
        found: dict[int, Differentiated] = {}

        def differentiate(part: int) -> None:
            mine = before[part].images
            wanted = {**summed, **{number: array[mine] for number, array in divided.items()}}
            heads = {position: array[mine] for position, array in gradients.items()}
            own = {number: left[number] for number in owned[part] if number in left}
            given = [array[mine] for array in labels], heads, wanted, own, owned if len(parts) > 1 else (), part
            found[part] = trainers[part].differentiate(before[part].passed, *given)

        on_each(differentiate, numbers)
        if summed and len(parts) > 1:
            with ExitStack() as locks:
                # In one order, for networks whose lists of GPUs have others.
                for _, part in sorted((number, part) for part, number in enumerate(numbers)):
                    locks.enter_context(trainers[part].lock)
                sums = [(part, total) for part in parts for total in found[part].sums]
                sources = [found[part].packed for part in parts]
                nccl.group(tuple(numbers)).add(sources, sums, [trainer.stream for trainer in trainers])

        def copy_out(part: int) -> None:
            to = {number: array[before[part].images] for number, array in divided.items()}
            to.update((number, parameters[number]) for number in owned[part] if number in parameters)
            trainers[part].copy_out([found[part].gradients[number] for number in to], list(to.values()))

        if divided or parameters:
            on_each(copy_out, numbers)
        ones: dict[Addresses, Left] = {}
        for part, trainer in enumerate(trainers):
            ones.update(trainer.left(before[part].passed, found[part].gradients, found[part].marked))
        leave(ones)


def _owned(sizes: Mapping[int, int], parts: int) -> list[list[int]]:
    """Return the numbers of the arrays of each part: about equally many bytes."""
    owned, loads = [list[int]() for _ in range(parts)], [0] * parts
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        part = loads.index(min(loads))
        owned[part].append(number)
        loads[part] += sizes[number]
    return owned


def _like(arrays: Mapping[int, np.ndarray], flat: np.ndarray) -> dict[int, np.ndarray]:
    """Return views of a flat array that have the arrays' shapes."""
    found, start = {}, 0
    for number, array in arrays.items():
        found[number] = flat[start : start + array.size].reshape(array.shape)
        start += array.size
    return found


def _rows(array: np.ndarray, images: int) -> np.ndarray:
    """Return a view of an array whose first axis counts images."""
    return array if len(array) == images else array.reshape(images, -1)
