"""Training steps of a network on one GPU: each copies in, computes, and copies out.

The forward pass copies data, parameters and states to the GPU, where it keeps all values, and outputs and new states
back. The backward pass copies the outputs' gradients and the labels in, and the gradients out, through the pipeline's
pinned buffers and several threads.

Gradients to parameters can stay on the GPU for an optimiser there, ``update``. MXNet's arrays for them then have a
signalling NaN in each element: results computed from them are NaN, and arithmetic in place changes their bits. What it
updates stays on a GPU too: large parameters cross the bus only to MXNet's arrays, until something else writes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ece408_op.core import dispatch
from ece408_op.errors import ProblemError
from ece408_op.plugin import host_context
from ece408_op.plugin.bridge import view_at
from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import INPUT, OUTPUT
from ece408_op.runtime.memory import address
from ece408_op.runtime.pinned import using
from ece408_op.runtime.recent import Recent

from . import _training
from ._definition import Shape
from ._gpu import Chooser
from ._kept import Held, Kept, Operands, Updated, kept_at
from ._meeting import Member
from ._network import parse
from ._packing import packing_of
from ._repeated import Repeated
from ._several_gpus import on_each
from ._step import Ahead, backward_step, queue_backward, step
from ._training_gpu import GpuOperators
from ._updates import Adam, Sgd, Update
from .engine import Engine

#: The bits of the NaN in gradients that are on a GPU, and of any NaN that arithmetic makes of it.
_SENTINEL, _CHANGED = 0x7FA0E408, 0x7FE0E408


#: The addresses of a parameter and its gradient on the host.
Addresses = tuple[int, int]


class Deferred(NamedTuple):
    """A gradient on a GPU, and the forward pass whose memory it may be in."""

    gpu: Gpu
    operators: GpuOperators
    gradient: Any
    before: _training.Forward | None


class Differentiated(NamedTuple):
    """Gradients on a GPU by number, packed ones for sums over several GPUs, and memory for its own of the sums.

    The gradients that it gets sums of are in that memory. marked: where those are that it defers.
    """

    gradients: Mapping[int, Any]
    packed: list[Any]
    sums: list[Any]
    marked: Mapping[int, Addresses]


class State(Protocol):
    """An optimiser's arrays for one parameter, and that parameter."""

    kept: Kept

    def on(self, gpu: Gpu) -> Sequence[Any]:
        """Return the arrays on a GPU, the current one."""


class HostArrays(NamedTuple):
    """A parameter and its gradient on the host: views of MXNet's arrays, addresses, and the gradient's bits."""

    parameter: np.ndarray
    gradient: np.ndarray
    addresses: Addresses
    bits: np.ndarray


def host_arrays_of(parameter: int, gradient: int, shape: Shape) -> HostArrays:
    """Return the arrays of a parameter and its gradient at these addresses, of any values where they are empty."""
    if 0 in shape:
        empty = np.empty(shape, np.float32)
        return HostArrays(empty, empty, (parameter, gradient), np.empty(0, np.uint32))
    views = view_at(parameter, shape), view_at(gradient, shape)
    return HostArrays(*views, (parameter, gradient), views[1].reshape(-1).view(np.uint32))


#: Gradients on a GPU that an update will read, of each of the last backward passes by the addresses of all its
#: parameters: networks whose update never comes do not keep the GPU's memory.
pending: Recent[tuple[Addresses, ...], dict[Addresses, Deferred]] = Recent(16)


class Trainer:
    """The training steps of one network; ``text`` is its graph, which ``engine`` infers."""

    def __init__(self, text: str, engine: Engine) -> None:
        self.network = _training.fused(parse(text))
        #: Its lock guards launches on its stream.
        self.gpu = engine.gpu
        self._operators = GpuOperators(engine.chooser)
        self._repeated = None if _training.is_random(self.network) else Repeated()

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
        member: Member | None = None,
    ) -> _training.Forward:
        """Fill the outputs and the new states, and return what the backward pass needs, in GPU memory.

        The arrays are in the network's order, states by number, C-contiguous float32; outputs share no memory with the
        others. Parameters are MXNet's memory. pinned: whether each array of data is. labels: returns them, in the
        network's order, for ``queue_backward``. meanwhile, member: as for ``step``. Raises DeviceError if the GPU fails
        or has no memory.
        """
        network, operators = self.network, self._operators.of(member)

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], _training.Forward]:
            given = dict(zip((*network.data, *network.parameters), arrays))
            shapes = network.infer(dict(zip(network.names(network.data), (array.shape for array in data))))
            found = _training.forward(network, operators, given, shapes, seed)
            new = [found.states.get(number, given[number]) for number in states]
            return [*(found.values[value] for value in network.outputs), *new], found

        inputs, results, passes = [*data, *parameters], [*outputs, *states.values()], None
        flags = [*pinned, *(False for _ in parameters)]
        if self._repeated:
            with self.gpu.device:
                passes = self._repeated.take((*(array.shape for array in data), member and member.key))
        ahead: list[Ahead | None] = [None]

        def behind() -> None:
            ahead[0] = queue_backward(self.gpu, passes, labels, member) if passes else None

        options: dict[str, Any] = {"meanwhile": meanwhile, "pinned": {INPUT: flags}, "member": member, "behind": behind}
        try:
            found = step(self.gpu, inputs, results, compute, passes, tuple(states), _kept_as, **options)
        except BaseException:
            if self._repeated:
                self._repeated.clear()
            raise
        # Passes that had no room have been computed again, without what was queued behind them.
        return passes.holds(found, None if passes.refused else ahead[0]) if passes else found

    def backward(
        self,
        before: _training.Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        targets: Mapping[int, np.ndarray],
        deferred: Mapping[int, tuple[int, np.ndarray]],
        meanwhile: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Fill the gradients to variables, ``targets`` by number, and defer others on the GPU for ``update``.

        labels: in the network's order. gradients: to the outputs, by position. deferred: by number, the parameter's
        address on the host and the gradient's array. A variable that no gradient reaches gets zeros. Raises DeviceError
        as ``forward``.
        """
        wanted = {**targets, **{number: array for number, (_, array) in deferred.items()}}

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], Mapping[int, Any]]:
            found = self._differentiated(before, arrays, gradients, wanted)
            return [found[number] for number in targets], found

        kind = tuple(gradients), tuple(targets), tuple(wanted)
        marked: dict[int, Addresses] = {}
        checks = [lambda: marked.update(_marked(deferred)), *meanwhile]
        outputs = list(targets.values())
        found = backward_step(self.gpu, before, labels, gradients, outputs, compute, kind, checks)
        defer(self.deferred(before, found, marked))

    def differentiate(
        self,
        before: _training.Forward,
        labels: Sequence[np.ndarray],
        gradients: Mapping[int, np.ndarray],
        wanted: Mapping[int, np.ndarray],
        deferred: Mapping[int, tuple[int, np.ndarray]],
        summed: Sequence[Sequence[int]] = (),
        meanwhile: Sequence[Callable[[], None]] = (),
        member: Member | None = None,
    ) -> Differentiated:
        """Return the gradients to variables on the GPU, of the shapes of ``wanted``, those to be summed also packed.

        deferred: those among them that this GPU keeps for ``update``. summed: the numbers of those that each member
        gets the sums of. Otherwise as ``backward``. All gradients are complete on return.
        """
        part = member.part if member else 0
        marked: dict[int, Addresses] = {}
        packings = [packing_of(tuple(wanted[number].shape for number in numbers)) for numbers in summed]

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], Differentiated]:
            found, xp = self._differentiated(before, arrays, gradients, wanted, member), self._operators.arrays.xp
            packed: list[Any] = []
            for numbers, packing in zip(summed, packings):
                flat = xp.zeros(packing.shapes[-1], np.float32)
                packed += packing.packed([found[number] for number in numbers], flat)
            sums, own = list[Any](), dict[int, Any]()
            if packings:
                sums = [xp.empty(shape, np.float32) for shape in packings[part].shapes]
                own = dict(zip(summed[part], packings[part].unpacked(sums)))
            return [], Differentiated({**found, **own}, packed, sums, {})

        kind = (tuple(gradients), tuple(wanted), tuple(map(tuple, summed)), part, "differentiated")
        checks = [lambda: marked.update(_marked(deferred)), *meanwhile]
        found = backward_step(self.gpu, before, labels, gradients, [], compute, kind, checks, member)
        return found._replace(marked=marked)

    def copy_out(self, arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> None:
        """Wait for the GPU, and copy arrays from there."""
        step(self.gpu, [], targets, lambda _: (list(arrays), None))

    def deferred(
        self, before: _training.Forward, found: Mapping[int, Any], marked: Mapping[int, Addresses]
    ) -> dict[Addresses, Deferred]:
        """Return gradients for ``defer``, whose arrays are marked."""
        # A gradient may be in memory of repeated passes, which is theirs while ``before`` lives.
        used = before if before.passes else None
        return {at: Deferred(self.gpu, self._operators, found[number], used) for number, at in marked.items()}

    def _differentiated(
        self,
        before: _training.Forward,
        arrays: Sequence[Any],
        gradients: Mapping[int, np.ndarray],
        wanted: Mapping[int, np.ndarray],
        member: Member | None = None,
    ) -> dict[int, Any]:
        """Return the gradients, C-contiguous; ``arrays``: labels and gradients to the outputs, on the GPU."""
        network, xp = self.network, self._operators.arrays.xp
        given = dict(zip(network.labels, arrays))
        seeds = dict(zip(gradients, arrays[len(network.labels) :]))
        found = _training.backward(network, self._operators.of(member), before, given, seeds, wanted)
        return {
            number: xp.ascontiguousarray(found[number]) if number in found else xp.zeros(array.shape, np.float32)
            for number, array in wanted.items()
        }


def _marked(deferred: Mapping[int, tuple[int, np.ndarray]]) -> dict[int, Addresses]:
    """Mark the arrays of gradients that stay on the GPU; return where they are."""
    found = {}
    for number, (at, array) in deferred.items():
        bits = array.reshape(-1).view(np.uint32)
        if not bits[0] == bits[-1] == _SENTINEL:
            bits.fill(_SENTINEL)
        found[number] = at, address(array)
    return found


def defer(ones: dict[Addresses, Deferred]) -> None:
    """Keep the gradients of one backward pass on their GPUs for ``update``."""
    if ones:
        pending.pop(tuple(ones), None)
        pending[tuple(ones)] = ones


def _kept_as(array: np.ndarray) -> Any | None:
    return kept_at(address(array))


_trainers: WeakKeyDictionary[Engine, Trainer] = WeakKeyDictionary()


def trainer_of(text: str, engine: Engine) -> Trainer:
    """Return the trainer of the network that ``engine`` infers; Gluon asks for it at each call."""
    if engine not in _trainers:
        _trainers[engine] = Trainer(text, engine)
    return _trainers[engine]


def update(
    rule: Sgd | Adam,
    hosts: Sequence[HostArrays],
    states: Sequence[State],
    rates: Sequence[float],
    decays: Sequence[float],
    kept: Sequence[Held | None],
    written_once: Sequence[bool],
) -> None:
    """Update parameters on the GPUs that have their gradients, the others on the first GPU.

    states: each keeps its updated parameter. rates, decays: see ``_updates.Update``. kept: what ``Kept.begin`` returned
    for the parameters; others are copied to the GPU. written_once: whether a gradient's array has been written only
    once since the last update; of others, all elements are checked.

    Raises ProblemError, before anything changes, if a gradient that was left on a GPU has been changed or was used
    before. Raises DeviceError, with the GPU's number, if one fails. Its parameters and states are as they were if it
    had no room; otherwise both may have changed, even in part. Those of other GPUs may be new.
    """
    taken = _taken([host.addresses for host in hosts])
    found = [
        one if _is_deferred(one, host.bits, known) else None for one, host, known in zip(taken, hosts, written_once)
    ]
    first = host_context.gpu(0)
    gpus = list(dict.fromkeys(one.gpu if one else first for one in found))

    def work(number: int) -> None:
        gpu = gpus[number]
        mine = [number for number, one in enumerate(found) if (one.gpu if one else first) is gpu]
        here, own_states = [hosts[n] for n in mine], [states[n] for n in mine]
        there: list[Any] = []
        for n in mine:
            held, deferred = kept[n], found[n]
            there += [held.array if held and held.update.gpu is gpu else None, deferred.gradient if deferred else None]
        last = kept[mine[0]]
        before = last.update if last and _are_same(there[::2], last.update.arrays) else None
        targets = [host.parameter for host in here]
        packing = packing_of(tuple(array.shape for array in targets))
        pairs = [array for host in here for array in host[:2]]
        given = [array for array, copy in zip(pairs, there) if copy is None]
        operators = next((one.operators for one in found if one and one.gpu is gpu), None)
        if not operators:
            with gpu.device, gpu.stream:
                operators = GpuOperators(Chooser(dispatch.AUTO, "float32", 0, cuda.chip(0)))

        def compute(arrays: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], Operands]]:
            room = None if before else cuda.cupy().empty(packing.shapes[-1], np.float32)
            rest = iter(arrays)
            both = iter([next(rest) if copy is None else copy for copy in there])
            updates = [
                Update(next(both), next(both), state.on(gpu), rates[n], decays[n]) for n, state in zip(mine, own_states)
            ]
            operands = before.operands if before and before.operands.are_of(updates) else Operands.of(updates)
            operands.rows = operators.update(rule, updates, operands.rows)
            packed = list(before.packed) if before else packing.packed([one.parameter for one in updates], room)
            return packed, (packed, operands)

        with using(targets) as flags:
            packed, operands = step(gpu, given, targets, compute, packs=False, pinned={OUTPUT: flags})
        with gpu.device:
            update = Updated(gpu, before.arrays if before else packing.unpacked(packed), packed, operands)
        for host, state, array in zip(here, own_states, update.arrays):
            state.kept.keep(Held(array, update), host.addresses[0])

    on_each(work, [gpu.device.id for gpu in gpus])


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _taken(several: Sequence[Addresses]) -> list[Deferred | None]:
    """Take all gradients for parameters and their gradients' arrays out of those that wait; return the newest ones."""
    found: list[Deferred | None] = [None] * len(several)
    for key, deferred in list(pending.items()):
        found = [deferred.pop(one, None) or older for one, older in zip(several, found)]
        if not deferred:
            pending.pop(key, None)
    return found


def _is_deferred(one: Deferred | None, bits: np.ndarray, written_once: bool) -> bool:
    """Return whether a gradient is on a GPU in place of its array; raises ProblemError for an array partly changed."""
    if one and written_once and bits[0] == bits[-1] == _SENTINEL:
        return True
    deferred = bits == _SENTINEL if one else bits[:1] == _SENTINEL
    if one and deferred.all():
        return True
    if deferred.any() or (bits[: deferred.size] == _CHANGED).any():
        raise ProblemError(
            "gradients='gpu': expected gradients as the network's last backward pass left them, got others: it ran "
            "twice before this update or not at all, or something changed the arrays; pass gradients='cpu'"
        )
    return False


__all__ = ("State", "Trainer", "defer", "host_arrays_of", "trainer_of", "update", "pending")
