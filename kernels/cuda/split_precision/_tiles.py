"""The tile that one block computes at a time: one class per kernel, with the shared memory that it takes.

CUDA sources read its public numbers as ``Config::name``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ece408_op.problem import DATA_GRADIENT, ITEM_BYTES, PAD, ConvProblem
from ece408_op.runtime.launch import REGISTERS, ceil_div, round_up

from ._shared_memory_layout import Stage, Tap
from ._wgmma import wgmma_macro

#: Bytes of shared memory for the small arrays, and for rounding each array up to 128 bytes.
_SLACK = 1536
#: Floats from one GEMM column to the next in the staging area of ``warpgroup_mma.cu``, which has the same number.
_STAGING_PITCH = 68
#: Address registers that a thread of ``warpgroup_mma.cu`` has for patterns of half k-steps.
_MOST_PATTERNS = 5
#: Per millisecond of an H200, fitted to the times of core/tuning.json: FLOP of tensor cores, reads of shared memory,
#: bytes that producers load, bytes that they split. The fixed milliseconds per tile.
_FLOPS, _READS, _LOADS, _SPLITS, _TILE = 510e9, 3e8, 0.9e9, 2.3e9, 1e-5
#: The time of loads without staging, relative to staged loads, if a tile is a part of an image with short runs.
_SHORT_RUNS = 5


@dataclass(frozen=True)
class Tile:
    """A block's share of a layer, as a GEMM: positions of the outputs times GEMM columns, over C K K products.

    A position is ``position_rows`` x ``position_columns`` outputs. A filter has ``filter_shifts`` GEMM columns, one for
    each of several neighbouring outputs. Eight columns are a column tile; a unit of work is some positions times a
    group of column tiles.
    """

    layer: ConvProblem
    components: int  # fp16 values per float32 value: 2 (fp16x3) or 1 (fp16x1)
    tile_images: int
    tile_lines: int  # lines of positions per image
    row_stride: int  # words of a stage from one input row to the next
    plane_stride: int  # and from one plane to the next: a plane holds two channels
    taps: tuple[Tap, ...]  # the im2col table: eight words per k-step of 16 products
    group_tiles: int  # column tiles that a warp or warpgroup accumulates at once
    math_warps: int
    copy_floats: int  # floats per asynchronous copy of the input
    producer_warps: int = 4
    filters_in_shared: bool = True
    input_from_global: bool = False  # producers read global memory twice instead of staging the input
    # Only some kernels use the following fields.
    m_tiles: int = 1  # groups of 16 positions that a warp multiplies at once
    filter_shifts: int = 1
    row_accumulators: int = 1  # output rows with separate accumulators, which share the words of their input rows
    stage: Stage | None = None  # the sizes for which strides and taps were chosen
    filter_blocks: int = 1  # blocks among which the filters are divided, if one block cannot hold them all
    consumer_registers: int = 0  # per thread of a math warp; producers get the rest
    promotion_interval: int = 0  # k-steps after which accumulators are promoted; 0: never
    filters_in_registers: bool = False
    store_floats: int = 1  # floats per store
    wgmma_n: int = 0  # positions of one instruction, eight of each line
    bulk_store: bool = False  # the TMA unit stores outputs that are staged in shared memory

    name: ClassVar[str]  # the kernel's, without its precision
    summary: ClassVar[str]
    sources: ClassVar[tuple[str, str]]  # its CUDA files
    features: ClassVar[frozenset[str]] = frozenset()  # what it supports beyond the plain convolution
    #: The fields in which a layer's candidates differ; the tuning table has their values for the fastest candidate.
    choices: ClassVar[tuple[str, ...]] = ("tile_images", "tile_lines")
    wgmma = one_channel = implicit_gemm = False
    position_columns, input_buffers = 1, 1
    shared_reads = 0  # reads of shared memory per tile, 128 bytes each
    staged_outputs = 0  # floats

    @property
    def config(self) -> dict[str, int]:
        """The sources' ``struct Config``: the tile's public numbers."""
        public = {name: getattr(self, name) for name in dir(self) if name[0] != "_" and name != "config"}
        return {name: value for name, value in public.items() if isinstance(value, int)}

    @property
    def defines(self) -> dict[str, int | str]:
        """The sources' macros: constants that are not numbers."""
        return {"TAP_TABLE": ", ".join(f"{{{plane}, {row}, {column}}}" for plane, row, column in self.taps)}

    # Derived numbers.
    k_steps = property(lambda self: len(self.taps) // 8)
    threads = property(lambda self: 32 * (self.math_warps + self.producer_warps))

    @property
    def producer_registers(self) -> int:
        """Registers per producer thread, of those that the math warps leave."""
        warps = self.math_warps + self.producer_warps
        pool = REGISTERS // (32 * warps) // 8 * 8 * warps
        return (pool - self.math_warps * self.consumer_registers) // self.producer_warps // 8 * 8

    tile_columns = property(lambda self: ceil_div(self.layer.output_width, self.position_columns))  # positions per line
    positions = property(lambda self: self.tile_images * self.tile_lines * self.tile_columns)
    position_rows = property(lambda self: 1 if self.one_channel else self.filter_shifts * self.row_accumulators)
    # Whether words of an odd last channel hold two rows, not two columns.
    odd_channel_pairs_rows = property(lambda self: bool(self.stage and self.stage.spans_rows))
    # K-steps per filter row, where they go row by row.
    row_k_steps = property(lambda self: self.stage.row_k_steps if self.stage and self.stage.by_row else 0)
    gemm_columns = property(lambda self: self.filter_shifts * self.layer.filters)
    column_tiles = property(lambda self: ceil_div(self.gemm_columns, 8))
    column_groups = property(lambda self: ceil_div(self.column_tiles, self.group_tiles * self.filter_blocks))
    # Column tiles in whole groups, as many for every block.
    padded_tiles = property(lambda self: self.column_groups * self.group_tiles * self.filter_blocks)
    # Bytes of all split filters.
    filter_bytes = property(lambda self: self.k_steps * self.padded_tiles * 32 * 8 * self.components)
    # Words of a block's split filters that may be in shared memory.
    filter_words = property(lambda self: self.filter_bytes // self.filter_blocks // ITEM_BYTES)
    # Tiles that an image is cut into; 1 where a tile is one image or several.
    tiles_per_image = property(lambda self: ceil_div(self.layer.output_height, self.position_rows * self.tile_lines))
    # Rows of an image in a stage; those of them that are not padding.
    stage_rows = property(lambda self: self.position_rows * self.tile_lines + self.layer.kernel - 1)
    input_rows = property(lambda self: min(self.layer.height, self.stage_rows))
    # Floats of a tile's input.
    input_floats = property(lambda self: self.tile_images * self.layer.channels * self.input_rows * self.layer.width)
    planes = property(lambda self: ceil_div(self.layer.channels, 2))
    # Words of one pipeline stage.
    stage_words = property(lambda self: self.components * self.tile_images * self.planes * self.plane_stride)
    # Positions that a math warp (with wgmma, a warpgroup) multiplies at a time.
    unit_positions = property(lambda self: 16 * self.m_tiles)
    # Units of work of a tile: some positions times a column group.
    units = property(lambda self: ceil_div(self.positions, self.unit_positions) * self.column_groups)

    @property
    def milliseconds(self) -> float:
        """The predicted time per image on an H200: that of the math warps or the producers, whichever take longer.

        The model ignores bank conflicts and the latency of reads; ``core.tuning`` scales it by measured times.
        ``split_precision`` adds the launches' latency and the layer's memory traffic.
        """
        columns = 64 if self.implicit_gemm else 8 * self.column_groups * self.group_tiles * self.row_accumulators
        positions = self.units // self.column_groups * self.unit_positions
        flops = 2 * 16 * self.k_steps * columns * positions * (2 * self.components - 1)
        # Math warps share the units of two stages.
        workers = self.math_warps // 4 if self.wgmma else self.math_warps
        multiplying = (flops / _FLOPS + self.shared_reads / _READS) / min(1.0, 2 * self.units / workers)
        slowly = _SHORT_RUNS if self.input_from_global and self.tiles_per_image > 1 else 1
        producing = ITEM_BYTES * (slowly * self.input_floats / _LOADS + self.stage_words / _SPLITS)
        # A norm between the sum and the maximum, because producers and math warps overlap, but not wholly: least where
        # a tile has fewer units than there are warpgroups, which then multiply both stages, so that none can be filled.
        # benchmarks/tile_order.py shows how well this orders tiles.
        norm = 2 if self.wgmma and self.units < workers else 5
        of_tile = (multiplying**norm + producing**norm) ** (1 / norm) + _TILE
        return float(of_tile * self.filter_blocks * self.tiles_per_image / self.tile_images)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        words = 2 * self.stage_words + self.staged_outputs + 8 * self.k_steps + 8 * self.padded_tiles
        words += 0 if self.input_from_global else self.input_buffers * self.input_floats
        words += round_up(self.positions, 16) // 2 if self.filters_in_registers else 0
        words += self.filter_words if self.filters_in_shared else 0
        return ITEM_BYTES * words + _SLACK


class MmaSyncTile(Tile):
    """``mma_sync.cu``: a warp multiplies ``m_tiles`` x 16 positions by ``group_tiles`` x 8 filter columns."""

    name, summary = "mma_sync", "split precision by mma.sync"
    sources, features = ("operands", "mma_sync"), frozenset({PAD, DATA_GRADIENT})
    choices = ("tile_images", "tile_lines", "input_from_global", "m_tiles", "group_tiles", "math_warps")
    shared_reads = property(
        lambda self: self.units * self.k_steps * self.components * (4 * self.m_tiles + 2 * self.group_tiles)
    )
    staged_outputs = property(lambda self: self.math_warps * 8 * (16 * self.m_tiles + 4))


class OneChannelTile(Tile):
    """``one_channel.cu``: a position is two neighbouring outputs of a row."""

    name, summary = "one_channel", "split precision, one channel, outputs stored without staging"
    sources = ("operands", "one_channel")
    one_channel, position_columns = True, 2


class WarpgroupTile(Tile):
    """``warpgroup_mma.cu``: wgmma, positions from registers, filters in shared memory."""

    name, summary = "warpgroup", "split precision by wgmma, output rows share inputs"
    sources, features = ("operands", "warpgroup_mma"), frozenset({PAD, DATA_GRADIENT})
    wgmma = True
    unit_positions = property(lambda self: 64)
    choices = (
        *("tile_images", "tile_lines", "input_from_global", "filter_shifts", "row_accumulators", "row_k_steps"),
        "group_tiles",
    )
    # K-steps of the words that fill no whole k-step of a filter row.
    rest_k_steps = property(lambda self: self.k_steps - self.layer.kernel * self.row_k_steps)
    # K-steps whose words a main loop reads.
    read_k_steps = property(
        lambda self: (
            self.row_k_steps * (self.layer.kernel - 1) + self.row_accumulators * (self.row_k_steps + self.rest_k_steps)
        )
    )
    shared_reads = property(lambda self: self.units * self.read_k_steps * 16 * self.components)
    staged_outputs = property(
        lambda self: self.math_warps // 4 * self.row_accumulators * 8 * self.group_tiles * _STAGING_PITCH
    )

    @property
    def _halves(self) -> list[tuple[int, tuple[int, ...]]]:
        """Per half k-step: the offset of its first word, and the other words' offsets relative to that."""
        offsets = [plane * self.plane_stride + row * self.row_stride + column for plane, row, column in self.taps]
        starts = range(0, len(offsets), 4)
        return [(offsets[i], tuple(offset - offsets[i] for offset in offsets[i : i + 4])) for i in starts]

    @property
    def _patterns(self) -> list[tuple[int, ...]]:
        """The distinct relative offsets of a half k-step's words; empty if there are too many for the registers."""
        found = list(dict.fromkeys(words for _, words in self._halves[: 2 * self.row_k_steps]))
        return found if len(found) <= _MOST_PATTERNS else []

    address_patterns = property(lambda self: len(self._patterns))

    @property
    def defines(self) -> dict[str, int | str]:
        patterns, halves = self._patterns, self._halves[: 2 * self.row_k_steps]
        table = (f"{{{4 * first}, {patterns.index(words)}}}" for first, words in halves) if patterns else ("{0}",)
        examples = [[words for _, words in halves].index(each) for each in patterns] or [0]
        return {
            **super().defines,
            "HALF_STEP_TABLE": ", ".join(table),
            "PATTERN_TABLE": ", ".join(map(str, examples)),
            **wgmma_macro("WGMMA_ALL_COMPONENTS", 8 * self.group_tiles * self.components),
            **wgmma_macro("WGMMA_HIGH_COMPONENT", 8 * self.group_tiles * (self.components - 1)),
        }


class ImplicitGemmTile(Tile):
    """``implicit_gemm.cu``: wgmma, filters in registers, positions as B in shared memory, without an im2col copy.

    Only the low components of the filters are in shared memory.
    """

    name, summary = "implicit_gemm", "split precision by wgmma, which reads inputs itself"
    sources = ("implicit_gemm_operands", "implicit_gemm")
    wgmma = implicit_gemm = True
    position_columns, input_buffers = 2, 2
    choices = ("tile_images", "tile_lines", "row_accumulators", "producer_warps")
    filter_bytes = property(lambda self: self.k_steps * 64 * 16 * 2 * self.components)
    filter_words = property(lambda self: self.k_steps * 512)
    planes = property(lambda self: ceil_div(self.row_accumulators * self.layer.channels, 4))

    @property
    def stage_words(self) -> int:  # type: ignore[override]
        # The last piece reads beyond the last plane; those values do not matter, but the memory must exist.
        lines, reach = round_up(self.tile_lines, self.wgmma_n // 8), (self.layer.kernel + 2) // 2
        over = (lines - 1 - self.tile_lines) * self.row_stride + round_up(self.tile_columns, 8) + reach - 1
        words: int = self.components * self.tile_images * self.planes * self.plane_stride
        return words + 4 * max(0, over)

    @property
    def output_pitch(self) -> int:
        """Floats between the staged outputs of two filters, such that a warp's stores fall on different banks.

        If a tile has whole maps, the staged images have y's layout, and one copy stores them.
        """
        run: int = self.position_rows * self.tile_lines * self.tile_columns * self.position_columns
        return run if run == self.layer.output_height * self.layer.output_width else run + (8 - run) % 16

    staged_outputs = property(
        lambda self: 2 * self.tile_images * self.layer.filters * self.output_pitch if self.bulk_store else 0
    )
    unit_positions = property(lambda self: self.wgmma_n)
    # Strips of eight positions of some lines.
    units = property(
        lambda self: self.tile_images * ceil_div(8 * self.tile_lines, self.wgmma_n) * ceil_div(self.tile_columns, 8)
    )

    @property
    def defines(self) -> dict[str, int | str]:
        return {
            **super().defines,
            **wgmma_macro("WGMMA_REGISTERS", self.wgmma_n),
            **wgmma_macro("WGMMA_SHARED", self.wgmma_n * (self.components - 1), shared=True),
        }
