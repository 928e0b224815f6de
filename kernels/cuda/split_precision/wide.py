"""Split precision for layers with many channels, on Hopper: ``general.cu``, and ``pointwise.cu`` for 1 x 1 filters.

The error, as a share of sum |x||w|, is that of ``split_precision`` but for the sums: an accumulator is promoted after
every 128 products at most, so truncation costs 2^-22 for each of those, whatever the length of the sum, and each
promotion one or two roundings of 2^-24. The sums of the low products are 2^-10 of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ATTRIBUTES, DATA_GRADIENT, ConvProblem, DataGradient
from ece408_op.runtime.launch import (
    GRID_YZ,
    SCRATCH_BYTES,
    Argument,
    Chip,
    Launch,
    Pair,
    Plan,
    TensorMap,
    ceil_div,
    round_up,
)

from ._tiles import wgmma_macro

_FOLDER = Path(__file__).parent
_TILE_PIXELS, _WIDE_TILE, _NARROW_TILE, _CONSUMERS, _PRODUCERS = 128, 128, 64, 2, 2
#: Threads of range_of_images, and of the other conversions; channels and pixels of a block of split_images.
_RANGE_THREADS, _THREADS, _SPLIT_TILE = 512, 256, 64
#: Values that a block of range_of_images looks at, about; blocks per image at most.
_RANGE_VALUES, _MOST_RANGE_BLOCKS = 1 << 15, 16
#: How much longer a narrow tile takes per filter than a wide one, since it loads each pixel twice as often.
_NARROW = 1.1
#: TMA's limits: channels that a pixel has a multiple of; where windows begin, and the offsets in them; strides.
_TMA_CHANNELS, _CORNERS, _MOST_OFFSET, _MOST_STRIDE = 8, range(-128, 128), 255, 8
#: Pixels of an image, and of all images of a launch: 32 bits count them, rounded up to tiles.
_MOST_IMAGE, _MOST_PIXELS = 2**30, 2**31 - 2**8
#: Channels, filters and products of a sum from which on tensor cores pay.
_FEWEST_CHANNELS, _FEWEST_FILTERS, _FEWEST_PRODUCTS = 24, 16, 64
_MOST_STAGES, _RECOMPUTE_BLOCKS = 8, 4
_PROMOTED_PRODUCTS = 128
#: Bytes of shared memory besides the stages: what aligns them to the swizzle, and 32 filters' outputs per consumer.
_OTHERS = 1024 + _CONSUMERS * 4 * 32 * (64 + 4)


@dataclass(frozen=True)
class _Convolution:
    """The convolution that the kernels compute: that of the problem or, for a data gradient, that of y.

    The data gradient of a convolution of stride 1 is a convolution of y with padding dilate (K - 1) - pad, in which
    channels and filters change places and the filters' rows and columns are reversed.
    """

    groups: int
    channels: int  # of a group
    filters: int  # of a group
    height: int
    width: int
    output_height: int
    output_width: int
    kernel_height: int
    kernel_width: int
    stride_height: int
    stride_width: int
    pad_height: int  # negative where a data gradient's y is larger than x
    pad_width: int
    dilate_height: int
    dilate_width: int
    transposed: bool

    @classmethod
    def of(cls, problem: ConvProblem) -> _Convolution:
        sizes = (problem.channels // problem.groups, problem.filters // problem.groups)
        inputs, outputs = (problem.height, problem.width), (problem.output_height, problem.output_width)
        kernel, pad, dilate = (problem.kernel, problem.kernel_width), problem.pad, problem.dilate
        transposed = isinstance(problem, DataGradient)
        if transposed:
            sizes, inputs, outputs = sizes[::-1], outputs, inputs
            pad = (dilate[0] * (kernel[0] - 1) - pad[0], dilate[1] * (kernel[1] - 1) - pad[1])
        return cls(problem.groups, *sizes, *inputs, *outputs, *kernel, *problem.stride, *pad, *dilate, transposed)

    @property
    def all_filters(self) -> int:
        return self.groups * self.filters

    @property
    def taps(self) -> int:
        return self.kernel_height * self.kernel_width

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def output_area(self) -> int:
        return self.output_height * self.output_width

    @property
    def padded_channels(self) -> int:
        """Channels of a group in the split images and filters."""
        return round_up(self.channels, _TMA_CHANNELS)

    @property
    def most_images(self) -> int:
        """The most images of a launch."""
        return _MOST_PIXELS // max(self.area, self.output_area)

    @property
    def im2col(self) -> tuple[Pair, Pair, Pair]:
        """TMA's corners and steps of the windows, columns first."""
        lower = (-self.pad_width, -self.pad_height)
        reach = (self.dilate_width * (self.kernel_width - 1), self.dilate_height * (self.kernel_height - 1))
        upper = (-lower[0] - reach[0], -lower[1] - reach[1])
        return lower, upper, (self.stride_width, self.stride_height)


def _limits(pointwise: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    own = _Convolution.of(problem)
    kernel = problem.kernel if problem.kernel == problem.kernel_width else (problem.kernel, problem.kernel_width)
    if pointwise and kernel != 1:
        return [f"kernel: expected 1, got {kernel}"]
    reasons = []
    if own.transposed and problem.stride != (1, 1):
        reasons.append(f"stride: expected (1, 1) for a data gradient, got {problem.stride}")
    if max(own.area, own.output_area) >= _MOST_IMAGE:
        reasons.append(f"image: fewer than 2^30 pixels, got {problem.height} x {problem.width}")
    if pointwise:
        return reasons + [f"padding: expected none, got {problem.pad}"] * any(problem.pad)
    lower, upper, steps = own.im2col
    if any(-first - last > _MOST_OFFSET for first, last in zip(lower, upper)):
        reasons.append(f"kernel: at most {_MOST_OFFSET + 1} rows and columns when dilated, got {kernel}")
    if not all(corner in _CORNERS for corner in (*lower, *upper)):
        reasons.append(
            f"windows: expected to begin within {_CORNERS[-1]} pixels of the image's edges, got kernel {kernel}, "
            f"dilation {problem.dilate} and padding {problem.pad}"
        )
    if max(steps) > _MOST_STRIDE:
        reasons.append(f"stride: at most {_MOST_STRIDE}, got {problem.stride}")
    return reasons


@dataclass(frozen=True)
class _Tile:
    """A block's tile of outputs, and the pipeline that feeds it: the rest of Config."""

    components: int  # high, and with three products low
    tile_filters: int
    stage_channels: int
    stages: int
    tile_pixels: int = _TILE_PIXELS
    consumers: int = _CONSUMERS

    @classmethod
    def of(cls, pointwise: bool, components: int, own: _Convolution, chip: Chip) -> _Tile:
        narrow = round_up(own.filters, _NARROW_TILE) * _NARROW < round_up(own.filters, _WIDE_TILE)
        filters = _NARROW_TILE if pointwise or narrow else _WIDE_TILE
        # As few channels beyond the last as possible, then as few stages.
        channels = min((64, 32, 16), key=lambda channels: (round_up(own.channels, channels), -channels))
        tile = cls(components, filters, channels, 1)
        return replace(tile, stages=min(_MOST_STAGES, (chip.shared_bytes - _OTHERS) // tile.stage_bytes(pointwise)))

    def stage_bytes(self, pointwise: bool) -> int:
        """Bytes of shared memory of a stage: pixels and filters, two barriers, the scales of converted pixels."""
        scales = 4 * self.tile_pixels if pointwise else 0
        return 2 * self.components * self.stage_channels * (self.tile_pixels + self.tile_filters) + 16 + scales

    def gemm(self, name: str, own: _Convolution, images: int, chip: Chip, arguments: tuple[Argument, ...]) -> Launch:
        """Return the launch of persistent blocks, with producer warpgroups as many as the kernel has."""
        pointwise = name == "pointwise_gemm"
        tiles = (
            ceil_div(images * own.output_area, self.tile_pixels) * own.groups * ceil_div(own.filters, self.tile_filters)
        )
        warpgroups = self.consumers + (_PRODUCERS if pointwise else 1)
        shared = _OTHERS + self.stages * self.stage_bytes(pointwise)
        return Launch(name, (min(tiles, chip.multiprocessors), 1, 1), (128 * warpgroups, 1, 1), arguments, shared)

    def filter_maps(self, own: _Convolution) -> tuple[TensorMap, TensorMap]:
        """The split filters [component][filter][tap][channel]; without low components the second map is not read."""
        sizes, box = (own.padded_channels, own.taps, own.all_filters), (self.stage_channels, 1, self.tile_filters)
        low = (self.components - 1) * 2 * math.prod(sizes)
        return TensorMap("split_w", sizes, box), TensorMap("split_w", sizes, box, offset=low)


def _split_filters(own: _Convolution, images: str | np.int32) -> Launch:
    arguments = ("w", "split_w", "w_exponents", "listed", images)
    return Launch("split_filters", (own.all_filters, 1, 1), (_THREADS, 1, 1), arguments)


def _recompute(source: str, target: str, chip: Chip) -> Launch:
    arguments = (source, "w", target, "w_exponents", "listed", "first", "images")
    return Launch("recompute_images", (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), (_THREADS, 1, 1), arguments)


def _plan(
    own: _Convolution,
    tile: _Tile,
    images: int,
    steps: Callable[[int], tuple[Launch, ...]],
    setup: tuple[Launch, ...],
    scratch: dict[str, int],
    config: dict[str, int],
) -> Plan:
    """Return the plan with what both kernels have: the filters, and the configuration."""
    split = 2 * tile.components * own.taps * own.padded_channels * own.all_filters
    both = {"split_w": split, "w_exponents": 4 * own.all_filters, **scratch}
    macros = {
        **wgmma_macro("WGMMA_HIGH", tile.tile_filters, shared=True),
        **wgmma_macro("WGMMA_LOW", tile.tile_filters * (tile.components - 1), shared=True),
    }
    everything = {**asdict(own), **asdict(tile), "padded_channels": own.padded_channels, **config}
    return Plan(macros, images, cache(steps), setup, scratch=both, config=everything)


def _general(components: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own = _Convolution.of(problem)
    tile = _Tile.of(False, components, own, chip)
    (source, _, target), channels = problem.operands, own.groups * own.padded_channels
    image_bytes = 2 * components * own.area * channels
    images = max(1, min(problem.batch, SCRATCH_BYTES // image_bytes, own.most_images, GRID_YZ))
    ranges = max(1, min(_MOST_RANGE_BLOCKS, own.groups * own.channels * own.area // _RANGE_VALUES))

    def steps(count: int) -> tuple[Launch, ...]:
        sizes, box = (channels, own.width, own.height, count), (tile.stage_channels, tile.tile_pixels)
        low = (components - 1) * 2 * math.prod(sizes)
        high_map, low_map = (TensorMap("split_x", sizes, box, own.im2col, offset) for offset in (0, low))
        blocks = (ceil_div(own.area, _SPLIT_TILE), ceil_div(channels, _SPLIT_TILE), count)
        split = (source, "ranges", "split_x", "x_exponents", "listed", "first", "images")
        gemm = (high_map, low_map, *tile.filter_maps(own), "x_exponents", "w_exponents", target, "first", "images")
        return (
            Launch(
                "range_of_images", (ranges, count, 1), (_RANGE_THREADS, 1, 1), (source, "ranges", "listed", "first")
            ),
            Launch("split_images", blocks, (_THREADS, 1, 1), split),
            tile.gemm("implicit_gemm_tma", own, count, chip, gemm),
            _recompute(source, target, chip),
        )

    scratch = {
        "split_x": image_bytes * images,
        "ranges": 8 * ranges * images,
        "x_exponents": 4 * images,
        "listed": 4 * (1 + images),
    }
    config = {
        "promote_every": _PROMOTED_PRODUCTS // tile.stage_channels,
        "range_blocks": ranges,
    }
    return _plan(own, tile, images, steps, (_split_filters(own, np.int32(0)),), scratch, config)


def _pointwise(components: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    own = _Convolution.of(problem)
    tile = _Tile.of(True, components, own, chip)
    source, _, target = problem.operands
    # Two words per image in the list of images to recompute.
    images = max(1, min(problem.batch, own.most_images, SCRATCH_BYTES // 8))

    def steps(count: int) -> tuple[Launch, ...]:
        arguments = (source, *tile.filter_maps(own), "w_exponents", target, "listed", "first", "images")
        return (
            _split_filters(own, "images"),
            tile.gemm("pointwise_gemm", own, count, chip, arguments),
            _recompute(source, target, chip),
        )

    return _plan(own, tile, images, steps, (), {"listed": 4 * (1 + 2 * images)}, {"producers": _PRODUCERS})


def _bound(components: int, problem: ConvProblem) -> float:
    """The largest |y - exact| as a share of sum |x||w|: see above."""
    n = problem.products
    # A pointwise stage has at least 16 products, and two roundings: of its sum and of the total.
    sums = min(n, _PROMOTED_PRODUCTS) * 2.0**-22 + (2 * ceil_div(n, 16) + 1) * 2.0**-24
    if components == 1:
        return (1 + 2.0**-11) ** 2 * (1 + sums) - 1 + 2.0**-22
    low = 2 * n * 2.0**-22 * 2.0**-10
    return (3 + 2.0**-9) * 2.0**-22 + (1 + 2.0**-9) * sums + low + 2.0**-22


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    own = _Convolution.of(problem)
    enough = own.channels >= _FEWEST_CHANNELS and own.filters >= _FEWEST_FILTERS
    return enough and problem.products >= _FEWEST_PRODUCTS


def _kernel(name: str, components: int, summary: str) -> CudaKernel:
    pointwise = name == "pointwise"
    shared = ("../denormals.cuh", "instructions.cuh", "tma.cuh", "range.cuh", "wide_tile.cuh")
    return CudaKernel(
        f"fp16x{2 * components - 1}_{name}",
        summary if components == 2 else f"fp16x3_{name} with the high components alone",
        tuple(_FOLDER / file for file in (*shared, f"{name}.cu")),
        partial(_pointwise if pointwise else _general, components),
        partial(_limits, pointwise),
        partial(_bound, components),
        capability=(9, 0),
        compiler=(12, 0),
        precision="float32" if components == 2 else "tf32",
        options=("--gpu-architecture=sm_90a",),
        exact_capability=True,
        arithmetic=f"fp16x{2 * components - 1}",
        recommended=_recommended,
        features=ATTRIBUTES | {DATA_GRADIENT},
    )


_KERNELS = (
    ("pointwise", "1 x 1 filters by wgmma, inputs converted on their way to shared memory"),
    ("general", "implicit GEMM by wgmma and TMA, three fp16 products per float32 product"),
)
#: Three fp16 products per float32 product, in order of preference; and one.
FP16X3, FP16X1 = (tuple(_kernel(name, components, summary) for name, summary in _KERNELS) for components in (2, 1))
