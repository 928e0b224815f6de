"""fp16x3_..._bordered: data gradients of layers with few channels by the split-precision kernels.

With stride 1, the gradient to the data is the plain convolution of the output gradient, bordered with K - 1 - pad
zeros, with the flipped filters. So a kernel here is one of ``split_precision`` after two launches of ``border.cu``, for
a range of images whose bordered copy fits the scratch memory. The error bound is that of the convolution.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import DATA_GRADIENT, ITEM_BYTES, PAD, ConvProblem, DataGradient
from ece408_op.runtime.launch import SCRATCH_BYTES, Argument, Chip, FromFirst, Launch, Plan, ceil_div

from . import split_precision

_FEATURES = frozenset({PAD, DATA_GRADIENT})
_THREADS, _BLOCKS = 256, 16
#: Per millisecond of an H200: the float32 operations of ``data_gradient_tiles``, about, and bytes of memory.
_FP32_FLOPS, _MEMORY_BYTES = 45e9, 4e9


def _convolution(problem: ConvProblem) -> ConvProblem:
    """Return the plain convolution whose output is the data gradient."""
    k = problem.kernel
    height, width = (size + 2 * (k - 1 - pad) for size, pad in zip(problem.y_shape[2:], problem.pad))
    return ConvProblem(problem.batch, problem.filters, height, width, problem.channels, k)


def _limits(kernel: CudaKernel, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if not isinstance(problem, DataGradient):
        return ["it computes the data gradient only"]
    if max(problem.pad) >= problem.kernel:
        return [f"padding: less than the kernel {problem.kernel}, got {problem.pad}"]
    return kernel.not_supported_reasons(_convolution(problem), chip)


def _plan(kernel: CudaKernel, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    convolution = _convolution(problem)
    image_bytes = ITEM_BYTES * math.prod(convolution.x_shape[1:])
    images = max(1, min(problem.batch, SCRATCH_BYTES // image_bytes))
    y, x = (FromFirst(name, ITEM_BYTES * math.prod(shape[1:])) for name, shape in zip("yx", problem.shapes[::2]))
    inner = kernel.plan(convolution.with_batch(images), chip, math.gcd(aligned, x.image_bytes))
    buffers: dict[Argument, Argument] = {"x": "bordered", "w": "flipped", "y": x, "first": np.int64(0)}

    def steps(images: int) -> tuple[Launch, ...]:
        add_border = Launch(
            "add_border", (chip.multiprocessors * _BLOCKS, 1, 1), (_THREADS, 1, 1), (y, "bordered", "images")
        )
        launches = [step for step in inner.steps(images) if isinstance(step, Launch)]
        return (add_border, *(replace(one, args=tuple(buffers.get(a, a) for a in one.args)) for one in launches))

    weights = math.prod(problem.w_shape)
    border = {f"border_{axis}": problem.kernel - 1 - pad for axis, pad in zip("hw", problem.pad)}
    return replace(
        inner,
        images_per_launch=images,
        steps=steps,
        setup=(Launch("flip_filters", (ceil_div(weights, _THREADS), 1, 1), (_THREADS, 1, 1), ("w", "flipped")),),
        scratch={**inner.scratch, "bordered": images * image_bytes, "flipped": ITEM_BYTES * weights},
        config={**inner.config, **border, "border_threads": _THREADS},
    )


def _bordered(kernel: CudaKernel) -> CudaKernel:
    def predicted(problem: ConvProblem, chip: Chip) -> float:
        convolution = _convolution(problem)
        copied = ITEM_BYTES * (math.prod(problem.y_shape) + 2 * math.prod(convolution.x_shape))
        return kernel.predicted_milliseconds(convolution, chip) + copied / _MEMORY_BYTES

    def recommended(problem: ConvProblem, chip: Chip) -> bool:
        if problem.needs - _FEATURES or _limits(kernel, problem, chip):
            return False
        # With few channels, most of a tensor core's columns are empty.
        convolution = _convolution(problem)
        return kernel.recommended(convolution, chip) and predicted(problem, chip) < convolution.flops / _FP32_FLOPS

    return replace(
        kernel,
        name=f"{kernel.name}_bordered",
        summary=f"data gradient by {kernel.name}, on a bordered copy of the output gradient",
        sources=(*kernel.sources, Path(__file__).parent / "border.cu"),
        plan=partial(_plan, kernel),
        limits=partial(_limits, kernel),
        error_bound=lambda problem: kernel.error_bound(_convolution(problem)),
        predicted_milliseconds=predicted,
        recommended=recommended,
        features=_FEATURES,
    )


KERNELS = (_bordered(split_precision.WARPGROUP), _bordered(split_precision.MMA_SYNC))
