"""Layers: implementations of ``New`` and their peers, timed on the same arrays, every timed output checked.

On the CPU a contestant's calls are timed as a user makes them, with fresh and with reused outputs; on a GPU a kernel is
timed on arrays in GPU memory. An implementation that does not support a layer is a row with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ece408_op.core import dispatch, timer, tuning
from ece408_op.core.check import Comparison, Reference
from ece408_op.core.kernel import CudaKernel, Kernel, float32_bound
from ece408_op.core.roofline import Ceilings
from ece408_op.errors import DeviceError, UnsupportedError
from ece408_op.problem import GRADIENTS, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.thread_pool import thread_count

from . import _split_form
from .launches import launches
from .results import FAILED, FRESH, KERNEL, PASSED, REUSED, SKIPPED, Case, Row

#: The peers' names on the CPU; cuDNN's begin with "cuDNN".
BUILT_IN = "MXNet Convolution"
PYTORCH = {"PyTorch contiguous": False, "PyTorch channels_last": True}

#: The number of an output's images that are compared with float64; all other images must be finite.
_CHECKED_ON_CPU, _CHECKED_ON_GPU = 16, 3

#: cuDNN may use an algorithm (Winograd, FFT) that does not keep the bound of a plain sum. So its error is shown, and
#: its output is wrong only if the error exceeds this share of the sum of |x||w|.
_CUDNN_BOUND = 0.01

#: By kind of call: the call, which returns its output, and a function that runs before each call, or None.
Calls = Mapping[str, tuple[Callable[[], Any], Any]]


@dataclass(frozen=True)
class Settings:
    """The implementations to time; repeats, budget (seconds) and fewest are as in ``timer.measure``.

    precision: "float32", "tf32" or "fp16", for ``auto`` and for cuDNN; on the CPU only "float32".
    tune: whether GPU kernels first measure their tiles.
    split_form: whether a GPU also computes the layers on activations that stay split.
    """

    impls: Sequence[str]
    repeats: int
    budget: float = math.inf
    fewest: int = 1
    seed: int = 0
    precision: str = "float32"
    peers: bool = True
    tune: bool = False
    split_form: bool = False


@dataclass(frozen=True)
class Contestant:
    """A contestant and its calls on given arrays; ``values`` converts an output to an array of NumPy or CuPy.

    A peer has no impl and no kernel.
    """

    name: str
    calls: Calls
    bound: float
    values: Callable[[Any], Any] = lambda output: output
    impl: str = ""
    kernel: Kernel | None = None


def known_impls(asked: Iterable[str], device: str) -> list[str]:
    """Return the names of the ``asked`` implementations; "all" stands for every kernel of the device.

    Raises UnsupportedError for an unknown implementation, or one of another device.
    """
    names = dispatch.names(device)
    for impl in asked:
        if impl != "all" and dispatch.device_of(impl, device) != device:
            known = ", ".join([dispatch.AUTO, "all", *names])
            raise UnsupportedError(f"--impl: expected one for the {device} ({known}), got {impl!r}; see --context")
    return [name for impl in asked for name in (names if impl == "all" else [impl])]


def cpu_case(name: str, problem: ConvProblem, settings: Settings, ceilings: Ceilings) -> Case:
    """Time one layer of random data on the CPU with MXNet's Convolution, ``New`` and, if installed, PyTorch."""
    import mxnet as mx

    from ece408_op.plugin import bridge

    random = np.random.RandomState(settings.seed)
    shapes, gradient = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}, problem.feature in GRADIENTS
    arrays = {name: mx.nd.empty(shapes[name]) for name in (shapes if gradient else "xw")}
    for which, array in arrays.items():
        draw = random.standard_normal if which == "w" else random.random_sample
        for part in bridge.cpu_view(array):
            part[...] = draw(part.shape)
    data, weight = arrays["x"], arrays["w"]
    a, b = (bridge.cpu_view(arrays[name]) for name in problem.operands[:2])
    bound, plain = float32_bound(problem), {"kernel": problem.w_shape[2:], "num_filter": problem.filters}
    attributes = {"stride": problem.stride, "pad": problem.pad, "dilate": problem.dilate, "num_group": problem.groups}
    shape = {**plain, **(attributes if problem.needs else {})}

    def contestants() -> Iterator[Contestant | Row]:
        # MXNet's Convolution keeps its weight array in another layout, so it gets a copy.
        own = {"x": data, "w": weight.copy()}
        built_in = partial(mx.nd.Convolution, *own.values(), no_bias=True, **shape)
        calls = _backward(built_in, own[problem.operands[2]], arrays["y"]) if gradient else _fresh_and_reused(built_in)
        yield Contestant(BUILT_IN, calls, bound, bridge.cpu_view)
        for impl in settings.impls:
            try:
                kernel = dispatch.select(problem, "cpu", impl)
            except UnsupportedError as error:
                yield Row(f"New {impl}", REUSED if gradient else FRESH, status=SKIPPED, reason=str(error), impl=impl)
                continue
            bound_of_new = kernel.error_bound(problem)
            if gradient:
                out = np.empty(problem.shapes[2], np.float32)
                run = partial(_filled, kernel, problem, a, b, out, thread_count(problem.flops))
                calls = {REUSED: (run, partial(out.fill, np.nan))}
                yield Contestant(f"New {impl}", calls, bound_of_new, impl=impl, kernel=kernel)
                continue
            calls = _fresh_and_reused(partial(mx.nd.Custom, data, weight, op_type="New", impl=impl, **shape))
            yield Contestant(f"New {impl}", calls, bound_of_new, bridge.cpu_view, impl, kernel)
        for peer, channels_last in PYTORCH.items() if find_spec("torch") else ():
            call = _pytorch(problem, a, b, "float32", channels_last)
            yield Contestant(peer, {FRESH: (call, None)}, bound, lambda output: output.numpy())

    reference = Reference(a, b, _CHECKED_ON_CPU, problem)
    rows = timed_rows(contestants(), lambda name: timer.cpu_clock, reference, settings)
    return case_of(name, problem, rows, ceilings)


def _fresh_and_reused(call: Callable[..., Any]) -> Calls:
    """Return both kinds of call of an MXNet operator, which wait; a reused output is filled with NaN before."""
    from ece408_op.plugin import bridge

    kept: dict[str, Any] = {}

    def waited(**out: Any) -> Any:
        output = call(**out)
        output.wait_to_read()
        return output

    def poison() -> None:
        if not kept:
            kept["out"] = waited()
        bridge.cpu_view(kept["out"]).fill(np.nan)

    return {FRESH: (waited, None), REUSED: (lambda: waited(**kept), poison)}


def _filled(kernel: Any, problem: ConvProblem, a: Any, b: Any, out: Any, *threads: int) -> Any:
    kernel.run(problem, a, b, out, *threads)
    return out


def _backward(call: Callable[[], Any], wanted: Any, head: Any) -> Calls:
    """Return a call that computes an MXNet operator's gradient to one array; the forward pass is not timed."""
    import mxnet as mx

    from ece408_op.plugin import bridge

    recorded: list[Any] = []
    wanted.attach_grad()

    def forward() -> None:
        with mx.autograd.record():
            recorded[:] = [call()]
        recorded[0].wait_to_read()
        bridge.cpu_view(wanted.grad).fill(np.nan)

    def backward() -> Any:
        recorded[0].backward(head)
        wanted.grad.wait_to_read()
        return wanted.grad

    return {REUSED: (backward, forward)}


def _pytorch(problem: ConvProblem, x: Any, w: Any, precision: str, channels_last: bool) -> Callable[[], Any]:
    """Return PyTorch's call for a problem's arrays of NumPy or CuPy; PyTorch searches for cuDNN's fastest algorithm.

    The arrays are converted to the memory format and the precision here, outside the timed call.
    """
    torch = pytorch(precision)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dtype = torch.float16 if precision == "fp16" else torch.float32
    attributes = problem.stride, problem.pad, problem.dilate, problem.groups
    arrays = [torch.from_dlpack(array).to(dtype).contiguous(memory_format=layout) for array in (x, w)]

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(*arrays, None, *attributes).detach()

    if problem.feature not in GRADIENTS:
        return call
    given, shapes = dict(zip(problem.operands, arrays)), {"x": problem.x_shape, "w": problem.w_shape}
    # PyTorch reads only the shape of the array whose gradient is wanted.
    given |= {name: torch.empty(shapes[name]).to(arrays[0], memory_format=layout) for name in {"x", "w"} - given.keys()}
    wanted, way = [problem.operands[2] == name for name in ("x", "w", "bias")], (*attributes[:3], False, (0, 0))
    passed = given["y"], given["x"], given["w"], None, *way, problem.groups, wanted
    return lambda: torch.ops.aten.convolution_backward(*passed)[wanted.index(True)]


def gpu_case(name: str, problem: ConvProblem, settings: Settings, ceilings: Ceilings) -> Case:
    """Time the implementations, and cuDNN if PyTorch has CUDA, on one layer of random data on the GPU."""
    cupy = cuda.cupy()
    rng = cupy.random.default_rng(settings.seed)
    w = rng.standard_normal(problem.shapes[1], dtype=np.float32)
    x = 2 * rng.random(problem.shapes[0], dtype=np.float32) - 1
    case = case_of(name, problem, gpu_rows(problem, x, w, settings), ceilings)
    del x, w
    cupy.get_default_memory_pool().free_all_blocks()
    return case


def gpu_rows(problem: ConvProblem, x: Any, w: Any, settings: Settings) -> Iterator[Row]:
    """Yield the rows of a layer whose x (B, C, H, W) and w (M, C, K, K) are CuPy arrays on the current GPU.

    For a gradient, x and w are the two arrays that it is computed from.
    """
    out = cuda.cupy().empty(problem.shapes[2], np.float32)
    evict, precision = timer.eviction(out), settings.precision
    tiles: dict[str, Mapping[str, int]] = {}

    def contestants() -> Iterator[Contestant | Row]:
        for impl in settings.impls:
            try:
                kernel = dispatch.select(problem, "gpu", impl, precision, cuda.chip())
            except UnsupportedError as error:
                yield Row(impl, KERNEL, status=SKIPPED, reason=str(error), impl=impl)
                continue
            if settings.tune and isinstance(kernel, CudaKernel):
                tiles[kernel.name] = tuning.tune(kernel, problem, x, w, out)
            calls: Calls = {KERNEL: (partial(_filled, kernel, problem, x, w, out), evict)}
            yield Contestant(impl, calls, kernel.error_bound(problem), impl=impl, kernel=kernel)
        if settings.split_form:
            try:
                layer = _split_form.SplitLayer(problem, x, w, precision)
                calls = {KERNEL: (layer, layer.prepare)}
                yield Contestant(_split_form.NAME, calls, layer.bound, layer.values, dispatch.AUTO)
            except UnsupportedError as error:
                yield Row(_split_form.NAME, KERNEL, status=SKIPPED, reason=str(error), impl=dispatch.AUTO)
        for layout in ("NCHW", "NHWC") if settings.peers and pytorch_has_cuda() else ():
            calls = {KERNEL: (_pytorch(problem, x, w, precision, layout == "NHWC"), evict)}
            yield Contestant(f"cuDNN {precision} {layout}", calls, _CUDNN_BOUND, _as_float32)

    for row in timed_rows(contestants(), timer.gpu_clock, Reference(x, w, _CHECKED_ON_GPU, problem), settings):
        kernel = dispatch.find(row.kernel) if row.kernel and row.status == PASSED else None
        if isinstance(kernel, CudaKernel):
            tile = {"tile": dict(tiles[kernel.name])} if tiles.get(kernel.name) else {}
            row = replace(row, details={"launches": launches(kernel, problem, x, w, out), **tile})  # noqa: PLW2901
        yield row


def pytorch(precision: str = "float32") -> Any:
    """Return the module torch, set to search for cuDNN's fastest algorithms, and to use TF32 only for "tf32"."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return torch


def pytorch_has_cuda() -> bool:
    """Return whether PyTorch is installed and has a GPU."""
    if not find_spec("torch"):
        return False
    import torch

    return bool(torch.cuda.is_available())


def _as_float32(output: Any) -> Any:
    return cuda.cupy().asarray(output, np.float32)


def timed_rows(
    contestants: Iterable[Contestant | Row],
    clock: Callable[[str], timer.Clock],
    reference: Reference,
    settings: Settings,
) -> Iterator[Row]:
    """Time and check each contestant; ``clock`` makes the clock for a contestant's name."""
    how_often: dict[str, Any] = {"repeats": settings.repeats, "budget": settings.budget, "fewest": settings.fewest}

    def check(one: Contestant, output: Any) -> Comparison:
        return reference.compare(one.values(output), one.kernel, bound=one.bound)

    for one in contestants:
        if isinstance(one, Row):
            yield one
            continue
        row = Row(one.name, "", impl=one.impl, bound=one.bound)
        if one.kernel is not None:
            row = replace(row, kernel=one.kernel.name, precision=one.kernel.precision)
        for kind, (call, before) in one.calls.items():
            try:
                timing = timer.measure(call, clock(one.name), before, partial(check, one), **how_often)
            except DeviceError as failure:
                yield replace(row, call=kind, status=FAILED, reason=str(failure))
                continue
            error = timing.worst.scaled if timing.worst else math.nan
            passed = error <= one.bound
            yield replace(
                row,
                call=kind,
                seconds=timing.seconds if passed else (),
                status=PASSED if passed else FAILED,
                reason="" if passed else f"{timing.worst}; error {error:.3g}, allowed {one.bound:.3g}",
                error=error if math.isfinite(error) else None,
            )


def case_of(name: str, problem: ConvProblem, rows: Iterable[Row], ceilings: Ceilings) -> Case:
    """Return the case of the rows, each with the roofline of the units that its kernel uses."""

    def roofline(row: Row) -> float | None:
        return ceilings.roofline_seconds(problem, dispatch.find(row.kernel).arithmetic) if row.kernel else None

    found = tuple(replace(row, roofline_seconds=roofline(row)) for row in rows)
    return Case(name, problem.batch, found, problem.convolution, ceilings.roofline_seconds(problem))
