"""MXNet's interface of the operator ``New``: its attributes, shapes, types, forward and backward.

    mx.nd.Custom(x, w, op_type="New", kernel=(5, 5), num_filter=50)

MXNet passes all attributes as text, and ends the process when a Prop's constructor raises. So the constructor only
stores them, and ``infer_shape`` checks them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import mxnet as mx
import numpy as np

from ece408_op.core import dispatch, tuning
from ece408_op.core.kernel import CudaKernel, Kernel
from ece408_op.errors import DeviceError, ProblemError
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from . import _cpu_context, _device_context, _shapes, bridge, default_layout, host_context, mxnet_errors, op_times
from .attributes import INPUTS, Attributes
from .op_times import Timing

#: Keywords of nd.Custom that are not the operator's attributes.
_OTHERS = ("op_type", "name", "out")


class NewProp(mx.operator.CustomOpProp):
    """Shapes, types and the creation of the operator, which has inputs data, weight and maybe bias, and one output."""

    def __init__(self, **attributes: str) -> None:
        super().__init__()
        self._text = attributes

    @cached_property
    def _attributes(self) -> Attributes:
        return Attributes.parse(self._text)

    def problem(self, x: tuple[int, ...], w: tuple[int, ...]) -> ConvProblem:
        """Return the problem for these shapes of data and weight, which infer_shape has accepted."""
        return _problem(self._attributes, x, w)

    def list_arguments(self) -> list[str]:
        """Return the inputs' names; ``infer_shape`` reports wrong attributes."""
        try:
            return list(self._attributes.inputs)
        except ProblemError:
            return list(INPUTS[:2])

    def declare_backward_dependency(
        self, out_grad: Sequence[int], in_data: Sequence[int], out_data: Sequence[int]
    ) -> list[int]:
        """Return the arrays that gradients read: the output's gradient, data and weight, so that no output is kept."""
        return [*out_grad, *in_data[:2]]

    @mxnet_errors.reported_at_once
    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]], list[Any]]:
        """Return the shapes of inputs and output as far as known: -1 is an unknown size, [] an unknown rank."""
        attributes = self._attributes
        default_layout.check_subgraph(self._text)
        inputs, output = _shapes.infer(attributes, tuple(map(tuple, in_shape)))
        return list(map(list, inputs)), [list(output)], []

    @mxnet_errors.reported_at_once
    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return float32 for all arrays, whether their types are known or not."""
        self._attributes  # noqa: B018 - this checks the attributes if infer_shape has not been called before
        for name, dtype in zip(INPUTS, in_type):
            bridge.check_float32(dtype, name)
        return [np.float32] * len(in_type), [np.float32], []

    @mxnet_errors.reported_at_once
    def infer_storage_type(self, in_stype: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Return dense storage for all arrays."""
        for name, stype in zip(INPUTS, in_stype):
            bridge.check_dense(stype, name)
        return list(in_stype), ["default"], []

    @mxnet_errors.reported_at_once
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> NewOp:
        """Return the operator for arrays of one device and shape."""
        home = "gpu" if ctx.device_type == "gpu" else "cpu"
        number = ctx.device_id if home == "gpu" else 0
        chip = cuda.chip(number) if _computes_on(self._attributes, home) == "gpu" else None
        return NewOp(self._attributes, home, number, chip)


class NewOp(mx.operator.CustomOp):
    """One layer on one device; MXNet calls forward from its worker threads, several at a time.

    home: the device of the arrays, "cpu" or "gpu". number: that GPU's number. chip: the GPU that computes, None if the
    CPU does.
    """

    def __init__(self, attributes: Attributes, home: str, number: int, chip: Chip | None) -> None:
        super().__init__()
        self._attributes = attributes
        self._home = home
        self._number = number
        self._chip = chip

    @mxnet_errors.reported_with_outputs
    def forward(self, is_train: bool, req: Sequence[str], in_data: Any, out_data: Any, aux: Any) -> None:
        """Compute the output as ``req`` asks: null, write, inplace or add."""
        if req[0] != "null":
            self.compute(*in_data, *out_data, add=req[0] == "add")

    def compute(self, *arrays: Any, add: bool = False) -> None:
        """Fill the output or, with ``add``, add to it; record the call.

        arrays: the NDArrays data, weight, bias (if any) and output, whose inputs are ready. Returns when the output is
        filled. Raises Ece408Error.
        """
        x, w, *bias, y = arrays
        self._run_and_record(_problem(self._attributes, x.shape, w.shape), (x, w, y), add, *bias)

    def _run_and_record(self, problem: ConvProblem, operands: Sequence[Any], add: bool, bias: Any = None) -> None:
        """Fill the third operand of a problem, or add to it, and record the call."""
        start = time.perf_counter()
        attributes, device = self._attributes, "cpu" if self._chip is None else "gpu"
        selection = attributes.impl, attributes.precision, self._chip
        kernel = dispatch.select_with_gradients(problem, device, *selection)
        if attributes.tune and isinstance(kernel, CudaKernel) and problem.batch:
            tuning.tune_once(kernel, problem, self._number)
        timing = self._run_in_context(kernel, problem, operands, add, bias) if problem.batch else Timing(0.0)
        if not problem.batch and not add:
            self._fill(operands[2], 0)  # sums over an empty batch
        whole = time.perf_counter() - start
        op_times.record(op_times.OpTime(attributes.layer, problem, kernel.name, kernel.device, *timing, whole))

    def _run_in_context(
        self, kernel: Kernel, problem: ConvProblem, operands: Sequence[Any], add: bool, bias: Any = None
    ) -> Timing:
        if isinstance(kernel, CudaKernel) and self._home == "gpu":
            addresses = tuple(map(bridge.address_of, operands))
            address = None if bias is None else bridge.address_of(bias)
            return _device_context.convolve(kernel, problem, addresses, self._number, add, address)
        a, b, out = map(bridge.cpu_view, operands, problem.shapes)
        bias_view = None if bias is None else bridge.cpu_view(bias)
        # A kernel's output must not overlap its inputs.
        separate = add or any(np.may_share_memory(each, out) for each in (a, b, bias_view) if each is not None)
        target = np.empty_like(out) if separate else out
        if isinstance(kernel, CudaKernel):
            timing = host_context.convolve(kernel, problem, a, b, target, bias_view)
        else:
            timing = _cpu_context.convolve(kernel, problem, a, b, target, bias_view)
        if add:
            out += target
        elif separate:
            out[...] = target
        return timing

    @mxnet_errors.reported_with_outputs
    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """Compute the gradients to data, weight and bias, each as its ``req`` asks.

        Raises DeviceError for a fused operator, and fills its gradients with NaN so that no training uses old values.
        """
        wanted = [name for name, request in zip(INPUTS, req) if request != "null"]
        gradients, adds = dict(zip(INPUTS, in_grad)), {name: r == "add" for name, r in zip(INPUTS, req)}
        if self._attributes.fuse:
            for name in wanted:
                self._fill(gradients[name], 0xFF)
            raise DeviceError(f"fuse={self._attributes.fuse!r} has no gradient; train with a New that is not fused")
        x, w = in_data[:2]
        (y,) = out_grad
        problem = _problem(self._attributes, x.shape, w.shape)
        for name in wanted:
            if name == "data":
                self._run_and_record(problem.data_gradient, (y, w, gradients[name]), adds[name])
            elif name == "weight":
                self._run_and_record(problem.weight_gradient, (x, y, gradients[name]), adds[name])
            elif problem.batch:
                self._bias_gradient(problem, y, gradients[name], adds[name])
            elif not adds[name]:
                self._fill(gradients[name], 0)

    def _bias_gradient(self, problem: ConvProblem, y: Any, out: Any, add: bool) -> None:
        """Sum y over images and pixels on the arrays' device, because a copy to a GPU takes longer than the sum."""
        if self._home == "gpu":
            addresses = bridge.address_of(y), bridge.address_of(out)
            _device_context.bias_gradient(problem, *addresses, self._number, add)
        else:
            _cpu_context.bias_gradient(problem, bridge.cpu_view(y), bridge.cpu_view(out), add)

    def _fill(self, array: Any, byte: int) -> None:
        """Fill an array with 0, or with NaN if all bits of the byte are set."""
        if self._home == "gpu" and array.size:
            _device_context.fill(bridge.address_of(array), ITEM_BYTES * array.size, byte, self._number)
        elif array.size:
            bridge.cpu_view(array).view(np.uint8)[...] = byte


@lru_cache(maxsize=256)
def _computes_on(attributes: Attributes, home: str) -> str:
    """Return the device that computes, "cpu" or "gpu", for arrays on the device ``home``."""
    device = attributes.device or home
    if dispatch.device_of(attributes.impl, device) != device:
        raise DeviceError(
            f"impl: expected an implementation for the {device}, where "
            f"{'it is to run' if attributes.device else 'the arrays are'}, got "
            f"{attributes.impl!r}; pass device='{dispatch.device_of(attributes.impl, device)}' or another impl"
        )
    if device == "cpu" and home == "gpu":
        raise DeviceError("device: expected 'gpu', where the arrays are, got 'cpu'; copy them to mx.cpu() first")
    return device


@lru_cache(maxsize=1024)
def _problem(attributes: Attributes, x: tuple[int, ...], w: tuple[int, ...]) -> ConvProblem:
    return attributes.problem(x, w)


def parsed_call(data: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[NewProp, tuple[int, ...]]:
    """Return the operator's Prop and the output's shape for a call of nd.Custom.

    Raises Ece408Error if the attributes, or the arrays' shapes or types, are wrong.
    """
    prop = NewProp(**{name: str(value) for name, value in kwargs.items() if name not in _OTHERS})
    if len(data) != len(prop.list_arguments()):
        raise ProblemError(f"expected {', '.join(prop.list_arguments())}, got {len(data)} arrays")
    _, (shape,), _ = prop.infer_shape([array.shape for array in data])
    prop.infer_type([array.dtype for array in data])
    return prop, tuple(shape)


def register() -> None:
    """Register ``New`` with MXNet; once per process."""
    mx.operator.register("New")(NewProp)
