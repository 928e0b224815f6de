"""Imperative calls of the package's operators: ``call`` replaces MXNet's nd.Custom, and has three steps.

1. The synchronous fast path. Through MXNet's engine, a call passes two other threads and ten callbacks: about 350
   microseconds, for a kernel that takes 10 or 20. So a small call waits for its inputs and computes in the caller's
   thread. All other calls go through the engine: calls with ``out=`` (the array may have pending readers), calls
   recorded by autograd, large calls (they should overlap with other work), empty batches, and wrong calls, so that
   all errors are reported in the same way. So do all calls while other threads exist: another thread may write an
   input meanwhile, or pass the weight to a built-in Convolution, which changes its layout. A Convolution queued
   earlier begins before the weight's reorder: see ``default_layout.reorder``. MXNet's profiler does not see calls on
   the fast path.
2. An output from the output pool (``output_pool``), for a large call on the CPU. It is passed as ``out=``; only the
   origin of its memory differs from MXNet's own arrays. Calls with ``out=``, recorded calls and wrong calls skip this
   step.
3. Inputs in the default layout (``default_layout``), and the output's gradient too if the call is recorded.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.errors import Ece408Error
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import thread_pool

from . import bridge, default_layout, interrupts, output_pool
from .default_layout import NETWORK, OP_TYPE
from .operator import NewProp, parsed_call

#: The most floating-point operations, and the most bytes of the three arrays, of a small call, by the arrays' device:
#: about 0.1 ms on one core, less on a GPU.
MOST_FLOPS = {"cpu": 8_000_000, "gpu": 100_000_000}
MOST_BYTES = {"cpu": 2_000_000, "gpu": 100_000_000}


def install() -> None:
    """Replace nd.Custom in all modules of MXNet; once per process."""
    custom = mx.nd.Custom
    uninterrupted = interrupts.with_deferred_interrupts(custom)

    @functools.wraps(custom)
    def wrapped(*data: Any, **kwargs: Any) -> Any:
        return call(uninterrupted, data, kwargs)

    default_layout.replace("mxnet.ndarray", "Custom", wrapped)


def call(custom: Any, data: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the steps above for this package's operators; call MXNet's ``custom`` directly for all other operators."""
    op_type, out = kwargs.get("op_type"), kwargs.get("out")
    if op_type not in (OP_TYPE, NETWORK):
        return custom(*data, **kwargs)
    recorded = op_type == OP_TYPE and mx.autograd.is_recording()
    if op_type == OP_TYPE and out is None and not recorded and all(type(each) is mx.nd.NDArray for each in data):
        try:
            prop, shape = parsed_call(data, kwargs)
        except Ece408Error:
            return custom(*data, **kwargs)  # MXNet's call reports the error
        output = _computed_synchronously(data, prop, shape)
        if output is not None:
            return output
        kwargs["out"] = out = _pooled_output(data, shape)
    for array in out if isinstance(out, (list, tuple)) else (out,):
        _in_default_layout(array)
    data = tuple(
        _in_default_layout(array, op_type == OP_TYPE and place > 0, recorded) for place, array in enumerate(data)
    )
    if not recorded:
        return custom(*data, **kwargs)
    # A view, so that the gradient of the output arrives in the default layout.
    view = default_layout.view(custom(*data, **{**kwargs, "out": None}))
    return view if out is None else mx.nd.identity(view, out=out)


def _computed_synchronously(data: tuple[Any, ...], prop: NewProp, shape: tuple[int, ...]) -> Any:
    """Return the output of a small call, or None if the engine has to compute it or to report its error."""
    if not thread_pool.is_only_thread():
        return None
    home, context, shapes = "gpu" if bridge.on_gpu(data[0]) else "cpu", data[0].context, [each.shape for each in data]
    if 0 in shapes[0] or any(array.context != context for array in data[1:]):
        return None
    problem = prop.problem(*shapes[:2])
    if problem.flops > MOST_FLOPS[home] or problem.bytes > MOST_BYTES[home]:
        return None
    if context.device_type in ("cpu_shared", "cpu_pinned"):  # the engine's output is in mx.cpu()
        return None
    try:
        operator = prop.create_operator(context, shapes, None)
    except Ece408Error:
        return None
    if home == "cpu":
        for array in data:
            default_layout.reorder(array)
    for array in data:
        array.wait_to_read()  # raises the failure of the input's operator, which MXNet reports only once
    try:
        output = mx.nd.empty(shape, context, np.float32)
        operator.compute(*data, output)
    except Exception:
        return None
    return output


def _pooled_output(data: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    """Return a pooled array for a large call's output; None if MXNet has to make the output or to report an error."""
    if ITEM_BYTES * math.prod(shape) < output_pool.LEAST_BYTES or any(array.context != mx.cpu() for array in data):
        return None
    pool = output_pool.pool()
    try:
        return pool.array(shape)
    except Ece408Error:
        return None


def _in_default_layout(array: Any, shared: bool = False, recorded: bool = False) -> Any:
    """Return the array, or a copy, which will have the default layout when the next call begins.

    shared: the array is a weight, which other threads may pass to a built-in Convolution at any moment. recorded: the
    backward pass reads the array too, and a built-in Convolution may read it before.
    """
    if not isinstance(array, mx.nd.NDArray) or bridge.on_gpu(array):
        return array
    may_change = shared and (recorded or not thread_pool.is_only_thread())
    if may_change and array.stype == "default" and array.ndim == 4 and array.size and array.dtype == np.float32:
        # Only this call has the copy, so its layout stays. Slices always have the default layout.
        return mx.nd.slice_axis(array, axis=0, begin=0, end=None)
    default_layout.reorder(array)
    return array
