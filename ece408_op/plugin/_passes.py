"""The launches of ``passes.cu``: a call's work on a GPU besides the kernel.

Addresses are those of C-contiguous arrays on the GPU ``device``, the current one. The work is queued on the stream.
CuPy's own functions would need more parts of CUDA on the machine.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan, ceil_div

_THREADS = 256
#: The most blocks; each thread computes further elements in a grid-stride loop.
_BLOCKS = 1 << 20
#: Blocks per launch, enough to fill a GPU.
_FILLING = 2048
_FLOAT64 = 8


def enqueue(entry: str, addresses: dict[str, int], count: int, device: int, stream: Any, *numbers: Any) -> None:
    """Launch a kernel whose arguments are addresses, numbers and last a count of elements: a thread computes one."""
    launch = _launch(entry, min(ceil_div(count, _THREADS), _BLOCKS), (*addresses, *numbers, np.int64(count)))
    cuda.enqueue(_one_launch(launch), 1, addresses, device, stream)


def add_bias(bias: int, y: int, problem: ConvProblem, device: int, stream: Any) -> None:
    """Add the bias (M,) to y (B, M, OH, OW)."""
    _, filters, rows, columns = problem.y_shape
    numbers = np.int32(filters), np.int64(rows * columns)
    enqueue("add_bias", {"b": bias, "y": y}, prod(problem.y_shape), device, stream, *numbers)


def bias_gradient(y: int, out: int, problem: ConvProblem, device: int, stream: Any) -> None:
    """Fill out (M,) with the sums of y (B, M, OH, OW) over images and pixels."""
    cuda.enqueue(bias_gradient_program(problem), 1, {"y": y, "w": out}, device, stream)


@lru_cache(maxsize=256)
def bias_gradient_program(problem: ConvProblem) -> cuda.Program:
    """Return the program that fills "w" (M,) with the sums of "y" (B, M, OH, OW) over images and pixels."""
    images, filters, rows, columns = problem.y_shape
    parts = min(images, ceil_div(_FILLING, filters))
    sizes = np.int32(images), np.int32(filters), np.int64(rows * columns)
    steps = (
        _launch("sum_pixels", parts * filters, ("y", "partial", *sizes)),
        _launch("sum_parts", ceil_div(filters, _THREADS), ("partial", "w", np.int32(parts), np.int32(filters))),
    )
    return _program("bias_gradient", steps, {"partial": _FLOAT64 * parts * filters})


def _launch(entry: str, blocks: int, arguments: tuple[Any, ...]) -> Launch:
    return Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), arguments)


@lru_cache(maxsize=256)
def _one_launch(launch: Launch) -> cuda.Program:
    return _program(launch.entry, (launch,), {})


def _program(name: str, steps: tuple[Launch, ...], scratch: dict[str, int]) -> cuda.Program:
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: steps, scratch=scratch)
    return cuda.Program(name, Path(__file__).with_name("passes.cu").read_text(encoding="utf-8"), (), plan)
