"""A window in registers: the fastest plain float32 kernel for layers of one channel or a few.

Every thread keeps the inputs of its R x P output pixels in registers while it goes through all filters;
``sliding_window.cu`` says how. This file picks R, P and F.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem, PooledProblem
from ece408_op.runtime.launch import (
    SHARED_BYTES,
    Chip,
    Launch,
    Plan,
    blocks_in_waves,
    ceil_div,
    images_per_launch,
    layer_defines,
    round_up,
    waves_defines,
)

_FOLDER = Path(__file__).parent
_THREADS = 128
#: Registers of one scheduler, of which a multiprocessor has four.
_REGISTERS = 16384
#: Registers beside window and sums.
_OTHER = 24
#: With more channels the window is read too often.
_MOST_CHANNELS = 4
#: Filters, or groups of them, that one block goes through: fewer would read the window too often, more leave too few
#: tiles to go round.
_PASSES = 12
#: How often the grid fills the chip.
_WAVES = 7


@dataclass(frozen=True)
class Tile:
    """A thread's share; the letters are those of ``sliding_window.cu``."""

    rows: int  # R
    pixels: int  # P
    filters: int  # F
    x_vector: int  # XV: floats of one read from global memory
    y_vector: int  # OV: floats of one store

    def registers(self, kernel: int) -> int:
        """Registers that a thread needs, about."""
        window = (self.rows + kernel - 1) * round_up(self.pixels + kernel - 1, self.x_vector)
        return window + self.rows * self.pixels * self.filters + _OTHER

    def warps(self, kernel: int) -> int:
        """Warps of one scheduler."""
        return _REGISTERS // (32 * round_up(self.registers(kernel), 8))

    def tiles(self, problem: ConvProblem) -> int:
        """Tiles of one image."""
        rows, columns = _computed(problem)
        return ceil_div(rows, self.rows) * ceil_div(columns, self.pixels)

    def parts(self, problem: ConvProblem) -> int:
        """Blocks that share the filters of a tile: PARTS."""
        passes = ceil_div(problem.filters, self.filters)
        room = SHARED_BYTES // self.pass_bytes(problem)
        return ceil_div(passes, min(_PASSES, room))

    def pass_bytes(self, problem: ConvProblem) -> int:
        """Shared memory of F filters' weights."""
        return ITEM_BYTES * problem.channels * round_up(problem.kernel**2 * self.filters, 4)


def _step(problem: ConvProblem) -> int:
    """Outputs from one element of y to the next: STEP."""
    return 2 if isinstance(problem, PooledProblem) else 1


def _computed(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns of the convolution that are computed: what no maximum takes is left out."""
    rows, columns = problem.y_shape[2:]
    return _step(problem) * rows, _step(problem) * columns


def _tiles(problem: ConvProblem, aligned: int) -> Iterator[Tile]:
    (height, width), step = _computed(problem), _step(problem)
    for pixels in (p for p in (1, 2, 4) if p <= width and p % step == 0):
        # A vector is aligned if every tile begins at one, the last too, which is moved back to the edge.
        begins = (width, pixels) if width % pixels == 0 else (width, pixels, width - pixels)
        vectors = [v for v in (4, 2, 1) if 4 * v <= aligned]
        read = next(v for v in vectors if all(n % v == 0 for n in (problem.width, *begins[1:])))
        stored = next(v for v in vectors if all(n // step % v == 0 for n in begins))
        for rows in range(step, min(height, 12) + 1, step):
            for filters in (1, 2) if problem.filters > 1 else (1,):
                yield Tile(rows, pixels, filters, read, stored)


def _cost(problem: ConvProblem, tile: Tile) -> float:
    """Issue slots a multiply-add, fitted to 105 tiles of nine layers timed on an H200."""
    k, sums = problem.kernel, tile.rows * tile.pixels
    done = problem.channels * k * k * sums
    reads = (tile.rows + k - 1) * ceil_div(tile.pixels + k - 1, tile.x_vector)
    # A change of weight and its read; a store of less than 16 bytes a lane costs as much as a whole one.
    stores = sums / _step(problem) ** 2
    slots = 1.04 * done + 0.78 * problem.channels * k * k + 2.3 * stores / tile.y_vector + 5.7
    # A window's inputs are waited for.
    often = 1 if problem.channels == 1 else ceil_div(problem.filters, tile.filters)
    slots += 25 * reads * problem.channels * often / problem.filters
    height, width = _computed(problem)
    twice = tile.tiles(problem) * sums / (height * width)
    # Seen, not understood: tiles moved back from the lower edge made 20 % slower what they should have made 3 %.
    twice *= 1.15 if height % tile.rows else 1.0
    few = {1: 2.0, 2: 1.57, 3: 1.04, 4: 1.08}.get(tile.warps(k), 1.0)
    return slots / done * twice * few


@lru_cache(maxsize=256)
def best_tile(problem: ConvProblem, aligned: int) -> Tile | None:
    """The tile of the least cost for the layer; None where no window fits the registers."""
    fitting = [t for t in _tiles(problem, aligned) if t.registers(problem.kernel) <= 248]
    return min(fitting, key=lambda tile: _cost(problem, tile), default=None)


def _reasons(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
    reasons = []
    rows, columns = _computed(problem)
    if rows > problem.output_height or columns > problem.output_width:
        got = f"{problem.output_height} x {problem.output_width}"
        reasons.append(f"fuse: maxima of whole 2 x 2 outputs only, got the convention 'full' on {got}")
    if problem.channels > _MOST_CHANNELS:
        reasons.append(f"channels: at most {_MOST_CHANNELS}, got {problem.channels}")
    if best_tile(problem.with_batch(1), 4) is None:
        reasons.append(f"kernel: at most 13 x 13, whose window fits the registers, got {problem.kernel}")
    return reasons


def _plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
    tile = best_tile(problem.with_batch(1), aligned)
    assert tile is not None, "a problem that _reasons takes"
    blocks = tile.warps(problem.kernel) * 128 // _THREADS
    parts, passes = tile.parts(problem), ceil_div(problem.filters, tile.filters)
    shared = ceil_div(passes, parts) * tile.pass_bytes(problem)
    tiles = tile.tiles(problem)
    held = max(1, chip.multiprocessors * blocks // parts)

    def steps(images: int) -> tuple[Launch, ...]:
        grid = (blocks_in_waves(ceil_div(images * tiles, _THREADS), held, _WAVES) * parts, 1, 1)
        return (Launch("sliding_window", grid, (_THREADS, 1, 1), ("x", "w", "y", "first", "images"), shared),)

    defines = {
        **layer_defines(problem),
        "R": tile.rows,
        "P": tile.pixels,
        "F": tile.filters,
        "XV": tile.x_vector,
        "OV": tile.y_vector,
        "PARTS": parts,
        "THREADS": _THREADS,
        "BLOCKS": blocks,
        **waves_defines(held, _WAVES),
    }
    return Plan(defines, images_per_launch(problem.batch, tiles), steps)


KERNEL = CudaKernel(
    "sliding_window",
    "the whole input window of a thread's pixels in registers, for all filters",
    (_FOLDER / "../layer.cuh", _FOLDER / "../waves.cuh", _FOLDER / "sliding_window.cu"),
    _plan,
    _reasons,
    fuses_pooling=True,
)
