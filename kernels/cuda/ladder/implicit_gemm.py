"""implicit_gemm: the matrix product of im2col_gemm without columns in global memory."""

from __future__ import annotations

from functools import partial

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Plan, ceil_div, grid_reasons, one_launch

from ..sources import sources

_TILE = 16


def _blocks(problem: ConvProblem, images: int) -> int:
    pixels = problem.output_height * problem.output_width * images
    return ceil_div(pixels, _TILE) * ceil_div(problem.filters, _TILE)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_blocks(problem, 1))


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    return one_launch(problem, "implicit_gemm", partial(_blocks, problem), _TILE * _TILE, {"tile": _TILE})


KERNEL = CudaKernel(
    "implicit_gemm",
    "im2col_gemm without columns in global memory",
    sources("ladder/implicit_gemm.cu"),
    _plan,
    _limits,
)
