"""The benchmark on the GPU: our kernels beside cuDNN, on the same arrays, every timed output checked on the device.

A call is timed between two events on one stream. Inputs and outputs rotate through as many sets as together exceed the
second-level cache several times, so that nothing of a call's data is left there from the call before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ece408_op.core import dispatch, reference
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

#: Images of a set that are held against float64, evenly spread; all others must be finite.
CHECKED_IMAGES = 3

#: All sets together are so many times the second-level cache.
_TIMES_CACHE = 4

#: A peer may use an algorithm (Winograd, FFT) that the bound of a plain sum does not hold for: its error is shown,
#: and only a share of the sum of |x||w| beyond this is called wrong.
_PEER_BOUND = 0.01


@dataclass(frozen=True)
class Set:
    """One rotation's arrays on the GPU, and what the checked images' outputs are in float64."""

    x: Any
    w: Any
    out: Any
    places: list[int]
    exact: Any
    size: Any

    def error(self, out: Any) -> float:
        """The largest |out - exact| over the checked images, as a share of the sum of |x||w|; infinite for a hole."""
        cupy = cuda.cupy()
        if not bool(cupy.isfinite(out).all()):
            return math.inf
        off = cupy.abs(out[self.places].astype(np.float64) - self.exact)
        return float((off / cupy.maximum(self.size, 1e-300)).max())


@dataclass(frozen=True)
class GpuTiming:
    """One contestant on one layer: milliseconds of each timed call, the worst error of their outputs, and its bound."""

    milliseconds: tuple[float, ...]
    error: float
    bound: float
    #: The kernel that ``auto`` stands for; empty for others.
    kernel: str = ""

    @property
    def passed(self) -> bool:
        """Every timed output was within the bound, and finite."""
        return self.error <= self.bound

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return float(np.median(self.milliseconds))

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and the upper quartile, in milliseconds."""
        low, high = np.percentile(self.milliseconds, [25, 75])
        return float(low), float(high)

    def __str__(self) -> str:
        """The median and the quartiles; no speed where an output was wrong."""
        if not self.passed:
            return f"WRONG: error {self.error:.3g}, allowed {self.bound:.3g}"
        low, high = self.spread
        return f"{self.median:.4g} ms ({low:.4g} to {high:.4g})"


def make_sets(problem: ConvProblem, seed: int) -> list[Set]:
    """Random arrays: x uniform in [-1, 1), w normal; the same for the same seed."""
    cupy = cuda.cupy()
    count = max(2, -(-_TIMES_CACHE * cuda.l2_bytes() // problem.bytes))
    rng = cupy.random.default_rng(seed)
    w = rng.standard_normal(problem.w_shape, dtype=np.float32)
    places = sorted({int(place) for place in np.linspace(0, problem.batch - 1, CHECKED_IMAGES)})
    sets = []
    for _ in range(count):
        x = 2 * rng.random(problem.x_shape, dtype=np.float32) - 1
        chosen = x[places].get()
        exact, size = (cupy.asarray(of(chosen, w.get())) for of in (reference.convolve, reference.magnitude))
        sets.append(Set(x, w, cupy.empty(problem.y_shape, np.float32), places, exact, size))
    return sets


#: A contestant made ready for a layer: a call on a set, which returns its output as a CuPy array of float32.
Call = Callable[[Set], Any]


def measure(call: Call, sets: list[Set], bound: float, repeats: int, name: str) -> GpuTiming:
    """So many timed calls over the sets in turn, each output filled with NaN before and checked after it."""
    for warming in sets[:2]:
        cuda.milliseconds(partial(call, warming), name)
    times, worst = [], 0.0
    for number in range(repeats):
        given = sets[number % len(sets)]
        given.out.fill(np.nan)
        kept: list[Any] = []
        times.append(cuda.milliseconds(lambda: kept.append(call(given)), name))  # noqa: B023 (called at once)
        worst = max(worst, given.error(_as_float32(kept.pop())))
    return GpuTiming(tuple(times), worst, bound)


def _as_float32(out: Any) -> Any:
    return cuda.cupy().asarray(out, np.float32)


def ours(impl: str, problem: ConvProblem, precision: str, chip: Chip) -> tuple[CudaKernel, Call]:
    """The kernel that ``New`` takes for the layer, and its call; raises UnsupportedError where none does."""
    kernel = dispatch.select(problem, "gpu", impl, precision, chip)
    if not isinstance(kernel, CudaKernel):
        raise UnsupportedError(f"impl: expected a kernel for the gpu, got {impl!r}, one for the {kernel.device}")

    def call(given: Set) -> Any:
        kernel.run(problem, given.x, given.w, given.out)
        return given.out

    return kernel, call


def peers(precision: str) -> dict[str, Callable[[list[Set]], Call]]:
    """cuDNN through PyTorch in both memory layouts, by name; none where PyTorch with CUDA is not installed."""
    if not find_spec("torch"):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    return {f"cuDNN {precision} {layout}": _Cudnn(precision, layout == "NHWC").prepare for layout in ("NCHW", "NHWC")}


@dataclass(frozen=True)
class _Cudnn:
    """PyTorch's convolution with its search for cuDNN's fastest algorithm on; the conversion of inputs is not timed."""

    precision: str
    channels_last: bool

    def prepare(self, sets: list[Set]) -> Call:
        import torch

        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        dtype = torch.float16 if self.precision == "fp16" else torch.float32
        given = {
            id(one): [torch.from_dlpack(array).to(dtype).contiguous(memory_format=layout) for array in (one.x, one.w)]
            for one in sets
        }

        def call(one: Set) -> Any:
            with torch.inference_mode():
                return torch.nn.functional.conv2d(*given[id(one)]).detach()

        return call


def contest(
    problem: ConvProblem, impls: list[str], precision: str, repeats: int, seed: int
) -> Iterator[tuple[str, GpuTiming]]:
    """Each contestant's name and timing on one layer, the peers last."""
    chip = cuda.chip()
    sets = make_sets(problem, seed)
    for impl in impls:
        kernel, call = ours(impl, problem, precision, chip)
        timing = measure(call, sets, kernel.error_bound(problem), repeats, kernel.name)
        yield impl, GpuTiming(timing.milliseconds, timing.error, timing.bound, kernel.name if impl == "auto" else "")
    for name, prepare in peers(precision).items():
        yield name, measure(prepare(sets), sets, _PEER_BOUND, repeats, name)
