"""What the kernels for wide layers share: the tile of a block, whose fields CUDA sources read as ``Config::name``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Argument, Chip, Launch, TensorMap, ceil_div, round_up

from ._convolution import Convolution
from ._wgmma import wgmma_macro

#: Pixels, filters and consumers of a tile, and how much longer it takes per output than the largest: it loads pixels or
#: filters more often. Without low and promoted sums, threads have the registers for larger tiles.
_TILES = {(128, 128, 2): 1.0, (128, 96, 2): 1.05, (128, 64, 2): 1.1, (128, 32, 2): 1.4}
_ONE_COMPONENT_TILES = {
    (128, 256, 2): 1.0, (192, 128, 3): 1.06, (128, 128, 2): 1.08, (256, 96, 2): 1.2, (192, 96, 3): 1.2,
    (256, 64, 2): 1.4, (128, 64, 2): 1.6, (128, 32, 2): 2.5,
}  # fmt: skip
_POINTWISE_TILE = (128, 64, 2)
#: Channels of a stage, and how much longer it takes per channel than the first: 16 are one instruction.
_STAGE_CHANNELS = {64: 1.0, 32: 1.15, 16: 2.0}
#: Producer warpgroups of ``pointwise.cu``; threads of split_filters.
PRODUCERS, THREADS = 2, 256
#: TMA's limits: where windows begin, and the offsets in them; strides.
_CORNERS, _MOST_OFFSET, _MOST_STRIDE = range(-128, 128), 255, 8
#: Pixels of an image: 32 bits count those of a launch.
_MOST_IMAGE = 2**30
_MOST_STAGES, PROMOTED_PRODUCTS = 8, 128
#: Bytes of shared memory that align the stages to the swizzle, and those of two more barriers.
_ALIGNMENT = 1024 + 16
#: Bytes of filters that a block may keep besides the stages; bytes of a multiprocessor that each block takes.
_MOST_RESIDENT, _RESERVED = 80 * 1024, 1024
#: Pixels and the most filters of a tile whose epilogue takes as long as its products; stages from which on it pays.
_SHORT_TILE, _FEWEST_STAGES = (128, 64), 3


@dataclass(frozen=True)
class WideTile:
    """A block's tile of outputs, and the pipeline that feeds it: the rest of Config."""

    components: int  # high, and with three products low
    tile_filters: int
    stage_channels: int
    stages: int
    tile_pixels: int
    consumers: int
    resident: bool = False  # whether a block keeps the filters of all its tiles
    blocks: int = 1  # of a multiprocessor: with two, one's epilogue overlaps the other's products

    @classmethod
    def of(
        cls, pointwise: bool, components: int, own: Convolution, chip: Chip, images: int, residual: bool = False
    ) -> WideTile:
        """Return the tile for a launch of that many images; residual: whether its epilogue loads one."""

        def time(sizes: tuple[int, int, int]) -> float:
            pixels, filters, _ = sizes
            tiles = ceil_div(images * own.output_area, pixels) * own.groups * ceil_div(own.filters, filters)
            return ceil_div(tiles, chip.multiprocessors) * pixels * filters * tiles_of[sizes]

        def length(channels: int) -> float:
            return round_up(own.channels, channels) * _STAGE_CHANNELS[channels]

        channels = min(_STAGE_CHANNELS, key=length)
        pixels, most = _SHORT_TILE
        if components == 1 and not (pointwise or residual) and own.taps == 1 and own.filters <= most:
            tile = cls(1, round_up(own.filters, 32), channels, 1, pixels, 1, resident=True, blocks=2)
            tile = tile.filled(own, chip, pointwise)
            if tile.stages >= _FEWEST_STAGES:
                return tile
        tiles_of = _TILES if components == 2 or pointwise else _ONE_COMPONENT_TILES
        pixels, filters, consumers = _POINTWISE_TILE if pointwise else min(tiles_of, key=time)
        tile = cls(components, filters, channels, 1, pixels, consumers)
        resident = components == 1 and not pointwise and tile.filter_bytes(own) <= _MOST_RESIDENT
        return replace(tile, resident=resident).filled(own, chip, pointwise)

    def filled(self, own: Convolution, chip: Chip, pointwise: bool) -> WideTile:
        """Return this tile with as many stages as fit shared memory."""
        free = (chip.shared_bytes + _RESERVED) // self.blocks - _RESERVED - self._others(own, pointwise)
        return replace(self, stages=min(_MOST_STAGES, free // self.stage_bytes(pointwise)))

    def stage_bytes(self, pointwise: bool) -> int:
        """Bytes of shared memory of a stage: pixels and filters, two barriers, the scales of converted pixels."""
        scales = 4 * self.tile_pixels if pointwise else 0
        rows = self.tile_pixels + (0 if self.resident else self.tile_filters)
        return 2 * self.components * self.stage_channels * rows + 16 + scales

    def filter_bytes(self, own: Convolution) -> int:
        """Bytes of the filters of a tile."""
        return 2 * self.components * round_up(own.channels, self.stage_channels) * own.taps * self.tile_filters

    def _others(self, own: Convolution, pointwise: bool) -> int:
        """Bytes of shared memory besides the stages; the epilogue's are Staging's of split_form.cu, or 32 filters."""
        staged = 16 * self.tile_pixels // self.consumers + 8 * self.tile_filters + 4 * 2 * 8 * 144 + 16
        return _ALIGNMENT + self.consumers * max(4 * 32 * (64 + 4), staged) + self.resident * self.filter_bytes(own)

    def gemm(self, name: str, own: Convolution, images: int, chip: Chip, arguments: tuple[Argument, ...]) -> Launch:
        """Return the launch of persistent blocks, with producer warpgroups as many as the kernel has."""
        pointwise = name == "pointwise_gemm"
        filter_tiles = own.groups * ceil_div(own.filters, self.tile_filters)
        tiles = ceil_div(images * own.output_area, self.tile_pixels) * filter_tiles
        blocks = self.blocks * chip.multiprocessors
        if self.resident:  # all tiles of a block have the same filters
            blocks = max(1, blocks // filter_tiles) * filter_tiles
        warpgroups = self.consumers + (PRODUCERS if pointwise else 1)
        shared = self._others(own, pointwise) + self.stages * self.stage_bytes(pointwise)
        return Launch(name, (min(tiles, blocks), 1, 1), (128 * warpgroups, 1, 1), arguments, shared)

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
        promote_every = PROMOTED_PRODUCTS // self.stage_channels if self.components == 2 else 0
        more = {"padded_channels": own.padded_channels, "promote_every": promote_every}
        return {**asdict(own), **asdict(self), **more, "split_form": False, **others}

    @property
    def defines(self) -> dict[str, int | str]:
        """The sources' macros."""
        low = self.tile_filters * (self.components - 1)
        return {
            **wgmma_macro("WGMMA_HIGH", self.tile_filters, shared=True),
            **wgmma_macro("WGMMA_LOW", low, shared=True),
            **wgmma_macro("WGMMA_HIGH_FIRST", self.tile_filters, shared=True, overwrite=True),
            **wgmma_macro("WGMMA_LOW_FIRST", low, shared=True, overwrite=True),
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
