"""The cut of a layer for ``winograd_gemm``: tiles, panels and chunks, and the sizes of its arrays."""

from __future__ import annotations

from dataclasses import dataclass

from ece408_op.problem import ConvProblem, Pair

from ._ir import LINE_FLOATS, whole_lines

#: Forms of a tile's 4 x 4 inputs.
FORMS = 16

#: Vectors of tiles per panel at most, and filters whose products are transformed back together.
PANEL, CHUNK = 3, 16


@dataclass(frozen=True)
class GemmPlan:
    """The cut of one layer, a batch of one, for vectors of ``lanes`` tiles and blocks of ``block`` filters.

    A tile is 2 x 2 outputs. Tiles are numbered over rows, columns and images; a panel has up to PANEL vectors of them.

        inputs    [form][channel][tile of the panel]
        weights   [chunk][form][block][channel][filter of the block]
        products  [form][filter of the chunk][tile of the panel]
    """

    layer: ConvProblem
    lanes: int
    block: int

    @property
    def tile_columns(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.layer.output_width // 2)

    @property
    def tiles(self) -> int:
        """Tiles of an image."""
        return -(-self.layer.output_height // 2) * self.tile_columns

    @property
    def blocks(self) -> int:
        """Blocks of filters per chunk: a divisor of all blocks. The last block may have filters beyond the layer's."""
        total = -(-self.layer.filters // self.block)
        return max(n for n in range(1, min(total, CHUNK // self.block) + 1) if total % n == 0)

    @property
    def chunks(self) -> int:
        """Chunks of filters."""
        return -(-self.layer.filters // (self.blocks * self.block))

    @property
    def chunk_weights(self) -> int:
        """Floats of the transformed weights of a chunk."""
        return FORMS * self.blocks * self.layer.channels * self.block

    @property
    def input_stride(self) -> int:
        """Floats from the inputs of a channel to the next: a panel, and a vector that may be written beyond it."""
        return (PANEL + 1) * self.lanes

    @property
    def product_stride(self) -> int:
        """Floats from the products of a filter to the next."""
        return (PANEL + 1) * self.lanes

    @property
    def form_strides(self) -> Pair:
        """Floats from one form to the next, of inputs and of products; an odd number of lines spares L1's sets."""
        sizes = self.layer.channels * self.input_stride, self.blocks * self.block * self.product_stride
        return sizes[0] + LINE_FLOATS, sizes[1] + LINE_FLOATS

    @property
    def row_stride(self) -> int:
        """Floats of one of the four rows of the padded image that a row of tiles reads."""
        return whole_lines(self.layer.width + 2 * self.layer.pad[1] + 4 * self.lanes + 4)

    @property
    def scratch(self) -> int:
        """Floats of scratch per thread, all zero at first: four rows, a row of zeros, inputs, products."""
        return 5 * self.row_stride + FORMS * sum(self.form_strides)
