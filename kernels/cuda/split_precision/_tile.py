"""The tile of a block, its parts, and the memory that they take. The letters are the sources'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import ceil_div, round_up

from ._shared_memory_layout import Tap

#: Shared memory beside the arrays, each of which is rounded up to 128 bytes.
_SLACK = 1536
#: Positions of a tile of several images: more would leave too few tiles to go round.
_MOST_POSITIONS = 4096


@dataclass(frozen=True)
class Tile:
    """A block's share of a layer.

    A position of it stands for ``rows`` x ``sets`` rows of outputs of one column, or, ``folded``, for ``rows``
    neighbouring outputs of one row. Its filters are split into two 16-bit floats (``parts`` 2) or rounded to one.
    """

    parts: int  # PARTS
    rows: int  # R: outputs that columns of filters stand for
    sets: int  # RA: output rows that have sums of their own
    images: int  # IMG
    super_rows: int  # TR: lines of positions
    columns: int  # TW: positions of a line
    stride: int  # S
    plane: int  # PL
    taps: tuple[Tap, ...]  # TAPS: eight a step
    row_steps: int  # KR: steps of one filter row; the first K KR steps are those
    tiles: int  # NT: column tiles of a group
    warps: int  # NC
    vector: int  # XV
    loaders: int = 4  # NP
    teams: int = 0  # warps by four that multiply with wgmma; 0: warps by themselves, with mma.sync
    registers: int = 0  # TEAM_REGISTERS: of a team's thread; the loaders have the rest
    pixels: int = 4  # MT: sixteens of positions of a warp
    keep_a: bool = False  # KEEP_A
    stationary: bool = False  # STATIONARY: a warp keeps its filters in registers
    pairs: bool = False  # PAIRS: a lane's two positions are neighbours
    filters_first: bool = False  # FILTERS_FIRST: filters are the tensor cores' A, positions their B
    ahead: bool = False  # AHEAD: a tile's inputs are copied while those of the one before are split
    shared_weights: bool = True  # W_SHARED
    direct: bool = False  # DIRECT
    folded: bool = False  # FOLDED
    quads: bool = False  # QUADS
    filter_blocks: int = 1  # MBLOCKS: blocks that share the filters
    y_vector: int = 1  # YV: floats of one store
    chunk: int = 0  # CHUNK: steps after which sums are parted; 0: never
    bulk: bool = False  # BULK: outputs leave by the copy engine, staged in shared memory
    outs: int = 2  # OUTS: tiles whose outputs are staged
    one_run: bool = False  # whole images are staged as they lie in y: one copy sends them
    across: int = 0  # ACROSS: positions of one instruction of fp16x3_implicit_gemm, eight of a line; 0: another kernel

    @property
    def steps(self) -> int:
        """Steps of 16 products: KSTEPS."""
        return len(self.taps) // 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + self.loaders)

    @property
    def down(self) -> int:
        """Output rows of a line of positions."""
        return 1 if self.folded else self.rows * self.sets

    @property
    def along(self) -> int:
        """Output columns of a position."""
        return self.rows if self.folded else 2 if self.across else 1

    @property
    def out_pitch(self) -> int:
        """Floats from one filter's outputs to the next: OUT_PITCH, so that a warp's stores meet in few banks."""
        run = self.down * self.super_rows * self.columns * self.along
        if self.one_run:
            return run
        return run + ((8 if self.filters_first or self.across else 4) - run) % 16

    def out_floats(self, problem: ConvProblem) -> int:
        """Floats for sums on their way out: OUT_FLOATS."""
        if self.bulk:
            filters = problem.filters if self.filter_blocks == 1 else 8 * self.tiles * self.groups(problem)
            return self.outs * self.images * filters * self.out_pitch
        if self.folded or self.stationary or self.quads or self.across:
            return 0
        return self.teams * self.sets * 8 * self.tiles * 68 if self.teams else self.warps * 8 * (16 * self.pixels + 4)

    def column_tiles(self, problem: ConvProblem) -> int:
        """Tiles of eight columns, R columns a filter: NTILES."""
        return ceil_div(self.rows * problem.filters, 8)

    def padded_tiles(self, problem: ConvProblem) -> int:
        """The same, in groups of NT, as many for every block."""
        return round_up(self.column_tiles(problem), self.tiles * self.filter_blocks)

    def groups(self, problem: ConvProblem) -> int:
        """Groups of NT tiles of one block: GB."""
        return self.padded_tiles(problem) // (self.tiles * self.filter_blocks)

    def filter_bytes(self, problem: ConvProblem) -> int:
        """Bytes of all filters, split and in the tensor cores' order."""
        if self.across:
            return self.steps * self.filter_blocks * 64 * 16 * 2 * self.parts
        return self.steps * self.padded_tiles(problem) * 32 * 8 * self.parts

    def inputs(self, problem: ConvProblem) -> int:
        """Floats of input that a tile has, copied to shared memory or, ``direct``, read where they are."""
        whole = self.columns * self.along >= problem.output_width
        columns = problem.width if whole else self.columns + problem.kernel - 1
        rows = min(problem.height, self.down * self.super_rows + problem.kernel - 1)
        return self.images * problem.channels * rows * columns

    @property
    def pieces(self) -> int:
        """Strips of eight positions of ``across`` / 8 lines that an image is multiplied in: PIECES."""
        return ceil_div(8 * self.super_rows, self.across) * ceil_div(self.columns, 8)

    def planes(self, problem: ConvProblem) -> int:
        """Planes of an image: of words, or, of ``fp16x3_implicit_gemm``, of units of four."""
        if self.across:
            return ceil_div(self.down * problem.channels, 4)
        return ceil_div(problem.channels, 2)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Shared memory of a block."""
        words = 2 * self.parts * self.images * self.planes(problem) * self.plane
        if self.across:
            lines, reach = round_up(self.super_rows, self.across // 8), (problem.kernel + 2) // 2
            over = (lines - 1 - self.super_rows) * self.stride + round_up(self.columns, 8) + reach - 1
            words += 8 * max(0, over)
        words += 0 if self.direct else (1 + self.ahead) * self.inputs(problem)
        words += self.out_floats(problem) + 8 * self.steps + 8 * self.padded_tiles(problem)
        words += round_up(self.images * self.super_rows * self.columns, 16) // 2 if self.stationary else 0
        filters = self.filter_bytes(problem) // self.filter_blocks if self.shared_weights else 0
        filters = filters // 2 if self.across else filters  # the low parts alone
        return ITEM_BYTES * words + filters + _SLACK

    def tiles_an_image(self, problem: ConvProblem) -> int:
        """Tiles that an image is cut into; 1 where a tile is one image or several."""
        across = ceil_div(problem.output_width, self.columns * self.along)
        return ceil_div(ceil_div(problem.output_height, self.down), self.super_rows) * across


def cuts(problem: ConvProblem, down: int) -> Iterator[tuple[int, int, int]]:
    """IMG, TR and TW for lines of so many output rows: several images, one, bands of one, then parts of bands."""
    lines, width = ceil_div(problem.output_height, down), problem.output_width
    for images in (16, 12, 8, 6, 5, 4, 3, 2):
        if images * lines * width <= _MOST_POSITIONS and images <= problem.batch:
            yield images, lines, width
    for parts in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64):
        if parts <= lines:
            yield 1, ceil_div(lines, parts), width
    for parts in (2, 3, 4, 6, 8, 12, 16):
        columns = ceil_div(width, parts)
        if 8 <= columns <= 256:
            for high in sorted({min(lines, n) for n in (4, 8, 16)}):
                yield 1, high, columns
    # Whole units of 64 positions.
    for columns, high in ((64, 1), (64, 2), (32, 2), (32, 4), (16, 4), (16, 8), (21, 3), (21, 6)):
        if columns < width and high <= lines:
            yield 1, high, columns


def copied(problem: ConvProblem, down: int, lines: int, whole: bool, aligned: int) -> int:
    """Floats of one copy into shared memory: XV."""
    if not whole:
        return 1
    image = problem.channels * problem.height * problem.width
    starts = [problem.height * problem.width, down * lines * problem.width, problem.width]
    if down * lines >= problem.output_height:
        starts = [image]
    return next(v for v in (4, 2, 1) if 4 * v <= aligned and all(n % v == 0 for n in starts))
