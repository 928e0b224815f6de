"""cudnn: NVIDIA's library, through its Python package nvidia-cudnn-frontend, where it is faster than our kernels.

The first call for a layer times the first plans of cuDNN's heuristics, and the process keeps the fastest. Plans that
round the factors to TF32 or shorter formats, accumulate in these, or have transforms that lose digits are excluded. The
results of two runs may differ in the last bits, because the order of cuDNN's sums and the fastest plan vary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from importlib import import_module
from itertools import chain, islice
from math import pi, prod, sqrt
from threading import Lock
from typing import Any

import numpy as np

from ece408_op.core import timer
from ece408_op.core.kernel import EPS32, CudaKernel, float32_bound
from ece408_op.errors import DeviceError
from ece408_op.problem import (
    ATTRIBUTES,
    DATA_GRADIENT,
    DILATE,
    GROUPS,
    ITEM_BYTES,
    STRIDE,
    WEIGHT_GRADIENT,
    ConvProblem,
    DataGradient,
    WeightGradient,
)
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command
from ece408_op.runtime.launch import Chip, LibraryCall, Plan, round_up

#: The alignment of tensors' addresses, in bytes.
_ALIGNMENT = 16
_EXCLUDED = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "WINOGRAD_TILE_13x13")
#: The most scratch memory of a plan, in bytes.
_WORKSPACE_BYTES = 1 << 30
#: The plans that a layer's first call times, as many as PyTorch's (torch.backends.cudnn.benchmark_limit); the timed
#: calls per plan; the seconds after which no further call of a plan is timed.
_TIMED_PLANS, _TIMED_CALLS, _PLAN_SECONDS = 10, 3, 0.05
#: The seconds after which no further plan of a layer is timed.
TIMED_SECONDS = 1.0
#: From this many channels and filters on, cuDNN is faster than blocked_gemm, in a forward pass and in a weight gradient
#: (ece408-bench layers --gradient weight).
_WIDE, _WIDE_WEIGHT_GRADIENT = 64, 32
#: The tile size of cuDNN's FFT; the fewest filter elements, times the share of its tiles that an image fills, with
#: which the FFT is faster than three products on tensor cores (the same command).
_FFT_TILE, _FFT_ELEMENTS = 32, 20


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


#: A call sets the stream of its GPU's handle first, so it holds this lock until its work is queued.
_lock = Lock()


def _handle() -> Any:
    """Return the current GPU's handle."""
    return _handle_of(cuda.cupy().cuda.runtime.getDevice())


@cache
def _handle_of(device: int) -> Any:
    return library().create_handle()


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
                self._bytes = dict(zip(problem.operands, (ITEM_BYTES * prod(shape) for shape in problem.shapes)))
                self._create_plans(package)
                #: An iterator that builds the remaining plans; the number of the plan to run.
                self._plans = self._built()
                self._number = next(self._plans, -1)
                if self._number < 0:
                    raise RuntimeError("none that can be built")
            except Exception as error:
                raise DeviceError(f"cuDNN: expected a plan for {problem}, got {error}") from error
        self._timed = False

    def _create_plans(self, package: Any) -> None:
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
        self._graph.deselect_numeric_notes([getattr(package.numerical_note, name) for name in _EXCLUDED])
        self._graph.deselect_workspace_greater_than(_WORKSPACE_BYTES)
        self._graph.check_support()

    def _built(self) -> Iterator[int]:
        """Build one plan after another, in the order of cuDNN's heuristics; yield the numbers of those built."""
        for number in range(self._graph.get_execution_plan_count()):
            try:
                self._graph.build_plan_at_index(number)
            except Exception:  # from cuDNN: the plan is excluded, or not for this GPU
                continue
            yield number

    def __call__(self, addresses: Mapping[str, int], stream: Any) -> None:
        """Queue the computation on a stream of the current GPU, for which it must have been planned.

        The first call also times other plans, on the caller's arrays, unless a CUDA graph is captured.
        """
        with _lock, stream:
            gpu, filled = cuda.cupy().cuda, list(self._tensors)[-1]
            # cuDNN refuses addresses that are not aligned.
            copies = {name: gpu.alloc(self._bytes[name]) for name, start in addresses.items() if start % _ALIGNMENT}
            pointers = {t: copies[name].ptr if name in copies else addresses[name] for name, t in self._tensors.items()}
            for name in copies.keys() - {filled}:
                self._copy(name, addresses[name], copies[name].ptr, stream)
            library().set_stream(handle=_handle(), stream=stream.ptr)
            if not self._timed and not stream.is_capturing():
                self._number, self._timed = self._fastest(pointers), True
                # Otherwise CuPy's pool would keep the workspaces of all timed plans.
                cuda.cupy().get_default_memory_pool().free_all_blocks(stream)
            self._execute(self._number, pointers)
            if filled in copies:
                self._copy(filled, copies[filled].ptr, addresses[filled], stream)

    def _copy(self, name: str, source: int, target: int, stream: Any) -> None:
        runtime = cuda.cupy().cuda.runtime
        runtime.memcpyAsync(target, source, self._bytes[name], runtime.memcpyDeviceToDevice, stream.ptr)

    def _execute(self, number: int, pointers: Mapping[Any, int]) -> None:
        size = self._graph.get_workspace_size_plan_at_index(number)
        # CuPy's pool reuses the memory only for later work of this stream. Plans need an address even for 0 bytes.
        workspace = cuda.cupy().cuda.alloc(max(1, size))
        self._graph.execute_plan_at_index(pointers, workspace.ptr, number, handle=_handle())

    def _fastest(self, pointers: Mapping[Any, int]) -> int:
        """Return the number of the fastest of the first plans; plans that fail or lack memory are left out."""
        seconds: dict[int, float] = {}
        end = time.perf_counter() + TIMED_SECONDS
        clock = timer.gpu_clock("cudnn")
        for number in chain([self._number], islice(self._plans, _TIMED_PLANS - 1)):
            try:
                run = partial(self._execute, number, pointers)
                seconds[number] = min(timer.measure(run, clock, repeats=_TIMED_CALLS, budget=_PLAN_SECONDS).seconds)
            except (RuntimeError, MemoryError):
                continue
            if time.perf_counter() > end:
                break
        return min(seconds, key=lambda number: seconds[number], default=self._number)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@lru_cache(maxsize=256)
def _graph(problem: ConvProblem, device: int) -> _Graph:
    with cuda.on(device):
        return _Graph(problem)


def forget_plans() -> None:
    """Look for cuDNN again at the next call, and plan and time each layer again."""
    for cached in (library, _handle_of, _graph):
        cached.cache_clear()


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
    call = LibraryCall(problem.operands, _planned(problem))
    return Plan({}, max(1, problem.batch), lambda images: (call,))


#: Winograd's F(4x4, 3x3), the least precise transform that is not excluded. For factors of equal variance, a rounding
#: error of a transformed product has 31 times the effect on an output of an error of a product: along each axis the
#: root of the largest row of A^2 (G^2 1) (B^2 1) / 3, with the squares of each element of the matrices in "Fast
#: Algorithms for Convolutional Neural Networks" (A. Lavin and S. Gray, 2016). The transforms and the product round 20
#: times.
AMPLIFICATION, _ROUNDINGS = 31.4, 20
#: A sum of the transformed products has n / 9 terms, and rounds each half as often, on average.
_SUM_ROUNDINGS = 1 / 18
#: Six standard deviations of rounding errors that are uniform up to 2^-24. For normal factors, the mean
#: square divided by the square of the mean magnitude.
_DEVIATIONS, _NORMAL = 6 / sqrt(3), pi / 2


def _bound(problem: ConvProblem) -> float:
    """Return the larger of two error bounds: a float32 sum's, and Winograd's for independent roundings and factors.

    Independent roundings add up like a random walk (N. Higham and T. Mary, SIAM J. Sci. Comput. 41, 2019). The FFT
    amplifies none. For other factors, only norms of whole tiles bound the errors of both algorithms (B. Barabasz et
    al., ACM Trans. Math. Softw. 46, 2020), so ``_largest_in_maps`` takes the place of |x|.
    """
    walk = sqrt(_ROUNDINGS / problem.products + _SUM_ROUNDINGS)
    return max(float32_bound(problem), _DEVIATIONS * _NORMAL * AMPLIFICATION * walk * EPS32)


def _largest_in_maps(x: np.ndarray) -> np.ndarray:
    """Return x (B, C, H, W) with each value replaced by the largest magnitude in its map; a tile is a part of it."""
    return np.broadcast_to(np.abs(x).max(axis=(2, 3), keepdims=True, initial=0), x.shape)


def is_faster_than_fp16x3(problem: ConvProblem, chip: Chip) -> bool:
    """Return whether cuDNN is installed and its FFT computes a data gradient faster than fp16x3 kernels."""
    if not isinstance(problem, DataGradient) or problem.needs & {STRIDE, DILATE, GROUPS}:
        return False
    elements = 1.0
    for size, taps in ((problem.height, problem.kernel), (problem.width, problem.kernel_width)):
        elements *= taps * size / round_up(size, max(1, _FFT_TILE - taps + 1))
    return elements >= _FFT_ELEMENTS and not KERNEL.not_supported_reasons(problem, chip)


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    if problem.groups > 1 or isinstance(problem, DataGradient):
        return problem.groups == 1
    fewest = _WIDE_WEIGHT_GRADIENT if isinstance(problem, WeightGradient) else _WIDE
    wide = min(problem.channels, problem.filters) >= fewest and problem.kernel * problem.kernel_width > 1
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
    magnitude_images=_largest_in_maps,
)
