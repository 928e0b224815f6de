"""Convolution by cuDNN, through NVIDIA's Python package nvidia-cudnn-frontend.

It computes in float32: engines that use tensor cores would round the factors to TF32, and are excluded.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command

from ._definition import Shape
from ._layers import Convolution
from ._schedule import Call


@cache
def library() -> Any:
    """Return the package cudnn; raises DeviceError if it, or cuDNN itself, is missing."""
    try:
        package = import_module("cudnn")
        package.backend_version()
    except Exception as error:
        raise DeviceError(
            f"impl: expected cuDNN for 'cudnn', got {type(error).__name__}: {error}; {command('cudnn')}, or take "
            "impl='auto'"
        ) from error
    return package


def is_there() -> bool:
    """Return whether cuDNN can be used here."""
    try:
        library()
    except DeviceError:
        return False
    return True


@cache
def _handle(device: int) -> int:
    handle: int = library().create_handle()
    return handle


class CudnnConvolution:
    """One Convolution without its bias, planned by cuDNN's heuristics for one batch size."""

    def __init__(self, operator: Convolution, x: Shape, w: Shape, y: Shape, device: int) -> None:
        package = library()
        self._handle = _handle(device)
        single = package.data_type.FLOAT
        graph = package.pygraph(
            handle=self._handle, io_data_type=single, intermediate_data_type=single, compute_data_type=single
        )
        self._x, self._w = (
            graph.tensor(name=name, dim=list(shape), stride=_strides(shape), data_type=single)
            for name, shape in (("x", x), ("w", w))
        )
        self._y = graph.conv_fprop(
            image=self._x,
            weight=self._w,
            padding=list(operator.pad),
            stride=list(operator.stride),
            dilation=list(operator.dilate),
        )
        self._y.set_output(True).set_data_type(single).set_dim(list(y)).set_stride(_strides(y))
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
            graph.deselect_numeric_notes([package.numerical_note.TENSOR_CORE])
            graph.check_support()
            graph.build_plans(package.build_plan_policy.HEURISTICS_CHOICE)
        except Exception as error:
            raise DeviceError(f"cuDNN: expected a plan for {operator} on data {x}, got {error}") from error
        self._graph = graph
        self.scratch: int = graph.get_workspace_size()

    def bind(self, x: Any, w: Any, out: Any, scratch: Any) -> Call:
        """Return the call that launches the convolution on the current stream."""
        package, current = library(), cuda.cupy().cuda.get_current_stream
        pointers = {self._x: x.data.ptr, self._w: w.data.ptr, self._y: out.data.ptr}
        workspace = 0 if scratch is None else scratch.data.ptr

        def call() -> None:
            package.set_stream(handle=self._handle, stream=current().ptr)
            self._graph.execute(pointers, workspace, handle=self._handle)

        return call


def _strides(shape: Shape) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]
