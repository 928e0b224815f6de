"""What the kernels for wide layers share: the convolution that they compute, and the tile of a block.

CUDA sources read the fields of both as ``Config::name``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from ece408_op.problem import ConvProblem, DataGradient
from ece408_op.runtime.launch import Argument, Chip, Launch, Pair, TensorMap, ceil_div, round_up

from ._tiles import wgmma_macro

_TILE_PIXELS, _CONSUMERS = 128, 2
#: Filters of a tile, and how much longer it takes per filter than the widest: it loads each pixel more often.
_POINTWISE_FILTERS, _TILE_FILTERS = 64, {128: 1.0, 96: 1.05, 64: 1.1, 32: 1.4}
#: Channels of a stage, and how much longer it takes per channel than the first: 16 are one instruction.
_STAGE_CHANNELS = {64: 1.0, 32: 1.15, 16: 2.0}
#: Producer warpgroups of ``pointwise.cu``, and blocks of the recomputation per multiprocessor.
PRODUCERS, _RECOMPUTE_BLOCKS = 2, 4
#: Threads of split_filters and of the recomputation.
THREADS = 256
#: TMA's limits: channels that a pixel has a multiple of; where windows begin, and the offsets in them; strides.
_TMA_CHANNELS, _CORNERS, _MOST_OFFSET, _MOST_STRIDE = 8, range(-128, 128), 255, 8
#: Pixels of an image, and of all images of a launch: 32 bits count them, rounded up to tiles.
_MOST_IMAGE, _MOST_PIXELS = 2**30, 2**31 - 2**8
_MOST_STAGES, PROMOTED_PRODUCTS = 8, 128
#: Bytes of shared memory besides the stages: what aligns them to the swizzle, and 32 filters' outputs per consumer.
_OTHERS = 1024 + _CONSUMERS * 4 * 32 * (64 + 4)


@dataclass(frozen=True)
class Convolution:
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
    def of(cls, problem: ConvProblem) -> Convolution:
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
    def input_channels(self) -> int:
        """Channels of a pixel of the split images."""
        return self.groups * self.padded_channels

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


@dataclass(frozen=True)
class WideTile:
    """A block's tile of outputs, and the pipeline that feeds it: the rest of Config."""

    components: int  # high, and with three products low
    tile_filters: int
    stage_channels: int
    stages: int
    tile_pixels: int = _TILE_PIXELS
    consumers: int = _CONSUMERS

    @classmethod
    def of(cls, pointwise: bool, components: int, own: Convolution, chip: Chip, images: int) -> WideTile:
        """Return the tile for a launch of that many images."""
        pixel_tiles = ceil_div(images * own.output_area, _TILE_PIXELS) * own.groups

        def time(filters: int) -> float:
            waves = ceil_div(pixel_tiles * ceil_div(own.filters, filters), chip.multiprocessors)
            return waves * filters * _TILE_FILTERS[filters]

        def length(channels: int) -> float:
            return round_up(own.channels, channels) * _STAGE_CHANNELS[channels]

        filters = _POINTWISE_FILTERS if pointwise else min(_TILE_FILTERS, key=time)
        tile = cls(components, filters, min(_STAGE_CHANNELS, key=length), 1)
        return replace(tile, stages=min(_MOST_STAGES, (chip.shared_bytes - _OTHERS) // tile.stage_bytes(pointwise)))

    def stage_bytes(self, pointwise: bool) -> int:
        """Bytes of shared memory of a stage: pixels and filters, two barriers, the scales of converted pixels."""
        scales = 4 * self.tile_pixels if pointwise else 0
        return 2 * self.components * self.stage_channels * (self.tile_pixels + self.tile_filters) + 16 + scales

    def gemm(self, name: str, own: Convolution, images: int, chip: Chip, arguments: tuple[Argument, ...]) -> Launch:
        """Return the launch of persistent blocks, with producer warpgroups as many as the kernel has."""
        pointwise = name == "pointwise_gemm"
        tiles = (
            ceil_div(images * own.output_area, self.tile_pixels) * own.groups * ceil_div(own.filters, self.tile_filters)
        )
        warpgroups = self.consumers + (PRODUCERS if pointwise else 1)
        shared = _OTHERS + self.stages * self.stage_bytes(pointwise)
        return Launch(name, (min(tiles, chip.multiprocessors), 1, 1), (128 * warpgroups, 1, 1), arguments, shared)

    def image_maps(self, buffer: str, own: Convolution, images: int) -> tuple[TensorMap, TensorMap]:
        """The split images [component][image][row][column][channel], with the windows of the convolution."""
        sizes, box = (own.input_channels, own.width, own.height, images), (self.stage_channels, self.tile_pixels)
        low = (self.components - 1) * 2 * math.prod(sizes)
        return TensorMap(buffer, sizes, box, own.im2col), TensorMap(buffer, sizes, box, own.im2col, low)

    def filter_maps(self, own: Convolution) -> tuple[TensorMap, TensorMap]:
        """The split filters [component][filter][tap][channel]; without low components the second map is not read."""
        sizes, box = (own.padded_channels, own.taps, own.all_filters), (self.stage_channels, 1, self.tile_filters)
        low = (self.components - 1) * 2 * math.prod(sizes)
        return TensorMap("split_w", sizes, box), TensorMap("split_w", sizes, box, offset=low)

    def config(self, own: Convolution, **others: int) -> dict[str, bool | int | float]:
        """Return the sources' Config."""
        more = {"padded_channels": own.padded_channels, "promote_every": PROMOTED_PRODUCTS // self.stage_channels}
        return {**asdict(own), **asdict(self), **more, "split_form": False, **others}

    @property
    def defines(self) -> dict[str, int | str]:
        """The sources' macros."""
        return {
            **wgmma_macro("WGMMA_HIGH", self.tile_filters, shared=True),
            **wgmma_macro("WGMMA_LOW", self.tile_filters * (self.components - 1), shared=True),
        }

    def filter_buffers(self, own: Convolution) -> dict[str, int]:
        """Bytes of the split filters and of their exponents."""
        split = 2 * self.components * own.taps * own.padded_channels * own.all_filters
        return {"split_w": split, "w_exponents": 4 * own.all_filters}


def limits(pointwise: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    """Return why a kernel does not support a problem."""
    own = Convolution.of(problem)
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


def split_filters(own: Convolution, images: str | np.int32) -> Launch:
    """Return the launch that splits the filters, and empties the list of ``images`` to recompute."""
    arguments = ("w", "split_w", "w_exponents", "listed", images)
    return Launch("split_filters", (own.all_filters, 1, 1), (THREADS, 1, 1), arguments)


def recompute(chip: Chip, entry: str, arguments: tuple[Argument, ...]) -> Launch:
    """Return the launch that recomputes the listed images."""
    return Launch(entry, (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), (THREADS, 1, 1), arguments)
