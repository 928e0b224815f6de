"""What a kernel is: a name, what it supports, the error it may make, and a call.

A kernel is one record in ``kernels.KERNELS``. It knows nothing of MXNet: a CPU kernel is given
NumPy arrays, a GPU kernel CuPy arrays, all C-contiguous float32, and fills ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Protocol, Union

from ece408_op.errors import ProblemError, UnsupportedError
from ece408_op.problem import ConvProblem, PooledProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip, Plan, Planner

#: Reasons why a problem is not supported; none means that it is.
Reasons = Callable[[ConvProblem], list[str]]
#: The same for a GPU kernel, which may look at the chip too where it is known.
GpuReasons = Callable[[ConvProblem, Optional[Chip]], list[str]]

EPS32 = 2.0**-24
"""Half a unit in the last place of 1.0 in float32: the error of one rounding."""


def supports_all(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    """No limits: the kernel takes every problem."""
    return []


def always_recommended(problem: ConvProblem, chip: Chip) -> bool:
    """Whatever the problem, the kernel does as well as on the nearest that was timed."""
    return True


def always_profitable(problem: ConvProblem) -> bool:
    """The kernel is as fast as any behind it."""
    return True


def roofline(problem: ConvProblem, chip: Chip) -> float:
    """Milliseconds by an H200's rates of float32 and of memory, and for a launch: other layers' times go with it."""
    return max(problem.flops / 60e9, problem.bytes / 4e9) + 0.004


def needs_nothing(problem: ConvProblem, out: Any) -> None:
    """The kernel has nothing to prepare."""


def pooled_reasons(problem: ConvProblem, able: bool) -> list[str]:
    """Why a kernel that can, or cannot, do tanh and 2 x 2 maxima in the same pass cannot take the problem."""
    if able or not isinstance(problem, PooledProblem):
        return []
    return ["fuse: it has no tanh and 2 x 2 maxima in the same pass"]


def float32_bound(problem: ConvProblem) -> float:
    """The largest |y - exact| of a float32 sum of n products, in any order, as a share of sum |x||w|.

    It errs by at most about n roundings (N. Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1: n u / (1 - n u)).
    """
    n = problem.products
    return n * EPS32 / (1 - n * EPS32)


def reduced_bound(eps: float, eps_sum: float = EPS32) -> Callable[[ConvProblem], float]:
    """The bound where both factors of a product are first rounded by eps, and sums by eps_sum for each product."""

    def bound(problem: ConvProblem) -> float:
        n = problem.products
        return (1 + eps) ** 2 * (1 + n * eps_sum / (1 - n * eps_sum)) - 1

    return bound


class RunCpu(Protocol):
    """How a CPU kernel is called."""

    def __call__(self, problem: ConvProblem, x: Any, w: Any, out: Any, threads: int) -> None:
        """Fill out on so many threads."""


class TanhPool(NamedTuple):
    """A CPU kernel with tanh and 2 x 2 maxima behind it.

    ``run(problem, x, w, out, threads, full)`` fills out, shape (B, M, (OH + full) // 2, (OW + full) // 2); the rest is
    as in CpuKernel, and ``prepare(problem, full)`` compiles.
    """

    run: Callable[[ConvProblem, Any, Any, Any, int, bool], None]
    prepare: Callable[[ConvProblem, bool], None]


@dataclass(frozen=True)
class CpuKernel:
    """A convolution on NumPy arrays.

    ``run(problem, x, w, out, threads)`` fills out, shape (B, M, OH, OW), from x, shape (B, C, H, W),
    and w, shape (M, C, K, K); all are C-contiguous float32, aligned to 4 bytes, and B is at least 1.
    It is called from several threads at once. ``prepare(problem, out)`` does beforehand what a layer
    needs once: it compiles. ``tanh_pool`` is the same with what often follows, where the kernel can.
    """

    name: str
    summary: str
    run: RunCpu
    prepare: Callable[[ConvProblem, Any], None] = needs_nothing
    reasons: Reasons = supports_all
    device: str = "cpu"
    precision: str = "float32"
    tanh_pool: TanhPool | None = None
    bound: Callable[[ConvProblem], float] = float32_bound
    #: What weights the bound is a share of the sum of |x| times.
    magnitude_weights: Callable[[Any], Any] = abs
    #: Whether "auto" is to take it: it is expected to be faster than those behind it.
    recommended: Callable[[ConvProblem], bool] = always_profitable

    def not_supported_reasons(self, problem: ConvProblem) -> list[str]:
        """Every reason why this kernel cannot take the problem; empty when it can."""
        return [*pooled_reasons(problem, self.tanh_pool is not None), *self.reasons(problem)]

    def error_bound(self, problem: ConvProblem) -> float:
        """The largest |y - exact| allowed, as a share of sum |x| magnitude_weights(w) at that element."""
        return self.bound(problem)


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A convolution on CuPy arrays: CUDA C++ texts beside the record, and a plan of how to launch them.

    The texts are joined in order behind the plan's ``#define``s and compiled at the first call for a
    layer on a device. ``precision`` is what the products are made of: "float32", "fp16" or "tf32".
    """

    name: str
    summary: str
    sources: tuple[Path, ...]
    plan: Planner
    reasons: GpuReasons = supports_all
    bound: Callable[[ConvProblem], float] = float32_bound
    #: The oldest compute capability that the source compiles and is right for.
    capability: tuple[int, int] = (5, 0)
    #: The oldest release of the run-time compiler that knows the source's instructions.
    compiler: tuple[int, int] = (11, 0)
    precision: str = "float32"
    #: Options for NVRTC beside the language's version.
    options: tuple[str, ...] = ()
    device: str = "gpu"
    #: Whether chips of that capability alone can run it.
    exact: bool = False
    #: Whether a problem is one that times of others speak for.
    recommended: Callable[[ConvProblem, Chip], bool] = always_recommended
    #: About how many milliseconds a call takes, as its times on other layers are carried over; infinite: not known.
    estimate: Callable[[ConvProblem, Chip], float] = roofline
    #: Whether it takes a PooledProblem too, out then being (B, M, PH, PW).
    pools: bool = False
    #: What weights the bound is a share of the sum of |x| times.
    magnitude_weights: Callable[[Any], Any] = abs

    def runs_on(self, chip: Chip) -> bool:
        """Whether the chip is of a capability that the source is for."""
        return chip.capability == self.capability if self.exact else chip.capability >= self.capability

    def not_supported_reasons(self, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        """Every reason why this kernel cannot take the problem, on that chip where one is given; empty when it can."""
        reasons = [*pooled_reasons(problem, self.pools), *self.reasons(problem, chip)]
        if chip is not None and not self.runs_on(chip):
            need, got = (".".join(map(str, pair)) for pair in (self.capability, chip.capability))
            least = "" if self.exact else "at least "
            reasons.append(f"compute capability: {least}{need}, got {got} ({chip.name})")
        if chip is not None and chip.compiler < self.compiler:
            need, got = (".".join(map(str, pair)) for pair in (self.compiler, chip.compiler))
            reasons.append(f"NVRTC: at least {need}, got {got}; install a CuPy for a newer CUDA")
        return reasons

    def error_bound(self, problem: ConvProblem) -> float:
        """The largest |y - exact| allowed, as a share of the sum of |x||w| at that element."""
        return self.bound(problem)

    def text(self, plan: Plan) -> str:
        """What the compiler is given for that plan."""
        return _text(self.sources, tuple(plan.defines.items()))

    def run(self, problem: ConvProblem, x: Any, w: Any, out: Any, stream: Any = None) -> None:
        """Fill out, of the problem's y_shape, from x, (B, C, H, W), and w, (M, C, K, K), asynchronously.

        The arrays are CuPy's, C-contiguous float32, all on one GPU; the work is put on the CuPy stream given, by
        default the current one of that GPU. Raises ProblemError for other arrays, UnsupportedError with every
        reason, and DeviceError where compiling or launching fails.
        """
        self._check(problem, x, w, out)
        program = self.program(problem, x.device.id, *(array.data.ptr for array in (x, w, out)))
        if problem.batch:
            cuda.execute(program, problem.batch, {"x": x, "w": w, "y": out}, stream)

    def bind(self, problem: ConvProblem, x: Any, w: Any, out: Any) -> Callable[[], None]:
        """``run`` on these arrays, B at least 1, and CuPy's current stream, again and again: see ``cuda.bound``."""
        self._check(problem, x, w, out)
        return cuda.bound(
            self.program(problem, x.device.id, *(array.data.ptr for array in (x, w, out))),
            problem.batch,
            {"x": x, "w": w, "y": out},
        )

    def program(self, problem: ConvProblem, device: int, *addresses: int) -> cuda.Program:
        """What that device does for the problem, its arrays at these addresses; raises UnsupportedError, as ``run``."""
        return _prepared(self, problem, device, cuda.alignment(*addresses))

    def _check(self, problem: ConvProblem, x: Any, w: Any, out: Any) -> None:
        arrays = {"x": x, "w": w, "y": out}
        shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
        for key, array in arrays.items():
            if array.shape != shapes[key] or array.dtype.char != "f" or not array.flags.c_contiguous:
                raise ProblemError(
                    f"{self.name}: expected {key} as C-contiguous float32 of shape {shapes[key]}, "
                    f"got {array.dtype} of shape {array.shape} and strides {array.strides}"
                )
            if array.device.id != x.device.id:
                raise ProblemError(f"{self.name}: expected x, w and y on one GPU, got {x.device} and {array.device}")


Kernel = Union[CpuKernel, CudaKernel]


@lru_cache(maxsize=256)
def _prepared(kernel: CudaKernel, problem: ConvProblem, device: int, aligned: int) -> cuda.Program:
    chip = cuda.chip(device)
    reasons = kernel.not_supported_reasons(problem, chip)
    if reasons:
        raise UnsupportedError(f"{kernel.name} does not take {problem}: {'; '.join(reasons)}")
    plan = kernel.plan(problem, chip, aligned)
    return cuda.Program(kernel.name, kernel.text(plan), kernel.options, plan)


@lru_cache(maxsize=256)
def _text(sources: tuple[Path, ...], defines: tuple[tuple[str, int | str], ...]) -> str:
    # The texts are joined rather than #included: CuPy's cache is keyed by the text.
    parts = [f"#define {name} {value}\n" for name, value in defines]
    parts += [f'#line 1 "{path.name}"\n{path.read_text(encoding="utf-8")}' for path in sources]
    return "".join(parts)


__all__: tuple[str, ...] = (
    "CpuKernel",
    "CudaKernel",
    "EPS32",
    "Kernel",
    "Reasons",
    "RunCpu",
    "TanhPool",
    "float32_bound",
    "reduced_bound",
    "supports_all",
)
