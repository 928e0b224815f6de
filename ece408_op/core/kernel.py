"""A kernel's declaration: a name, the problems that it supports, its error bound, and a call.

A kernel is one record in ``kernels.KERNELS``. It knows nothing of MXNet: a CPU kernel takes NumPy arrays, a GPU kernel
CuPy arrays, all C-contiguous float32, and fills ``out``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, Union

from ece408_op.errors import ProblemError, UnsupportedError
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip, Plan, Planner

#: Returns the reasons why a problem is not supported; none means that it is.
Reasons = Callable[[ConvProblem], list[str]]
#: The same for a GPU kernel; the chip is None where no GPU is known.
GpuReasons = Callable[[ConvProblem, Optional[Chip]], list[str]]

EPS32, EPS16 = 2.0**-24, 2.0**-11
"""Half a unit in the last place of 1.0 in float32, and in float16 and TF32: the error of one rounding."""

SMALLEST32 = 2.0**-149
"""The smallest positive number of float32, which rounds a product below its range to a multiple of it."""


def roofline_milliseconds(problem: ConvProblem, chip: Chip) -> float:
    """Predict a kernel's time by the FP32 and memory rooflines of an H200, plus a launch's latency.

    Only ratios between layers matter: the tuning table scales the prediction to the times measured near the layer.
    """
    return max(problem.flops / 60e9, problem.bytes / 4e9) + 0.004


def _missing(problem: ConvProblem, kernel: Kernel) -> list[str]:
    if kernel.required and kernel.required not in problem.needs:
        return [f"it computes the {kernel.required} only"]
    return [f"it does not support {feature}" for feature in sorted(problem.needs - kernel.features)]


def float32_bound(problem: ConvProblem) -> float:
    """Return the bound on |y - exact| / sum |x||w| for a float32 sum of n products in any order.

    It is n u / (1 - n u) with u = 2^-24 (N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    return sum_bound(problem.products)


def sum_bound(n: int, eps: float = EPS32) -> float:
    """Return the bound of ``float32_bound`` for n products, u = ``eps``; infinite where it says nothing, from 1 / u."""
    return n * eps / (1 - n * eps) if n * eps < 1 else math.inf


def reduced_precision_bound(eps: float, eps_sum: float = EPS32) -> Callable[[ConvProblem], float]:
    """Return a function from a problem to the bound on |y - exact| / sum |x||w| of a reduced-precision kernel.

    Args:
        eps: the relative rounding error of each factor, such as 2^-11 for fp16 and TF32.
        eps_sum: the relative error of the sum per product.
    """

    def bound(problem: ConvProblem) -> float:
        return (1 + eps) ** 2 * (1 + sum_bound(problem.products, eps_sum)) - 1

    return bound


class RunCpu(Protocol):
    """The signature of a CPU kernel's ``run``."""

    def __call__(self, problem: ConvProblem, a: Any, b: Any, out: Any, threads: int, /) -> float | None:
        """Fill out from the operands a and b; returns the seconds of the computation alone where it knows them."""


@dataclass(frozen=True)
class CpuKernel:
    """A convolution on NumPy arrays.

    Attributes:
        name: the value of ``impl`` that selects the kernel.
        summary: one line for ``--help``.
        run: ``run(problem, a, b, out, threads)`` fills out, on at most ``threads`` threads. The arrays are the
            problem's operands, such as x (B, C, H, W), w (M, C, K, K) and y (B, M, OH, OW): C-contiguous float32,
            aligned to 4 bytes, B at least 1. Several threads may call it at the same time.
        prepare: ``prepare(problem, out)`` compiles what the layer needs, so that the time of ``run`` excludes it.
        features: what the kernel supports beyond the plain convolution, of the words of ``problem.needs``.
        required: the feature without which it supports no problem, such as a gradient; empty for none.
        limits: ``limits(problem)`` returns the reasons why the kernel does not support a problem whose needs are
            features.
        device: "cpu"; "gpu" for a user's file whose process copies the arrays to a GPU.
        precision: the precision of the products, "float32" but for such a file.
        error_bound: |y - exact| <= error_bound(problem) * (sum of magnitude_images(x) * magnitude_weights(w)) at every
            output element.
        magnitude_images: see error_bound; never less than |x|.
        magnitude_weights: see error_bound.
        recommended: whether "auto" prefers the kernel for a problem, because it is probably faster than the kernels
            after it in the list. Kernels that are not recommended come last.
        arithmetic: the units that compute the products, and how often: a key of ``roofline.PRODUCTS``.
    """

    name: str
    summary: str
    run: RunCpu
    prepare: Callable[[ConvProblem, Any], Any] = lambda problem, out: None
    limits: Reasons = lambda problem: []
    device: str = "cpu"
    precision: str = "float32"
    error_bound: Callable[[ConvProblem], float] = float32_bound
    magnitude_images: Callable[[Any], Any] = abs
    magnitude_weights: Callable[[Any], Any] = abs
    recommended: Callable[[ConvProblem], bool] = lambda problem: True
    arithmetic: str = "fp32"
    features: frozenset[str] = frozenset()
    required: str = ""

    def not_supported_reasons(self, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        """Return every reason why this kernel does not support the problem; empty if it does."""
        return _missing(problem, self) or list(self.limits(problem))


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A convolution on CuPy arrays: CUDA C++ files, and a function that plans their launch.

    Attributes:
        name, summary, features, required, error_bound, magnitude_*, arithmetic: as in CpuKernel.
        sources: CUDA files, joined in order after the plan's ``#define``s and compiled at the layer's first call on a
            device.
        plan: ``plan(problem, chip, aligned)`` returns the launches; all pointers are multiples of ``aligned`` bytes.
        limits: as in CpuKernel, called with the problem and the chip, or None for an unknown chip.
        capability: the lowest compute capability that runs the source; with ``exact_capability`` the only one.
        compiler: the oldest NVRTC that compiles the source.
        precision: the rounding of the inputs: "float32" (none), "tf32" (to 11 bits) or "fp16" (to 11 bits and fp16's
            range).
        options: options for NVRTC besides the C++ standard.
        device: always "gpu".
        recommended: whether "auto" prefers the kernel for a problem; False outside the sizes that were timed.
        predicted_milliseconds: the kernel's own prediction, which the tuning table scales; infinite for problems that
            it does not cover.
        tiles: ``tiles(problem, chip, aligned)`` returns the tiles that ``tuning.tune`` measures, in the words of
            ``tuning.recorded_tile``, which the plan obeys; none for most kernels.
    """

    name: str
    summary: str
    sources: tuple[Path, ...]
    plan: Planner
    limits: GpuReasons = lambda problem, chip: []
    error_bound: Callable[[ConvProblem], float] = float32_bound
    capability: tuple[int, int] = (5, 0)
    compiler: tuple[int, int] = (11, 0)
    precision: str = "float32"
    options: tuple[str, ...] = ()
    device: str = "gpu"
    exact_capability: bool = False
    recommended: Callable[[ConvProblem, Chip], bool] = lambda problem, chip: True
    predicted_milliseconds: Callable[[ConvProblem, Chip], float] = roofline_milliseconds
    tiles: Callable[[ConvProblem, Chip, int], Sequence[Mapping[str, int]]] = lambda problem, chip, aligned: []
    features: frozenset[str] = frozenset()
    required: str = ""
    magnitude_images: Callable[[Any], Any] = abs
    magnitude_weights: Callable[[Any], Any] = abs
    arithmetic: str = "fp32"

    def runs_on(self, chip: Chip) -> bool:
        """Return whether the chip's compute capability runs the source."""
        return chip.capability == self.capability if self.exact_capability else chip.capability >= self.capability

    def not_supported_reasons(self, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        """Return every reason why this kernel does not support the problem, on the chip if one is given."""
        reasons = _missing(problem, self) or list(self.limits(problem, chip))
        if chip is not None and not self.runs_on(chip):
            need, got = (".".join(map(str, pair)) for pair in (self.capability, chip.capability))
            least = "" if self.exact_capability else "at least "
            reasons.append(f"compute capability: {least}{need}, got {got} ({chip.name})")
        if chip is not None and chip.compiler < self.compiler:
            need, got = (".".join(map(str, pair)) for pair in (self.compiler, chip.compiler))
            reasons.append(f"NVRTC: at least {need}, got {got}; install a CuPy for a newer CUDA")
        return reasons

    def text(self, plan: Plan) -> str:
        """Return the source that the compiler gets for a plan."""
        return source_text(self.sources, plan)

    def run(self, problem: ConvProblem, x: Any, w: Any, out: Any, stream: Any = None) -> None:
        """Fill out, (B, M, OH, OW), from x (B, C, H, W) and w (M, C, K, K), asynchronously.

        The arrays are CuPy's, C-contiguous float32, all on one GPU. For a gradient, they are the problem's operands in
        their order. The weight gradient of an empty batch is zero.

        Args:
            stream: a CuPy stream; by default the current one of that GPU.

        Raises:
            ProblemError: the arrays have other shapes, types, strides or GPUs, or are not aligned to 4 bytes.
            UnsupportedError: the kernel does not support the problem; the message has every reason.
            DeviceError: compiling or launching fails.
        """
        program, arrays = self._checked(problem, x, w, out)
        if problem.batch:
            cuda.execute(program, problem.batch, arrays, stream)
        elif out.nbytes:  # the weight gradient of no images
            cuda.fill_with_zeros(out, stream)

    def prepare_launch(self, problem: ConvProblem, x: Any, w: Any, out: Any, scratch: Any = None) -> Callable[[], None]:
        """Return a function that repeats ``run`` on these arrays, B at least 1, on CuPy's current stream.

        Its launches are prepared once: see ``cuda.prepared_launch``, also for ``scratch``.
        """
        program, arrays = self._checked(problem, x, w, out)
        return cuda.prepared_launch(program, problem.batch, arrays, scratch)

    def program(self, problem: ConvProblem, device: int, *addresses: int) -> cuda.Program:
        """Return the source and launches for arrays at these addresses; raises UnsupportedError as ``run`` does."""
        return _program_of(self, problem, device, cuda.alignment(*addresses))

    def _checked(self, problem: ConvProblem, *operands: Any) -> tuple[cuda.Program, dict[str, Any]]:
        """Return the program for the arrays, and the arrays by their names in the plan, "x", "w" and "y"."""
        arrays = dict(zip(problem.operands, operands))
        for (key, array), shape in zip(arrays.items(), problem.shapes):
            if array.shape != shape or array.dtype.char != "f" or not array.flags.c_contiguous:
                raise ProblemError(
                    f"{self.name}: expected {key} as C-contiguous float32 of shape {shape}, "
                    f"got {array.dtype} of shape {array.shape} and strides {array.strides}"
                )
            if array.device.id != operands[0].device.id:
                raise ProblemError(
                    f"{self.name}: expected x, w and y on one GPU, got {operands[0].device} and {array.device}"
                )
        return self.program(problem, operands[0].device.id, *(array.data.ptr for array in operands)), arrays


Kernel = Union[CpuKernel, CudaKernel]


@lru_cache(maxsize=256)
def _program_of(kernel: CudaKernel, problem: ConvProblem, device: int, aligned: int) -> cuda.Program:
    if aligned < ITEM_BYTES:
        raise ProblemError(f"{kernel.name}: expected arrays aligned to {ITEM_BYTES} bytes, got {aligned} bytes")
    chip = cuda.chip(device)
    with cuda.on(device):  # a library plans for the current GPU
        reasons = kernel.not_supported_reasons(problem, chip)
        if reasons:
            raise UnsupportedError(f"{kernel.name} does not take {problem}: {'; '.join(reasons)}")
        plan = kernel.plan(problem, chip, aligned)
    return cuda.Program(kernel.name, kernel.text(plan), kernel.options, plan)


def forget_programs() -> None:
    """Plan again at the next call: what plans depend on has changed."""
    _program_of.cache_clear()


def source_text(sources: tuple[Path, ...], plan: Plan) -> str:
    """Return what the compiler gets: the plan's ``#define``s, its constants in struct Config, and the files' texts."""
    # The texts are joined rather than #included: CuPy's cache is keyed by the text.
    parts = [f"#define {name} {value}\n" for name, value in plan.defines.items()]
    if plan.config:
        parts += ["struct Config {\n", *(_constant(*each) for each in plan.config.items()), "};\n"]
    parts += [f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}' for path in sources]
    return "".join(parts)


def _constant(name: str, value: bool | int | float) -> str:
    kind, text = type(value).__name__, str(value).lower()
    return f"    static constexpr {kind} {name} = {text}{'f' if kind == 'float' else ''};\n"
