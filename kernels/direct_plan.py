"""How ``direct`` cuts a layer into tiles, by counting what each cut costs. No code is made here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ece408_op.problem import ConvProblem

#: Bytes of shifted image kept in the second-level cache: 512 KiB on many CPUs, some of it for weights and outputs.
CACHE_BYTES = 320 * 1024

#: Floats in a cache line.
LINE_FLOATS = 16

#: A multiply-add's result can be used after 4 cycles; two are begun in each; so are two loads.
LATENCY, PER_CYCLE = 4, 2


@dataclass(frozen=True)
class Plan:
    """The cut of one layer.

    ``blocks`` and ``tiles`` are (size, count) pairs: filters in a block, and vectors in a tile, larger ones first.
    ``rows`` output rows make a band, and there are ``bands`` of them; the last may overlap the one before.
    """

    layer: ConvProblem
    lanes: int
    blocks: tuple[tuple[int, int], ...]
    tiles: tuple[tuple[int, int], ...]
    rows: int
    bands: int

    @property
    def pixels(self) -> int:
        """Output pixels in a band's plane."""
        return self.rows * self.layer.output_width

    @property
    def channel_stride(self) -> int:
        """Floats from one channel of the shifted image to the next."""
        return (self.rows + self.layer.kernel - 1) * self.layer.output_width

    @property
    def shift_stride(self) -> int:
        """Floats from one shifted copy to the next."""
        return self.layer.channels * self.channel_stride

    @property
    def scratch(self) -> int:
        """Floats of scratch for a thread: all copies, and a vector that may be read beyond them."""
        return self.layer.kernel * self.shift_stride + self.lanes

    @property
    def whole_lines(self) -> bool:
        """Where y begins at a cache line, every vector that is stored lies in one line."""
        plane = self.layer.output_height * self.layer.output_width
        return plane % LINE_FLOATS == 0 and self.pixels % LINE_FLOATS == 0


def share_out(total: int, largest: int) -> tuple[tuple[int, int], ...]:
    """``total`` in the fewest pieces of at most ``largest``, sizes as even as can be: (size, count) pairs."""
    pieces = -(-total // largest)
    size, larger = divmod(total, pieces)
    return ((size + 1, larger), (size, pieces - larger)) if larger else ((size, pieces),)


def _cycles(taps: int, blocks: tuple[tuple[int, int], ...], tiles: tuple[tuple[int, int], ...]) -> float:
    total = 0.0
    for filters, many in blocks:
        for vectors, times in tiles:
            arithmetic = filters * vectors / PER_CYCLE
            loads = (filters + 1.5 * vectors) / PER_CYCLE  # half of the vectors lie across two cache lines
            total += many * times * (taps * max(arithmetic, loads, LATENCY) + filters * vectors + 12)
    return total


@cache
def make_plan(layer: ConvProblem, lanes: int, registers: int) -> Plan:
    """The cheapest cut for vectors of ``lanes`` floats and that many registers."""
    kernel, width = layer.kernel, layer.output_width
    row_bytes = 4 * kernel * layer.channels * width
    fitting = max(1, CACHE_BYTES // row_bytes - kernel + 1)
    bands = -(-layer.output_height // fitting)
    rows = -(-layer.output_height // bands)
    vectors = -(-rows * width // lanes)
    cuts = [
        (share_out(layer.filters, f), share_out(vectors, p))
        for p in range(1, registers)
        for f in range(1, registers)
        if f * p + p + 1 <= registers
    ]
    blocks, tiles = min(cuts, key=lambda cut: _cycles(layer.products, *cut))
    return Plan(layer, lanes, blocks, tiles, rows, bands)
