"""The tile of a block of ``register_blocked``, and the memory that it takes. The letters are the source's."""

from __future__ import annotations

from dataclasses import dataclass

from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import ceil_div, round_up


@dataclass(frozen=True)
class Tile:
    """A thread's, a warp's and a block's share; the letters are those of ``register_blocked.cu``."""

    pixels: int  # P
    filters: int  # F
    columns: int  # TW
    groups: int  # G
    passes: int  # GL
    lanes: int  # LANES
    channels: int  # CC
    stages: int  # STAGES
    blocks: int  # BLOCKS: of a multiprocessor
    rows: int  # ROWS
    stride: int  # S
    x_vector: int  # XV: floats of one read of inputs from shared memory
    copied: int  # XG: floats of one copy into it
    keep_weights: bool  # KEEP_W
    uniform: bool = False  # UNIFORM: weights in constant memory
    ahead: bool = False  # AHEAD: a row's are asked for while the one before it is computed

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups

    @property
    def strips(self) -> int:
        """Strips in a row of a column tile: CG."""
        return ceil_div(self.columns, self.pixels)

    def constant_bytes(self, problem: ConvProblem) -> int:
        """Constant memory of all weights."""
        groups = round_up(ceil_div(problem.filters, self.filters), self.groups * self.passes)
        return ITEM_BYTES * groups * problem.channels * problem.kernel * round_up(problem.kernel * self.filters, 4)

    def slack(self, kernel: int) -> int:
        """Floats that the last strip of the last row may read beyond it."""
        read = round_up(self.pixels + kernel - 1, self.x_vector)
        return max(0, (self.strips - 1) * self.pixels + read - self.stride)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Shared memory of a block: input rows, weights, and the sums on their way out."""
        k, chunks = problem.kernel, ceil_div(problem.channels, self.channels)
        x = round_up(self.channels * self.rows * self.stride + self.slack(k), 4)
        weights = 0 if self.uniform else self.passes * self.groups * self.channels * k * round_up(k * self.filters, 4)
        sums = self.threads * self.pixels
        return ITEM_BYTES * (self.stages * x + (chunks if self.keep_weights else self.stages) * weights + sums)
