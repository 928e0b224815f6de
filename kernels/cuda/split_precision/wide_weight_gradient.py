"""fp16x3_wide_weight_gradient: weight gradients of layers with many channels and filters, on Hopper.

This file chooses the tile; ``wide_weight_gradient.cu`` says what a block computes.

The error, as a share of sum |x||y|, is that of ``wide``. There are at most two additions per 128 products, one per 4096
low products, and one per block that shares a tile. A value of x or y below 2^-28 of the largest of its channel or
filter errs by up to 2^-50 of that one instead of 2^-22 of itself.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import DILATE, ITEM_BYTES, PAD, RECTANGULAR, STRIDE, WEIGHT_GRADIENT, ConvProblem
from ece408_op.runtime.launch import GRID_YZ, SCRATCH_BYTES, Chip, Launch, Plan, TensorMap, ceil_div, round_up

from . import _wide_tiles, wide
from ._convolution import Convolution
from ._wgmma import WGMMA_KERNEL
from ._wide_tiles import PROMOTED_PRODUCTS, THREADS, WideTile, fp16x3_bound

_FOLDER = Path(__file__).parent
#: Channels or filters per row of shared memory; output pixels per stage.
_BLOCK = _PIXELS = 64
#: Units and filters of a tile. Three consumer warpgroups have registers for 64 filters each.
_TILES = ((1, 64), (1, 128), (2, 64), (2, 128), (3, 64))
#: Per multiprocessor and cycle: fp16 multiply-adds, and bytes from L2.
_PRODUCTS, _BYTES = 2048, 24
#: The desired number of blocks of channel_ranges; the most blocks per channel.
_RANGE_BLOCKS, _MOST_PARTS = 2048, 32
#: Stages after which the sums of low products are promoted, and their products.
_LOW_STAGES = 64
_LOW_PRODUCTS = _LOW_STAGES * _PIXELS
#: The kernel is recommended from this many channels and filters, if at least this share of the tiles' sums are weights.
_FEWEST, _FEWEST_USED = 32, 0.4


def _best_tile(own: Convolution) -> tuple[int, int, int]:
    """Return the units and filters of the tile with the least predicted time, and the number of tiles."""
    all_units = own.taps * ceil_div(own.channels, _BLOCK)

    def cycles(tile: tuple[int, int, int]) -> float:
        units, filters, tiles = tile
        return tiles * max(3 * _BLOCK * units * filters / _PRODUCTS, 2 * 2 * (_BLOCK * units + filters) / _BYTES)

    return min(((n, m, ceil_div(all_units, n) * ceil_div(own.filters, m)) for n, m in _TILES), key=cycles)


def _partial_bytes(own: Convolution, blocks: int) -> int:
    """Return the bytes of all partial sums; the sums of one block for one tile are at index block + tile."""
    units, filters, tiles = _best_tile(own)
    return ITEM_BYTES * (blocks + tiles - 1) * units * _BLOCK * filters


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own = Convolution.of(problem)
    units, filters, _ = _best_tile(own)
    tile = WideTile(2, filters, _BLOCK, _BLOCK * units, units, reduction_outermost=True).filled(own, chip)
    blocks = chip.multiprocessors
    x_channels, y_channels = own.padded_channels, round_up(own.filters, 8)
    x_parts, y_parts = (max(1, min(_MOST_PARTS, _RANGE_BLOCKS // n)) for n in (own.channels, own.filters))
    image_bytes = ITEM_BYTES * (x_channels * own.area + y_channels * own.output_area)
    batch = max(1, problem.batch)
    images = ceil_div(batch, ceil_div(batch, max(1, min(SCRATCH_BYTES // image_bytes, own.most_images, GRID_YZ))))

    def split(entry: str, source: str, target: str, channels: int, area: int, images: int) -> Launch:
        grid = (ceil_div(area, _PIXELS), ceil_div(channels, _BLOCK), images)
        return Launch(entry, grid, (THREADS, 1, 1), (source, "ranges", target, "exponents", "first", "images"))

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        x_sizes, y_sizes = (x_channels, own.width, own.height, count), (y_channels, 1, count * own.output_area)
        x_low, y_low = 2 * math.prod(x_sizes), 2 * math.prod(y_sizes)
        maps = [TensorMap("split_x", x_sizes, (_BLOCK, _PIXELS), own.im2col, offset) for offset in (0, x_low)]
        maps += [TensorMap("split_y", y_sizes, (_BLOCK, 1, _PIXELS), offset=offset) for offset in (0, y_low)]
        gemm_block, shared = (tile.threads, 1, 1), tile.shared_bytes(own)
        range_grid = (x_parts * own.channels + y_parts * own.filters, 1, 1)
        sum_grid = (ceil_div(own.channels * own.taps, 8), ceil_div(own.filters, 32), 1)
        sum_arguments = ("partials", "exponents", "x", "y", "w", "first", "images")
        return (
            Launch("channel_ranges", range_grid, (THREADS, 1, 1), ("x", "y", "ranges", "first", "images")),
            split("split_inputs", "x", "split_x", own.channels, own.area, count),
            split("split_gradients", "y", "split_y", own.filters, own.output_area, count),
            Launch("weight_gradient_tiles", (blocks, 1, 1), gemm_block, (*maps, "partials", "images"), shared),
            Launch("sum_tiles", sum_grid, (THREADS, 1, 1), sum_arguments),
        )

    scratch = {
        "ranges": 4 * (x_parts * own.channels + y_parts * own.filters),
        "exponents": 4 * (own.channels + own.filters),
        "split_x": 4 * x_channels * own.area * images,
        "split_y": 4 * y_channels * own.output_area * images,
        "partials": _partial_bytes(own, blocks),
    }
    vectors = {
        f"{name}_vector": 4 if aligned >= 16 and area % 4 == 0 else 1
        for name, area in (("x", own.area), ("y", own.output_area))
    }
    numbers = {"blocks": blocks, "x_parts": x_parts, "y_parts": y_parts, **vectors}
    config = tile.config(own, low_stages=_LOW_STAGES, promotion_stages=PROMOTED_PRODUCTS // _PIXELS, **numbers)
    return Plan(tile.defines, images, steps, scratch=scratch, config=config)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    reasons = _wide_tiles.limits(False, problem, chip)
    size = _partial_bytes(Convolution.of(problem), chip.multiprocessors if chip else 1)
    return reasons + [f"partial sums: at most {SCRATCH_BYTES} bytes, got {size}"] * (size > SCRATCH_BYTES)


def _bound(problem: ConvProblem) -> float:
    n = problem.products
    additions = 2 * ceil_div(n, PROMOTED_PRODUCTS) + 2 * ceil_div(n, _LOW_PRODUCTS) + n // _PIXELS + 4
    return fp16x3_bound(n, additions, min(n, _LOW_PRODUCTS))


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    own = Convolution.of(problem)
    # A strided 1 x 1 convolution reads only some of the pixels that would be split.
    read = own.taps > 1 or problem.stride == (1, 1)
    units, filters, tiles = _best_tile(own)
    used = own.taps * own.channels * own.filters / (tiles * units * _BLOCK * filters)
    return read and min(own.channels, own.filters) >= _FEWEST and used >= _FEWEST_USED


KERNEL = CudaKernel(
    "fp16x3_wide_weight_gradient",
    "weight gradient by wgmma and TMA, for many channels and filters",
    (*wide.SHARED_SOURCES, _FOLDER / "wide_weight_gradient.cu"),
    _plan,
    _limits,
    _bound,
    **WGMMA_KERNEL,
    arithmetic="fp16x3",
    recommended=_recommended,
    features=frozenset({PAD, STRIDE, DILATE, RECTANGULAR, WEIGHT_GRADIENT}),
    required=WEIGHT_GRADIENT,
)
