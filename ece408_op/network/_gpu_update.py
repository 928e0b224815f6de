"""Updates of parameters on GPUs, from gradients that a backward pass has left there or that are in MXNet's arrays.

MXNet's arrays for gradients that stay on a GPU have a signalling NaN in each element: results computed from them are
NaN, and arithmetic in place changes their bits.
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

#: The bits of the NaN in gradients that are on a GPU, and of any NaN that arithmetic makes of it.
_SENTINEL, _CHANGED = 0x7FA0E408, 0x7FE0E408

#: The addresses of a parameter and its gradient on the host.
Addresses = tuple[int, int]


class Deferred(NamedTuple):
    """A gradient on a GPU for a later update, and what keeps its memory."""

    gpu: Gpu
    gradient: Any
    owner: Any


#: Deferred gradients, and the numbers of their backward passes, by the addresses of their arrays, the oldest first. Not
#: by the parameters' addresses: a KVStore updates its own copies of these. One update may be that of many networks.
pending: OrderedDict[int, tuple[int, Deferred]] = OrderedDict()
#: The passes whose gradients stay: networks whose update never comes do not keep the GPU's memory.
MOST_PASSES = 64
_passes = itertools.count()
#: For changes of ``pending``.
_lock = threading.Lock()


def mark(gradients: Iterable[np.ndarray]) -> None:
    """Fill the host's arrays of gradients that stay on a GPU."""
    for array in gradients:
        bits = array.reshape(-1).view(np.uint32)
        if not bits[0] == bits[-1] == _SENTINEL:
            bits.fill(_SENTINEL)


def defer(gradients: Mapping[int, Deferred]) -> None:
    """Keep the gradients of one backward pass, by the addresses of their arrays, which are marked, for ``update``."""
    number = next(_passes)
    with _lock:
        for key in gradients:
            pending.pop(key, None)  # the new one is the newest
        pending.update((key, (number, one)) for key, one in gradients.items())
        while pending and next(iter(pending.values()))[0] <= number - MOST_PASSES:
            pending.popitem(last=False)


def move_from(owner: Any, gpus: Sequence[Gpu]) -> None:
    """Copy the gradients that are in this owner's memory, which is wanted for the next step, to memory of their own.

    They may be of parameters that are never updated. Those that have no room, or are on others than these GPUs, whose
    locks the caller has, stay.
    """
    with _lock:
        for key, (number, one) in list(pending.items()) if owner else ():
            if one.owner is owner and one.gpu in gpus:
                no_room = cuda.cupy().cuda.memory.OutOfMemoryError
                with one.gpu.device, cuda.reported("training"), one.gpu.stream, suppress(no_room):
                    pending[key] = number, one._replace(gradient=one.gradient.copy(), owner=None)


class HostArrays(NamedTuple):
    """A parameter and its gradient on the host: views of MXNet's arrays, addresses, and the gradient's bits."""

    parameter: np.ndarray
    gradient: np.ndarray
    addresses: Addresses
    bits: np.ndarray


class State:
    """An optimiser's state for one parameter: float32 arrays, and the number of its updates.

    The arrays are on the host until the first update, then on a GPU. A pickled state has them on the host.
    """

    def __init__(self, arrays: Sequence[np.ndarray], updates: int = 0) -> None:
        self._arrays: Sequence[Any] = arrays
        #: The parameter's shape.
        self.shape: Shape = arrays[0].shape
        self.updates = updates
        self._gpu: Gpu | None = None
        self.cache, self.gradient_writes = ParameterCache(), WriteCount()
        self._host: HostArrays | None = None
        #: What pins the parameter, and the address of that.
        self._pinned: tuple[int, Pinned | None] = 0, None
        #: The parameter and the gradient that have been examined, and an object for the call in which they were: to ask
        #: MXNet's arrays takes microseconds.
        self.examined: tuple[Any, Any, Any] = None, None, None

    @property
    def shapes(self) -> list[Shape]:
        """The arrays' shapes."""
        return [array.shape for array in self._arrays]

    def on(self, gpu: Gpu) -> Sequence[Any]:
        """Return the arrays on a GPU, the current one."""
        if self._gpu is not gpu:
            self._arrays, self._gpu = [cuda.cupy().asarray(array) for array in self._on_host()], gpu
        return self._arrays

    def host_arrays(self, addresses: Addresses) -> HostArrays:
        """Return the arrays of the parameter and its gradient at these addresses; to make them takes microseconds."""
        if self._host is None or self._host.addresses != addresses:
            is_empty = 0 in self.shape
            views = [np.empty(self.shape, np.float32) if is_empty else view_at(at, self.shape) for at in addresses]
            self._host = HostArrays(views[0], views[1], addresses, views[1].reshape(-1).view(np.uint32))
        return self._host

    def pin(self, parameter: Any, host: HostArrays) -> None:
        """Pin the parameter, MXNet's array, at its second update."""
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
    """One parameter of an update: MXNet's arrays, and these on the host; learning rate and weight decay."""

    parameter: Any
    gradient: Any
    host: HostArrays
    state: State
    rate: float
    decay: float


def update(rule: Rule, operands: Sequence[Operand]) -> None:
    """Update parameters on the GPUs that have their gradients, the others on the first GPU.

    Raises ProblemError, before anything changes, if a gradient that was left on a GPU has been changed or was used
    before. Raises DeviceError, with the GPU's number, if one fails. Its parameters and states are as they were if it
    had no room; otherwise both may have changed, even in part. Those of other GPUs may be new.
    """
    cached = [one.state.cache.begin(one.parameter) for one in operands]
    # Of a gradient's array that was written once, by the backward pass, no element can have changed.
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
    """Return whether a gradient is on a GPU in place of its array; raises ProblemError for an array partly changed."""
    if one and written_once and bits[0] == bits[-1] == _SENTINEL:
        return True
    deferred = bits == _SENTINEL if one else bits[:1] == _SENTINEL
    if one and deferred.all():
        return True
    if deferred.any() or (bits[: deferred.size] == _CHANGED).any():
        raise ProblemError(
            "gradients='gpu': expected gradients as the network's last backward pass left them, got others: that "
            "pass ran twice before this update or not at all, or something changed the arrays; pass gradients='cpu'"
        )
    return False
