"""What a kernel is: a name, what it supports, the error it may make, and a call.

A kernel is one record in ``kernels.KERNELS``. It knows nothing of MXNet: a CPU kernel is given
NumPy arrays, a GPU kernel CuPy arrays, all C-contiguous float32, and fills ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Protocol, Tuple

from .problem import ConvProblem

#: Reasons why a problem is not supported; none means that it is.
Reasons = Callable[[ConvProblem], List[str]]

EPS32 = 2.0**-24
"""Half a unit in the last place of 1.0 in float32: the error of one rounding."""


def supports_all(problem: ConvProblem) -> list[str]:
    """No limits: the kernel takes every problem."""
    return []


class RunCpu(Protocol):
    def __call__(self, problem: ConvProblem, x: Any, w: Any, out: Any, threads: int) -> None: ...


@dataclass(frozen=True)
class CpuKernel:
    """A convolution on NumPy arrays.

    ``run(problem, x, w, out, threads)`` fills out, shape (B, M, OH, OW), from x, shape (B, C, H, W),
    and w, shape (M, C, K, K); all are C-contiguous float32, aligned to 4 bytes, and B is at least 1.
    It is called from several threads at once.
    """

    name: str
    summary: str
    run: RunCpu
    reasons: Reasons = supports_all
    device: str = "cpu"
    precision: str = "float32"

    def not_supported_reasons(self, problem: ConvProblem) -> list[str]:
        """Every reason why this kernel cannot take the problem; empty when it can."""
        return self.reasons(problem)

    def error_bound(self, problem: ConvProblem) -> float:
        """The largest |y - exact| allowed, as a share of the sum of |x||w| at that element.

        A float32 sum of n products, in any order, errs by at most about n roundings
        (N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: n u / (1 - n u)).
        """
        n = problem.products
        return n * EPS32 / (1 - n * EPS32)


__all__: Tuple[str, ...] = ("CpuKernel", "EPS32", "Reasons", "RunCpu", "supports_all")
