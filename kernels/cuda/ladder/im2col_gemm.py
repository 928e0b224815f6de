"""im2col_gemm: im2col, then a tiled matrix product; with many images per launch or, like the course's students, one."""

from __future__ import annotations

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import SCRATCH_BYTES, Chip, Launch, Plan, ceil_div, images_per_launch, layer_defines

from ..sources import sources

_TILE = 16
_THREADS = _TILE * _TILE


def _columns_bytes(problem: ConvProblem) -> int:
    """Bytes of the columns of one image."""
    return ITEM_BYTES * problem.products * problem.output_height * problem.output_width


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    size = _columns_bytes(problem)
    return [] if size <= SCRATCH_BYTES else [f"columns of one image: at most {SCRATCH_BYTES} bytes, got {size}"]


def _kernel(name: str, summary: str, most_images: int | None) -> CudaKernel:
    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        pixels = problem.output_height * problem.output_width
        filter_groups = ceil_div(problem.filters, _TILE)
        blocks = max(ceil_div(problem.channels * pixels, _THREADS), ceil_div(pixels, _TILE) * filter_groups)
        images = most_images or images_per_launch(problem.batch, blocks, _columns_bytes(problem))

        def steps(images: int) -> tuple[Launch, ...]:
            unroll = ceil_div(problem.channels * pixels * images, _THREADS)
            multiply = ceil_div(pixels * images, _TILE) * filter_groups
            block = (_THREADS, 1, 1)
            return (
                Launch("unroll", (unroll, 1, 1), block, ("x", "columns", "first", "images")),
                Launch("multiply", (multiply, 1, 1), block, ("w", "columns", "y", "first", "images")),
            )

        scratch = {"columns": images * _columns_bytes(problem)}
        return Plan(layer_defines(problem), images, steps, scratch=scratch, config={"tile": _TILE})

    return CudaKernel(name, summary, sources("ladder/im2col_gemm.cu"), plan, _limits)


MANY = _kernel("im2col_gemm", "im2col into global memory, then a tiled product; many images per launch", None)
ONE = _kernel("im2col_gemm_one", "im2col_gemm, one image per launch", 1)
