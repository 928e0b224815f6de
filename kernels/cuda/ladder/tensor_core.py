"""The fused product on tensor cores, its inputs rounded to 16-bit floats or to tf32."""

from __future__ import annotations

from pathlib import Path

from ece408_op.core.kernel import CudaKernel, reduced_precision_bound
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import (
    Chip,
    Launch,
    Plan,
    ceil_div,
    grid_reasons,
    images_per_launch,
    layer_defines,
    round_up,
)

_FOLDER = Path(__file__).parent
_THREADS = 128
#: Relative rounding of a 16-bit float, and of tf32: both keep 11 bits.
_EPS = 2.0**-11
#: Matrix units cut the terms of a sum off at the largest one's last bit rather than round them, 17 terms at a time
#: (M. Fasi, N. Higham, M. Mikaitis, S. Pranesh, Numerical behavior of NVIDIA tensor cores, 2021): twice a rounding
#: for each product and for each partial sum, at most four roundings a product.
_EPS_SUM = 2.0**-22


def _block_filters(problem: ConvProblem) -> int:
    groups = ceil_div(problem.filters, 64)
    return round_up(ceil_div(problem.filters, groups), 8)


def _blocks(problem: ConvProblem, images: int) -> int:
    pixels = images * problem.output_height * problem.output_width
    return ceil_div(pixels, _THREADS) * ceil_div(problem.filters, _block_filters(problem))


def _reasons(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    return grid_reasons(_blocks(problem, 1))


def _kernel(name: str, precision: str, products_a_word: int) -> CudaKernel:
    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        def steps(images: int) -> tuple[Launch, ...]:
            grid = (_blocks(problem, images), 1, 1)
            return (Launch("tensor_core", grid, (_THREADS, 1, 1), ("x", "w", "y", "first", "images")),)

        # Few products need few words: a step is not to be mostly zeros.
        words = 8 if problem.products <= 8 * products_a_word else 16
        defines = {
            **layer_defines(problem),
            "BLOCK_M": _block_filters(problem),
            "WORDS": words,
            "PER_WORD": products_a_word,
        }
        return Plan(defines, images_per_launch(problem.batch, _blocks(problem, 1)), steps)

    return CudaKernel(
        name,
        f"the fused product on tensor cores, its inputs rounded to {precision}",
        (_FOLDER / "../layer.cuh", _FOLDER / "tensor_core.cu"),
        plan,
        _reasons,
        reduced_precision_bound(_EPS, _EPS_SUM),
        capability=(8, 0),
        precision=precision,
        arithmetic=precision,
    )


FP16 = _kernel("tensor_core", "fp16", 2)
TF32 = _kernel("tensor_core_tf32", "tf32", 1)
