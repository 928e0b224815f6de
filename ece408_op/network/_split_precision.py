"""FullyConnected in split precision (fp16x3): the launches of ``split_precision.cu``, which describes the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip, Launch, ceil_div, round_up

from ._dense import BlasFullyConnected
from ._layers import FullyConnected
from ._passes import program
from ._schedule import Call, Computation, in_order

#: Rows of x per tile, elements per k-step, and the most columns of y per tile: the accumulators fill the registers.
_TILE_ROWS, _K_STEP, _MOST_COLUMNS = 128, 64, 168
_STAGES = 3
#: Bytes of an element in both halves.
_SPLIT_BYTES = 4
_CAPABILITY = (9, 0)
#: The fewest rows, columns and elements per sum for which split precision is faster than cuBLAS.
_PROFITABLE = (512, 64, 1024)


def is_profitable(rows: int, columns: int, length: int, chip: Chip) -> bool:
    """Return whether split precision is faster for a product of that size; only on Hopper."""
    sizes = zip((rows, columns, length), _PROFITABLE)
    return chip.capability == _CAPABILITY and all(size >= least for size, least in sizes)


def wgmma(columns: int) -> str:
    """Return the statement of ``mma``: 64 x 16 times 16 x columns, both from shared memory."""
    count = columns // 2
    registers = ", ".join(f"%{number}" for number in range(count))
    outputs = ", ".join(f'"+f"(accumulators[{number}])' for number in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    operands = f"{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0"
    text = f"{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; {name} {operands};}}"
    return f'asm volatile("{text}" : {outputs} : "l"(x), "l"(w), "r"(accumulate));'


class SplitFullyConnected(Computation):
    """FullyConnected in split precision; in float32 by cuBLAS for weights whose range is too wide for it."""

    def __init__(self, operator: FullyConnected, rows: int, length: int, activation: str | None, device: int) -> None:
        self._float32 = BlasFullyConnected(operator, rows, length, activation, device)
        columns, k_steps = operator.num_hidden, ceil_div(length, _K_STEP)
        column_tiles = ceil_div(columns, _MOST_COLUMNS)
        width = round_up(ceil_div(columns, column_tiles), 8)
        config = {
            "length": length,
            "k_steps": k_steps,
            "columns": columns,
            "column_tiles": column_tiles,
            "tile_rows": _TILE_ROWS,
            "tile_columns": width,
            "stages": _STAGES,
            "biased": int(not operator.no_bias),
        }

        def launched(entry: str, blocks: int, threads: int, names: tuple[Any, ...], shared: int = 0) -> cuda.Program:
            launch = Launch(entry, (blocks, 1, 1), (threads, 1, 1), names, shared)
            options = ("--gpu-architecture=sm_90a",)
            return program("split_precision.cu", launch, {"WGMMA": wgmma(width)}, activation, options, config)

        self._split_x = launched("split_x", rows, 256, ("x", "tiles", "scales", "marks"))
        self._split_w = launched("split_w", columns, 256, ("x", "tiles", "scales", "marks"))
        self._product = launched(
            "product",
            ceil_div(rows, _TILE_ROWS) * column_tiles,
            3 * _TILE_ROWS,
            ("x", "w", "x_scales", "w_scales", "bias", "y", np.int32(rows)),
            shared=_STAGES * (_TILE_ROWS + width) * _SPLIT_BYTES * _K_STEP + 1024,
        )
        self._recompute = launched("recompute_rows", rows, 256, ("marks", "x", "w", "bias", "y"))
        self.programs = (self._split_x, self._split_w, self._product, self._recompute)
        self._biased, self._columns = not operator.no_bias, columns
        self._w_bytes = column_tiles * width * k_steps * _K_STEP * _SPLIT_BYTES
        x_bytes = round_up(rows, _TILE_ROWS) * k_steps * _K_STEP * _SPLIT_BYTES
        #: Bytes of the tiles of x, of its scales and of its marks.
        self._sizes = (x_bytes, round_up(rows * ITEM_BYTES, 256), round_up(rows * ITEM_BYTES, 256))
        self.scratch = sum(self._sizes)
        self._w: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Split the weights, if they are parameters and their range allows it."""
        w, cp = inputs[1], cuda.cupy()
        self._w = None
        if w is None:
            return
        tiles = cp.zeros(self._w_bytes, np.uint8)  # columns behind the last one are zero
        scales, marks = cp.empty(self._columns, np.float32), cp.empty(self._columns, np.int32)
        cuda.execute(self._split_w, 1, {"x": w, "tiles": tiles, "scales": scales, "marks": marks}, None)
        if not bool(marks.any()):
            self._w = tiles, scales

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the calls that split x, multiply, and compute the marked rows again."""
        if self._w is None:
            return self._float32.bind(inputs, out, scratch)
        starts = np.cumsum((0, *self._sizes[:-1])) // ITEM_BYTES
        tiles, scales, marks = (scratch[int(start) :] for start in starts)
        (x, w), (w_tiles, w_scales) = inputs[:2], self._w
        bias = inputs[2] if self._biased else w_scales
        factors = {"x": tiles, "w": w_tiles, "x_scales": scales, "w_scales": w_scales}
        return in_order(
            cuda.prepared_launch(self._split_x, 1, {"x": x, "tiles": tiles, "scales": scales, "marks": marks}),
            cuda.prepared_launch(self._product, 1, {**factors, "bias": bias, "y": out}),
            cuda.prepared_launch(self._recompute, 1, {"marks": marks, "x": x, "w": w, "bias": bias, "y": out}),
        )
