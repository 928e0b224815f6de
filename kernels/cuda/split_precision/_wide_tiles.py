"""What the kernels for wide layers share: the tile of a block, whose fields CUDA sources read as ``Config::name``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ece408_op.core.kernel import sum_bound
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import GRID_YZ, Argument, Chip, Launch, TensorMap, ceil_div, round_up

from ._convolution import Convolution
from ._wgmma import wgmma_macro

#: Key: pixels, filters and consumers of a tile, and whether the consumers ping-pong. Value: per output, the time of one
#: product of the sum, and the remaining time in units of products. Smaller tiles load pixels or filters more often.
#: Without low and promoted sums, threads have registers for larger tiles; without a residual or float32 outputs as
#: well, they have registers for ping-pong. ``ece408-bench layers --context gpu --set resnet`` times the tiles, with
#: ``--split-form`` those of the last table.
_Shape = tuple[int, int, int, bool]
_Times = dict[_Shape, tuple[float, int]]
_TILES: _Times = {
    (128, 128, 2, False): (1.0, 0), (128, 96, 2, False): (1.05, 0), (128, 64, 2, False): (1.1, 0),
    (128, 32, 2, False): (1.4, 0),
}  # fmt: skip
_ONE_COMPONENT_TILES: _Times = {
    (128, 256, 2, False): (1.0, 0), (192, 128, 3, False): (1.06, 0), (128, 128, 2, False): (1.08, 0),
    (256, 96, 2, False): (1.2, 0), (192, 96, 3, False): (1.2, 0), (256, 64, 2, False): (1.4, 0),
    (128, 64, 2, False): (1.6, 0), (128, 32, 2, False): (2.5, 0),
}  # fmt: skip
_PLAIN_TILES: _Times = {
    (128, 256, 2, False): (1.27, 315), (192, 128, 3, False): (1.25, 350), (192, 128, 2, True): (1.21, 330),
    (128, 128, 2, True): (1.215, 320), (64, 128, 4, True): (1.0, 340), (256, 96, 2, False): (1.55, 350),
    (192, 96, 2, True): (1.45, 316), (128, 96, 2, True): (1.45, 330), (256, 64, 2, False): (1.6, 400),
    (256, 64, 2, True): (1.6, 330), (128, 64, 4, True): (1.7, 300), (128, 32, 2, False): (3.0, 400),
}  # fmt: skip
#: The fewest filters of a tile whose outputs the TMA unit stores; the most output buffers of a warp; the outputs below
#: which a ping-pong tile needs filters that stay in shared memory.
_FEWEST_STORED, _MOST_BUFFERS, _FEWEST_OUTPUTS = 64, 4, 128 * 128
#: {channels of a stage: its time per channel, relative to 64 channels}. An instruction takes 16 channels.
_STAGE_CHANNELS = {64: 1.0, 32: 1.15, 16: 2.0}
#: Threads of split_filters.
THREADS = 256
#: TMA's limits: the first row or column of a window, the offsets in a window, the stride.
_CORNERS, _MOST_OFFSET, _MOST_STRIDE = range(-128, 128), 255, 8
#: The most pixels of an image: 32 bits count those of a launch. The most channels: a grid's y counts blocks of 64.
_MOST_IMAGE, _MOST_CHANNELS = 2**30, 64 * GRID_YZ
_MOST_STAGES, PROMOTED_PRODUCTS = 8, 128
#: Bytes of shared memory to align the stages for the swizzle, and for two more barriers; for the barriers of turns.
_ALIGNMENT, _TURNS = 1024 + 16, 32
#: The most bytes of filters that a block keeps besides the stages; larger limits of shapes whose stages are small.
_MOST_RESIDENT, _MOST_RESIDENTS = 80 * 1024, {(128, 96, 2, True): 162 * 1024}


@dataclass(frozen=True)
class WideTile:
    """A block's tile of outputs, and the pipeline that feeds it: the rest of Config."""

    components: int  # 2 (fp16x3) or 1 (fp16x1)
    tile_filters: int
    stage_channels: int  # of one tap: a pipeline stage
    tile_pixels: int
    consumers: int  # warpgroups
    producers: int = 1  # warpgroups: one has TMA load split pixels; the two of pointwise.cu convert float32 ones
    stages: int = 0
    resident: bool = False  # whether a block keeps the filters of all its tiles
    ping_pong: bool = False  # whether each consumer takes whole tiles, so that epilogues overlap others' products;
    # otherwise they share a tile (cooperative)
    buffers: int = 0  # of each consumer warp, for the outputs of split_form.cu
    reduction_outermost: bool = False  # whether a row of shared memory has channels of one pixel of the sum

    @classmethod
    def of(
        cls, components: int, own: Convolution, chip: Chip, images: int,
        split_form: bool = False, residual: bool = False,
    ) -> WideTile:  # fmt: skip
        """Return the tile for a launch of ``images``; residual: whether a split form's epilogue loads a residual."""
        channels = _stage_channels(own)
        plain = split_form and components == 1 and not residual
        times = _TILES if components == 2 else _PLAIN_TILES if plain else _ONE_COMPONENT_TILES

        def tile(shape: _Shape) -> WideTile:
            pixels, filters, consumers, ping_pong = shape
            new = cls(components, filters, channels, pixels, consumers, ping_pong=ping_pong)
            most = _MOST_RESIDENTS.get(shape, _MOST_RESIDENT)
            return replace(new, resident=components == 1 and new.filter_bytes(own) <= most)

        def time(shape: _Shape) -> float:
            pixels, filters, consumers, ping_pong = shape
            if ping_pong and pixels * filters < _FEWEST_OUTPUTS and not tile(shape).resident:
                return math.inf
            tiles = ceil_div(images * own.output_area, pixels) * own.groups * ceil_div(own.filters, filters)
            product, rest = times[shape]
            turns = max(consumers if ping_pong else 1, ceil_div(tiles, chip.multiprocessors))
            return turns * pixels * filters * (product * own.taps * own.padded_channels + rest)

        chosen = tile(min(times, key=time))
        if not plain or chosen.tile_filters < _FEWEST_STORED:
            return chosen.filled(own, chip)
        pieces = chosen._own_pixels // 64 * (chosen.tile_filters // chosen._staged)
        return chosen.filled(own, chip, [n for n in range(1, _MOST_BUFFERS + 1) if pieces % n == 0])

    @classmethod
    def pointwise(cls, components: int, own: Convolution, chip: Chip) -> WideTile:
        """Return the tile of ``pointwise.cu``."""
        return cls(components, 64, _stage_channels(own), 128, 2, producers=2).filled(own, chip)

    def filled(self, own: Convolution, chip: Chip, buffers: Sequence[int] = (0,)) -> WideTile:
        """Return this tile with the most stages that fit shared memory; among equals, with the most ``buffers``."""
        tiles = [replace(self, buffers=n) for n in buffers]
        free = [chip.shared_bytes - tile._others(own) for tile in tiles]
        tiles = [replace(tile, stages=min(_MOST_STAGES, n // tile.stage_bytes)) for tile, n in zip(tiles, free)]
        chosen = max(tiles, key=lambda tile: (tile.stages, tile.buffers))
        if chosen.stages < 2:  # a consumer waits for the next stage before it releases one
            raise UnsupportedError(f"expected shared memory for two stages, got {chip.shared_bytes} bytes per block")
        return chosen

    #: A consumer's pixels; filters of split_form.cu's STAGED; bytes of all buffers.
    _own_pixels = property(lambda self: self.tile_pixels // (1 if self.ping_pong else self.consumers))
    _staged = property(lambda self: 32 if self.tile_filters % 64 else 64)
    output_bytes = property(lambda self: 4 * self.consumers * self.buffers * 16 * 2 * self._staged)
    threads = property(lambda self: 128 * (self.producers + self.consumers))

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory per stage: pixels and filters, two barriers, the scales of converted pixels."""
        scales = 4 * self.tile_pixels if self.producers > 1 else 0
        rows = self.tile_pixels + (0 if self.resident else self.tile_filters)
        return 2 * self.components * self.stage_channels * rows + 16 + scales

    def filter_bytes(self, own: Convolution) -> int:
        """Bytes of the filters of a tile."""
        return 2 * self.components * round_up(own.channels, self.stage_channels) * own.taps * self.tile_filters

    def _others(self, own: Convolution) -> int:
        """Bytes of shared memory besides the stages.

        The epilogue needs split_form.cu's Staging, or room for 32 filters of float32 outputs.
        """
        staged = 16 * self._own_pixels + 8 * self.tile_filters + 16
        staging = staged + 144 if self.buffers else max(4 * 32 * (64 + 4), staged + 4 * 2 * 8 * 144)
        if self.reduction_outermost:  # it stores from registers
            staging = 0
        others = _ALIGNMENT + _TURNS * self.ping_pong + self.consumers * staging + self.output_bytes
        return others + self.resident * self.filter_bytes(own)

    #: Bytes of shared memory of the pipeline.
    pipeline_bytes = property(lambda self: _ALIGNMENT + self.stages * self.stage_bytes)

    def shared_bytes(self, own: Convolution) -> int:
        """Bytes of shared memory of a block."""
        return self._others(own) + self.stages * self.stage_bytes

    def gemm(self, name: str, own: Convolution, images: int, chip: Chip, arguments: tuple[Argument, ...]) -> Launch:
        """Return the launch of ``name`` with persistent blocks, at most one per multiprocessor."""
        filter_tiles = own.groups * ceil_div(own.filters, self.tile_filters)
        tiles = ceil_div(images * own.output_area, self.tile_pixels) * filter_tiles
        blocks = chip.multiprocessors
        if self.resident:  # all tiles of a block have the same filters
            blocks = max(1, blocks // filter_tiles) * filter_tiles
        return Launch(name, (min(tiles, blocks), 1, 1), (self.threads, 1, 1), arguments, self.shared_bytes(own))

    def image_maps(self, buffer: str, own: Convolution, images: int) -> tuple[TensorMap, TensorMap]:
        """The split images [component][image][row][column][channel], with the windows of the convolution."""
        sizes, box = (own.input_channels, own.width, own.height, images), (self.stage_channels, self.tile_pixels)
        low = (self.components - 1) * 2 * math.prod(sizes)
        return TensorMap(buffer, sizes, box, own.im2col), TensorMap(buffer, sizes, box, own.im2col, low)

    def output_map(self, buffer: str, own: Convolution, images: int) -> TensorMap:
        """The split outputs of one component, [image and pixel][group][filter]; a warp stores 16 pixels at a time."""
        sizes = (own.output_channels // own.groups, own.groups, images * own.output_area)
        return TensorMap(buffer, sizes, (self._staged, 1, 16))

    def filter_maps(self, own: Convolution) -> tuple[TensorMap, TensorMap]:
        """The split filters [component][filter][tap][channel]; without low components the second map is not read."""
        sizes, box = (own.padded_channels, own.taps, own.all_filters), (self.stage_channels, 1, self.tile_filters)
        low = (self.components - 1) * 2 * own.filter_values
        return TensorMap("split_w", sizes, box), TensorMap("split_w", sizes, box, offset=low)

    def config(self, own: Convolution, **others: int) -> dict[str, bool | int | float]:
        """Return the sources' Config.

        Besides the fields it has ``padded_channels`` of a group in split filters and images; ``promotion_stages``,
        the stages between two accumulator promotions, 0 for none; ``output_bytes`` of staged outputs; and from
        ``others`` ``any_spread_scale``, whether the largest value alone decides a scale, ``dense``, whether filters lie
        as dense.cu multiplies them, and ``bias`` and ``residual``, whether split_form.cu adds them.
        """
        interval = PROMOTED_PRODUCTS // self.stage_channels if self.components == 2 else 0
        more = {"padded_channels": own.padded_channels, "output_bytes": self.output_bytes}
        more |= {"any_spread_scale": False, "dense": False}
        return {**asdict(own), **asdict(self), **more, "promotion_stages": interval, **others}

    @property
    def defines(self) -> dict[str, int | str]:
        """The sources' macros."""
        macros: dict[str, int | str] = {}
        for name, columns in (("HIGH", self.tile_filters), ("LOW", self.tile_filters * (self.components - 1))):
            macros |= wgmma_macro(f"WGMMA_{name}", columns, shared=True, transposed=self.reduction_outermost)
        return macros


def _stage_channels(own: Convolution) -> int:
    return min(_STAGE_CHANNELS, key=lambda n: round_up(own.channels, n) * _STAGE_CHANNELS[n])


def fp16x3_bound(products: int, additions: int, low_products: int) -> float:
    """Return the error bound that ``wide`` derives, as a share of sum |x||w|.

    Args:
        products: the reduction length.
        additions: the additions in float32 per output.
        low_products: the most low products in one sum: up to its promotion or, where it is never promoted, all of them.
    """
    sums = min(products, PROMOTED_PRODUCTS) * 2.0**-22 + sum_bound(additions)
    return (4 + 2.0**-9) * 2.0**-22 + (1 + 2.0**-9) * sums + 2 * low_products * 2.0**-32


def limits(pointwise: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    """Return why a kernel, pointwise or general, does not support a problem; empty if it does."""
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
    if own.input_channels > _MOST_CHANNELS:
        reasons.append(f"channels: at most {_MOST_CHANNELS}, in groups of multiples of 8, got {own.input_channels}")
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
