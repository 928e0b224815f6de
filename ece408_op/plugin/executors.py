"""Changes to MXNet's executors: a forward pass waits for one of another mode, pins arguments, and counts their writes.

An executor's arguments use the same memory at each call. The operator cannot pin it: a Custom operator's arrays do not
own their memory, and so cannot keep it alive; nor do they have MXNet's counts of writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.runtime import pinned

from . import array_version, bridge, default_layout


def install() -> None:
    """Replace the executors' forward; once per process."""
    forward = mx.executor.Executor.forward

    @wraps(forward)
    def prepared(self: Any, is_train: bool = False, **keywords: Any) -> Any:
        _finish_another_mode(self, is_train)
        if pinned.wanted or array_version.wanted:
            _pin_and_count(self)
        return forward(self, is_train, **keywords)

    mx.executor.Executor.forward = prepared
    mx.nd.NDArray._sync_copyfrom = _counted_afterwards(mx.nd.NDArray._sync_copyfrom)


def _counted_afterwards(copy: Callable[..., None]) -> Callable[..., None]:
    """Return MXNet's copy of a NumPy array that is counted as a write after it, too.

    MXNet counts it only before it copies. A call in another thread may find that count, and half of the new values.
    """

    @wraps(copy)
    def copied(self: Any, source: Any) -> None:
        copy(self, source)
        if array_version.counts_writes() and self.stype == "default" and not bridge.on_gpu(self):
            default_layout.reorder(self)  # an empty write

    return copied


def _finish_another_mode(executor: Any, is_train: bool) -> None:
    """Wait for a forward pass with another is_train.

    Operators read is_train when they run, from a field of the executor. A pending pass would get the next one's value:
    max-pooling would have wrong gradients, and ``gpu_network``'s node would have none.
    """
    if vars(executor).get("_ece408_is_train", is_train) != is_train:
        for output in executor.outputs:
            output.wait_to_read()
    executor._ece408_is_train = is_train


def _pin_and_count(executor: Any) -> None:
    """Pin the arrays that earlier calls have copied to a GPU, and count MXNet's writes to those that calls compare.

    They stay so until the executor is freed.
    """
    own = vars(executor).get("_ece408_arrays")
    if own is None:
        # The executor's own NDArrays, by address; a Pinned object replaces each one that is pinned.
        own = array_version.by_address([*executor.arg_arrays, *executor.aux_arrays])
        executor._ece408_arrays = own
    if own.keys() & array_version.wanted.keys() and array_version.is_readable():
        arrays = array_version.by_address([*executor.arg_arrays, *executor.aux_arrays])
        executor._ece408_counted = [array_version.Counted(*one) for one in arrays.items()]
    for address in own.keys() & pinned.wanted.keys():
        size, owner = pinned.wanted.pop(address, 0), own[address]
        if size and not isinstance(owner, pinned.Pinned):
            # The copied memory may have been freed, and this array may be a smaller one in its place.
            own[address] = pinned.Pinned(owner, address, min(size, np.dtype(owner.dtype).itemsize * owner.size))
