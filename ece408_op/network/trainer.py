"""Training steps of a network on one GPU or on several GPUs of one host: copies in, computation, copies out.

The forward pass copies data, parameters and states to the GPU, saves all values there, and copies outputs and new
states back. The backward pass copies the outputs' gradients and the labels in. Gradients to parameters are copied out,
or stay on the GPU for an optimiser (``_gpu_update``), whose updated parameters stay there too (``cached_at``).

Training on several GPUs is data parallel: each has all parameters and computes its share of the batch; the shares
differ by at most one image. NCCL sums each parameter's gradients on one GPU, which hands the sum to MXNet or to the
update. All GPUs sum about equally many bytes, because copying new parameters or gradients out takes long. BatchNorm
exchanges its sums within the passes, and normalizes with the mean and variance of the whole batch, so that results do
not depend on the number of GPUs except for rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ece408_op.runtime import cuda, nccl
from ece408_op.runtime.bounded_dict import BoundedDict
from ece408_op.runtime.memory import address

from . import _inference, _training
from ._cuda_graphs import CaptureError, GraphCache, Graphs
from ._data_parallel import Rank, RankGroup, RetryError
from ._gpu_update import Deferred, cached_at, defer, mark, move_from
from ._layers import BatchNorm
from ._network import parse
from ._step import packing_of, step, with_retry
from ._training import Backward, Forward, Gradients, SavedValues, queue_backward
from ._training_gpu import GpuOperators
from .engine import Engine

#: The rank's number is added to a step's seed from this bit on; the seed leaves these bits free.
_SEED_SHIFT = 56


class Trainer:
    """The training steps of a network, whose graph is ``text``, on the GPUs of its inference engines."""

    def __init__(self, text: str, engines: Sequence[Engine]) -> None:
        self._unfused = parse(text)
        self.network = self._unfused.fused_for_training()
        self._gpus = [engine.gpu for engine in engines]
        self._choosers = [engine.chooser for engine in engines]
        self._graphs, self._repeats = GraphCache(), not self.network.is_random
        #: The kinds of passes that have run, with the shapes of their data.
        self._known: BoundedDict[Hashable, bool] = BoundedDict(64)
        operators = [node.operator for _, node in self.network.operators]
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
    ) -> Forward:
        """Fill the outputs, and the new states once all GPUs have computed; return the values for the backward pass.

        The arrays are C-contiguous float32, in the network's order, and states by number; outputs share no memory with
        the others. Parameters are views of MXNet's memory. pinned: whether each array of data is pinned. labels:
        returns the labels, in the network's order. meanwhile: functions to call while the GPU computes. Raises
        DeviceError, with the GPU's number, if a GPU fails or lacks memory, and if NCCL is missing for several GPUs.
        Raises ProblemError if several GPUs are to share the batch of a network that, BatchNorm aside, does not compute
        each image by itself.
        """
        network, shares = self.network, _inference.shares(self._unfused, data, len(self._gpus))
        new = {number: np.empty_like(array) for number, array in states.items()}
        pinned_inputs = [*pinned, *(False for _ in parameters)]

        def compute_share(rank: Rank, graphs: Graphs | None) -> SavedValues:
            inputs = [*map(rank.share_of, data), *parameters]
            # Only the first GPU copies the new states out, since all compute the same ones.
            results = [*map(rank.share_of, outputs), *(() if rank.number else new.values())]

            def compute(arrays: Sequence[Any]) -> tuple[Sequence[Any], SavedValues]:
                given = dict(zip((*network.data, *network.parameters), arrays))
                shapes = network.infer([array.shape for array in inputs[: len(data)]])
                own_seed = seed + (rank.number << _SEED_SHIFT)
                operators = GpuOperators(self._choosers[rank.number], rank)
                found = _training.forward(network, operators, given, shapes, own_seed)
                changed = [] if rank.number else [found.states.get(number, given[number]) for number in states]
                values = [*(found.values[value] for value in network.outputs), *changed]
                return packing_of(results).packed(values), found

            def queue(found: SavedValues) -> SavedValues:
                queued = queue_backward(rank, graphs, kind, lambda: list(map(rank.share_of, labels())))
                return replace(found, queued=queued)

            graph = graphs.of(rank, ("forward", tuple(states)), packing_of(inputs).shapes) if graphs else None
            return step(
                rank.gpu,
                inputs,
                results,
                compute,
                graph=graph,
                cached=lambda array: cached_at(address(array)),
                pinned_inputs=pinned_inputs,
                meanwhile=() if rank.number else meanwhile,
                then=queue,
                first=first,
            )

        gpus = self._gpus[: len(shares)]
        with _inference.locked(gpus):
            data_shapes = tuple(array.shape for array in data)
            first = self._is_first("forward", data_shapes)
            move_from(self._graphs.user(), gpus)
            graphs = self._graphs.take(data_shapes, gpus) if self._repeats else None
            kind: Hashable = None
            if graphs:
                kind, graphs.backward = graphs.backward, None
            try:
                ranks, graphs = self._on_ranks(shares, graphs, compute_share)
            except BaseException:
                self._graphs.clear()
                raise
            found = Forward(data_shapes, shares, ranks, graphs)
            if graphs:
                graphs.user = weakref.ref(found)
        for number, array in states.items():
            array[...] = new[number]
        return found

    def backward(
        self,
        before: Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
        deferred: Mapping[int, np.ndarray],
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Fill ``targets`` with the gradients to its variables, and keep those to ``deferred`` on GPUs for the update.

        Both map variables' numbers to host arrays; those of ``deferred`` are marked instead of filled. Gradients to
        parameters are sums over all GPUs. A variable that no gradient reaches gets zeros. labels: in the network's
        order. gradients: to the outputs, by position. Raises DeviceError as ``forward``.
        """
        one = Backward(self.network, before, labels, gradients, targets, deferred)
        checks = [lambda: mark(deferred.values()), *meanwhile]

        def compute_share(rank: Rank, graphs: Graphs | None) -> Gradients:
            operators = GpuOperators(self._choosers[rank.number], rank)
            return one.compute(rank, operators, graphs, () if rank.number else checks, first)

        gpus = self._gpus[: len(before.shares)]
        with _inference.locked(gpus):
            first = self._is_first(one.kind, before.data_shapes)
            if any(rank.queued for rank in before.ranks) and not one.is_queued:
                for gpu in gpus:
                    # The queued pass that is not wanted uses the same memory as this one.
                    cuda.wait("training", gpu.stream)
            found, _ = self._on_ranks(before.shares, before.graphs, compute_share)
            if one.summed and len(gpus) > 1:
                sums = [(number, array) for number, each in enumerate(found) for array in each.sums]
                partial, streams = [each.partial for each in found], [gpu.stream for gpu in gpus]
                nccl.communicator(tuple(gpu.device.id for gpu in gpus)).reduce(partial, sums, streams)
            if targets:
                self._on_ranks(before.shares, None, lambda rank, _: one.copy_out(rank, found[rank.number]))
            if before.graphs:
                before.graphs.backward = None if gradients else one.kind
        # A gradient may be in the graphs' memory, which the graphs do not reuse while ``before`` is alive.
        memory = before if before.graphs else None
        owned = [(rank, number) for rank, numbers in enumerate(one.owned) for number in numbers if number in deferred]
        defer(
            {
                address(deferred[number]): Deferred(gpus[rank], found[rank].gradients[number], memory)
                for rank, number in owned
            }
        )

    def _is_first(self, *key: Hashable) -> bool:
        known = key in self._known
        self._known[key] = True
        return not known

    def _on_ranks(
        self, shares: Sequence[slice], graphs: Graphs | None, work: Callable[[Rank, Graphs | None], Any]
    ) -> tuple[list[Any], Graphs | None]:
        """Run work(rank, graphs) for each share; return the results, and the graphs, or None if they were not used.

        The caller holds the GPUs' locks.
        """
        gpus = self._gpus[: len(shares)]

        def attempt(repeats: bool) -> tuple[list[Any], Graphs | None]:
            used = graphs if repeats and graphs and not graphs.refused else None
            exchanges = self._exchanges and len(gpus) > 1
            communicator = nccl.communicator(tuple(gpu.device.id for gpu in gpus)) if exchanges else None
            try:
                return RankGroup(gpus, shares, communicator).run(lambda rank: work(rank, used)), used
            except RetryError as error:
                if used:
                    # After a lack of memory, a later step may capture again.
                    used.drop(refuse=isinstance(error, CaptureError))
                raise

        return with_retry(gpus, attempt)


_trainers: weakref.WeakKeyDictionary[Engine, dict[tuple[int, ...], Trainer]] = weakref.WeakKeyDictionary()


def trainer_of(text: str, engines: Sequence[Engine]) -> Trainer:
    """Return the trainer for these inference engines, cached because Gluon makes an operator for each call."""
    known, numbers = _trainers.setdefault(engines[0], {}), tuple(engine.gpu.device.id for engine in engines)
    if numbers not in known:
        known[numbers] = Trainer(text, engines)
    return known[numbers]
