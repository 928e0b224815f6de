"""How ``direct`` cuts a layer into tiles, by counting what each cut costs. No code is made here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ece408_op.problem import ConvProblem

#: Bytes of a unit's shifted rows, at most, and as a share of the second-level cache: it holds two units' and the
#: weights and outputs at work. Less makes more bands and passes, more made all layers tried slower.
CACHE_BYTES, CACHE_SHARE = 320 * 1024, 5 / 16

#: Floats in a cache line.
LINE_FLOATS = 16

#: A multiply-add's result can be used after 4 cycles; two are begun in each; so are two loads.
LATENCY, PER_CYCLE = 4, 2

#: Vector registers that a tile needs beside its sums and its pixels: one for a weight, and one that keeps the compiler
#: from spilling (4 x 3 in 16 registers spilled, and took twice as long).
SPARE = 2

#: Cycles to move a vector between the first and the second-level cache.
ACCESS = 4

#: (size, count) pairs: how something is cut.
Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """The cut of one layer.

    ``blocks``, ``tiles`` and ``passes`` are (size, count) pairs, larger ones first: filters in a block, vectors in a
    tile, and channels in a pass, of which a later one adds to what those before it left in y. ``rows`` output rows
    make a band, and there are ``bands`` of them; the last may overlap the one before.
    """

    layer: ConvProblem
    lanes: int
    blocks: Pieces
    tiles: Pieces
    passes: Pieces
    rows: int
    bands: int

    @property
    def pixels(self) -> int:
        """Output pixels in a band's plane."""
        return self.rows * self.layer.output_width

    @property
    def channel_stride(self) -> int:
        """Floats from one channel of the shifted image to the next."""
        return self.shifted_rows * self.layer.output_width

    @property
    def shift_stride(self) -> int:
        """Floats from one shifted copy to the next."""
        return self.passes[0][0] * self.channel_stride

    @property
    def single(self) -> bool:
        """One pass takes all channels."""
        return self.passes == ((self.layer.channels, 1),)

    @property
    def shifted_rows(self) -> int:
        """Rows of the image that a band needs."""
        return self.rows + self.layer.kernel - 1

    @property
    def pass_count(self) -> int:
        """Passes over a band."""
        return sum(count for _, count in self.passes)

    @property
    def units(self) -> int:
        """Passes over all bands of an image."""
        return self.bands * self.pass_count

    @property
    def tile_count(self) -> int:
        """Tiles in a band's plane."""
        return sum(count for _, count in self.tiles)

    @property
    def ahead(self) -> int:
        """Rows of the next unit that are shifted during each tile, as long as there are any left."""
        return -(-self.shifted_rows // (self.tile_count * sum(count for _, count in self.blocks)))

    @property
    def copies(self) -> int:
        """Floats of a unit's shifted copies, and a vector that may be read beyond them; whole cache lines."""
        return -(-(self.layer.kernel * self.shift_stride + self.lanes) // LINE_FLOATS) * LINE_FLOATS

    @property
    def scratch(self) -> int:
        """Floats of scratch for a thread: the copies of the unit that computes, and those of the next one."""
        return 2 * self.copies

    @property
    def whole_lines(self) -> bool:
        """Where y begins at a cache line, every vector that is stored lies in one line, and is stored once."""
        plane = self.layer.output_height * self.layer.output_width
        return self.single and plane % LINE_FLOATS == 0 and self.pixels % LINE_FLOATS == 0


def share_out(total: int, largest: int) -> Pieces:
    """``total`` in the fewest pieces of at most ``largest``, sizes as even as can be: (size, count) pairs."""
    pieces = -(-total // largest)
    size, larger = divmod(total, pieces)
    return ((size + 1, larger), (size, pieces - larger)) if larger else ((size, pieces),)


def _last_two_together(tiles: Pieces) -> Pieces:
    """The tiles, but that the last is not of one vector, if there is another. It may spill: it is one of many."""
    size, count = tiles[-1]
    if size > 1 or sum(many for _, many in tiles) == 1:
        return tiles
    before = [*tiles[:-1], (size, count - 1)] if count > 1 else list(tiles[:-1])
    last, many = before.pop()
    return (*before, *([(last, many - 1)] if many > 1 else []), (last + 1, 1))


def _cycles(taps: int, blocks: Pieces, tiles: Pieces) -> float:
    total = 0.0
    for filters, many in blocks:
        for vectors, times in tiles:
            arithmetic = filters * vectors / PER_CYCLE
            loads = (filters + 1.5 * vectors) / PER_CYCLE  # half of the vectors lie across two cache lines
            tap = max(arithmetic, loads, LATENCY) + loads / 16  # of two that are as quick, the one that loads less
            total += many * times * (taps * tap + filters * vectors + 12)
    return total


def _bands(layer: ConvProblem, lanes: int, limit: int) -> tuple[int, int, int]:
    """(channels in a pass, rows in a band, bands): the cheapest that keeps a pass's shifted rows in ``limit`` bytes.

    More passes read and write y more often; more bands shift rows again that two of them need.
    """
    kernel, columns = layer.kernel, layer.output_width
    best = (float("inf"), 0, 0, 0)
    for channels in sorted({-(-layer.channels // pieces) for pieces in range(1, layer.channels + 1)}, reverse=True):
        fitting = limit // (4 * kernel * channels * columns) - kernel + 1
        if fitting < 1 < channels:
            continue
        bands = -(-layer.output_height // max(1, fitting))
        rows = -(-layer.output_height // bands)
        passes = -(-layer.channels // channels)
        if passes > 1 and rows * columns < lanes:
            continue  # less than a vector cannot be added to
        shifted = layer.channels * kernel * (rows + kernel - 1) * bands * -(-columns // lanes)
        again = (passes - 1) * layer.filters * bands * -(-rows * columns // lanes)
        best = min(best, (ACCESS * (shifted + again), channels, rows, bands))
    return best[1:]


@cache
def make_plan(layer: ConvProblem, lanes: int, registers: int, cache_bytes: int) -> Plan:
    """The cheapest cut for vectors of ``lanes`` floats, that many registers and that large a second-level cache."""
    channels, rows, bands = _bands(layer, lanes, min(CACHE_BYTES, int(CACHE_SHARE * cache_bytes)))
    passes = share_out(layer.channels, channels)
    pixels = rows * layer.output_width
    vectors = -(-pixels // lanes)
    # The last vector overlaps the one before. Where passes add to y, one tile must load both before it stores either.
    together = pixels % lanes != 0 and sum(count for _, count in passes) > 1
    cuts = [
        (share_out(layer.filters, f), _last_two_together(tiles) if together else tiles)
        for p in range(1, registers)
        for tiles in [share_out(vectors, p)]
        for f in range(1, registers)
        if f * p + p + SPARE <= registers
    ]
    blocks, tiles = min(cuts, key=lambda cut: _cycles(layer.products, *cut))
    return Plan(layer, lanes, blocks, tiles, passes, rows, bands)
