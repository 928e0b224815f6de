"""The operator ``New`` as MXNet sees it: its attributes, shapes and types, and its forward.

    mx.nd.Custom(x, w, op_type="New", kernel=(5, 5), num_filter=50)

MXNet hands all attributes over as text and ends the process when a Prop's constructor raises, so
the constructor only keeps them; they are judged when shapes are inferred.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from . import bridge, call_record, dispatch, mxnet_errors, plain_layout
from .attributes import Attributes
from .errors import DeviceError, ProblemError
from .kernel import CpuKernel
from .problem import ConvProblem

_UNKNOWN = -1
_INPUTS = ("data", "weight")


class NewProp(mx.operator.CustomOpProp):
    """Shapes, types and the creation of the operator: inputs data and weight, one output."""

    def __init__(self, **attributes: str) -> None:
        super().__init__(need_top_grad=True)
        self._text = attributes

    def list_arguments(self) -> list[str]:
        """The inputs' names."""
        return list(_INPUTS)

    def list_outputs(self) -> list[str]:
        """The output's name."""
        return ["output"]

    @mxnet_errors.keeps_reason(asynchronous=False)
    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]], list[Any]]:
        """Shapes of data, weight and output, as far as they are known: -1 is an unknown size, [] an unknown rank."""
        attributes = Attributes.parse(self._text)
        plain_layout.check_subgraph(self._text)
        data, weight = _agreed_shapes(list(in_shape[0]), list(in_shape[1]), attributes)
        if not data:
            return [data, weight], [[]], []
        output = [data[0], attributes.num_filter]
        for axis, name in ((2, "rows"), (3, "columns")):
            size = data[axis]
            if size != _UNKNOWN and size < attributes.kernel:
                raise ProblemError(
                    f"kernel: expected at most the image's {size} {name}, got ({attributes.kernel}, "
                    f"{attributes.kernel}) for data of shape {_text(data)}; use a smaller kernel or larger images"
                )
            output.append(_UNKNOWN if size == _UNKNOWN else size - attributes.kernel + 1)
        return [data, weight], [output], []

    @mxnet_errors.keeps_reason(asynchronous=False)
    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """float32 for everything, whether known yet or not."""
        Attributes.parse(self._text)
        for name, dtype in zip(_INPUTS, in_type):
            if dtype is not None and np.dtype(dtype) != np.float32:
                raise ProblemError(f"{name}: expected float32, got {np.dtype(dtype).name}; convert it with astype")
        return [np.float32, np.float32], [np.float32], []

    @mxnet_errors.keeps_reason(asynchronous=False)
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> NewOp:
        """The operator for arrays of one device and shape."""
        attributes = Attributes.parse(self._text)
        device = attributes.device or ctx.device_type
        if dispatch.device_of(attributes.impl, device) != device:
            raise DeviceError(
                f"impl: expected an implementation for the {device}, where the arrays live, got "
                f"{attributes.impl!r}; pass device='{dispatch.device_of(attributes.impl, device)}' or another impl"
            )
        if device != ctx.device_type:
            raise DeviceError(f"device: expected {ctx.device_type!r}, where the arrays live, got {device!r}")
        return NewOp(attributes)


class NewOp(mx.operator.CustomOp):
    """One layer at work; MXNet calls forward from its worker threads, several at a time."""

    def __init__(self, attributes: Attributes) -> None:
        super().__init__()
        self._attributes = attributes

    @mxnet_errors.keeps_reason(asynchronous=True)
    def forward(self, is_train: bool, req: Sequence[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Compute the output as ``req`` asks: null, write, inplace or add."""
        if req[0] == "null":
            return
        x, w, y = (bridge.cpu_view(array) for array in (*in_data, *out_data))
        problem = ConvProblem.from_shapes(x.shape, w.shape)
        kernel = dispatch.select(problem, "cpu", self._attributes.impl, self._attributes.precision)
        # A kernel may not read what it writes: an output that is its own input goes through a copy.
        aside = req[0] == "add" or np.may_share_memory(x, y) or np.may_share_memory(w, y)
        target = np.empty_like(y) if aside else y
        self._compute(kernel, problem, x, w, target)
        if req[0] == "add":
            y += target
        elif aside:
            y[...] = target

    def _compute(self, kernel: CpuKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
        start = time.perf_counter()
        if problem.batch:
            kernel.run(problem, x, w, y, dispatch.thread_count(problem))
        seconds = time.perf_counter() - start
        call_record.record(call_record.OpTime(self._attributes.layer, problem, kernel.name, kernel.device, seconds))

    @mxnet_errors.keeps_reason(asynchronous=True)
    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """Raise: there is no gradient. The gradients are NaN, so that nobody trains on old values."""
        for gradient, request in zip(in_grad, req):
            if request != "null":
                gradient[:] = np.nan
        raise DeviceError("there is no gradient; train with MXNet's Convolution and use New for inference")


def register() -> None:
    """Make ``New`` known to MXNet; once a process."""
    mx.operator.register("New")(NewProp)


def _agreed_shapes(data: list[int], weight: list[int], attributes: Attributes) -> tuple[list[int], list[int]]:
    """Both shapes, each filled in from the attributes and from the other; raises where they disagree."""
    for name, shape in zip(_INPUTS, (data, weight)):
        if shape and len(shape) != 4:
            layout = "(batch, channels, height, width)" if name == "data" else "(filters, channels, kernel, kernel)"
            raise ProblemError(f"{name}: expected 4 dimensions {layout}, got shape {_text(shape)}")
    channels = data[1] if data else _UNKNOWN
    expected = [attributes.num_filter, channels, attributes.kernel, attributes.kernel]
    if not weight:
        return data, expected
    for want, got in zip(expected, weight):
        if _UNKNOWN not in (want, got) and want != got:
            raise ProblemError(
                f"weight: expected shape {_text(expected)} (num_filter, data's channels, kernel), got {_text(weight)}"
            )
    expected = [got if want == _UNKNOWN else want for want, got in zip(expected, weight)]
    if data and channels == _UNKNOWN:
        data[1] = expected[1]
    return data, expected


def _text(shape: Sequence[int]) -> str:
    return "(" + ", ".join("?" if size == _UNKNOWN else str(size) for size in shape) + ")"
