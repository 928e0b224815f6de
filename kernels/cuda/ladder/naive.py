"""naive: the direct convolution, one thread per output, and the first changes that the course's students made to it."""

from __future__ import annotations

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import TANH_POOL, ConvProblem
from ece408_op.runtime.launch import Chip, Plan, ceil_div, grid_reasons, one_launch

from ..sources import sources


def _kernel(
    name: str,
    summary: str,
    block: tuple[int, int] = (32, 32),
    all_filters_in_block: bool = False,
    sum_in_global: bool = False,
) -> CudaKernel:
    pixels_in_row = block[1] == 1

    def blocks(problem: ConvProblem) -> int:
        rows, columns = problem.y_shape[2:]
        tiles = ceil_div(columns, block[0]) * ceil_div(rows, block[1])
        if pixels_in_row:
            tiles = ceil_div(rows * columns, block[0])
        return tiles if all_filters_in_block else tiles * problem.filters

    def limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        return grid_reasons(blocks(problem))

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        config = {
            "block_columns": block[0],
            "block_rows": block[1],
            "pixels_in_row": pixels_in_row,
            "filters_per_block": problem.filters if all_filters_in_block else 1,
            "sum_in_global": sum_in_global,
        }
        of_images, arguments = (lambda images: blocks(problem) * images), ("x", "w", "y", "first")
        return one_launch(problem, "naive", of_images, (*block, 1), config, arguments)

    features = frozenset() if sum_in_global else frozenset({TANH_POOL})
    return CudaKernel(name, summary, sources("ladder/naive.cu"), plan, limits, features=features)


NAIVE = _kernel("naive", "one thread per output, 32 x 32 threads per block, a block per image and filter")
GLOBAL_SUM = _kernel("naive_global_sum", "naive with its running sum in global memory", sum_in_global=True)
BLOCK1024 = _kernel("naive_block1024", "naive, 1024 x 1 threads per block along the pixels", (1024, 1))
IMAGE_BLOCK = _kernel(
    "naive_image_block", "naive_block1024, one block per image for all filters", (1024, 1), all_filters_in_block=True
)
