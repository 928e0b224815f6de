"""The tiling of a layer for ``direct``, chosen by a cost model. No code is generated here."""

from __future__ import annotations

from collections.abc import Callable

from ece408_op.problem import ConvProblem, Pair
from ece408_op.runtime.launch import ceil_div

from ._ir import Partition, partition, whole_lines

#: The most bytes of a unit's shifted rows, also as a share of L2: L2 must hold the rows of two units, and the weights
#: and outputs in use. Smaller limits make more bands and passes; larger ones made all tried layers slower.
CACHE_BYTES, CACHE_SHARE = 320 * 1024, 5 / 16

#: The latency of a multiply-add in cycles; the multiply-adds, and the loads, that begin per cycle.
LATENCY, PER_CYCLE = 4, 2

#: Vector registers that a tile needs besides its sums and its pixels: one for a weight, and one that keeps the compiler
#: from spilling (4 x 3 in 16 registers spilled, and took twice as long).
SPARE = 2


def step_cycles(filters: int, vectors: int, loads_per_vector: float = 1.5) -> float:
    """Return the cycles to load the vectors and one weight per filter, and to multiply each vector by each weight.

    The default assumes that half of the vectors cross a cache line. Ties are broken in favour of fewer loads.
    """
    arithmetic, loads = filters * vectors / PER_CYCLE, (filters + loads_per_vector * vectors) / PER_CYCLE
    return max(arithmetic, loads, LATENCY) + loads / 16


def tile_sizes(registers: int, spare: int) -> list[Pair]:
    """Return all (sums per vector, vectors) that fit the registers, with the vectors and ``spare`` others."""
    numbers = range(1, registers)
    return [(f, v) for f in numbers for v in numbers if f * v + v + spare <= registers]


def total_cycles(first: Partition, second: Partition, cycles: Callable[[int, int], float]) -> float:
    """Return the cycles of all tiles; a tile is a piece of ``first`` times a piece of ``second``."""
    return sum(m * n * cycles(a, b) for a, m in first for b, n in second)


def fastest_tiling(
    first: int, second: int, sizes: list[Pair], cycles: Callable[[int, int], float]
) -> tuple[Partition, Partition]:
    """Return partitions of two sizes whose tiles together take the fewest cycles; ``sizes`` are the largest tiles."""
    cuts = [(partition(first, a), partition(second, b)) for a, b in sizes]
    return min(cuts, key=lambda cut: total_cycles(cut[0], cut[1], cycles))


class DirectPlan:
    """The tiling of one layer.

    blocks        filters per block
    tiles         vectors of output pixels per tile
    pass_count    passes over the channels; a later pass adds to the sums that earlier passes stored in y
    rows, bands   output rows per band, number of bands; the last band may overlap the band before it
    pixels        output pixels in a band of a plane
    shifted_rows  rows of the image that a band needs
    in_place      whether the image is its own shifted copy: filters of one column, no vector beyond the last pixel
    units         units of an image: one per band and pass
    tile_count    tiles in a band of a plane
    rows_ahead    rows of the next unit that each tile shifts, while there are any left
    nontemporal   whether y may be stored past the caches: each of its lines is whole vectors, stored once

    Sizes in floats: ``channel_stride`` and ``shift_stride`` are the distances between channels of a shifted copy, and
    between shifted copies; ``copies``: a unit's shifted copies, with one vector that may be read beyond them, in whole
    cache lines; ``scratch``: the copies of the current and of the next unit, per thread.
    """

    def __init__(
        self, layer: ConvProblem, lanes: int, blocks: Partition, tiles: Partition, passes: int, rows: int, bands: int
    ) -> None:
        self.layer, self.lanes, self.rows, self.bands = layer, lanes, rows, bands
        self.blocks, self.tiles, self.pass_count = blocks, tiles, passes
        self.pixels, plane = rows * layer.output_width, layer.output_height * layer.output_width
        self.shifted_rows = rows + layer.kernel - 1
        self.in_place = layer.kernel_width == 1 and self.pixels >= lanes
        self.channel_stride = layer.height * layer.width if self.in_place else self.shifted_rows * layer.output_width
        self.shift_stride = ceil_div(layer.channels, passes) * self.channel_stride
        self.units = bands * self.pass_count
        self.tile_count = sum(count for _, count in tiles)
        self.rows_ahead = ceil_div(self.shifted_rows, self.tile_count * sum(count for _, count in blocks))
        self.copies = whole_lines(layer.kernel_width * self.shift_stride + lanes)
        self.scratch = 0 if self.in_place else 2 * self.copies
        self.nontemporal = passes == 1 and whole_lines(plane) == plane and whole_lines(self.pixels) == self.pixels


def _merged_last_tile(tiles: Partition) -> Partition:
    """Merge a last tile of one vector with the tile before it. The merged tile may spill, but it is one of many."""
    size, count = tiles[-1]
    if size > 1 or sum(many for _, many in tiles) == 1:
        return tiles
    before = [*tiles[:-1], (size, count - 1)] if count > 1 else list(tiles[:-1])
    last, many = before.pop()
    return (*before, *([(last, many - 1)] if many > 1 else []), (last + 1, 1))


def _bands(layer: ConvProblem, lanes: int, limit: int) -> tuple[int, int, int]:
    """Return (passes, rows per band, bands) that move the fewest vectors and whose shifted rows fit ``limit`` bytes.

    More passes read and write y more often; more bands shift more rows twice. If no unit fits, the result has the
    smallest unit that later passes allow.
    """
    kernel, copies, columns = layer.kernel, layer.kernel_width, layer.output_width
    best = (float("inf"), 0, 0, 0)
    for passes in range(1, layer.channels + 1):
        channels = ceil_div(layer.channels, passes)
        fitting = limit // (4 * copies * channels * columns) - kernel + 1
        if fitting < 1 < channels:
            continue
        bands = ceil_div(layer.output_height, max(1, fitting))
        rows = ceil_div(layer.output_height, bands)
        if passes > 1 and rows * columns < lanes:
            continue  # a later pass cannot add to less than a vector
        shifted = layer.channels * copies * (rows + kernel - 1) * bands * ceil_div(columns, lanes)
        added = (passes - 1) * layer.filters * bands * ceil_div(rows * columns, lanes)
        best = min(best, (shifted + added, passes, rows, bands))
    _, passes, rows, bands = best
    if not rows:
        return (layer.channels if layer.output_height * columns >= lanes else 1), layer.output_height, 1
    return passes, rows, bands


def make_plan(layer: ConvProblem, lanes: int, registers: int, l2_bytes: int) -> DirectPlan:
    """Return the fastest predicted tiling for vectors of ``lanes`` floats, ``registers``, and ``l2_bytes`` of L2."""
    passes, rows, bands = _bands(layer, lanes, min(CACHE_BYTES, int(CACHE_SHARE * l2_bytes)))
    pixels = rows * layer.output_width
    vectors = ceil_div(pixels, lanes)
    # The last vector overlaps the vector before it. If passes add to y, one tile must load both before it stores
    # either.
    together = pixels % lanes != 0 and passes > 1
    merged = _merged_last_tile if together else tuple
    sizes = sorted((v, f) for f, v in tile_sizes(registers, SPARE))
    cuts = [(partition(layer.filters, f), merged(partition(vectors, v))) for v, f in sizes]

    def cycles(filters: int, vectors: int) -> float:
        return layer.products * step_cycles(filters, vectors) + filters * vectors + 12

    blocks, tiles = min(cuts, key=lambda cut: total_cycles(cut[0], cut[1], cycles))
    return DirectPlan(layer, lanes, blocks, tiles, passes, rows, bands)
