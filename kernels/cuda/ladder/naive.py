"""The direct convolution, one thread an output, and what the course's teams first changed about it."""

from __future__ import annotations

from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, grid_reasons, images_per_launch, layer_defines

_FOLDER = Path(__file__).parent


def _kernel(
    name: str, summary: str, block: tuple[int, int], one_block_an_image: bool, sum_in_global: bool
) -> CudaKernel:
    in_row = block[1] == 1

    def blocks(problem: ConvProblem) -> int:
        rows, columns = problem.y_shape[2:]
        tiles = ceil_div(rows * columns, block[0]) if in_row else ceil_div(columns, block[0]) * ceil_div(rows, block[1])
        return tiles if one_block_an_image else tiles * problem.filters

    def reasons(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        return grid_reasons(blocks(problem))

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        def steps(images: int) -> tuple[Launch, ...]:
            return (Launch("naive", (blocks(problem) * images, 1, 1), (*block, 1), ("x", "w", "y", "first")),)

        defines = {
            **layer_defines(problem),
            "BLOCK_X": block[0],
            "BLOCK_Y": block[1],
            "PIXELS_IN_ROW": int(in_row),
            "FILTERS": problem.filters if one_block_an_image else 1,
            "SUM_IN_GLOBAL": int(sum_in_global),
        }
        return Plan(defines, images_per_launch(problem.batch, blocks(problem)), steps)

    sources = (_FOLDER / "../layer.cuh", _FOLDER / "naive.cu")
    return CudaKernel(name, summary, sources, plan, reasons, fuses_pooling=not sum_in_global)


NAIVE = _kernel(
    "naive", "one thread an output, 32 x 32 threads a block, a block an image and filter", (32, 32), False, False
)
GLOBAL_SUM = _kernel("naive_global_sum", "naive, its sum kept in global memory", (32, 32), False, True)
BLOCK1024 = _kernel("naive_block1024", "naive, 1024 x 1 threads a block along the pixels", (1024, 1), False, False)
IMAGE_BLOCK = _kernel(
    "naive_image_block", "naive_block1024, one block an image for all filters", (1024, 1), True, False
)
