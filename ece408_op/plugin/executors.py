"""Changes to MXNet's executors: a forward pass waits for one of another mode, and pins arguments.

An executor's arguments use the same memory at each call. The operator cannot pin it: a Custom operator's arrays do not
own their memory, and so cannot keep it alive.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import pinned

from . import bridge


def install() -> None:
    """Replace the executors' forward; once per process."""
    forward = mx.executor.Executor.forward

    @wraps(forward)
    def prepared(self: Any, is_train: bool = False, **keywords: Any) -> Any:
        _finish_another_mode(self, is_train)
        if pinned.wanted:
            _pin(self)
        return forward(self, is_train, **keywords)

    mx.executor.Executor.forward = prepared


def _finish_another_mode(executor: Any, is_train: bool) -> None:
    """Wait for a forward pass with another is_train.

    Operators read is_train when they run, from a field of the executor. A pending pass would get the next one's value:
    max-pooling would have wrong gradients, and ``gpu_network``'s node would have none.
    """
    if vars(executor).get("_ece408_is_train", is_train) != is_train:
        for output in executor.outputs:
            output.wait_to_read()
    executor._ece408_is_train = is_train


def _pin(executor: Any) -> None:
    """Pin the arguments that earlier calls have copied to a GPU; they stay pinned until the executor is freed."""
    found = vars(executor).get("_ece408_pinned")
    if found is None:
        arrays = [array for array in executor.arg_arrays if ITEM_BYTES * array.size >= pinned.LEAST_BYTES]
        arrays = [array for array in arrays if array.stype == "default" and not bridge.on_gpu(array)]
        # The executor's own NDArrays, by address; a Pinned object replaces each one that is pinned.
        found = executor._ece408_pinned = dict(zip(bridge.addresses(arrays), arrays))
    for address in found.keys() & pinned.wanted.keys():
        size, owner = pinned.wanted.pop(address, 0), found[address]
        if size and not isinstance(owner, pinned.Pinned):
            # The copied memory may have been freed, and this array may be a smaller one in its place.
            found[address] = pinned.Pinned(owner, address, min(size, np.dtype(owner.dtype).itemsize * owner.size))
