"""data_gradient_tiles: the data gradient of a layer with few channels, by a tile of pixels per thread.

This file chooses the tile; ``data_gradient_tiles.cu`` says what a thread computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import DATA_GRADIENT, ITEM_BYTES, PAD, RECTANGULAR, ConvProblem
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, even_shares, layer_defines, round_up

from ..sources import sources
from ._pipeline import odd_vectors, resident_blocks, step_cycles

# ``ece408-bench layers --context gpu --gradient data --impl data_gradient_tiles`` times these constants.
#: The most threads per block, bytes of shared memory per block (two blocks fit an sm_90 multiprocessor), sums per
#: thread.
_MOST_THREADS, _MOST_SHARED, _MOST_SUMS = 512, 112 * 1024, 48
#: Products from one promotion of the sums to the next: with one level of sums the error was three times cuDNN's.
_PROMOTED_PRODUCTS = 128
#: The most channels: with more, tensor cores or blocked_gemm are faster.
_MOST_CHANNELS = 16


@dataclass(frozen=True)
class DataGradientTile:
    """What a block and a thread compute: Config of ``data_gradient_tiles.cu``."""

    rows: int
    columns: int
    channels: int
    images: int
    step_filters: int
    stages: int  # of the pipeline
    pitch: int
    map_rows: int
    promotion: int  # filters from one promotion of the sums to the next
    copy_vector: int  # floats of one copy, and of one store
    store_vector: int
    blocks: int = 1  # resident per multiprocessor

    def threads(self, problem: ConvProblem) -> int:
        """Return the threads per block."""
        tiles = ceil_div(problem.height, self.rows) * ceil_div(problem.width, self.columns)
        return round_up(self.images * ceil_div(problem.channels, self.channels) * tiles, 32)

    def row_floats(self, problem: ConvProblem) -> int:
        """Return the floats of a row of a thread's window."""
        shift = -(problem.kernel_width - 1 - problem.pad[1]) % 4
        return round_up(shift + self.columns + problem.kernel_width - 1, 4)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Return the shared memory of all stages and the weights."""
        image_pitch = self.step_filters * self.map_rows * self.pitch
        image_pitch += (ceil_div(problem.width, self.columns) * self.columns - image_pitch) % 32
        stage = self.images * image_pitch
        channels = round_up(problem.channels, self.channels)
        weights = problem.filters * channels * problem.kernel * round_up(problem.kernel_width, 4)
        return ITEM_BYTES * (self.stages * stage + weights)

    def registers(self, problem: ConvProblem) -> int:
        """Return the approximate number of registers of a thread."""
        sums, taps = self.rows * self.columns * self.channels, round_up(problem.kernel_width, 4)
        weights = problem.kernel * taps if self.rows > 1 else 2 * taps
        return round_up(2 * sums + self.row_floats(problem) + weights + 20, 8)


def _tiles(problem: ConvProblem, aligned: int) -> Iterator[DataGradientTile]:
    copy, store = (gcd(aligned // ITEM_BYTES, width) for width in (problem.output_width, problem.width))
    promotion = ceil_div(_PROMOTED_PRODUCTS, problem.kernel * problem.kernel_width)
    sizes = even_shares(problem.channels, 8)
    # An odd number of whole vectors per thread: the columns of eight neighbouring threads then lie in different banks.
    for columns, channels, rows in product((4, 12), sizes, range(1, 9)):
        if rows * columns * channels > _MOST_SUMS or min(rows, channels) > 1:
            continue
        one = DataGradientTile(rows, columns, channels, 1, 1, 2, 0, 0, promotion, copy, store)
        last_column = (ceil_div(problem.width, columns) - 1) * columns
        pitch = odd_vectors(last_column + one.row_floats(problem))
        map_rows = round_up(problem.height, rows) + problem.kernel - 1
        for images, filters, stages in product(range(1, 17), (1, 2, 4, 8), (2, 3, 4)):
            tile = replace(one, images=images, step_filters=filters, stages=stages, pitch=pitch, map_rows=map_rows)
            threads, shared = tile.threads(problem), tile.shared_bytes(problem)
            if threads > _MOST_THREADS:
                break  # so have more images
            blocks = resident_blocks(threads, one.registers(problem), shared)
            if shared <= _MOST_SHARED and blocks:
                yield replace(tile, blocks=blocks)


def _cost(problem: ConvProblem, tile: DataGradientTile) -> float:
    """Return the predicted cycles of a multiprocessor per multiply-add."""
    taps, threads = problem.kernel * problem.kernel_width, tile.threads(problem)
    window_rows: float = tile.rows + problem.kernel - 1
    if tile.rows == 1:  # a thread skips the rows that lie above or below y
        window_rows *= min(1.0, (problem.output_height + 2) / problem.height)
    fmas: float = tile.columns * tile.channels * problem.kernel_width
    fmas *= window_rows if tile.rows == 1 else tile.rows * problem.kernel
    inputs = window_rows * tile.row_floats(problem) / 4
    weights = tile.channels * problem.kernel * round_up(problem.kernel_width, 4) / 4
    # Issue slots, and shared-memory cycles: four per vector of inputs. Shared memory serves one scheduler at a time.
    issue, shared = fmas + inputs + weights + 12, 4 * (4 * inputs + weights)
    floats = tile.images * problem.output_height * problem.output_width
    filter_cycles = max(issue, shared) + 0.3 * min(issue, shared) + 10 * floats / tile.copy_vector / threads
    issued, copied = tile.step_filters * filter_cycles + 100, ITEM_BYTES * tile.blocks * tile.step_filters * floats
    cycles = step_cycles(issued, tile.blocks * threads, copied, tile.stages)
    steps = ceil_div(problem.filters, tile.step_filters)
    useful = tile.images * problem.channels * problem.height * problem.width * problem.filters * taps
    return cycles * steps / tile.blocks / useful


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, aligned: int) -> DataGradientTile | None:
    """Return the tile with the least cost for the layer; None if no tile fits a block."""
    return min(_tiles(problem, aligned), key=lambda tile: _cost(problem, tile), default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    if problem.channels > _MOST_CHANNELS:
        return [f"channels: at most {_MOST_CHANNELS}, got {problem.channels}"]
    if problem.pad[0] >= problem.kernel or problem.pad[1] >= problem.kernel_width:
        return [f"padding: less than the kernel {(problem.kernel, problem.kernel_width)}, got {problem.pad}"]
    tiles = [best_tile(problem.with_batch(1), aligned) for aligned in (4, 8, 16)]
    if None in tiles:
        return [f"shared memory of a block: the weights and two maps do not fit {_MOST_SHARED} bytes"]
    needed = max(tile.shared_bytes(problem) for tile in tiles if tile)
    if chip is not None and needed > chip.shared_bytes:
        return [f"shared memory of a block: at least {needed} bytes, got {chip.shared_bytes}"]
    return []


def plan_of(tile: DataGradientTile, problem: ConvProblem, chip: Chip) -> Plan:
    """Return the plan for one tile."""

    def steps(images: int) -> tuple[Launch, ...]:
        grid = (min(ceil_div(images, tile.images), chip.multiprocessors * tile.blocks), 1, 1)
        arguments = ("y", "w", "x", "first", "images")
        block = (tile.threads(problem), 1, 1)
        return (Launch("data_gradient_tiles", grid, block, arguments, tile.shared_bytes(problem)),)

    return Plan(layer_defines(problem), max(1, min(problem.batch, 2**30)), steps, config=asdict(tile))


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = best_tile(problem.with_batch(1), aligned)
    assert tile is not None, "_limits refuses a problem without a tile"
    return plan_of(tile, problem, chip)


KERNEL = CudaKernel(
    "data_gradient_tiles",
    "data gradient as a direct convolution: a tile of pixels per thread, for few channels",
    sources("vectors.cuh", "float32/data_gradient_tiles.cu"),
    _plan,
    _limits,
    features=frozenset({PAD, RECTANGULAR, DATA_GRADIENT}),
    required=DATA_GRADIENT,
)
