"""The passes between convolutions whose activations stay split: ``split_passes.cu`` describes them.

Programs for ``cuda.prepared_launch``. All read x and x_scales and fill y and y_scales, in ``split_form``'s formats,
with these exceptions and additions:

    pool        none
    depthwise   w (K L, C') and bias (C',) of float32, C' channels with zeros beyond the last, and limits
    concat      x, x1, x2, x3 and x_scales, scales1, scales2, scales3, as many as there are inputs
    combine     factor (B, C) of float32, residual and residual_scales; x takes the place of a missing array
    join        y is float32, NCHW
    unfold      x is float32, NCHW; y_scales must be zero before
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.core.kernel import source_text
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.cuda import Program
from ece408_op.runtime.launch import GRID_YZ, Launch, Pair, Plan, ceil_div, round_up

from .split_form import activation_define

_FOLDER = Path(__file__).parent
_SOURCES = tuple(
    _FOLDER / file
    for file in ("../denormals.cuh", "instructions.cuh", "range.cuh", "split_arrays.cuh", "split_passes.cu")
)
_THREADS, _UNIT = 256, 8
#: Pixels and channels of a block of join_images.
_JOINED = 32, 64
#: The fewest pixels of a window that several threads share.
_FEWEST_SHARED = 16
#: Blocks of largest_of_images per image.
_RANGE_BLOCKS = 8
#: The most channels times window columns that become channels. More than 16 such channels are rounded up to a multiple
#: of 32: TMA gathers windows more slowly from pixels of 48 bytes than from pixels of 64. Rows per thread.
_MOST_UNFOLDED, _UNFOLDED, _UNFOLDED_ROWS = 64, 32, 4
#: Limits of units in a split array and of values in an unfolded image, which 32 bits count; the most inputs of concat.
_MOST_UNITS, _MOST_VALUES, MOST_INPUTS = 2**31, 2**31 - 1, 4

Shape = tuple[int, ...]


def _units(shape: Shape) -> int:
    """Return the units of eight channels of an array (B, C, H, W)."""
    batch, channels, height, width = shape
    return batch * height * width * ceil_div(channels, _UNIT)


def reasons(*shapes: Shape) -> list[str]:
    """Return why passes do not support inputs and outputs of these shapes (B, C, H, W); empty if they do."""
    units = max(map(_units, shapes))
    found = [f"values: fewer than 2^34, got {_UNIT * units}"] if units >= _MOST_UNITS - _THREADS else []
    return found + [f"batch: at most {GRID_YZ}, got {shapes[0][0]}"] * (shapes[0][0] > GRID_YZ)


def pool(
    x: Shape,
    y: Shape,
    window: Pair,
    stride: Pair,
    pad: Pair,
    kind: str,
    count_pad: bool = False,
    activation: str | None = None,
) -> Program:
    """Return the program of a pooling; kind: "max", "avg" or "sum"."""
    config = {"maximum": kind == "max", "mean": kind == "avg", "count_pad": count_pad}
    whole = (*y[2:], *window, *pad) == (1, 1, *x[2:], 0, 0) and x[2] * x[3] >= _FEWEST_SHARED
    entry = "global_pool_split" if whole else "pool_split"
    return _program(entry, (), x, y, {**_windows(window, stride, pad), **config}, activation)


def depthwise(
    x: Shape,
    y: Shape,
    window: Pair,
    stride: Pair,
    pad: Pair,
    activation: str | None = None,
    below_zero: bool = False,
) -> Program:
    """Return the program of a convolution whose groups have one channel and one filter, such as a BatchNorm.

    below_zero: it multiplies only values below zero, which is a PReLU.
    """
    config = {**_windows(window, stride, pad), "below_zero": below_zero}
    return _program("depthwise_split", ("w", "bias", "limits"), x, y, config, activation)


def concat(x: Sequence[Shape], activation: str | None = None) -> Program:
    """Return the program that joins at most MOST_INPUTS arrays along their channels, multiples of eight each."""
    ends = [sum(shape[1] for shape in x[: number + 1]) for number in range(len(x))]
    y, missing = (x[0][0], ends[-1], *x[0][2:]), MOST_INPUTS - len(x)
    config = {f"end_{number}": end for number, end in enumerate(ends + [ends[-1]] * missing)}
    arrays = ("x", *(f"x{number}" for number in range(1, len(x))), *("x",) * missing)
    scales = ("x_scales", *(f"scales{number}" for number in range(1, len(x))), *("x_scales",) * missing)
    return _program("concat_split", (), y, y, {"inputs": len(x), **config}, activation, arrays + scales)


def combine(x: Shape, has_factor: bool, has_residual: bool, activation: str | None = None) -> Program:
    """Return the program of x factor + residual; factor: a number per image and channel, at most one in magnitude."""
    config, others = {"has_factor": has_factor, "residual": has_residual}, ("factor", "residual", "residual_scales")
    return _program("combine_split", others, x, x, config, activation)


def join(x: Shape) -> Program:
    """Return the program that converts a split array to float32 in NCHW."""
    return _program("join_images", (), x, x, {}, None)


def unfolded(problem: ConvProblem) -> ConvProblem | None:
    """Return the equivalent convolution of images whose channels are this one's window columns; None if not profitable.

    ``unfold`` makes these images. It is for few channels, but more than one, and for windows of several columns.
    """
    _, channels, height, width = problem.x_shape
    few = problem.kernel_width > 1 and 1 < channels <= _MOST_UNFOLDED // problem.kernel_width
    if not few or problem.groups != 1 or problem.dilate[1] != 1 or channels * height * width > _MOST_VALUES:
        return None
    columns = (width + 2 * problem.pad[1] - problem.kernel_width) // problem.stride[1] + 1
    filled = channels * problem.kernel_width
    filled = round_up(filled, _UNFOLDED if filled > _UNFOLDED // 2 else _UNFOLDED // 2)
    sizes = (problem.batch, filled, height, columns, problem.filters, problem.kernel, 1)
    return ConvProblem(*sizes, (problem.stride[0], 1), (problem.pad[0], 0), (problem.dilate[0], 1))


def unfold(problem: ConvProblem, components: int = 2) -> Program:
    """Return the program that splits a convolution's images, with the columns of each window as channels."""
    x, y = problem.x_shape, unfolded(problem)
    assert y, "profitable"
    others = {"window_width": problem.kernel_width, "stride_width": problem.stride[1], "pad_width": problem.pad[1]}
    others |= {"components": components, "unfolded_channels": y.channels, "unfolded_rows": _UNFOLDED_ROWS}
    largest = Launch("largest_of_images", (_RANGE_BLOCKS, x[0], 1), (_THREADS, 1, 1), ("x", "y_scales", "images"))
    return _program("unfold_columns", (), x, y.x_shape, others, None, ("x",), (largest,))


def unfolded_filters(w: Any, problem: ConvProblem) -> Any:
    """Return the filters (M, C, K, L) of a convolution, a CuPy array, as those of its ``unfolded`` problem."""
    taps = w.reshape(len(w), -1, problem.kernel, w.shape[3]).transpose(0, 3, 1, 2)
    filters = cuda.cupy().zeros(problem.w_shape, np.float32)
    filters[:, : taps.shape[1] * taps.shape[2]] = taps.reshape(len(w), -1, problem.kernel, 1)
    return filters


def _windows(window: Pair, stride: Pair, pad: Pair) -> dict[str, int]:
    pairs = {"window": window, "stride": stride, "pad": pad}
    return {f"{name}_{side}": size for name, pair in pairs.items() for side, size in zip(("height", "width"), pair)}


def _program(
    entry: str,
    parameters: tuple[str, ...],
    x: Shape,
    y: Shape,
    others: Mapping[str, int],
    activation: str | None,
    read: tuple[str, ...] = ("x", "x_scales"),
    before: tuple[Launch, ...] = (),
) -> Program:
    sizes = dict(zip(("channels", "height", "width", "output_height", "output_width"), (*x[1:], *y[2:])))
    # Config fields that only some of the kernels need.
    some = {"components": 2, "maximum": False, "mean": False, "count_pad": False, "inputs": 1}
    some |= {"below_zero": False, "has_factor": False, "residual": False}
    ends = {f"end_{number}": x[1] for number in range(MOST_INPUTS)}
    config = {**sizes, **some, **ends, **_windows((1, 1), (1, 1), (0, 0)), **others}
    grid, written = (ceil_div(_units(y), _THREADS), 1, 1), ["y", "y_scales"]
    if entry == "join_images":
        grid, written = (ceil_div(x[2] * x[3], _JOINED[0]), ceil_div(x[1], _JOINED[1]), x[0]), ["y"]
    if entry == "global_pool_split":
        grid = (ceil_div(_units(y), _UNIT * x[0]), x[0], 1)
    if entry == "unfold_columns":
        units = ceil_div(y[2], _UNFOLDED_ROWS) * y[3] * y[1] // _UNIT
        grid = (ceil_div(units, _THREADS), y[0], 1)
    launch = Launch(entry, grid, (_THREADS, 1, 1), (*read, *parameters, *written, "images"))
    defines = {entry.upper(): 1, **activation_define(activation)}
    plan = Plan(defines, x[0], lambda images: (*before, launch), config=config)
    return Program(entry, source_text(_SOURCES, plan), (), plan)
