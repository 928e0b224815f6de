"""implicit_gemm: the matrix product of im2col_gemm without columns in global memory."""

from __future__ import annotations

from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, grid_reasons, images_per_launch, layer_defines

_FOLDER = Path(__file__).parent
_TILE = 16


def _blocks(problem: ConvProblem, images: int) -> int:
    pixels = problem.output_height * problem.output_width * images
    return ceil_div(pixels, _TILE) * ceil_div(problem.filters, _TILE)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_blocks(problem, 1))


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    def steps(images: int) -> tuple[Launch, ...]:
        grid = (_blocks(problem, images), 1, 1)
        return (Launch("implicit_gemm", grid, (_TILE * _TILE, 1, 1), ("x", "w", "y", "first", "images")),)

    images = images_per_launch(problem.batch, _blocks(problem, 1))
    return Plan(layer_defines(problem), images, steps, config={"tile": _TILE})


KERNEL = CudaKernel(
    "implicit_gemm",
    "im2col_gemm without columns in global memory",
    (_FOLDER / "../layer.cuh", _FOLDER / "implicit_gemm.cu"),
    _plan,
    _limits,
)
