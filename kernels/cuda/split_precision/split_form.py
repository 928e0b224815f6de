"""Convolutions whose activations stay split, NHWC, from one layer to the next: ``split_form.cu`` describes the form.

Three programs, for ``cuda.execute`` with these arrays; other memory is theirs:

    split_activations   reads x (float32, NCHW); fills split_x and x_scales
    split_weights       reads w (float32); fills split_w and w_exponents
    convolution         reads x, x_scales, w, split_w, w_exponents, and as asked bias (float32, one value per filter),
                        residual and residual_scales; fills y and y_scales

Split arrays are of float16, in ``activation_shape``; scales are (B, 2) of int32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ece408_op.errors import UnsupportedError
from ece408_op.problem import ATTRIBUTES, ConvProblem
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import GRID_YZ, Chip, Launch, Plan, round_up

from . import wide
from ._wide_tiles import THREADS, Convolution, WideTile, limits, recompute, split_filters

#: fp16x3_general with the sources of the split form; no kernel of the list, because its arrays are others.
_KERNEL = replace(
    wide.FP16X3[1],
    name="split form",
    sources=(*wide.FP16X3[1].sources, Path(__file__).with_name("split_form.cu")),
    features=ATTRIBUTES,
)


def activation_shape(batch: int, channels: int, height: int, width: int, components: int = 2) -> tuple[int, ...]:
    """Return the shape of a split array: (components, B, H, W, C rounded up to a multiple of eight)."""
    return (components, batch, height, width, round_up(channels, 8))


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


def split_activations(problem: ConvProblem, chip: Chip, components: int = 2) -> Program:
    """Return the program that splits the float32 input of a convolution."""
    own, _ = _checked(problem, chip, components)
    ranges = 8 * wide.range_blocks(own) * problem.batch
    launches = wide.split_images(own, "x", problem.batch)
    return _program(problem, chip, components, launches, {"ranges": ranges, "listed": 4 * (1 + problem.batch)})


def split_weights(problem: ConvProblem, chip: Chip, components: int = 2) -> Program:
    """Return the program that splits the filters of a convolution."""
    own, _ = _checked(problem, chip, components)
    return _program(problem, chip, components, (split_filters(own, np.int32(0)),), {"listed": 4})


def convolution(
    problem: ConvProblem,
    chip: Chip,
    components: int = 2,
    bias: bool = False,
    residual: bool = False,
    relu: bool = False,
) -> Program:
    """Return the program of a convolution, with what follows it.

    Args:
        problem: the convolution, of whole split arrays: batch images.
        chip: the GPU.
        components: 2 for fp16x3, 1 for fp16x1.
        bias: whether to add a bias.
        residual: whether to add a split array of y's shape.
        relu: whether to set negative values to 0 at last.

    Raises:
        UnsupportedError: the convolution cannot be computed in split form.
    """
    own, tile = _checked(problem, chip, components)
    # Pointers that are not read are x's.
    added = ("bias" if bias else "x", "residual" if residual else "x", "residual_scales" if residual else "x")
    maps = (*tile.image_maps("x", own, problem.batch), *tile.filter_maps(own))
    gemm = (*maps, "x_scales", "w_exponents", *added, "y", "y_scales", "images")
    scales = ("x_scales", "w_exponents", added[0], added[2], "y_scales", "listed", "images")
    again = ("x", "x_scales", "w", "w_exponents", *added, "y", "y_scales", "listed", "images")
    launches = (
        Launch("scale_outputs", (1, 1, 1), (THREADS, 1, 1), scales),
        tile.gemm("implicit_gemm_split", own, problem.batch, chip, gemm),
        recompute(chip, "recompute_split_images", again),
    )
    return _program(
        problem,
        chip,
        components,
        launches,
        {"listed": 4 * (1 + problem.batch)},
        bias=bias,
        residual=residual,
        relu=relu,
    )


def _checked(problem: ConvProblem, chip: Chip, components: int) -> tuple[Convolution, WideTile]:
    found = _KERNEL.not_supported_reasons(problem, chip) or reasons(problem)
    if found:
        raise UnsupportedError(f"split form does not take {problem}: {'; '.join(found)}")
    own = Convolution.of(problem)
    return own, WideTile.of(False, components, own, chip)


def _program(
    problem: ConvProblem,
    chip: Chip,
    components: int,
    launches: tuple[Launch, ...],
    scratch: dict[str, int],
    bias: bool = False,
    residual: bool = False,
    relu: bool = False,
) -> Program:
    own, tile = _checked(problem, chip, components)
    config = tile.general_config(own, wide.range_blocks(own), split_form=True, bias=bias, residual=residual, relu=relu)
    plan = Plan(tile.defines, max(1, problem.batch), lambda images: launches, scratch=scratch, config=config)
    return Program(_KERNEL.name, _KERNEL.text(plan), _KERNEL.options, plan)
