"""sliding_window: sliding-window direct convolution, the fastest plain float32 kernel for one channel or a few.

This file chooses the tile; ``sliding_window.cu`` says how a thread computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import gcd

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, TANH_POOL, ConvProblem, PooledProblem
from ece408_op.runtime.launch import (
    REGISTERS,
    SHARED_BYTES,
    Chip,
    Launch,
    Plan,
    ceil_div,
    images_per_launch,
    layer_defines,
    round_up,
)

from ..sources import sources

# ``ece408-bench sweep --impl sliding_window --random 24`` times these constants and those of ``_cost``.
_THREADS = 128
#: Registers of a thread besides its window and sums; of a thread at most: the hardware's 255, in its steps of eight.
_OTHER_REGISTERS, _MOST_REGISTERS = 24, 248
#: The most channels: with more, the window is read too often.
_MOST_CHANNELS = 4
#: The most passes of FILTERS filters per block: with fewer the window is read too often, with more there are too few
#: blocks for all multiprocessors.
_PASSES = 12
#: The most blocks in the grid per block that the chip holds (register_blocked.py says why). On 62 layers, 4 took 1.012
#: times as long as 8, and 16 took 0.99 times as long, but 1.03 times on a pooled layer of the course.
_SHARES = 8


@dataclass(frozen=True)
class SlidingWindowTile:
    """What a thread computes: Config of ``sliding_window.cu``."""

    rows: int
    columns: int
    filters: int
    load_vector: int  # floats of one load from global memory
    store_vector: int  # floats of one store

    def registers(self, kernel: int) -> int:
        """Return the approximate number of registers of a thread."""
        window = (self.rows + kernel - 1) * round_up(self.columns + kernel - 1, self.load_vector)
        return window + self.rows * self.columns * self.filters + _OTHER_REGISTERS

    def warps(self, kernel: int) -> int:
        """Return the number of warps that the registers of one of a multiprocessor's four schedulers hold."""
        return REGISTERS // (4 * 32 * round_up(self.registers(kernel), 8))

    def tiles(self, problem: ConvProblem) -> int:
        """Return the tiles of one image."""
        rows, columns = _computed(problem)
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)

    def parts(self, problem: ConvProblem) -> int:
        """Return the number of blocks that share the filters of a tile."""
        fitting = SHARED_BYTES // self.pass_bytes(problem)
        return ceil_div(ceil_div(problem.filters, self.filters), min(_PASSES, fitting))

    def pass_bytes(self, problem: ConvProblem) -> int:
        """Return the shared memory of the weights of one pass."""
        return ITEM_BYTES * problem.channels * round_up(problem.kernel**2 * self.filters, 4)


def _step(problem: ConvProblem) -> int:
    """Return the outputs from one element of y to the next."""
    return 2 if isinstance(problem, PooledProblem) else 1


def _computed(problem: ConvProblem) -> tuple[int, int]:
    """Return the rows and columns of the convolution that are computed: with pooling, those that a maximum covers."""
    rows, columns = problem.y_shape[2:]
    return _step(problem) * rows, _step(problem) * columns


def _tiles(problem: ConvProblem, aligned: int) -> Iterator[SlidingWindowTile]:
    (height, width), step = _computed(problem), _step(problem)
    for columns in (p for p in (1, 2, 4) if p <= width and p % step == 0):
        # Vectors are aligned if every tile begins at one, including the last tile, which is moved back to the edge.
        begins = (width, columns) if width % columns == 0 else (width, columns, width - columns)
        load = gcd(aligned // ITEM_BYTES, problem.width, *begins[1:])
        store = gcd(aligned // ITEM_BYTES, *(n // step for n in begins))
        for rows in range(step, min(height, 12) + 1, step):
            for filters in (1, 2) if problem.filters > 1 else (1,):
                yield SlidingWindowTile(rows, columns, filters, load, store)


def _cost(problem: ConvProblem, tile: SlidingWindowTile) -> float:
    """Return the issue slots per multiply-add, fitted to 105 tiles of nine layers timed on an H200."""
    k, sums = problem.kernel, tile.rows * tile.columns
    products = problem.channels * k * k * sums
    loads = (tile.rows + k - 1) * ceil_div(tile.columns + k - 1, tile.load_vector)
    # A new weight costs a read and a change; a store of less than 16 bytes per lane costs as much as one of 16 bytes.
    stores = sums / _step(problem) ** 2
    slots = 1.04 * products + 0.78 * problem.channels * k * k + 2.3 * stores / tile.store_vector + 5.7
    # The warp waits for a window's inputs.
    windows = 1 if problem.channels == 1 else ceil_div(problem.filters, tile.filters)
    slots += 25 * loads * problem.channels * windows / problem.filters
    height, width = _computed(problem)
    repeated = tile.tiles(problem) * sums / (height * width)
    # Measured, not understood: tiles moved back from the lower edge cost 20 % where 3 % more work was expected.
    repeated *= 1.15 if height % tile.rows else 1.0
    few_warps = {1: 2.0, 2: 1.57, 3: 1.04, 4: 1.08}.get(tile.warps(k), 1.0)
    return slots / products * repeated * few_warps


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, aligned: int) -> SlidingWindowTile | None:
    """Return the tile with the least cost for the layer; None if no window fits the registers."""
    fitting = [t for t in _tiles(problem, aligned) if t.registers(problem.kernel) <= _MOST_REGISTERS]
    return min(fitting, key=lambda tile: _cost(problem, tile), default=None)


def _limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    reasons = []
    rows, columns = _computed(problem)
    if rows > problem.output_height or columns > problem.output_width:
        got = f"{problem.output_height} x {problem.output_width}"
        reasons.append(f"fuse: maxima of whole 2 x 2 outputs only, got the convention 'full' on {got}")
    if problem.channels > _MOST_CHANNELS:
        reasons.append(f"channels: at most {_MOST_CHANNELS}, got {problem.channels}")
    if best_tile(problem.with_batch(1), 4) is None:
        largest = 13 if isinstance(problem, PooledProblem) else 14
        reasons.append(f"kernel: at most {largest} x {largest}, whose window fits the registers, got {problem.kernel}")
    return reasons


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = best_tile(problem.with_batch(1), aligned)
    assert tile is not None, "_limits refuses a problem without a tile"
    blocks = tile.warps(problem.kernel) * 128 // _THREADS
    parts, passes = tile.parts(problem), ceil_div(problem.filters, tile.filters)
    shared = ceil_div(passes, parts) * tile.pass_bytes(problem)
    tiles = tile.tiles(problem)
    most = _SHARES * max(1, chip.multiprocessors * blocks // parts)

    def steps(images: int) -> tuple[Launch, ...]:
        grid = (min(ceil_div(images * tiles, _THREADS), most) * parts, 1, 1)
        return (Launch("sliding_window", grid, (_THREADS, 1, 1), ("x", "w", "y", "first", "images"), shared),)

    own = {"parts": parts, "threads": _THREADS, "blocks": blocks}
    images = images_per_launch(problem.batch, tiles)
    return Plan(layer_defines(problem), images, steps, config={**asdict(tile), **own})


KERNEL = CudaKernel(
    "sliding_window",
    "sliding-window direct convolution: a thread's input window in registers, for all filters",
    sources("vectors.cuh", "float32/sliding_window.cu"),
    _plan,
    _limits,
    features=frozenset({TANH_POOL}),
)
