"""Training steps of a network on one GPU: each copies in, computes, and copies out.

The forward pass copies data, parameters and states to the GPU, where it keeps all values, and outputs and new states
back. The backward pass copies the outputs' gradients and the labels in, and the gradients out. So each parameter
crosses the bus once per step in each direction, through the pipeline's pinned buffers and several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import INPUT, Chunk, Pipeline, StagingBuffer, Transfer

from . import _training
from ._network import parse
from ._training_gpu import GpuOperators
from .engine import LEAST_TRANSFER, Engine, copying_threads, engines

Result = TypeVar("Result")


class Trainer:
    """The training steps of one network; ``text`` is its graph, which ``engine`` infers."""

    def __init__(self, text: str, engine: Engine) -> None:
        self.network = parse(text)
        self._gpu = engine.gpu
        self._operators = GpuOperators(engine.chooser)

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
        network = self.network

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], _training.Forward]:
            given = dict(zip((*network.data, *network.parameters), arrays))
            found = _training.forward(network, self._operators, given, seed)
            new = [found.states.get(number, given[number]) for number in states]
            return [*(found.values[value] for value in network.outputs), *new], found

        return self._step([*data, *parameters], [*outputs, *states.values()], compute)

    def backward(
        self,
        before: _training.Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
    ) -> None:
        """Fill the gradients to variables, ``targets`` by number.

        labels: in the network's order. gradients: to the outputs, by position. A variable that no gradient reaches gets
        zeros. Raises DeviceError as ``forward``.
        """
        network = self.network

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], None]:
            xp = self._operators.arrays.xp
            given = dict(zip(network.labels, arrays))
            seeds = dict(zip(gradients, arrays[len(labels) :]))
            found = _training.backward(network, self._operators, before, given, seeds, targets)
            filled = (
                found[number] if number in found else xp.zeros(target.shape, np.float32)
                for number, target in targets.items()
            )
            return [xp.ascontiguousarray(array) for array in filled], None

        self._step([*labels, *gradients.values()], list(targets.values()), compute)

    def _step(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        compute: Callable[[Sequence[Any]], tuple[list[Any], Result]],
    ) -> Result:
        """Copy the inputs to the GPU, compute arrays and a result there, and copy the arrays to the outputs."""
        gpu, pool = self._gpu, cuda.cupy().get_default_memory_pool()
        if not any(array.size for array in inputs):
            # The pipeline computes when the last input has come, so there has to be one.
            inputs = [*inputs, np.zeros(1, np.float32)]
        with gpu.lock, gpu.device, cuda.reported("training"):
            for last_try in (False, True):
                device = _Device(gpu, inputs, compute)
                try:
                    device.run(inputs, outputs)
                    return device.result
                except cuda.cupy().cuda.memory.OutOfMemoryError as error:
                    gpu.wait()
                    # Other networks on this GPU wait for its lock: their memory can be freed.
                    for other in engines():
                        if other.gpu is gpu:
                            other.batches.clear()
                    pool.free_all_blocks()
                    if last_try:
                        raise DeviceError(
                            f"the GPU's memory: expected room for a training step on {len(inputs[0])} images, got "
                            f"{error}; use a smaller batch"
                        ) from error
                except BaseException:
                    gpu.wait()
                    raise
        raise AssertionError("the second try returns or raises")


class _Device:
    """The GPU as the copy pipeline asks for it, for one step: all of it is one chunk."""

    def __init__(self, gpu: Gpu, inputs: Sequence[np.ndarray], compute: Callable[..., Any]) -> None:
        self._gpu, self._compute, self.staging = gpu, compute, gpu.staging
        with gpu.stream:
            self._inputs = [cuda.cupy().empty(array.shape, np.float32) for array in inputs]
        self._outputs: list[Any] = []
        self.result: Any = None

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Copy the inputs, compute, and copy the outputs."""
        threads = copying_threads(self._gpu, sum(array.nbytes for array in (*inputs, *outputs)))
        inputs, outputs = ([array.reshape(1, -1) for array in arrays] for arrays in (inputs, outputs))
        Pipeline(self, [Chunk(0, 1)], inputs, outputs, LEAST_TRANSFER // ITEM_BYTES).run(threads)

    def copy(self, buffer: StagingBuffer, transfer: Transfer, after: Any) -> None:
        arrays = self._inputs if transfer.role == INPUT else self._outputs
        self._gpu.copy(buffer, arrays[transfer.array].data.ptr, transfer, after)

    def compute(self, this: Chunk) -> Any:
        with self._gpu.device, self._gpu.stream:
            self._outputs, self.result = self._compute(self._inputs)
            return self._gpu.stream.record()


__all__ = ("Trainer",)
