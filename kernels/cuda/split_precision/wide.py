"""Split precision for layers with many channels, on Hopper: ``general.cu``, and ``pointwise.cu`` for 1 x 1 filters.

The error, as a share of sum |x||w|, is that of ``split_precision`` but for the sums: an accumulator is promoted after
every 128 products at most, so truncation costs 2^-22 for each of those, whatever the length of the sum, and each
promotion one or two roundings of 2^-24. The sums of the low products are 2^-10 of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import (
    GRID_YZ,
    SCRATCH_BYTES,
    Chip,
    Launch,
    Plan,
    TensorMap,
    ceil_div,
    layer_defines,
    round_up,
)

from ..ladder import register_tiled

_FOLDER = Path(__file__).parent
_TILE_PIXELS, _WIDE_TILE, _NARROW_TILE, _CONSUMERS, _PRODUCERS = 128, 128, 64, 2, 2
_WARPGROUP = 128
#: Threads of split_filters, range_of_images and split_images; channels and pixels of a block of the latter.
_FILTER_THREADS, _RANGE_THREADS, _SPLIT_THREADS, _SPLIT_TILE = 256, 512, 256, 64
#: Values that a block of range_of_images looks at, about; blocks per image at most.
_RANGE_VALUES, _MOST_RANGE_BLOCKS = 1 << 15, 16
#: How much longer a narrow tile takes per filter than a wide one, since it loads each pixel twice as often.
_NARROW = 1.1
#: TMA's limits: channels that a pixel has a multiple of, a window's rows and columns.
_TMA_CHANNELS, _MOST_KERNEL = 8, 128
#: Channels and products of a sum from which on tensor cores pay.
_FEWEST_CHANNELS, _FEWEST_PRODUCTS = 24, 64
_MOST_STAGES, _RECOMPUTE_BLOCKS = 8, 2
_PROMOTED_PRODUCTS = 128
#: Bytes: what aligns the stages to the swizzle, a stage's two barriers, a consumer's staged outputs of 32 filters.
_ALIGNMENT, _BARRIERS, _STAGING = 1024, 16, 4 * 32 * (64 + 4)


def _reasons(pointwise: bool, problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if pointwise and problem.kernel != 1:
        return [f"kernel: expected 1, got {problem.kernel}"]
    reasons = []
    if problem.kernel > _MOST_KERNEL:
        reasons.append(f"kernel: at most {_MOST_KERNEL}, got {problem.kernel}")
    if problem.height * problem.width >= 2**30:
        reasons.append(f"image: fewer than 2^30 pixels, got {problem.height} x {problem.width}")
    return reasons


@dataclass(frozen=True)
class _Tile:
    """A block's tile of outputs, and the pipeline that feeds it."""

    terms: int
    filters: int
    stage_channels: int
    stages: int
    shared: int

    @classmethod
    def of(cls, pointwise: bool, terms: int, problem: ConvProblem, chip: Chip) -> _Tile:
        narrow = round_up(problem.filters, _NARROW_TILE) * _NARROW < round_up(problem.filters, _WIDE_TILE)
        filters = _NARROW_TILE if pointwise or narrow else _WIDE_TILE
        # As few channels beyond the last as possible, then as few stages.
        channels = min((64, 32, 16), key=lambda channels: (round_up(problem.channels, channels), -channels))
        stage = (1 + terms // 3) * 2 * channels * (_TILE_PIXELS + filters) + _BARRIERS
        stage += 4 * _TILE_PIXELS if pointwise else 0
        others = _ALIGNMENT + _CONSUMERS * _STAGING
        stages = min(_MOST_STAGES, (chip.shared_bytes - others) // stage)
        return cls(terms, filters, channels, stages, others + stages * stage)

    @property
    def parts(self) -> int:
        """High, and with three terms low."""
        return 2 if self.terms == 3 else 1

    def grid(self, problem: ConvProblem, images: int, chip: Chip) -> tuple[int, int, int]:
        pixels = images * problem.output_height * problem.output_width
        tiles = ceil_div(pixels, _TILE_PIXELS) * ceil_div(problem.filters, self.filters)
        return (min(tiles, chip.multiprocessors), 1, 1)

    def filter_maps(self, problem: ConvProblem) -> tuple[TensorMap, TensorMap]:
        """The split filters [part][filter][tap][channel]; without low parts the second map is not read."""
        sizes = (round_up(problem.channels, _TMA_CHANNELS), problem.kernel**2, problem.filters)
        box = (self.stage_channels, 1, self.filters)
        low = 2 * sizes[0] * sizes[1] * sizes[2] if self.parts == 2 else 0
        return TensorMap("split_w", sizes, box), TensorMap("split_w", sizes, box, offset=low)


def _finished(
    tile: _Tile,
    problem: ConvProblem,
    recompute: Plan,
    config: Mapping[str, int],
) -> tuple[dict[str, int | str], dict[str, bool | int | float]]:
    """The defines and the configuration of both kernels, with those of the float32 kernel that recomputes images."""
    own = layer_defines(problem, 2)
    macro = _multiply_macro(tile.filters)
    defines: dict[str, int | str] = {
        **recompute.defines,
        **own,
        "WIDE": max(int(own["WIDE"]), int(recompute.defines["WIDE"])),
        "MMA(sums, a, b)": macro,
        "MMA_LOW(sums, a, b)": macro if tile.parts == 2 else "",
    }
    return defines, {
        **recompute.config,
        "tile_pixels": _TILE_PIXELS,
        "tile_filters": tile.filters,
        "stage_channels": tile.stage_channels,
        "stages": tile.stages,
        "low_parts": tile.parts == 2,
        "consumers": _CONSUMERS,
        "channels": round_up(problem.channels, _TMA_CHANNELS),
        **config,
    }


def _multiply_macro(columns: int) -> str:
    """wgmma of 64 x columns x 16 on two matrices in shared memory, added to ``sums``."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"((sums)[{i}])' for i in range(count))
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    text = f"{shape} {{{registers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
    return f'asm volatile("{text}" : {outputs} : "l"(a), "l"(b))'


def _split_filters(problem: ConvProblem, images: str | np.int32) -> Launch:
    return Launch(
        "split_filters",
        (problem.filters, 1, 1),
        (_FILTER_THREADS, 1, 1),
        ("w", "split_w", "w_exponents", "listed", images),
    )


def _recompute(plan: Plan, chip: Chip) -> Launch:
    (launch,) = [step for step in plan.steps(1) if isinstance(step, Launch)]
    arguments = ("x", "w", "y", "w_exponents", "listed", "first", "images")
    return Launch("recompute_images", (_RECOMPUTE_BLOCKS * chip.multiprocessors, 1, 1), launch.block, arguments)


def _filter_scratch(tile: _Tile, problem: ConvProblem) -> dict[str, int]:
    channels = round_up(problem.channels, _TMA_CHANNELS)
    split = 2 * tile.parts * problem.kernel**2 * channels * problem.filters
    return {"split_w": split, "w_exponents": 4 * problem.filters}


def _general(terms: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = _Tile.of(False, terms, problem, chip)
    channels, area = round_up(problem.channels, _TMA_CHANNELS), problem.height * problem.width
    image_bytes = 2 * tile.parts * area * channels
    images = max(1, min(problem.batch, SCRATCH_BYTES // image_bytes, (2**31 - 1) // area, GRID_YZ))
    ranges = max(1, min(_MOST_RANGE_BLOCKS, problem.channels * area // _RANGE_VALUES))
    recompute = register_tiled.REGISTER_TILED.plan(problem, chip, aligned)

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        sizes, box = (channels, problem.width, problem.height, count), (tile.stage_channels, _TILE_PIXELS)
        window, low = (problem.kernel, problem.kernel), (tile.parts - 1) * 2 * area * channels * count
        maps = (TensorMap("split_x", sizes, box, window), TensorMap("split_x", sizes, box, window, low))
        blocks = (ceil_div(area, _SPLIT_TILE), ceil_div(channels, _SPLIT_TILE), count)
        return (
            Launch("range_of_images", (ranges, count, 1), (_RANGE_THREADS, 1, 1), ("x", "ranges", "listed", "first")),
            Launch(
                "split_images",
                blocks,
                (_SPLIT_THREADS, 1, 1),
                ("x", "ranges", "split_x", "x_exponents", "listed", "first", "images"),
            ),
            Launch(
                "implicit_gemm_tma",
                tile.grid(problem, count, chip),
                (_WARPGROUP * (_CONSUMERS + 1), 1, 1),
                (*maps, *tile.filter_maps(problem), "x_exponents", "w_exponents", "y", "first", "images"),
                tile.shared,
            ),
            _recompute(recompute, chip),
        )

    promote_every = _PROMOTED_PRODUCTS // tile.stage_channels
    defines, config = _finished(tile, problem, recompute, {"promote_every": promote_every, "range_blocks": ranges})
    scratch = {
        **_filter_scratch(tile, problem),
        "split_x": image_bytes * images,
        "ranges": 8 * ranges * images,
        "x_exponents": 4 * images,
        "listed": 4 * (1 + images),
    }
    setup = (_split_filters(problem, np.int32(0)),)
    return Plan(defines, images, steps, setup, scratch=scratch, config=config)


def _pointwise(terms: int, problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = _Tile.of(True, terms, problem, chip)
    # Two words per image in the list of images to recompute.
    images = max(1, min(problem.batch, (2**31 - 1) // (problem.height * problem.width), SCRATCH_BYTES // 8))
    recompute = register_tiled.REGISTER_TILED.plan(problem, chip, aligned)

    @cache
    def steps(count: int) -> tuple[Launch, ...]:
        arguments = ("x", *tile.filter_maps(problem), "w_exponents", "y", "listed", "first", "images")
        threads = _WARPGROUP * (_CONSUMERS + _PRODUCERS)
        return (
            _split_filters(problem, "images"),
            Launch("pointwise_gemm", tile.grid(problem, count, chip), (threads, 1, 1), arguments, tile.shared),
            _recompute(recompute, chip),
        )

    defines, config = _finished(tile, problem, recompute, {"producers": _PRODUCERS})
    scratch = {**_filter_scratch(tile, problem), "listed": 4 * (1 + 2 * images)}
    return Plan(defines, images, steps, scratch=scratch, config=config)


def _bound(terms: int, problem: ConvProblem) -> float:
    """The largest |y - exact| as a share of sum |x||w|: see above."""
    n = problem.products
    # A pointwise stage has at least 16 products, and two roundings: of its sum and of the total.
    sums = min(n, _PROMOTED_PRODUCTS) * 2.0**-22 + (2 * ceil_div(n, 16) + 1) * 2.0**-24
    if terms == 1:
        return (1 + 2.0**-11) ** 2 * (1 + sums) - 1 + 2.0**-22
    low = 2 * n * 2.0**-22 * 2.0**-10
    return (3 + 2.0**-9) * 2.0**-22 + (1 + 2.0**-9) * sums + low + 2.0**-22


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    return problem.channels >= _FEWEST_CHANNELS and problem.products >= _FEWEST_PRODUCTS


def _kernel(name: str, terms: int, summary: str) -> CudaKernel:
    pointwise = "pointwise" in name
    shared = ("../layer.cuh", "../denormals.cuh", "../ladder/register_tiled.cu", "wide_tile.cuh")
    files = (*shared, "pointwise.cu" if pointwise else "general.cu")
    return CudaKernel(
        name,
        summary,
        tuple(_FOLDER / file for file in files),
        partial(_pointwise if pointwise else _general, terms),
        partial(_reasons, pointwise),
        partial(_bound, terms),
        capability=(9, 0),
        compiler=(12, 0),
        precision="float32" if terms == 3 else "tf32",
        options=("--gpu-architecture=sm_90a",),
        exact_capability=True,
        arithmetic="fp16x3" if terms == 3 else "fp16x1",
        recommended=_recommended,
    )


GENERAL = _kernel("fp16x3_general", 3, "implicit GEMM by wgmma and TMA, three fp16 products per float32 product")
POINTWISE = _kernel("fp16x3_pointwise", 3, "1 x 1 filters by wgmma, inputs converted on their way to shared memory")
FP16X1_GENERAL = _kernel("fp16x1_general", 1, "fp16x3_general with the high parts alone")
FP16X1_POINTWISE = _kernel("fp16x1_pointwise", 1, "fp16x3_pointwise with the high parts alone")
