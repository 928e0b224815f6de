"""Large outputs of imperative calls, in memory that earlier ones have left (_output_pool.py).

A call without ``out`` is given one, and goes MXNet's way as ever. So the array that it returns is MXNet's own in all
but where its memory comes from. Recorded calls, small ones, other contexts than mx.cpu(), and all that is wrong, go
without.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mxnet as mx

from ece408_op.errors import Ece408Error
from ece408_op.problem import ITEM_BYTES

from . import _operator, _output_pool, bridge, default_layout


def install() -> None:
    """Put it in front of nd.Custom; once a process."""
    default_layout.replace("mxnet.ndarray", "Custom", _given_an_output(mx.nd.Custom))


def _given_an_output(custom: Any) -> Any:
    @functools.wraps(custom)
    def wrapped(*data: Any, **kwargs: Any) -> Any:
        if kwargs.get("op_type") == default_layout.OP_TYPE and kwargs.get("out") is None:
            output = _output(data, kwargs)
            if output is not None:
                kwargs = {**kwargs, "out": output}
        return custom(*data, **kwargs)

    return wrapped


def _output(data: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An array for the output; None where MXNet is to make it, or to say what is wrong."""
    if mx.autograd.is_recording() or not all(type(array) is mx.nd.NDArray for array in data):
        return None
    if len(data) != len(_operator.INPUTS) or any(array.context != mx.cpu() for array in data):
        return None
    x, w = (array.shape for array in data)
    if len(x) != 4 or len(w) != 4 or ITEM_BYTES * x[0] * w[0] * x[2] * x[3] < _output_pool.LEAST:  # no more than that
        return None
    try:
        _, shape = _operator.asked(data, kwargs)
        lent = _output_pool.keeper().lend(shape) if ITEM_BYTES * math.prod(shape) >= _output_pool.LEAST else None
    except Ece408Error:
        return None
    return None if lent is None else bridge.from_dlpack(lent)
