"""Layers: implementations of ``New`` and their peers, timed on the same arrays, every timed output checked.

On the CPU a contestant's calls are timed as a user makes them, with fresh outputs and with reused ones; on a GPU a
kernel is timed on arrays that are there. An implementation that does not support a layer is a row that says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ece408_op.core import dispatch, timer
from ece408_op.core.kernel import CudaKernel, Kernel, float32_bound
from ece408_op.core.roofline import Ceilings
from ece408_op.errors import DeviceError, UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

from ._launches import launches
from .results import FAILED, FRESH, KERNEL, REUSED, SKIPPED, Case, Row

#: The peers' names on the CPU; cuDNN's begin with "cuDNN".
BUILT_IN = "MXNet Convolution"
PYTORCH = {"PyTorch contiguous": False, "PyTorch channels_last": True}

#: Images of an output that are compared with float64; all others must be finite.
_CHECKED_ON_CPU, _CHECKED_ON_GPU = 16, 3

#: cuDNN may use an algorithm (Winograd, FFT) that the bound of a plain sum does not hold for: its error is shown, and
#: only a share of the sum of |x||w| beyond this is called wrong.
_CUDNN_BOUND = 0.01


Progress = Callable[[Row], Any]


@dataclass(frozen=True)
class Limits:
    """How often a call is timed: see ``timer.measure``; budget in seconds."""

    repeats: int
    budget: float = math.inf
    fewest: int = 1


@dataclass(frozen=True)
class _Contestant:
    """A contestant that holds its input.

    ``fresh()`` returns its output when that is computed; ``reused(output)`` writes into one, and is None where the
    contestant can't. ``values(output)`` is the output as an array of NumPy or CuPy. A peer has no impl and no kernel.
    """

    name: str
    fresh: Callable[[], Any]
    values: Callable[[Any], Any]
    bound: float
    reused: Callable[[Any], Any] | None = None
    impl: str = ""
    kernel: Kernel | None = None


def known_impls(asked: Iterable[str], device: str) -> list[str]:
    """The implementations that were asked for, with all of the device's kernels in the place of "all".

    Raises UnsupportedError where one is unknown, or another device's.
    """
    names = dispatch.names(device)
    for impl in asked:
        if impl != "all" and dispatch.device_of(impl, device) != device:
            known = ", ".join([dispatch.AUTO, "all", *names])
            raise UnsupportedError(f"--impl: expected one for the {device} ({known}), got {impl!r}; see --context")
    return [name for impl in asked for name in (names if impl == "all" else [impl])]


def cpu_case(
    name: str,
    problem: ConvProblem,
    impls: Iterable[str],
    seed: int,
    limits: Limits,
    ceilings: Ceilings,
    progress: Progress = lambda row: None,
) -> Case:
    """All contestants on one layer of random data on the CPU: MXNet's Convolution, ``New``, PyTorch if installed.

    ``progress`` is called with each row when it is measured.
    """
    import mxnet as mx

    from ece408_op.plugin import bridge

    random = np.random.RandomState(seed)
    data, weight = mx.nd.empty(problem.x_shape), mx.nd.empty(problem.w_shape)
    x, w = bridge.cpu_view(data), bridge.cpu_view(weight)
    for image in x:
        image[...] = random.random_sample(image.shape)
    w[...] = random.standard_normal(problem.w_shape)
    reference = timer.Reference(x, w, _CHECKED_ON_CPU)
    found = _on_cpu(problem, data, weight, (x, w), impls)
    rows = (row for one in found for row in ([one] if isinstance(one, Row) else _cpu_rows(one, reference, limits)))
    return case_of(name, problem, rows, ceilings, progress)


def _on_cpu(
    problem: ConvProblem, data: Any, weight: Any, views: tuple[Any, Any], impls: Iterable[str]
) -> Iterator[_Contestant | Row]:
    import mxnet as mx

    from ece408_op.plugin import bridge

    bound = float32_bound(problem)
    shape = {"kernel": (problem.kernel,) * 2, "num_filter": problem.filters}

    def through_mxnet(name: str, call: Callable[..., Any], impl: str = "", kernel: Kernel | None = None) -> _Contestant:
        def waited(**out: Any) -> Any:
            output = call(**out)
            output.wait_to_read()
            return output

        return _Contestant(name, waited, bridge.cpu_view, bound, lambda output: waited(out=output), impl, kernel)

    # MXNet's Convolution keeps its weight in a layout of its own, so it has a copy.
    own = weight.copy()
    yield through_mxnet(BUILT_IN, lambda **out: mx.nd.Convolution(data, own, no_bias=True, **shape, **out))
    for impl in impls:
        name = f"New {impl}"
        try:
            kernel = dispatch.select(problem, "cpu", impl)
        except UnsupportedError as error:
            yield Row(name, FRESH, status=SKIPPED, reason=str(error), impl=impl)
            continue
        new = partial(mx.nd.Custom, data, weight, op_type="New", impl=impl, **shape)
        yield through_mxnet(name, new, impl, kernel)
    if find_spec("torch"):
        for name, channels_last in PYTORCH.items():
            yield _Contestant(name, _pytorch(views, channels_last), lambda output: output.numpy(), bound)


def _pytorch(views: tuple[Any, Any], channels_last: bool) -> Callable[[], Any]:
    import torch

    layout = torch.channels_last if channels_last else torch.contiguous_format
    arrays = [torch.from_numpy(array).contiguous(memory_format=layout) for array in views]

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(*arrays)

    return call


def _cpu_rows(contestant: _Contestant, reference: timer.Reference, limits: Limits) -> Iterator[Row]:
    """The rows of fresh and of reused outputs; those are filled with NaN before each call."""

    def check(output: Any) -> timer.Check:
        return reference.check(contestant.values(output))

    timing = timer.measure(contestant.fresh, timer.cpu_clock, check=check, **asdict(limits))
    yield _row(contestant, FRESH, timing)
    if contestant.reused is not None:
        output, write = contestant.fresh(), contestant.reused

        def reuse() -> Any:
            write(output)
            return output

        poison = contestant.values(output)
        timing = timer.measure(reuse, timer.cpu_clock, lambda: poison.fill(np.nan), check, **asdict(limits))
        yield _row(contestant, REUSED, timing)


def gpu_case(
    name: str,
    problem: ConvProblem,
    impls: Iterable[str],
    precision: str,
    seed: int,
    limits: Limits,
    ceilings: Ceilings,
    progress: Progress = lambda row: None,
    peers: bool = True,
) -> Case:
    """All contestants on one layer of random data on the GPU; the peers are cuDNN's layouts, where PyTorch has CUDA.

    precision: "float32", "tf32" or "fp16", of ``auto`` and of cuDNN.
    """
    cupy = cuda.cupy()
    rng = cupy.random.default_rng(seed)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    x = 2 * rng.random(problem.x_shape, dtype=np.float32) - 1
    case = case_of(name, problem, gpu_rows(problem, x, w, impls, precision, limits, peers), ceilings, progress)
    del x, w
    cupy.get_default_memory_pool().free_all_blocks()
    return case


def gpu_rows(
    problem: ConvProblem, x: Any, w: Any, impls: Iterable[str], precision: str, limits: Limits, peers: bool = True
) -> Iterator[Row]:
    """The rows of a layer whose x (B, C, H, W) and w (M, C, K, K) are CuPy arrays on the current GPU."""
    out = cuda.cupy().empty(problem.y_shape, np.float32)
    reference, evict = timer.Reference(x, w, _CHECKED_ON_GPU), timer.Eviction(out)
    for one in _on_gpu(problem, x, w, out, impls, precision, peers):
        if isinstance(one, Row):
            yield one
            continue
        try:
            yield _gpu_row(one, problem, (x, w, out), reference, evict, limits)
        except DeviceError as error:
            yield Row(one.name, KERNEL, status=FAILED, reason=str(error), impl=one.impl)


def _gpu_row(
    contestant: _Contestant,
    problem: ConvProblem,
    arrays: tuple[Any, Any, Any],
    reference: timer.Reference,
    evict: timer.Eviction,
    limits: Limits,
) -> Row:
    def check(output: Any) -> timer.Check:
        return reference.check(contestant.values(output))

    timing = timer.measure(contestant.fresh, timer.GpuClock(contestant.name), evict, check, **asdict(limits))
    row = _row(contestant, KERNEL, timing)
    if isinstance(contestant.kernel, CudaKernel):
        row = replace(row, details={"launches": launches(contestant.kernel, problem, *arrays)})
    return row


def _on_gpu(
    problem: ConvProblem, x: Any, w: Any, out: Any, impls: Iterable[str], precision: str, peers: bool
) -> Iterator[_Contestant | Row]:
    def run(kernel: Any) -> Any:
        kernel.run(problem, x, w, out)
        return out

    for impl in impls:
        try:
            kernel = dispatch.select(problem, "gpu", impl, precision, cuda.chip())
        except UnsupportedError as error:
            yield Row(impl, KERNEL, status=SKIPPED, reason=str(error), impl=impl)
            continue
        bound = kernel.error_bound(problem)
        yield _Contestant(impl, partial(run, kernel), lambda y: y, bound, impl=impl, kernel=kernel)
    for name, channels_last in _cudnn_layouts(precision).items() if peers else ():
        yield _Contestant(name, _cudnn(x, w, precision, channels_last), _as_float32, _CUDNN_BOUND)


def _cudnn_layouts(precision: str) -> dict[str, bool]:
    if not find_spec("torch"):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    return {f"cuDNN {precision} NCHW": False, f"cuDNN {precision} NHWC": True}


def _cudnn(x: Any, w: Any, precision: str, channels_last: bool) -> Callable[[], Any]:
    """PyTorch's convolution with its search for cuDNN's fastest algorithm; the conversion of inputs is not timed."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dtype = torch.float16 if precision == "fp16" else torch.float32
    arrays = [torch.from_dlpack(array).to(dtype).contiguous(memory_format=layout) for array in (x, w)]

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(*arrays).detach()

    return call


def _as_float32(output: Any) -> Any:
    return cuda.cupy().asarray(output, np.float32)


def _row(contestant: _Contestant, call: str, timing: timer.Timing) -> Row:
    error, kernel = timing.check.error, contestant.kernel
    row = Row(contestant.name, call, timing.seconds, impl=contestant.impl, bound=contestant.bound)
    if kernel is not None:
        row = replace(row, kernel=kernel.name, precision=kernel.precision)
    if error <= contestant.bound:
        return replace(row, error=error)
    reason = f"{timing.check.worst}; error {error:.3g} of the sum of |x||w|, allowed {contestant.bound:.3g}"
    return replace(row, seconds=(), status=FAILED, reason=reason, error=error if math.isfinite(error) else None)


def case_of(
    name: str, problem: ConvProblem, rows: Iterable[Row], ceilings: Ceilings, progress: Progress = lambda row: None
) -> Case:
    """The case of the rows, each with the roofline of the units that its kernel uses."""
    found = []
    for row in rows:
        progress(row)
        if row.kernel:
            roofline = ceilings.roofline_seconds(problem, dispatch.find(row.kernel).arithmetic)
            row = replace(row, roofline_seconds=roofline)  # noqa: PLW2901
        found.append(row)
    return Case(name, problem.batch, tuple(found), problem, ceilings.roofline_seconds(problem))
