"""cudnn: NVIDIA's library, through its Python package nvidia-cudnn-frontend, where it is faster than our kernels.

cuDNN chooses an engine by its heuristics. Engines are excluded that round the factors to TF32 or to shorter formats, or
that add in these. Gradients to the data may differ in the last bits from run to run: the order of cuDNN's sums varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from math import prod
from threading import Lock
from typing import Any

from ece408_op.core.kernel import CudaKernel, sum_bound
from ece408_op.errors import DeviceError
from ece408_op.problem import (
    ATTRIBUTES,
    DATA_GRADIENT,
    DILATE,
    STRIDE,
    WEIGHT_GRADIENT,
    ConvProblem,
    DataGradient,
    WeightGradient,
)
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command
from ece408_op.runtime.launch import Chip, LibraryCall, Plan

_EXCLUDED = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION")
#: The most scratch memory of an engine, in bytes.
_WORKSPACE_BYTES = 1 << 30
#: From this many channels and filters on, cuDNN's engines are faster than blocked_gemm (benchmarks/gradients_gpu.py).
_WIDE = 64
#: Rounding errors of the transforms of cuDNN's Winograd and FFT engines, counted as products of a sum.
_TRANSFORMS = 1 << 8


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


#: cuDNN's handles by GPU: a call sets the handle's stream first, so it holds the lock until its work is queued.
_handles: dict[int, Any] = {}
_lock = Lock()


def _handle() -> Any:
    """Return the current GPU's handle."""
    device = cuda.cupy().cuda.runtime.getDevice()
    if device not in _handles:
        _handles[device] = library().create_handle()
    return _handles[device]


class _Graph:
    """A problem as cuDNN's graph of one node, planned for the current GPU; raises DeviceError if no engine takes it."""

    def __init__(self, problem: ConvProblem) -> None:
        package, attributes = library(), {"stride": problem.stride, "dilation": problem.dilate, "padding": problem.pad}
        single = package.data_type.FLOAT
        words = {name: list(pair) for name, pair in attributes.items()}
        with _lock:
            try:
                self._graph = package.pygraph(
                    handle=_handle(), io_data_type=single, intermediate_data_type=single, compute_data_type=single
                )
                a, b = (
                    self._graph.tensor(name=name, dim=list(shape), stride=_strides(shape), data_type=single)
                    for name, shape in zip(problem.operands[:2], problem.shapes)
                )
                if isinstance(problem, DataGradient):
                    out = self._graph.conv_dgrad(loss=a, filter=b, **words)
                elif isinstance(problem, WeightGradient):
                    out = self._graph.conv_wgrad(image=a, loss=b, **words)
                else:
                    out = self._graph.conv_fprop(image=a, weight=b, **words)
                filled = problem.shapes[2]
                out.set_output(True).set_data_type(single).set_dim(list(filled)).set_stride(_strides(filled))
                self._tensors = dict(zip(problem.operands, (a, b, out)))
                self._plan(package)
            except Exception as error:
                raise DeviceError(f"cuDNN: expected a plan for {problem}, got {error}") from error

    def _plan(self, package: Any) -> None:
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
        self._graph.deselect_numeric_notes([getattr(package.numerical_note, name) for name in _EXCLUDED])
        self._graph.deselect_workspace_greater_than(_WORKSPACE_BYTES)
        self._graph.check_support()
        self._graph.build_plans(package.build_plan_policy.HEURISTICS_CHOICE)
        self.workspace_bytes: int = self._graph.get_workspace_size()

    def __call__(self, addresses: Mapping[str, int], stream: Any) -> None:
        """Queue the computation on a stream of the GPU that it is planned for, the current one."""
        pointers = {tensor: addresses[name] for name, tensor in self._tensors.items()}
        with _lock:
            library().set_stream(handle=_handle(), stream=stream.ptr)
            self._graph.execute(pointers, addresses["workspace"], handle=_handle())


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@lru_cache(maxsize=256)
def _graph(problem: ConvProblem, device: int) -> _Graph:
    with cuda.on(device):
        return _Graph(problem)


def _planned(problem: ConvProblem) -> _Graph:
    return _graph(problem.with_batch(max(1, problem.batch)), cuda.cupy().cuda.runtime.getDevice())


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    try:
        library()
        if chip is not None:
            _planned(problem)
    except DeviceError as error:
        return [str(error)]
    return []


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    graph = _planned(problem)
    call = LibraryCall((*problem.operands, "workspace"), graph)
    # No engine needs an address of size 0, but every plan has one.
    scratch = {"workspace": max(1, graph.workspace_bytes)}
    return Plan({}, max(1, problem.batch), lambda images: (call,), scratch=scratch)


def _bound(problem: ConvProblem) -> float:
    """Return the bound of a float32 sum with the transforms' errors.

    For Winograd's algorithm and the FFT, theory bounds the error by norms of whole tiles: where neighbours in a tile
    have very different magnitudes, or are infinite, the error of an element can be larger.
    """
    return sum_bound(problem.products + _TRANSFORMS)


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    if problem.groups > 1 or isinstance(problem, DataGradient):
        return problem.groups == 1
    wide = min(problem.channels, problem.filters) >= _WIDE and problem.kernel * problem.kernel_width > 1
    return wide and not problem.needs & {STRIDE, DILATE}


KERNEL = CudaKernel(
    "cudnn",
    "cuDNN in float32, if it is installed",
    (),
    _plan,
    _limits,
    _bound,
    recommended=_recommended,
    features=ATTRIBUTES | {DATA_GRADIENT, WEIGHT_GRADIENT},
)
