"""Update parameters on GPUs, from gradients that a backward pass left there or that are in MXNet's arrays.

If a gradient stays on a GPU, every element of MXNet's array for it is a signalling NaN: results computed from the array
are NaN, and arithmetic in place changes its bits.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ece408_op.errors import ProblemError
from ece408_op.plugin import host_context
from ece408_op.plugin.bridge import view_at
from ece408_op.plugin.host_context import Gpu
from ece408_op.runtime import cuda
from ece408_op.runtime.copy_pipeline import OUTPUT
from ece408_op.runtime.pinned import Pinned, using

from . import _updates
from ._definition import Shape
from ._inference import on_each
from ._packing import packing_of
from ._parameter_cache import ParameterCache, Updated, WriteCount
from ._step import step, with_retry
from ._updates import Rule, Update

#: The bits of the signalling NaN, and of the quiet NaN that arithmetic turns it into.
_SENTINEL, _CHANGED = 0x7FA0E408, 0x7FE0E408

#: The addresses of a parameter and its gradient on the host.
Addresses = tuple[int, int]


class Deferred(NamedTuple):
    """A gradient on a GPU for a later update, and the object that keeps its memory alive."""

    gpu: Gpu
    gradient: Any
    owner: Any


#: Deferred gradients with the numbers of their backward passes, by the addresses of their host arrays, oldest first.
#: The parameters' addresses are no keys, because a KVStore updates its own copies of the parameters. One dictionary for
#: all networks, since one update may be for several.
pending: OrderedDict[int, tuple[int, Deferred]] = OrderedDict()
#: The number of latest passes whose gradients are kept, so that networks without updates do not fill the GPU's memory.
MOST_PASSES = 64
_passes = itertools.count()
#: Held to change ``pending``.
_lock = threading.Lock()


def mark(gradients: Iterable[np.ndarray]) -> None:
    """Fill the host arrays of gradients that stay on a GPU with the signalling NaN."""
    for array in gradients:
        bits = array.reshape(-1).view(np.uint32)
        if not bits[0] == bits[-1] == _SENTINEL:
            bits.fill(_SENTINEL)


def defer(gradients: Mapping[int, Deferred]) -> None:
    """Keep the gradients of one backward pass for ``update``, by the addresses of their marked host arrays."""
    number = next(_passes)
    with _lock:
        for key in gradients:
            pending.pop(key, None)  # so that the new entry comes last
        pending.update((key, (number, one)) for key, one in gradients.items())
        while pending and next(iter(pending.values()))[0] <= number - MOST_PASSES:
            pending.popitem(last=False)


def move_from(owner: Any, gpus: Sequence[Gpu]) -> None:
    """Copy pending gradients out of an owner's memory, which the next step needs, to separate memory.

    They may belong to parameters that are never updated. Gradients stay in place if there is no room for a copy, or if
    they are on none of ``gpus``, whose locks the caller holds.
    """
    with _lock:
        for key, (number, one) in list(pending.items()) if owner else ():
            if one.owner is owner and one.gpu in gpus:
                no_room = cuda.cupy().cuda.memory.OutOfMemoryError
                with one.gpu.device, cuda.reported("training"), one.gpu.stream, suppress(no_room):
                    pending[key] = number, one._replace(gradient=one.gradient.copy(), owner=None)


class HostArrays(NamedTuple):
    """Views of MXNet's arrays for a parameter and its gradient, their addresses, and the gradient's bits as uint32."""

    parameter: np.ndarray
    gradient: np.ndarray
    addresses: Addresses
    bits: np.ndarray


class State:
    """An optimiser's state for one parameter: float32 arrays, and the number of updates.

    The arrays are on the host until the first update, then on a GPU. Pickling copies them to the host.
    """

    def __init__(self, arrays: Sequence[np.ndarray], updates: int = 0) -> None:
        self._arrays: Sequence[Any] = arrays
        #: The parameter's shape.
        self.shape: Shape = arrays[0].shape
        self.updates = updates
        self._gpu: Gpu | None = None
        self.cache, self.gradient_writes = ParameterCache(), WriteCount()
        self._host: HostArrays | None = None
        #: The parameter's address, and the object that pins its memory.
        self._pinned: tuple[int, Pinned | None] = 0, None
        #: The parameter and the gradient that the optimiser has checked, and an object that identifies the call which
        #: did. Cached because each query of an MXNet array takes microseconds.
        self.examined: tuple[Any, Any, Any] = None, None, None

    @property
    def shapes(self) -> list[Shape]:
        """The arrays' shapes."""
        return [array.shape for array in self._arrays]

    def on(self, gpu: Gpu) -> Sequence[Any]:
        """Return the arrays on ``gpu``, the current GPU."""
        if self._gpu is not gpu:
            self._arrays, self._gpu = [cuda.cupy().asarray(array) for array in self._on_host()], gpu
        return self._arrays

    def host_arrays(self, addresses: Addresses) -> HostArrays:
        """Return the views at these addresses, cached because making them takes microseconds."""
        if self._host is None or self._host.addresses != addresses:
            is_empty = 0 in self.shape
            views = [np.empty(self.shape, np.float32) if is_empty else view_at(at, self.shape) for at in addresses]
            self._host = HostArrays(views[0], views[1], addresses, views[1].reshape(-1).view(np.uint32))
        return self._host

    def pin(self, parameter: Any, host: HostArrays) -> None:
        """Pin the memory of ``parameter``, MXNet's array, at its second update at the same address."""
        at = host.addresses[0]
        if self._pinned[0] != at:
            self._pinned = at, None
        elif self._pinned[1] is None:
            self._pinned = at, Pinned(parameter, at, host.parameter.nbytes)

    def _on_host(self) -> list[np.ndarray]:
        return [array.get() if hasattr(array, "get") else np.asarray(array) for array in self._arrays]

    def __reduce__(self) -> Any:
        import mxnet as mx

        mx.nd.waitall()
        return State, (self._on_host(), self.updates)


class Operand(NamedTuple):
    """One parameter of an update: MXNet's arrays, views of them, the state, learning rate and weight decay."""

    parameter: Any
    gradient: Any
    host: HostArrays
    state: State
    rate: float
    decay: float


def update(rule: Rule, operands: Sequence[Operand]) -> None:
    """Update each parameter on the GPU that has its gradient, or on GPU 0 if the gradient is in MXNet's array.

    Raises ProblemError, before anything changes, if the array of a gradient on a GPU was changed, or if an earlier
    update has used the gradient. Raises DeviceError, with the GPU's number, if a GPU fails: its parameters and states
    are unchanged if it lacked memory, and otherwise may be partly updated. Other GPUs' parameters may be updated.
    """
    cached = [one.state.cache.begin(one.parameter) for one in operands]
    # If a gradient's array was written only once, by the backward pass, no element can have changed since.
    written_once = [one.state.gradient_writes.is_once(one.gradient) for one in operands]
    for one in operands:
        one.state.pin(one.parameter, one.host)
    with _lock:
        taken = [pending.pop(one.host.addresses[1], (0, None))[1] for one in operands]
    deferred = [
        gradient if _is_deferred(gradient, one.host.bits, once) else None
        for gradient, one, once in zip(taken, operands, written_once)
    ]
    gpus = [gradient.gpu if gradient else host_context.gpu(0) for gradient in deferred]
    different = list(dict.fromkeys(gpus))

    def on_gpu(number: int) -> None:
        gpu = different[number]
        mine = [number for number, one in enumerate(gpus) if one is gpu]
        targets = [operands[n].host.parameter for n in mine]
        there: list[Any] = []
        for n in mine:
            copy, gradient = cached[n], deferred[n]
            there += [copy.array if copy and copy.update.gpu is gpu else None, gradient.gradient if gradient else None]
        first = cached[mine[0]]
        last = first.update if first and _are_same(there[::2], first.update.arrays) else None
        packing = packing_of(targets)

        def compute(arrays: Sequence[Any]) -> tuple[Sequence[Any], Updated]:
            rest = iter(arrays)
            both = [next(rest) if array is None else array for array in there]
            packed = last.packed if last else packing.packed(both[::2])
            found = last or Updated(gpu, packing.unpacked(packed), packed)
            updates = [
                Update(parameter, gradient, operands[n].state.on(gpu), operands[n].rate, operands[n].decay)
                for parameter, gradient, n in zip(found.arrays, both[1::2], mine)
            ]
            _updates.update(rule, updates)
            return packed, found

        host = (array for n in mine for array in operands[n].host[:2])
        inputs = [array for array, copy in zip(host, there) if copy is None]
        with using(targets) as flags, gpu.lock:
            found = with_retry([gpu], lambda _: step(gpu, inputs, targets, compute, pinned={OUTPUT: flags}))
        for n, array in zip(mine, found.arrays):
            operands[n].state.cache.keep(array, found, operands[n].host.addresses[0])

    on_each(on_gpu, [gpu.device.id for gpu in different])


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _is_deferred(one: Deferred | None, bits: np.ndarray, written_once: bool) -> bool:
    """Return whether a gradient is on a GPU instead of in its array; raises ProblemError for a partly changed array."""
    if one and written_once and bits[0] == bits[-1] == _SENTINEL:
        return True
    deferred = bits == _SENTINEL if one else bits[:1] == _SENTINEL
    if one and deferred.all():
        return True
    if deferred.any() or (bits[: deferred.size] == _CHANGED).any():
        raise ProblemError(
            "gradients='gpu': expected gradients as the network's last backward pass left them, got others: this "
            "pass ran twice before the update or not at all, or something changed the arrays; pass gradients='cpu'"
        )
    return False
