"""Update parameters on GPUs, from gradients that a backward pass left there or that are in MXNet's arrays.

If a gradient stays on a GPU, every element of MXNet's array for it is a signalling NaN: results computed from the array
are NaN, and arithmetic in place changes its bits.

Copies of updated parameters stay on a GPU, so that later forward passes and updates need not copy them in again. An
update also writes the new parameter to MXNet's array. The GPU's copy is valid while that is MXNet's last write to the
array (``array_version``). If MXNet's write counts cannot be read, no copy is valid.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np

from ece408_op.errors import ProblemError
from ece408_op.plugin import array_version, host_context
from ece408_op.plugin.bridge import view_at
from ece408_op.plugin.host_context import Gpu
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.pinned import Pinned, using

from ._definition import Shape
from ._inference import on_each
from ._passes import launch
from ._step import packing_of, step, with_retry

#: The bits of the signalling NaN, and of the quiet NaN that arithmetic turns it into.
_SENTINEL, _CHANGED = 0x7FA0E408, 0x7FE0E408
#: Blocks per parameter.
_UPDATE_BLOCKS = 64


@lru_cache(maxsize=4096)
def host_view(address: int, shape: Shape) -> np.ndarray:
    """Return a view of MXNet's memory, cached because making hundreds takes a millisecond."""
    return np.empty(shape, np.float32) if 0 in shape else view_at(address, shape)


class Deferred(NamedTuple):
    """A gradient on a GPU for a later update; owner: keeps its memory alive; number: that of its backward pass."""

    gpu: Gpu
    gradient: Any
    owner: Any
    number: int = 0


#: Deferred gradients by the addresses of their host arrays, oldest first.
#: The parameters' addresses are no keys, because a KVStore updates its own copies of the parameters. One dictionary for
#: all networks, since one update may be for several.
pending: OrderedDict[int, Deferred] = OrderedDict()
#: The number of latest passes whose gradients are kept, so that networks without updates do not fill the GPU's memory.
MOST_PASSES = 64
_passes = count()
#: Held to change ``pending``.
_lock = threading.Lock()


def mark(gradients: Iterable[np.ndarray]) -> None:
    """Fill the host arrays of gradients that stay on a GPU with the signalling NaN."""
    for array in gradients:
        bits = array.reshape(-1).view(np.uint32)
        if not bits[0] == bits[-1] == _SENTINEL:
            bits.fill(_SENTINEL)


def check_unmarked(parameters: Iterable[np.ndarray]) -> None:
    """Raise ProblemError if a parameter was computed from a marked gradient, as by an optimiser of MXNet's own."""
    for array in parameters:
        if array.size and math.isnan(array.item(0)) and array.reshape(-1).view(np.uint32)[0] in (_SENTINEL, _CHANGED):
            raise ProblemError(
                "gradients='gpu': expected parameters that the optimiser gpusgd or gpuadam updates, got NaN computed "
                "from MXNet's gradient arrays, as by sgd; set the parameters again, and use one of the two or "
                "gradients='cpu'"
            )


def defer(gradients: Mapping[int, Deferred]) -> None:
    """Keep the gradients of one backward pass for ``update``, by the addresses of their marked host arrays."""
    number = next(_passes)
    with _lock:
        for key in gradients:
            pending.pop(key, None)  # so that the new entry comes last
        pending.update((key, one._replace(number=number)) for key, one in gradients.items())
        while pending and next(iter(pending.values())).number <= number - MOST_PASSES:
            pending.popitem(last=False)


def move_from(owner: Any, gpus: Sequence[Gpu]) -> None:
    """Copy pending gradients out of an owner's memory, which the next step needs, to separate memory.

    They may belong to parameters that are never updated. Gradients stay in place if there is no room for a copy, or if
    they are on none of ``gpus``, whose locks the caller holds.
    """
    with _lock:
        for key, one in list(pending.items()) if owner else ():
            if one.owner is owner and one.gpu in gpus:
                no_room = cuda.cupy().cuda.memory.OutOfMemoryError
                with one.gpu.device, cuda.reported("training"), one.gpu.stream, suppress(no_room):
                    pending[key] = one._replace(gradient=one.gradient.copy(), owner=None)


class WriteCount:
    """MXNet's count of writes to an array, compared from one update to the next."""

    def __init__(self) -> None:
        self._array: Any = None
        #: Returns the count; None if it cannot be read.
        self.version: Callable[[], int] | None = None
        #: The count at the last update.
        self.last = 0

    def is_once(self, array: Any) -> bool:
        """Return whether MXNet has written the array exactly once since the last call; False if that cannot be known.

        The caller is a function of ``engine_queue`` that reads or writes MXNet's array.
        """
        is_same = self._array is array
        if not is_same:
            self._array, self.version = array, None
            self.version = array_version.version_of(array) if array_version.is_readable() else None
        before, self.last = self.last, self.version() if self.version else 0
        return is_same and self.last == before + 1


class Updated(NamedTuple):
    """The parameters of one update on a GPU: CuPy arrays, and the packed arrays that hold their memory."""

    gpu: Gpu
    arrays: Sequence[Any]
    packed: Sequence[Any]


class _Copy(NamedTuple):
    """The GPU's copy of a parameter: valid while the count of writes to the host's array is ``writes``."""

    array: Any
    update: Updated
    address: int
    version: Callable[[], int]
    writes: int


class State:
    """An optimiser's state for one parameter: float32 arrays, and the number of updates; and the parameter's copy.

    The arrays are on the host until the first update, then on a GPU. Pickling copies them to the host. The parameter's
    copy is on the GPU of its last update.
    """

    def __init__(self, arrays: Sequence[np.ndarray], updates: int = 0) -> None:
        self._arrays: Sequence[Any] = arrays
        #: The parameter's shape.
        self.shape: Shape = arrays[0].shape
        self.updates = updates
        self._gpu: Gpu | None = None
        self._writes, self.gradient_writes = WriteCount(), WriteCount()
        #: All of the copy's fields in one object, which other threads read meanwhile (``cached_at``).
        self._copy: _Copy | None = None
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

    def pin(self, parameter: Any, address: int) -> None:
        """Pin the memory of ``parameter``, MXNet's array, at its second update at the same address."""
        if self._pinned[0] != address:
            self._pinned = address, None
        elif self._pinned[1] is None:
            self._pinned = address, Pinned(parameter, address, ITEM_BYTES * math.prod(self.shape))

    def begin(self, parameter: Any) -> _Copy | None:
        """Return the parameter's copy, if it is valid, for the caller to update, and drop it until ``keep``.

        So a failed update leaves no copy. parameter: MXNet's array. The caller is a function of ``engine_queue``.
        """
        copy, self._copy = self._copy, None
        return copy if self._writes.is_once(parameter) else None

    def keep(self, array: Any, update: Updated, address: int) -> None:
        """Keep ``array``, whose values the update writes to the parameter's address; only updates may change it."""
        if self._writes.version:
            self._copy = _Copy(array, update, address, self._writes.version, self._writes.last + 1)
            _states[address] = self

    def copy_at(self, address: int) -> Any | None:
        """Return the copy's CuPy array if it has the values of the parameter at that address, else None."""
        copy = self._copy
        return copy.array if copy and copy.address == address and copy.version() == copy.writes else None

    def _on_host(self) -> list[np.ndarray]:
        return [array.get() if hasattr(array, "get") else np.asarray(array) for array in self._arrays]

    def __reduce__(self) -> Any:
        import mxnet as mx

        mx.nd.waitall()
        return State, (self._on_host(), self.updates)


#: States by the parameter's address. A state with a copy keeps MXNet's array alive, so that no other array gets its
#: address. An entry may be outdated; ``copy_at`` checks that.
_states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()


def cached_at(address: int) -> Any | None:
    """Return a CuPy array, on any GPU, with the values of MXNet's parameter at that address; None if there is none.

    The caller may only read the array, and is a function that MXNet's engine runs to read the parameter.
    """
    found = _states.get(address)
    return found.copy_at(address) if found else None


class Update(NamedTuple):
    """One parameter's update: CuPy float32 arrays of one shape. The parameter and its states change.

    rate: the learning rate. decay: the weight decay's factor.
    """

    parameter: Any
    gradient: Any
    states: Sequence[Any]
    rate: float
    decay: float


class Rule(NamedTuple):
    """An optimiser's rule: Adam (Kingma and Ba, 2015), or SGD, whose momentum is beta1.

    Adam's bias correction is part of each Update's rate. scale: the factor of gradients. clip: the limit of the
    absolute values of gradients' elements, infinite for no limit.
    """

    is_adam: bool
    scale: float
    clip: float
    beta1: float
    beta2: float = 0.0
    epsilon: float = 0.0

    @property
    def states(self) -> int:
        """The number of arrays in a parameter's state."""
        return 2 if self.is_adam else 1


def rows_of(updates: Sequence[Update]) -> np.ndarray:
    """Return ``struct Row`` of training.cu for each parameter: four addresses, the element count, and both factors."""
    factors = np.array([(one.rate, one.decay) for one in updates], np.float32).view(np.int64)
    rows = np.zeros((len(updates), 6), np.int64)
    addresses = [[array.data.ptr for array in (one.parameter, one.gradient, *one.states)] for one in updates]
    rows[:, : len(addresses[0])] = addresses
    rows[:, 4], rows[:, 5:] = [one.parameter.size for one in updates], factors
    return rows


def apply(rule: Rule, updates: Sequence[Update]) -> None:
    """Update all parameters by a rule in one launch, on the current device and stream."""
    numbers = rule.scale, rule.clip, rule.beta1, rule.beta2, 1 - rule.beta1, 1 - rule.beta2, rule.epsilon
    arrays, grid = {"x": cuda.cupy().asarray(rows_of(updates))}, (_UPDATE_BLOCKS, len(updates))
    # A parameter may have any number of elements.
    launch("update", arrays, tuple(map(np.float32, numbers)), 1 << 31, grid=grid, ADAM=int(rule.is_adam))


class Operand(NamedTuple):
    """One parameter of an update: MXNet's arrays, their addresses, the state, learning rate and weight decay."""

    parameter: Any
    gradient: Any
    addresses: tuple[int, int]
    state: State
    rate: float
    decay: float


def update(rule: Rule, operands: Sequence[Operand]) -> None:
    """Update each parameter on the GPU that has its gradient, or on GPU 0 if the gradient is in MXNet's array.

    Raises ProblemError, before anything changes, if the array of a gradient on a GPU was changed, or if an earlier
    update has used the gradient. Raises DeviceError, with the GPU's number, if a GPU fails: its parameters and states
    are unchanged if it lacked memory, and otherwise may be partly updated. Other GPUs' parameters may be updated.
    """
    cached = [one.state.begin(one.parameter) for one in operands]
    # If a gradient's array was written only once, by the backward pass, no element can have changed since.
    written_once = [one.state.gradient_writes.is_once(one.gradient) for one in operands]
    for one in operands:
        one.state.pin(one.parameter, one.addresses[0])
    with _lock:
        taken = [pending.pop(one.addresses[1], None) for one in operands]
    # The host arrays of each parameter and its gradient.
    hosts = [[host_view(address, one.state.shape) for address in one.addresses] for one in operands]
    deferred = [
        gradient if _is_deferred(gradient, host.reshape(-1).view(np.uint32), once) else None
        for gradient, (_, host), once in zip(taken, hosts, written_once)
    ]
    gpus = [gradient.gpu if gradient else host_context.gpu(0) for gradient in deferred]
    different = list(dict.fromkeys(gpus))

    def on_gpu(number: int) -> None:
        gpu = different[number]
        mine = [number for number, one in enumerate(gpus) if one is gpu]
        targets = [hosts[n][0] for n in mine]
        there: list[Any] = []
        for n in mine:
            copy, gradient = cached[n], deferred[n]
            there += [copy.array if copy and copy.update.gpu is gpu else None, gradient.gradient if gradient else None]
        first = cached[mine[0]]
        # The last update's packed arrays serve again if it was for the same parameters in the same order.
        last = first.update if first and [*map(id, there[::2])] == [*map(id, first.update.arrays)] else None
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
            apply(rule, updates)
            return packed, found

        inputs = [array for array, copy in zip(chain(*(hosts[n] for n in mine)), there) if copy is None]
        with using(targets) as flags, gpu.lock:
            found = with_retry([gpu], lambda _: step(gpu, inputs, targets, compute, pinned_outputs=flags))
        for n, array in zip(mine, found.arrays):
            operands[n].state.keep(array, found, operands[n].addresses[0])

    on_each(on_gpu, different)


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
