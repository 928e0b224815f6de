"""tensor_core: the implicit GEMM on tensor cores, its inputs rounded to fp16 or to tf32."""

from __future__ import annotations

from functools import partial

from ece408_op.core.kernel import EPS16, CudaKernel, reduced_precision_bound
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Plan, ceil_div, grid_reasons, one_launch, round_up

from ..sources import sources

_THREADS = 128
#: Tensor cores truncate the terms of a sum at the largest one's last bit instead of rounding them, 17 terms at a time
#: (M. Fasi, N. Higham, M. Mikaitis, S. Pranesh, Numerical behavior of NVIDIA tensor cores, 2021). A truncation errs up
#: to twice as much as a rounding, once per product and once per partial sum: at most four roundings per product.
_EPS_SUM = 2.0**-22


def _block_filters(problem: ConvProblem) -> int:
    return round_up(ceil_div(problem.filters, ceil_div(problem.filters, 64)), 8)


def _blocks(problem: ConvProblem, images: int) -> int:
    pixels = images * problem.output_height * problem.output_width
    return ceil_div(pixels, _THREADS) * ceil_div(problem.filters, _block_filters(problem))


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_blocks(problem, 1))


def _kernel(name: str, precision: str, values_per_word: int) -> CudaKernel:
    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        config = {
            "block_filters": _block_filters(problem),
            # A short reduction gets short steps: otherwise most of a step would be zeros.
            "words_per_step": 8 if problem.products <= 8 * values_per_word else 16,
            "values_per_word": values_per_word,
        }
        return one_launch(problem, "tensor_core", partial(_blocks, problem), _THREADS, config)

    return CudaKernel(
        name,
        f"the implicit GEMM on tensor cores, its inputs rounded to {precision}",
        sources("ladder/tensor_core.cu"),
        plan,
        _limits,
        reduced_precision_bound(EPS16, _EPS_SUM),
        capability=(8, 0),
        precision=precision,
        arithmetic=precision,
    )


FP16 = _kernel("tensor_core", "fp16", 2)
TF32 = _kernel("tensor_core_tf32", "tf32", 1)
