"""The fused product with register tiles: in float32, with its batch split over streams, and on 16-bit storage."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from ece408_op.core.kernel import CudaKernel, float32_bound, reduced_precision_bound
from ece408_op.problem import ConvProblem, PooledProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, grid_reasons, images_per_launch, layer_defines

_FOLDER = Path(__file__).parent
#: Pixels of a warp: eight for each lane.
_WARP_PIXELS = 256
#: Warps across the pixels, and rows of a step, for so many warps across the filters: two steps' tiles fit 48 KB,
#: and a thread holds 16 or 32 words on their way from global to shared memory.
_WARPS_N = {1: 4, 2: 2, 4: 2, 8: 1}
_DEPTH = {1: 4, 2: 4, 4: 8, 8: 8}
#: Relative rounding of a 16-bit float.
_EPS16 = 2.0**-11


@dataclass(frozen=True)
class _Shape:
    """A block's warps across filters and pixels, and the filters of one thread."""

    warps_m: int
    warps_n: int
    filters: int

    @classmethod
    def of(cls, problem: ConvProblem) -> _Shape:
        # The filters in groups of at most 64, one group a block, as equal as can be; then 8 or fewer a warp.
        group = ceil_div(problem.filters, ceil_div(problem.filters, 64))
        warps = next(n for n in _WARPS_N if 8 * n >= group)
        return cls(warps, _WARPS_N[warps], ceil_div(group, warps))

    @property
    def pixels(self) -> int:
        return _WARP_PIXELS * self.warps_n

    def elements(self, problem: ConvProblem) -> int:
        """Elements of y that a block's pixels become."""
        return self.pixels // 4 if isinstance(problem, PooledProblem) else self.pixels

    def blocks(self, problem: ConvProblem, images: int) -> int:
        elements = images * prod(problem.y_shape[2:])
        return ceil_div(elements, self.elements(problem)) * ceil_div(problem.filters, self.warps_m * self.filters)


def _reasons(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_Shape.of(problem).blocks(problem, 1))


def _kernel(name: str, summary: str, streams: int = 1, half: bool = False) -> CudaKernel:
    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        shape = _Shape.of(problem)

        def steps(images: int) -> tuple[Launch, ...]:
            grid = (shape.blocks(problem, images), 1, 1)
            block = (32 * shape.warps_m * shape.warps_n, 1, 1)
            return (Launch("register_tiled", grid, block, ("x", "w", "y", "first", "images")),)

        # A block's pixels may come from so many images.
        span = ceil_div(shape.elements(problem), prod(problem.y_shape[2:])) + 1
        defines = {
            **layer_defines(problem, span),
            "WARPS_M": shape.warps_m,
            "WARPS_N": shape.warps_n,
            "FILTERS": shape.filters,
            "DEPTH": _DEPTH[shape.warps_m],
        }
        images = images_per_launch(problem.batch, shape.blocks(problem, 1))
        return Plan(defines, min(images, max(1, ceil_div(problem.batch, streams))), steps, streams=streams)

    files = ["../layer.cuh", *(["half.cu"] if half else []), "register_tiled.cu"]
    bound = reduced_precision_bound(_EPS16) if half else float32_bound
    precision = "fp16" if half else "float32"
    sources = tuple(_FOLDER / f for f in files)
    # A thread's pixels lie elsewhere on 16-bit storage: the corners of a maximum would be in several threads.
    return CudaKernel(name, summary, sources, plan, _reasons, bound, precision=precision, fuses_pooling=not half)


REGISTER_TILED = _kernel("register_tiled", "implicit_gemm, eight pixels by eight filters a thread in registers")
STREAMS = _kernel("streams", "register_tiled, the batch split over four streams", streams=4)
HALF = _kernel("half", "register_tiled on 16-bit floats in shared memory, summed in float32", half=True)
