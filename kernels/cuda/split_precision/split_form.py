"""Convolutions whose activations stay split, NHWC, from one layer to the next: ``split_form.cu`` describes them.

Programs for ``cuda.execute`` and ``cuda.prepared_launch`` with these arrays:

    split_activations   reads x (float32, NCHW); fills split_x and x_scales
    split_weights       reads w (float32), of the convolution's program; fills split_w and w_exponents
    convolution         reads x, x_scales, w, split_w, w_exponents, limits and, if asked, bias (float32, one value per
                        filter), residual and residual_scales; fills y and y_scales, which must be zero before

Split arrays are of float16, in ``activation_shape``; scales are (B, 2) of int32. ``split_passes`` has the layers that
may stand between convolutions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.errors import UnsupportedError
from ece408_op.problem import ATTRIBUTES, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import GRID_YZ, Chip, Plan, round_up

from . import wide
from ._convolution import Convolution
from ._wide_tiles import WideTile, limits, split_filters

#: fp16x3_general with the sources of the split form. It is not in the list of kernels, because it takes other arrays.
_KERNEL = replace(
    wide.FP16X3[1],
    name="split form",
    sources=(*wide.GEMM_SOURCES, Path(__file__).with_name("split_form.cu")),
    features=ATTRIBUTES,
)
#: A factor that covers the rounding errors of a limit in float32.
_MARGIN = 1 + 2.0**-10


def activation_shape(batch: int, channels: int, height: int, width: int, components: int = 2) -> tuple[int, ...]:
    """Return the shape of a split array: (components, B, H, W, C rounded up to a multiple of eight)."""
    return (components, batch, height, width, round_up(channels, 8))


def output_limits(factors: Any, added: Any = None) -> Any:
    """Return ``limits``, (2,) of float32: the largest |y| per largest |x|, and the largest |bias|.

    Args:
        factors: a CuPy array of weights, whose first axis counts output channels.
        added: a bias, or None.
    """
    cp = cuda.cupy()
    gain = cp.absolute(factors).reshape(len(factors), -1).sum(axis=1).max()
    most = cp.zeros((), np.float32) if added is None else cp.absolute(added).max()
    return (cp.stack([gain, most]) * _MARGIN).astype(np.float32)


def reasons(problem: ConvProblem) -> list[str]:
    """Return why a convolution cannot be computed in split form; empty if it can."""
    own = Convolution.of(problem)
    found = limits(False, problem)
    if own.groups > 1 and (own.channels % 8 or own.filters % 8):
        found.append(
            f"groups: expected a multiple of 8 channels and filters each, got {own.channels} and {own.filters}"
        )
    most = min(own.most_images, GRID_YZ)
    if problem.batch > most:
        found.append(f"batch: at most {most}, got {problem.batch}")
    return found


def split_activations(shape: tuple[int, ...], chip: Chip, components: int = 2) -> Program:
    """Return the program that splits float32 images (B, C, H, W)."""
    batch, channels, height, width = shape
    # A convolution that reads the images.
    problem = ConvProblem(batch, channels, height, width, 8, 1)
    own, tile = _checked(problem, chip, components)
    blocks, launches = wide.range_blocks(own), wide.split_images(own, "x", batch)
    config = tile.config(own, range_blocks=blocks, any_spread_scale=True)
    scratch = {"ranges": 8 * blocks * batch, "listed": 4 * (1 + batch)}
    plan = Plan(tile.defines, max(1, batch), lambda images: launches, scratch=scratch, config=config)
    kernel = wide.FP16X3[1]
    return Program("split activations", kernel.text(plan), kernel.options, plan)


def split_weights(convolution: Program, problem: ConvProblem) -> Program:
    """Return the program that splits the filters of ``convolution``, from the same compiled source."""
    own = Convolution.of(problem)
    launch = split_filters(own, np.int32(0))
    plan = replace(convolution.plan, steps=lambda images: (launch,), scratch={"listed": 4})
    return Program(convolution.name, convolution.source, convolution.options, plan)


def split_weight_bytes(problem: ConvProblem, components: int = 2) -> int:
    """Return the bytes of the split filters of a convolution."""
    return 2 * components * Convolution.of(problem).filter_values


def convolution(
    problem: ConvProblem,
    chip: Chip,
    components: int = 2,
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
) -> Program:
    """Return the program of a convolution, with its bias, residual and activation.

    Args:
        problem: the convolution, of whole split arrays: batch images.
        chip: the GPU.
        components: 2 for fp16x3, 1 for fp16x1.
        bias: whether to add a bias.
        residual: whether to add a split array of y's shape.
        activation: a CUDA expression of a float v, which is applied last; it maps 0 to 0, and no v to a larger |v|.

    Raises:
        UnsupportedError: the convolution cannot be computed in split form.
    """
    own, tile = _checked(problem, chip, components, residual)
    # x stands in for arrays that are not read.
    added = ("bias" if bias else "x", "residual" if residual else "x", "residual_scales" if residual else "x")
    maps = (*tile.image_maps("x", own, problem.batch), *tile.filter_maps(own), tile.output_map("y", own, problem.batch))
    arguments = (*maps, "x", "x_scales", "w", "w_exponents", "limits", *added, "y", "y_scales", "images")
    launches = (tile.gemm("implicit_gemm_split", own, problem.batch, chip, arguments),)
    defines = {**tile.defines, **activation_define(activation)}
    config = tile.config(own, range_blocks=1, any_spread_scale=True, bias=bias, residual=residual)
    plan = Plan(defines, max(1, problem.batch), lambda images: launches, config=config)
    return Program(_KERNEL.name, _KERNEL.text(plan), _KERNEL.options, plan)


def activation_define(activation: str | None) -> dict[str, int | str]:
    """Return the sources' macro ACTIVATION; none without an activation."""
    return {"ACTIVATION(v)": activation} if activation else {}


def _checked(problem: ConvProblem, chip: Chip, components: int, residual: bool = False) -> tuple[Convolution, WideTile]:
    found = _KERNEL.not_supported_reasons(problem, chip) or reasons(problem)
    if found:
        raise UnsupportedError(f"split form does not take {problem}: {'; '.join(found)}")
    own = Convolution.of(problem)
    return own, WideTile.of(components, own, chip, max(1, problem.batch), True, residual)
