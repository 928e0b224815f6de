"""A network's forward and backward pass in training: every value is saved, and gradients are computed in reverse order.

A backward pass, on one GPU or several, can be queued right behind its forward pass.

This is reverse-mode differentiation (A. Griewank, On automatic differentiation, 1989). No later value overwrites a
value's memory, so each operator's gradient can read inputs and output. CuPy allocates the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ece408_op.runtime import cuda

from ._cuda_graphs import Graphs
from ._data_parallel import Rank, share_of
from ._definition import Operator, Shape, Trained
from ._network import Network
from ._step import packing_of, pinned_array, step
from ._training_gpu import GpuOperators


@dataclass(frozen=True)
class SavedValues:
    """A forward pass on a GPU: by number, the values, ``Operator.train``'s results, and the new values of states."""

    values: Mapping[int, Any]
    saved: Mapping[int, Any]
    states: Mapping[int, Any]
    #: The QueuedBackward that is queued behind this pass, if any: see ``queue_backward``.
    queued: Any = None


def forward(
    network: Network, operators: GpuOperators, given: Mapping[int, Any], shapes: Mapping[int, Shape], seed: int
) -> SavedValues:
    """Compute all values, of these shapes, from data and parameters; equal seeds make equal random numbers."""
    values, saved = dict(given), {}
    states: dict[int, Any] = {}
    for number, node in network.operators:
        # The second use of a layer updates the states that its first use has updated.
        inputs = [states.get(entry.node, values.get(entry.node)) for entry in node.inputs]
        if node.operator.view and type(node.operator).train is Operator.train:  # Dropout is a view at inference only
            values[number] = values[node.inputs[0].node].reshape(shapes[number])
            continue
        values[number] = operators.xp.empty(shapes[number], np.float32)
        saved[number] = operators.train(node, inputs, values[number], seed + number)
        new = node.operator.new_states(saved[number])
        states.update({node.inputs[position].node: value for position, value in new.items()})
    return SavedValues(values, saved, states)


def backward(
    network: Network,
    operators: GpuOperators,
    before: SavedValues,
    labels: Mapping[int, Any],
    gradients: Mapping[int, Any],
    wanted: Collection[int],
) -> dict[int, Any]:
    """Return the gradients to the wanted variables by number, except variables that no gradient reaches.

    labels: the variables that the forward pass does not read. gradients: those to outputs, by the outputs' positions.
    """
    xp, values = operators.xp, {**before.values, **labels}
    found: dict[int, Any] = {}
    for position, gradient in gradients.items():
        _add(found, network.outputs[position], gradient)
    needed = set(wanted)
    for number, node in network.operators:
        if any(entry.node in needed for entry in node.inputs):
            needed.add(number)
    for number, node in reversed(network.operators):
        gradient = found.pop(number, None)
        if number not in needed or (gradient is None and not node.operator.is_loss):
            continue
        if gradient is not None:
            gradient = xp.ascontiguousarray(gradient)
        sources = [entry.node for entry in node.inputs]
        given = Trained([values.get(source) for source in sources], values[number], before.saved.get(number))
        results = operators.gradients(node, given, gradient, [source in needed for source in sources])
        for source, result in zip(sources, results):
            if result is not None and source in needed:
                _add(found, source, result)
    return {value: found[value] for value in wanted if value in found}


def _add(found: dict[int, Any], value: int, gradient: Any) -> None:
    """Add to a value's gradient, out of place: views of the arrays may be other values' gradients."""
    found[value] = found[value] + gradient if value in found else gradient


class Gradients(NamedTuple):
    """One rank's gradients on its GPU.

    gradients: all, by number. The others are packed (``_step.Packing``). images: the gradients to variables whose
    images are divided among the ranks. partial: this GPU's contribution to the summed gradients. sums: the sums over
    all GPUs that this rank owns.
    """

    gradients: Mapping[int, Any]
    images: Sequence[Any]
    partial: Sequence[Any]
    sums: Sequence[Any]


class QueuedBackward(NamedTuple):
    """A backward pass that is queued behind its forward pass: its kind, copies of its labels, and its gradients."""

    kind: Hashable
    labels: Sequence[np.ndarray]
    gradients: Gradients


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward pass on all GPUs.

    shares: the images of each GPU that computed, which are the first ones of the trainer's GPUs. ranks: their values.
    graphs: the CUDA graphs that own the values' memory, None if there are none.
    """

    data_shapes: Sequence[Shape]
    shares: Sequence[slice]
    ranks: Sequence[SavedValues]
    graphs: Graphs | None


@dataclass(eq=False)
class Backward:
    """One backward pass on all GPUs; the fields after ``before`` are arguments of ``Trainer.backward``."""

    network: Network
    before: Forward
    labels: Sequence[np.ndarray]
    gradients: Mapping[int, np.ndarray]
    targets: Mapping[int, np.ndarray]
    deferred: Mapping[int, np.ndarray]

    def __post_init__(self) -> None:
        parameters, targets = {*self.network.parameters}, self.targets.items()
        self._parameters = {number: array for number, array in targets if number in parameters}
        #: Gradients to data and labels: each GPU computes those of its share of the images.
        self._images = {number: array for number, array in targets if number not in parameters}
        self.summed, ranks = {**self._parameters, **self.deferred}, len(self.before.shares)
        #: For each rank, the numbers of the gradients that are summed on its GPU.
        self.owned = _owned({number: array.nbytes for number, array in self.summed.items()}, ranks)
        #: Equal for passes that read gradients to the same outputs, and copy out and defer those to the same variables.
        self.kind: Hashable = tuple(self.gradients), tuple(self.targets), tuple(self.deferred)
        self.is_queued = not self.gradients and all(map(self._is_queued, range(ranks)))

    def _is_queued(self, rank: int) -> bool:
        queued = self.before.ranks[rank].queued
        labels = [share_of(array, self.before.shares, rank) for array in self.labels]
        return bool(queued and queued.kind == self.kind and all(map(np.array_equal, queued.labels, labels)))

    def compute(
        self,
        rank: Rank,
        operators: GpuOperators,
        graphs: Graphs | None,
        meanwhile: Sequence[Callable[[], None]],
        first: bool,
    ) -> Gradients:
        """Compute the gradients on the rank's GPU, or wait for them if they are queued; return them, complete."""
        if self.is_queued:
            queued: Any = self.before.ranks[rank.number].queued
            return step(rank.gpu, [], [], lambda _: ([], queued.gradients), meanwhile=meanwhile)
        inputs = list(map(rank.share_of, (*self.labels, *self.gradients.values())))
        images = {number: rank.share_of(array) for number, array in self._images.items()}
        shapes = {number: array.shape for number, array in {**self.summed, **images}.items()}

        def compute(arrays: Sequence[Any]) -> tuple[Sequence[Any], Gradients]:
            labels = dict(zip(self.network.labels, arrays))
            heads = dict(zip(self.gradients, arrays[len(labels) :]))
            before, xp = self.before.ranks[rank.number], cuda.cupy()
            known = backward(self.network, operators, before, labels, heads, shapes)
            gradients = {
                number: xp.ascontiguousarray(known[number]) if number in known else xp.zeros(shape, np.float32)
                for number, shape in shapes.items()
            }
            return [], self._packed(rank, gradients, list(images.values()))

        graph = graphs.of(rank, self.kind, packing_of(inputs).shapes) if graphs else None
        return step(rank.gpu, inputs, [], compute, graph=graph, meanwhile=meanwhile, first=first)

    def _packed(self, rank: Rank, gradients: dict[int, Any], images: Sequence[np.ndarray]) -> Gradients:
        """Return the gradients, packed where they are copied out or summed, with memory for the rank's own sums."""
        packings = [packing_of([self.summed[number] for number in numbers]) for numbers in self.owned]
        partial, sums = list[Any](), list[Any]()
        if rank.size > 1 or self._parameters:
            for numbers, packing in zip(self.owned, packings):
                partial += packing.packed([gradients[number] for number in numbers])
            sums = partial
        if rank.size > 1:
            own = packings[rank.number]
            sums = [cuda.cupy().empty(shape, np.float32) for shape in own.shapes]
            gradients.update(zip(self.owned[rank.number], own.unpacked(sums)))
        packed = packing_of(images).packed([gradients[number] for number in self._images]) if images else []
        return Gradients(gradients, packed, partial, sums)

    def copy_out(self, rank: Rank, found: Gradients) -> None:
        """Copy the rank's share of image gradients and its sums of parameter gradients to the targets."""
        images = list(map(rank.share_of, self._images.values()))
        parameters = [self._parameters[number] for number in self.owned[rank.number]] if self._parameters else []
        if images:
            step(rank.gpu, [], images, lambda _: (found.images, None))
        if parameters:
            step(rank.gpu, [], parameters, lambda _: (found.sums, None))


def queue_backward(
    rank: Rank, graphs: Graphs | None, kind: Hashable, labels: Callable[[], list[np.ndarray]]
) -> QueuedBackward | None:
    """Queue the backward pass for these labels behind a forward pass, before MXNet asks for it.

    So the GPU need not wait for MXNet and Python between the passes. kind: that of the last step's backward pass.
    Returns None if ``graphs`` or ``kind`` is None, or if no pass of that kind is captured as a CUDA graph. The current
    GPU and stream are the rank's.
    """
    if graphs is None or kind is None:
        return None
    given = [array.copy() for array in labels()]
    packing = packing_of(given)
    graph = graphs.of(rank, kind, packing.shapes)
    if not graph.is_captured:
        return None
    graph.pinned = graph.pinned or [pinned_array(rank.gpu, shape) for shape in packing.shapes]
    for array, label in zip(graph.pinned, packing.large(given)):
        array[...] = label
    packing.copy_small(given, graph.pinned[-1])
    for target, array in zip(graph.inputs, graph.pinned):
        target.set(array)
    _, gradients = graph.launch()
    if rank.group.communicator:
        # No thread waits for this pass before the next call on these GPUs. If a GPU fails meanwhile, ``watch`` aborts
        # the communicator.
        rank.group.communicator.watch(rank.gpu.stream.record())
    return QueuedBackward(kind, given, gradients)


def _owned(sizes: Mapping[int, int], parts: int) -> list[list[int]]:
    """Divide arrays into parts of about equally many bytes; return the array numbers of each part."""
    owned, loads = [list[int]() for _ in range(parts)], [0] * parts
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        part = loads.index(min(loads))
        owned[part].append(number)
        loads[part] += sizes[number]
    return owned
