"""register_tiled: the implicit GEMM with register tiles; also with its batch split over streams, and in fp16 (half)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod

from ece408_op.core.kernel import EPS16, CudaKernel, reduced_precision_bound
from ece408_op.problem import TANH_POOL, ConvProblem, PooledProblem
from ece408_op.runtime.launch import Chip, Plan, ceil_div, grid_reasons, layer_defines, one_launch

from ..sources import sources

#: Pixels of a warp: eight per lane.
_WARP_PIXELS = 256
#: Warps along the filters: (warps along the pixels, k per step). Both buffers fit 48 KB, and a thread holds 16 or 32
#: words between its loads from global memory and its stores to shared memory.
_SHAPES = {1: (4, 4), 2: (2, 4), 4: (2, 8), 8: (1, 8)}


@dataclass(frozen=True)
class _BlockShape:
    """The Config of register_tiled.cu."""

    warps_along_filters: int
    warps_along_pixels: int
    filters_per_thread: int
    k_per_step: int

    @classmethod
    def of(cls, problem: ConvProblem) -> _BlockShape:
        """Divide the filters evenly: into blocks of at most 64, then into warps of at most 8."""
        block_filters = ceil_div(problem.filters, ceil_div(problem.filters, 64))
        warps = next(n for n in _SHAPES if 8 * n >= block_filters)
        return cls(warps, _SHAPES[warps][0], ceil_div(block_filters, warps), _SHAPES[warps][1])

    def elements(self, problem: ConvProblem) -> int:
        """Return the elements of y that a block computes per filter."""
        pixels = _WARP_PIXELS * self.warps_along_pixels
        return pixels // 4 if isinstance(problem, PooledProblem) else pixels

    def blocks(self, problem: ConvProblem, images: int) -> int:
        """Return the blocks of a launch."""
        block_filters = self.warps_along_filters * self.filters_per_thread
        elements = images * prod(problem.y_shape[2:])
        return ceil_div(elements, self.elements(problem)) * ceil_div(problem.filters, block_filters)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_BlockShape.of(problem).blocks(problem, 1))


def _kernel(name: str, summary: str, streams: int = 1, half: bool = False) -> CudaKernel:
    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        shape = _BlockShape.of(problem)
        threads = 32 * shape.warps_along_filters * shape.warps_along_pixels
        whole = one_launch(problem, "register_tiled", partial(shape.blocks, problem), threads, asdict(shape))
        images_per_block = ceil_div(shape.elements(problem), prod(problem.y_shape[2:])) + 1
        images = max(1, min(whole.images_per_launch, ceil_div(problem.batch, streams)))
        defines = layer_defines(problem, images_per_block)
        return replace(whole, defines=defines, images_per_launch=images, streams=streams)

    if half:
        files = sources("ladder/half.cu", "ladder/register_tiled.cu")
        return CudaKernel(name, summary, files, plan, _limits, reduced_precision_bound(EPS16), precision="fp16")
    # half supports no pooling: in its order of pixels, the four corners of a maximum would be in several threads.
    files = sources("ladder/register_tiled.cu")
    return CudaKernel(name, summary, files, plan, _limits, features=frozenset({TANH_POOL}))


REGISTER_TILED = _kernel("register_tiled", "implicit_gemm with eight pixels by eight filters per thread in registers")
STREAMS = _kernel("streams", "register_tiled with the batch split over four streams", streams=4)
HALF = _kernel("half", "register_tiled on fp16 values in shared memory, summed in float32", half=True)
