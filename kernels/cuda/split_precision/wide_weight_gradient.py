"""fp16x3_wide_weight_gradient: weight gradients of layers with many channels and filters by wgmma, on Hopper.

This file chooses the tile and the number of blocks; ``wide_weight_gradient.cu`` says what they compute.

The error, as a share of sum |x||y|, is that of ``wide`` but for the sums: promotions, of high and low products alike,
and a block's and a tile's additions are rounded. Values that are too small to be split cost 2^-23 more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Optional

import numpy as np

from ece408_op.core.kernel import CudaKernel, sum_bound
from ece408_op.problem import ATTRIBUTES, GROUPS, ITEM_BYTES, WEIGHT_GRADIENT, ConvProblem, WeightGradient
from ece408_op.runtime.launch import SCRATCH_BYTES, Argument, Chip, Launch, Pair, Plan, TensorMap, ceil_div, round_up

from .. import cudnn
from ._tiles import wgmma_macro
from ._wide_tiles import PROMOTED_PRODUCTS, Convolution, limits

#: Where windows begin and how they follow one another: see TensorMap.
Windows = Optional[tuple[Pair, Pair, Pair]]

_FOLDER = Path(__file__).parent
_CONSUMERS, _FILTER_BOX, _STAGES = 2, 64, (4, 3)
#: Pixels of a stage, as many as leave room for enough stages; all divide into k-steps of 16.
_STAGE_PIXELS = (64, 48)
#: Columns of a consumer. Channels of a box, and how much longer a product takes than with the most.
_COLUMNS, _BOXES = (128, 96, 64), {64: 1.0, 32: 1.05, 16: 1.2}
#: Products per value from L2 from which on the tensor cores are the limit.
_PRODUCTS_PER_VALUE = 64
#: Blocks of a channel's range, and their threads; pixels and channels of a block that splits; threads of all others.
_RANGE_BLOCKS, _RANGE_THREADS, _SPLIT_TILE, _THREADS = 8, 512, 64, 256
#: Blocks at most: the error bound depends on it. Blocks of the recomputation.
_MOST_BLOCKS, _RECOMPUTE_BLOCKS = 132, 528
#: Bytes of a block's shared memory on Hopper, and those that align the stages; bytes of all partial tiles at most.
_SHARED_BYTES, _ALIGNMENT, _MOST_PARTIAL_BYTES = 227 * 1024, 1024, SCRATCH_BYTES // 4
#: Split arrays of fewer bytes stay in L2. Bytes per second of memory, and FLOP per second of a multiprocessor.
_L2_BYTES, _BANDWIDTH, _FLOPS = 30e6, 3.5e12, 4.7e12
#: Columns of a window times channels that become channels at most.
_MOST_FOLDED = 32
#: Channels, filters, FLOP, and FLOP per byte of the split arrays from which on it is faster than others
#: (benchmarks/gradients_gpu.py).
_FEWEST_CHANNELS, _FEWEST_FILTERS, _LEAST_FLOPS, _LEAST_INTENSITY = 16, 32, 2e9, 34


@dataclass(frozen=True)
class _Tile:
    """What a block computes: Config of ``wide_weight_gradient.cu``."""

    filter_boxes: int  # of 64 filters: one per consumer, or one for all
    consumer_columns: int
    box_channels: int
    stage_pixels: int = 0
    stages: int = 0
    consumers: int = _CONSUMERS
    components: int = 2

    @property
    def filters(self) -> int:
        """Filters of a block."""
        return _FILTER_BOX * self.filter_boxes

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.consumer_columns * self.consumers // self.filter_boxes

    @property
    def pixel_bytes(self) -> int:
        """Bytes of shared memory of a stage per pixel."""
        return 2 * self.components * (self.filters + self.columns)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: two barriers of 8 bytes per stage."""
        return _ALIGNMENT + self.stages * (self.stage_pixels * self.pixel_bytes + 16)

    @property
    def sums(self) -> int:
        """Sums of a block."""
        return self.filters * self.columns

    def tiles(self, own: Convolution) -> int:
        """Return the tiles of all weights."""
        boxes = own.taps * ceil_div(own.channels, self.box_channels)
        return ceil_div(own.filters, self.filters) * ceil_div(boxes, self.columns // self.box_channels)

    @property
    def pixel_products(self) -> float:
        """The products per pixel that take as long as a block's, or as its loads from L2."""
        products = max(self.sums, _PRODUCTS_PER_VALUE * (self.filters + self.columns))
        return products * _BOXES[self.box_channels]

    @classmethod
    def of(cls, own: Convolution) -> _Tile:
        """Return the fastest tile, with as many pixels per stage as leave shared memory for enough stages."""
        tiles = [cls(*sizes) for sizes in product((2, 1), _COLUMNS, _BOXES) if sizes[1] % sizes[2] == 0]
        best = min(tiles, key=lambda tile: tile.tiles(own) * tile.pixel_products)
        staged = (replace(best, stage_pixels=n, stages=s) for n in _STAGE_PIXELS for s in _STAGES)
        return next(tile for tile in staged if tile.shared_bytes <= _SHARED_BYTES)


def _blocks(own: Convolution, tile: _Tile, images: int, multiprocessors: int) -> int:
    """Return the blocks: with a common divisor of the tiles, several load the same pixels at the same time."""
    tiles, pixels = tile.tiles(own), images * own.output_area
    units = tiles * ceil_div(pixels, tile.stage_pixels)
    split_bytes = _image_bytes(own) * images

    def time(blocks: int) -> float:
        flops = 6 * ceil_div(units, blocks) * tile.stage_pixels * tile.pixel_products
        passes = tiles // math.gcd(tiles, blocks) if split_bytes > _L2_BYTES else 1
        return max(flops / _FLOPS, passes * split_bytes / _BANDWIDTH)

    return min(range(1, min(units, multiprocessors, _MOST_BLOCKS) + 1), key=lambda blocks: (time(blocks), -blocks))


def _convolution(problem: ConvProblem) -> Convolution:
    """Return the convolution of what is split: see Inputs of ``wide_weight_gradient.cu``."""
    own = Convolution.of(problem)
    if own.kernel_width == 1 or own.channels * own.kernel_width <= _MOST_FOLDED:
        own = replace(own, channels=own.channels * own.kernel_width, width=own.output_width)
        own = replace(own, kernel_width=1, stride_width=1, pad_width=0, dilate_width=1)
    if own.kernel_height == 1:
        own = replace(own, height=own.output_height, stride_height=1, pad_height=0)
    return own


def _padded_filters(own: Convolution) -> int:
    return round_up(own.filters, 8)


def _image_bytes(own: Convolution) -> int:
    """Return the bytes of an image's split arrays."""
    return 4 * (own.area * own.padded_channels + own.output_area * _padded_filters(own))


def _images(own: Convolution, batch: int) -> int:
    """Return the images of a launch: equal shares, since all launches divide the work alike."""
    most = max(1, min(batch, SCRATCH_BYTES // _image_bytes(own), own.most_images))
    return ceil_div(max(1, batch), ceil_div(max(1, batch), most))


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if not isinstance(problem, WeightGradient):
        return ["it computes the weight gradient only"]
    own, reasons = _convolution(problem), limits(False, problem)
    if _image_bytes(own) > SCRATCH_BYTES:
        reasons.append(f"image: at most {SCRATCH_BYTES} bytes with its outputs, got {_image_bytes(own)}")
    tile = _Tile.of(own)
    most = _MOST_PARTIAL_BYTES // (ITEM_BYTES * tile.sums) - _MOST_BLOCKS
    if tile.tiles(own) > most:
        reasons.append(f"weights: at most {most} tiles of {tile.filters} x {tile.columns}, got {tile.tiles(own)}")
    return reasons


def _bound(problem: ConvProblem) -> float:
    own, n = _convolution(problem), problem.products
    launches = ceil_div(max(1, problem.batch), _images(own, problem.batch))
    # Promotions of at least 96 products but for the last of a share; the shares of a tile; the recomputation has fewer.
    additions = 2 * (ceil_div(n, 96) + launches * (2 * _MOST_BLOCKS + 2))
    sums = min(n, PROMOTED_PRODUCTS) * 2.0**-22 + sum_bound(additions)
    low = 2 * min(n, PROMOTED_PRODUCTS) * 2.0**-22 * 2.0**-10
    return (3 + 2.0**-9) * 2.0**-22 + (1 + 2.0**-9) * sums + low + 2.0**-22


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own, batch = _convolution(problem), np.int64(problem.batch)
    tile, images, filters = _Tile.of(own), _images(own, problem.batch), _padded_filters(own)
    tiles, blocks = tile.tiles(own), _blocks(own, tile, images, chip.multiprocessors)
    chunks, channels = np.int32(ceil_div(images * own.output_area, tile.stage_pixels)), own.channels + own.filters
    ranges = ("x", "y", "ranges", "channels", "listed", batch)
    # The fewer tiles, the more partial tiles has each.
    slices = 1 if tiles >= 32 else 4 if tiles >= 8 else 8

    def maps(buffer: str, sizes: tuple[int, ...], box: tuple[int, ...], im2col: Windows = None) -> Iterator[TensorMap]:
        for offset in (0, 2 * math.prod(sizes)):
            yield TensorMap(buffer, sizes, box, im2col, offset)

    def launch(
        name: str, grid: int, arguments: tuple[Argument, ...], threads: int = _THREADS, shared: int = 0
    ) -> Launch:
        return Launch(name, (grid, 1, 1), (threads, 1, 1), (*arguments, "first", "images"), shared)

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        x_sizes = (own.padded_channels, own.width, own.height, count)
        x_maps = maps("split_x", x_sizes, (tile.box_channels, tile.stage_pixels), own.im2col)
        y_sizes = (filters, 1, count * own.output_area)
        y_maps = maps("split_y", y_sizes, (_FILTER_BOX, 1, tile.stage_pixels))
        split_blocks = sum(
            ceil_div(count * area, _SPLIT_TILE) * ceil_div(padded, _SPLIT_TILE)
            for area, padded in ((own.area, own.padded_channels), (own.output_area, filters))
        )
        sum_blocks, gemm_threads = tiles * tile.sums * slices // _THREADS, 128 * (tile.consumers + 1)
        sum_arguments = ("partials", "w", "channels", "listed", chunks, np.int32(blocks), batch)
        return (
            launch("split_operands", split_blocks, ("x", "y", "ranges", "channels", "split_x", "split_y")),
            launch(
                "weight_gradient_tma", blocks, (*x_maps, *y_maps, "partials", chunks), gemm_threads, tile.shared_bytes
            ),
            launch("sum_tiles", sum_blocks, sum_arguments),
            launch("recompute_weights", _RECOMPUTE_BLOCKS, ("x", "y", "w", "listed", batch)),
        )

    scratch = {
        "ranges": 4 * channels * _RANGE_BLOCKS,
        "channels": 8 * channels,
        "split_x": 4 * own.area * own.padded_channels * images,
        "split_y": 4 * own.output_area * filters * images,
        "partials": ITEM_BYTES * tile.sums * (tiles + blocks - 1),
        "listed": 4 * (1 + math.prod(problem.w_shape)),
    }
    more = {
        "source_height": problem.height,
        "source_width": problem.width,
        "folded_columns": own.channels // problem.channels,
        "folds": own != Convolution.of(problem),
        "window_stride_height": problem.stride[0] // own.stride_height,
        "window_stride_width": problem.stride[1] // own.stride_width,
        "window_pad_height": problem.pad[0] - own.pad_height,
        "window_pad_width": problem.pad[1] - own.pad_width,
        "window_dilate_width": problem.dilate[1],
        "padded_channels": own.padded_channels,
        "padded_filters": filters,
        "range_blocks": _RANGE_BLOCKS,
        "slices": slices,
        "promote_every": PROMOTED_PRODUCTS // tile.stage_pixels,
    }
    defines = wgmma_macro("WGMMA_MN", tile.consumer_columns, shared=True, mn_major=True)
    config = {**asdict(own), **asdict(tile), **more}
    setup = Launch("ranges_of_channels", (channels, _RANGE_BLOCKS, 1), (_RANGE_THREADS, 1, 1), ranges)
    return Plan(defines, images, steps, (setup,), scratch=scratch, config=config)


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    own, flops = _convolution(problem), problem.flops
    wide = own.channels >= _FEWEST_CHANNELS and own.filters >= _FEWEST_FILTERS
    dense = flops >= max(_LEAST_FLOPS, _LEAST_INTENSITY * problem.batch * _image_bytes(own))
    return wide and dense and not cudnn.is_faster_than_fp16x3(problem, chip)


KERNEL = CudaKernel(
    "fp16x3_wide_weight_gradient",
    "weight gradient by wgmma and TMA, three fp16 products per float32 product",
    tuple(
        _FOLDER / file
        for file in (
            *(f"{name}.cuh" for name in ("../denormals", "instructions", "tma", "range", "split_arrays", "pipeline")),
            "wide_weight_gradient.cu",
        )
    ),
    _plan,
    _limits,
    _bound,
    capability=(9, 0),
    compiler=(12, 0),
    options=("--gpu-architecture=sm_90a",),
    exact_capability=True,
    arithmetic="fp16x3",
    recommended=_recommended,
    features=(ATTRIBUTES - {GROUPS}) | {WEIGHT_GRADIENT},
)
