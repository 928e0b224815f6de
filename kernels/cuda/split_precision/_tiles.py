"""The tile that one block computes at a time: one class per kernel, with the shared memory that it takes.

CUDA sources read its public numbers as ``Config::name``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import ceil_div, round_up

from ._taps import BANKS, NO_TAP, Taps, half_steps, one_channel_taps, warpgroup_taps, wavefronts, window_taps
from ._wgmma import wgmma_macro

#: Shared memory for the small arrays, and for rounding each array up to 128 bytes.
_SLACK = 1536
#: Floats from one GEMM column to the next in the output buffer of ``warpgroup_mma.cu``, which has the same number.
_STAGING_PITCH = 68
#: Address registers that a thread of ``warpgroup_mma.cu`` has for patterns of half k-steps.
_MOST_PATTERNS = 5


@dataclass(frozen=True)
class Tile:
    """A block's share of a layer, as a GEMM: positions of the outputs times GEMM columns, over C K K products.

    A position is ``position_rows`` x ``position_columns`` outputs. A filter has ``filter_shifts`` GEMM columns, for
    outputs that neighbour one another. Eight columns are a column tile; a unit of work takes a group of column tiles.
    """

    layer: ConvProblem
    components: int  # fp16 values per float32 value: 2 (fp16x3) or 1 (fp16x1)
    tile_images: int
    tile_lines: int  # lines of positions per image
    group_tiles: int  # column tiles that a warp or warpgroup accumulates at once
    math_warps: int
    copy_floats: int  # floats per asynchronous copy of the input
    row_stride: int = 0  # words of a stage from one input row to the next
    plane_stride: int = 0  # and from one plane to the next: a plane holds two channels
    # What only some kernels have.
    filter_shifts: int = 1
    filter_blocks: int = 1  # blocks among which the filters are divided, where those of one do not fit
    row_accumulators: int = 1  # output rows with accumulators of their own, which share the words of their input rows
    m_tiles: int = 1  # 16 positions each
    wgmma_n: int = 8  # positions of one instruction, eight of each line
    producer_warps: int = 4
    consumer_registers: int = 0  # per thread of a math warp; producers get the rest
    promotion_interval: int = 0  # k-steps after which accumulators are promoted; 0: never
    store_floats: int = 1  # floats per store
    filters_in_registers: bool = False
    filters_in_shared: bool = True
    input_from_global: bool = False  # producers read global memory twice instead of staging the input
    prefetch_input: bool = False  # the next tile's input is copied while this one's is split
    bulk_store: bool = False  # the copy engine stores outputs that are staged in shared memory

    #: The numbers that the candidates of a layer differ in: the tuning table has those of the fastest one.
    choices: ClassVar[tuple[str, ...]] = ("tile_images", "tile_lines")
    wgmma = one_channel = implicit_gemm = False
    position_columns = 1
    barriers = 4

    @property
    def config(self) -> dict[str, bool | int | float]:
        """The sources' ``struct Config``: every public number of the tile."""
        values = {name: getattr(self, name) for name in dir(self) if name[0] != "_" and name != "config"}
        return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}

    @property
    def defines(self) -> dict[str, int | str]:
        """The constants that are no numbers."""
        return {"TAP_TABLE": ", ".join(f"{{{plane}, {row}, {column}}}" for plane, row, column in self.taps)}

    @property
    def taps(self) -> Taps:
        """The im2col table: eight words per k-step of 16 products."""
        return window_taps(self.layer.channels, self.layer.kernel, self.filter_shifts)

    # Numbers that follow from the others.
    k_steps = property(lambda self: len(self.taps) // 8)
    row_k_steps = property(lambda self: 0)  # k-steps per filter row, where they go row by row
    threads = property(lambda self: 32 * (self.math_warps + self.producer_warps))
    tile_columns = property(lambda self: ceil_div(self.layer.output_width, self.position_columns))  # positions per line
    positions = property(lambda self: self.tile_images * self.tile_lines * self.tile_columns)
    position_rows = property(lambda self: 1 if self.one_channel else self.filter_shifts * self.row_accumulators)
    # Input rows of a stage.
    _stage_rows = property(lambda self: self.position_rows * self.tile_lines + self.layer.kernel - 1)

    def _plane_strides(self, least: int) -> list[int]:
        offsets = range(0, BANKS, 4) if self.planes > 1 else (9,)
        return sorted(round_up(least - offset, BANKS) + offset for offset in offsets)

    def _strides(self) -> Iterator[tuple[int, int]]:
        """Yield row and plane strides, the smallest first."""
        words = ceil_div(self.layer.width + 2 * self.layer.pad[1], self.position_columns)
        for row_stride in range(words, words + BANKS + 1):
            yield from ((row_stride, plane) for plane in self._plane_strides(self._stage_rows * row_stride))

    def with_smallest_strides(self) -> Tile:
        """Return the tile with the strides that take the least shared memory."""
        row_stride, plane_stride = next(self._strides())
        return replace(self, row_stride=row_stride, plane_stride=plane_stride)

    @lru_cache(maxsize=1024)  # noqa: B019 - tiles are small
    def laid_out(self, shared_bytes: int) -> Tile | None:
        """Return the tile with the strides that cause the fewest bank conflicts, or None where none fits."""
        found, fewest = None, math.inf
        for row_stride, plane_stride in self._strides():
            tile = replace(self, row_stride=row_stride, plane_stride=plane_stride)
            if tile.shared_bytes <= shared_bytes:
                where = (row_stride, plane_stride, self.tile_columns, self.position_columns, self.position_rows)
                cycles = round(wavefronts(self.taps, *where), 2)
                if cycles < fewest:
                    found, fewest = tile, cycles
            if fewest <= 1:
                break
        return found

    gemm_columns = property(lambda self: self.filter_shifts * self.layer.filters)
    column_tiles = property(lambda self: ceil_div(self.gemm_columns, 8))
    column_groups = property(lambda self: ceil_div(self.column_tiles, self.group_tiles * self.filter_blocks))
    # Column tiles in whole groups, as many for every block.
    padded_tiles = property(lambda self: self.column_groups * self.group_tiles * self.filter_blocks)
    # Bytes of all split filters.
    filter_bytes = property(lambda self: self.k_steps * self.padded_tiles * 32 * 8 * self.components)
    # Words of a block's split filters, as far as they may lie in shared memory.
    filter_words = property(lambda self: self.filter_bytes // self.filter_blocks // ITEM_BYTES)
    # Tiles that an image is cut into; 1 where a tile is one image or several.
    tiles_per_image = property(lambda self: ceil_div(self.layer.output_height, self.position_rows * self.tile_lines))
    input_rows = property(lambda self: min(self.layer.height, self._stage_rows))
    # Floats of a tile's input.
    input_floats = property(lambda self: self.tile_images * self.layer.channels * self.input_rows * self.layer.width)
    planes = property(lambda self: ceil_div(self.layer.channels, 2))
    # Words of one pipeline stage.
    stage_words = property(lambda self: self.components * self.tile_images * self.planes * self.plane_stride)

    @property
    def output_pitch(self) -> int:
        """Floats between the staged outputs of two filters, such that a warp's stores fall on different banks.

        Staged images of whole maps lie as in y, and one copy stores them.
        """
        run = self.position_rows * self.tile_lines * self.tile_columns * self.position_columns
        return run if run == self.layer.output_height * self.layer.output_width else run + (8 - run) % 16

    # Floats of staged outputs.
    staged_outputs = property(
        lambda self: 2 * self.tile_images * self.layer.filters * self.output_pitch if self.bulk_store else 0
    )
    # Positions that a math warp, with wgmma a warpgroup, multiplies at a time.
    unit_positions = property(lambda self: 64)
    row_blocks = property(lambda self: ceil_div(self.positions, self.unit_positions))  # of unit_positions each
    # Units of work of a tile: some positions times a column group.
    units = property(lambda self: self.row_blocks * self.column_groups)
    shared_reads = property(lambda self: 0)  # reads of shared memory per tile, 128 bytes each

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        words = 2 * self.stage_words + self.staged_outputs + 8 * self.k_steps + 8 * self.padded_tiles
        words += 0 if self.input_from_global else (1 + self.prefetch_input) * self.input_floats
        words += round_up(self.positions, 16) // 2 if self.filters_in_registers else 0
        words += self.filter_words if self.filters_in_shared else 0
        return ITEM_BYTES * words + _SLACK


@dataclass(frozen=True)
class MmaSyncTile(Tile):
    """``mma_sync.cu``: a warp multiplies ``m_tiles`` x 16 positions by ``group_tiles`` x 8 filter columns."""

    choices = ("tile_images", "tile_lines", "input_from_global", "m_tiles", "group_tiles", "math_warps")

    unit_positions = property(lambda self: 16 * self.m_tiles)
    shared_reads = property(
        lambda self: self.units * self.k_steps * self.components * (4 * self.m_tiles + 2 * self.group_tiles)
    )
    staged_outputs = property(lambda self: self.math_warps * 8 * (16 * self.m_tiles + 4))


@dataclass(frozen=True)
class OneChannelTile(Tile):
    """``one_channel.cu``: a position is two neighbouring outputs of a row."""

    one_channel = True
    position_columns = 2

    @property
    def taps(self) -> Taps:
        return one_channel_taps(self.layer.kernel)

    def _plane_strides(self, least: int) -> list[int]:
        return [least]

    @property
    def uniform_taps(self) -> bool:
        """Whether the four words of every half k-step lie alike; a half without words does."""
        real = self.taps[: -4 if self.taps[-4] == NO_TAP else None]
        return len(half_steps(real, self.row_stride, self.plane_stride)[1]) == 1

    @property
    def defines(self) -> dict[str, int | str]:
        # A half without words reads any.
        firsts = (max(0, offset) for offset, _ in half_steps(self.taps, self.row_stride, self.plane_stride)[0])
        return {**super().defines, "HALF_STEP_TABLE": ", ".join(map(str, firsts))}


@dataclass(frozen=True)
class WarpgroupTile(Tile):
    """``warpgroup_mma.cu``: wgmma, positions from registers, filters in shared memory."""

    wgmma = True
    choices = ("tile_images", "tile_lines", "input_from_global", "filter_shifts", "row_accumulators", "group_tiles")

    @property
    def taps(self) -> Taps:
        return warpgroup_taps(self.layer.channels, self.layer.kernel, self.filter_shifts)[0]

    row_k_steps = property(lambda self: warpgroup_taps(self.layer.channels, self.layer.kernel, self.filter_shifts)[1])
    # K-steps of the words that fill no whole k-step of a filter row.
    rest_k_steps = property(lambda self: self.k_steps - self.layer.kernel * self.row_k_steps)

    @property
    def read_k_steps(self) -> int:
        """K-steps whose words a main loop reads."""
        shared = self.row_k_steps * (self.layer.kernel + self.row_accumulators - 1)
        return shared + self.row_accumulators * self.rest_k_steps

    shared_reads = property(lambda self: self.units * self.read_k_steps * 16 * self.components)
    staged_outputs = property(
        lambda self: self.math_warps // 4 * self.row_accumulators * 8 * self.group_tiles * _STAGING_PITCH
    )

    def _half_steps(self) -> tuple[list[tuple[int, int]], list[int]]:
        halves, examples = half_steps(self.taps[: 8 * self.row_k_steps], self.row_stride, self.plane_stride)
        return (halves, examples) if len(examples) <= _MOST_PATTERNS else ([], [])

    # In how many ways the four words of half a k-step lie; 0 where they are too many for the registers.
    address_patterns = property(lambda self: len(self._half_steps()[1]))

    @property
    def defines(self) -> dict[str, int | str]:
        halves, examples = self._half_steps()
        return {
            **super().defines,
            "HALF_STEP_TABLE": ", ".join(f"{{{offset}, {pattern}}}" for offset, pattern in halves) or "{0}",
            "PATTERN_TABLE": ", ".join(map(str, examples)) or "0",
            **wgmma_macro("WGMMA_ALL_COMPONENTS", 8 * self.group_tiles * self.components),
            **wgmma_macro("WGMMA_HIGH_COMPONENT", 8 * self.group_tiles if self.components == 2 else 0),
        }


@dataclass(frozen=True)
class ImplicitGemmTile(Tile):
    """``implicit_gemm.cu``: wgmma, filters in registers, positions as B in shared memory, without an im2col copy."""

    wgmma = implicit_gemm = True
    barriers = 12
    position_columns = 2
    choices = ("tile_images", "tile_lines", "row_accumulators", "producer_warps")

    # Lines of row_accumulators input rows that a filter reaches.
    _lines = property(lambda self: ceil_div(self.layer.kernel + self.row_accumulators - 1, self.row_accumulators))

    @property
    def taps(self) -> Taps:
        reach = (self.layer.kernel + 2) // 2
        return (NO_TAP,) * 8 * ceil_div(self.planes * reach * self._lines, 2)

    def _strides(self) -> Iterator[tuple[int, int]]:
        row_stride = self.tile_columns + self.layer.kernel // 2
        yield row_stride, 4 * (self.tile_lines + self._lines - 1) * row_stride

    filter_bytes = property(lambda self: self.k_steps * 64 * 16 * 2 * self.components)
    filter_words = property(lambda self: self.k_steps * 512)
    planes = property(lambda self: ceil_div(self.row_accumulators * self.layer.channels, 4))

    @property
    def stage_words(self) -> int:
        # The last piece reads on behind the last plane, whatever lies there.
        lines, reach = round_up(self.tile_lines, self.wgmma_n // 8), (self.layer.kernel + 2) // 2
        over = (lines - 1 - self.tile_lines) * self.row_stride + round_up(self.tile_columns, 8) + reach - 1
        return super().stage_words + 4 * max(0, over)

    unit_positions = property(lambda self: self.wgmma_n)

    @property
    def row_blocks(self) -> int:
        # Strips of eight positions of some lines.
        return self.tile_images * ceil_div(8 * self.tile_lines, self.wgmma_n) * ceil_div(self.tile_columns, 8)

    @property
    def defines(self) -> dict[str, int | str]:
        shared = self.wgmma_n if self.components == 2 else 0
        return {
            **super().defines,
            **wgmma_macro("WGMMA_REGISTERS", self.wgmma_n),
            **wgmma_macro("WGMMA_REGISTERS_OVERWRITE", self.wgmma_n, overwrite=True),
            **wgmma_macro("WGMMA_SHARED", shared, shared=True),
            **wgmma_macro("WGMMA_SHARED_OVERWRITE", shared, shared=True, overwrite=True),
        }
