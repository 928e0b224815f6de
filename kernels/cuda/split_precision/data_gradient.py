"""fp16x3_data_gradient: data gradients of layers with few channels on tensor cores, for sm_80 and later.

This file chooses the tile; ``data_gradient.cu`` says what a block computes. The error bound is that of ``wide``:
accumulators are promoted after 128 products, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import DATA_GRADIENT, PAD, RECTANGULAR, ConvProblem, DataGradient
from ece408_op.runtime.launch import REGISTERS, Chip, Launch, Plan, ceil_div, layer_defines, round_up

from ._wide_tiles import PROMOTED_PRODUCTS
from .wide import promoted_bound

_FOLDER = Path(__file__).parent
#: With fewer channels most columns of a product are empty, and with fewer filters most rows of a k-step.
_FEWEST_CHANNELS, _FEWEST_FILTERS, _MOST_CHANNELS = 4, 6, 32
#: A multiprocessor's cycles: for 16 x 8 x 16 products on tensor cores; to split a word of two values.
_MMA_CYCLES, _SPLIT_CYCLES, _LATENCY = 1.64, 0.4, 5000
#: Shared memory that the GPU reserves per thread block, and alignment.
_RESERVED = 1024 + 512


@dataclass(frozen=True)
class _Tile:
    """What a block and a warp compute: Config of ``data_gradient.cu``."""

    m_tiles: int
    warps: int
    row_pitch: int
    plane_pitch: int
    vector: int  # floats per read
    blocks: int = 1  # resident per multiprocessor
    promotion: int = PROMOTED_PRODUCTS // 16


def _k_steps(problem: ConvProblem) -> int:
    return ceil_div(problem.kernel * problem.kernel_width * ceil_div(problem.filters, 8), 2)


def _fragment_bytes(problem: ConvProblem) -> int:
    return _k_steps(problem) * ceil_div(problem.channels, 8) * 32 * 16


def _shared_bytes(problem: ConvProblem, tile: _Tile) -> int:
    words = 2 * 4 * ceil_div(problem.filters, 8) * tile.plane_pitch
    return _fragment_bytes(problem) + 8 * _k_steps(problem) + 4 * words


def _tiles(problem: ConvProblem, aligned: int, most_shared: int) -> Iterator[_Tile]:
    row_pitch = problem.width + problem.kernel_width - 1
    # The four planes of half a k-step then begin in different banks of shared memory.
    plane_pitch = round_up((problem.height + problem.kernel - 1) * row_pitch - 8, 32) + 8
    outputs = problem.filters * problem.output_height * problem.output_width
    vector = 4 if aligned == 16 and outputs % 4 == 0 else 1
    for m_tiles, warps in product((1, 2, 3, 4, 5, 6), (4, 8, 12, 16)):
        tile = _Tile(m_tiles, warps, row_pitch, plane_pitch, vector)
        shared = _shared_bytes(problem, tile)
        registers = round_up(ceil_div(problem.channels, 8) * (12 * m_tiles + 4) + 2 * m_tiles + 48, 8)
        blocks = min(most_shared // (shared + _RESERVED), REGISTERS // (32 * warps * registers), 4)
        if blocks and registers <= 255:
            yield _Tile(m_tiles, warps, row_pitch, plane_pitch, vector, blocks)


def _cost(problem: ConvProblem, tile: _Tile) -> float:
    """Return the predicted cycles of a multiprocessor per image."""
    channel_tiles = ceil_div(problem.channels, 8)
    shared, products = 8 * tile.m_tiles + 4 * channel_tiles, 3 * _MMA_CYCLES * tile.m_tiles * channel_tiles
    unit = _k_steps(problem) * (max(shared, products) + 0.3 * min(shared, products))
    rounds = ceil_div(problem.height * problem.width, 16 * tile.m_tiles * tile.warps)
    words = ceil_div(problem.filters, 2) * problem.output_height * problem.output_width
    # The warps of a scheduler hide one another's latencies, and other blocks those of splitting an image.
    waiting = 1 + 0.8 / (tile.blocks * tile.warps / 4)
    return rounds * tile.warps * unit * waiting + words * _SPLIT_CYCLES + _LATENCY / tile.blocks


@lru_cache(maxsize=256)
def _best_tile(problem: ConvProblem, aligned: int, most_shared: int) -> _Tile | None:
    tiles = _tiles(problem, aligned, most_shared)
    return min(tiles, key=lambda tile: _cost(problem, tile), default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if not isinstance(problem, DataGradient):
        return ["it computes the data gradient only"]
    if problem.channels > _MOST_CHANNELS:
        return [f"channels: at most {_MOST_CHANNELS}, got {problem.channels}"]
    if problem.pad[0] >= problem.kernel or problem.pad[1] >= problem.kernel_width:
        return [f"padding: less than the kernel {(problem.kernel, problem.kernel_width)}, got {problem.pad}"]
    shared = chip.shared_bytes if chip else 227 * 1024
    if _best_tile(problem.with_batch(1), 4, shared) is None:
        return [f"shared memory of a block: the filters and an image of y do not fit {shared} bytes"]
    return []


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = _best_tile(problem.with_batch(1), aligned, chip.shared_bytes)
    assert tile is not None, "_limits refuses a problem without a tile"
    channel_tiles, threads = ceil_div(problem.channels, 8), 32 * tile.warps

    def steps(images: int) -> tuple[Launch, ...]:
        grid = (min(images, chip.multiprocessors * tile.blocks), 1, 1)
        arguments = ("y", "w", "fragments", "exponents", "x", "first", "images")
        return (Launch("data_gradient", grid, (threads, 1, 1), arguments, _shared_bytes(problem, tile)),)

    split = Launch("split_flipped_filters", (channel_tiles, 1, 1), (256, 1, 1), ("w", "fragments", "exponents"))
    scratch = {"fragments": _fragment_bytes(problem), "exponents": 4 * 8 * channel_tiles}
    images = max(1, min(problem.batch, 2**30))
    return Plan(layer_defines(problem), images, steps, (split,), scratch=scratch, config=asdict(tile))


def _recommended(problem: ConvProblem, chip: Chip) -> bool:
    # Each image has a block of its own.
    enough = problem.channels >= _FEWEST_CHANNELS and problem.filters >= _FEWEST_FILTERS
    return enough and 2 * problem.batch >= chip.multiprocessors


KERNEL = CudaKernel(
    "fp16x3_data_gradient",
    "data gradient by mma.sync, whole images in shared memory, for few channels",
    (
        *(_FOLDER / f"../{file}.cuh" for file in ("layer", "denormals", "data_gradient_in_float32")),
        *(_FOLDER / file for file in ("instructions.cuh", "range.cuh", "data_gradient.cu")),
    ),
    _plan,
    _limits,
    lambda problem: promoted_bound(2, problem),
    capability=(8, 0),
    compiler=(11, 8),
    arithmetic="fp16x3",
    recommended=_recommended,
    features=frozenset({PAD, RECTANGULAR, DATA_GRADIENT}),
)
