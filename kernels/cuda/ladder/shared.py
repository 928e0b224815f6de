"""shared, constant and unrolled: tiles in shared memory, then weights in constant memory, then unrolled loops."""

from __future__ import annotations

from dataclasses import replace

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ITEM_BYTES, ConvProblem, Pair
from ece408_op.runtime.launch import (
    CONSTANT_BYTES,
    SHARED_BYTES,
    Chip,
    CopyToConstant,
    Plan,
    ceil_div,
    grid_reasons,
    one_launch,
)

from ..sources import sources

_THREADS = 256
#: Output pixels of a tile, at most: four per thread.
_PIXELS = 4 * _THREADS
#: Bytes of shared memory for the filter of `shared`; a larger filter is loaded some channels at a time.
_FILTER_BYTES = 8192


def input_tile(problem: ConvProblem, other_bytes: int = 0) -> Pair | None:
    """Return the rows and columns of the tile, of at most _PIXELS output pixels, with the least cost for an image.

    The tile's input window of all channels and ``other_bytes`` fit the 48 KB that every block has. None if not even
    one pixel's window fits.
    """
    best, least_cost = None, 0
    halo = problem.kernel - 1
    for rows in range(1, min(problem.output_height, _PIXELS) + 1):
        columns_that_fit = (SHARED_BYTES - other_bytes) // (ITEM_BYTES * problem.channels * (rows + halo)) - halo
        columns = min(problem.output_width, _PIXELS // rows, columns_that_fit)
        if columns < 1:
            continue
        # The cost of a tile is its window and its outputs, including those beyond the image's edge.
        size = problem.channels * (rows + halo) * (columns + halo) + rows * columns * problem.filters
        cost = _tiles(problem, (rows, columns)) * size
        if best is None or cost < least_cost:
            best, least_cost = (rows, columns), cost
    return best


def _tiles(problem: ConvProblem, tile: Pair) -> int:
    return ceil_div(problem.output_height, tile[0]) * ceil_div(problem.output_width, tile[1])


def _kernel(name: str, summary: str, entry: str, weights_in_constant: bool) -> CudaKernel:
    def filter_channels(problem: ConvProblem) -> int:
        return max(1, min(problem.channels, _FILTER_BYTES // (ITEM_BYTES * problem.kernel**2)))

    def tile_of(problem: ConvProblem) -> Pair | None:
        filter_bytes = 0 if weights_in_constant else ITEM_BYTES * filter_channels(problem) * problem.kernel**2
        return input_tile(problem, filter_bytes)

    def weight_bytes(problem: ConvProblem) -> int:
        return ITEM_BYTES * problem.filters * problem.products

    def limits(problem: ConvProblem, chip: Chip | None = None) -> list[str]:
        found, size = [], weight_bytes(problem)
        if weights_in_constant and size > CONSTANT_BYTES:
            found.append(f"filters: at most {CONSTANT_BYTES} bytes of constant memory, got {size}")
        tile = tile_of(problem)
        if tile is None:
            window = ITEM_BYTES * problem.products
            return [*found, f"one window of all channels: at most the 48 KB of shared memory, got {window} bytes"]
        return found + grid_reasons(_tiles(problem, tile))

    def plan(problem: ConvProblem, chip: Chip, aligned: int) -> Plan:
        tile = tile_of(problem)
        assert tile is not None, "limits() refuses a problem without a tile"
        config = {"threads": _THREADS, "tile_rows": tile[0], "tile_columns": tile[1]}
        in_image = _tiles(problem, tile)
        if weights_in_constant:
            whole = one_launch(problem, entry, lambda n: n * in_image, _THREADS, config, ("x", "y", "first"))
            return replace(whole, setup=(CopyToConstant("weights", "w", weight_bytes(problem)),))
        config["filter_channels"] = filter_channels(problem)
        return one_launch(problem, entry, lambda n: n * in_image, _THREADS, config, ("x", "w", "y", "first"))

    return CudaKernel(name, summary, sources("ladder/tile.cuh", f"ladder/{name}.cu"), plan, limits)


SHARED = _kernel("shared", "the tile's input window and one filter at a time in shared memory", "shared_tile", False)
CONSTANT = _kernel("constant", "shared with all filters in constant memory", "constant_weights", True)
UNROLLED = _kernel("unrolled", "constant with its inner loops unrolled", "unrolled", True)
