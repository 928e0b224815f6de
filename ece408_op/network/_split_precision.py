"""The launches of ``split_precision.cu``: FullyConnected in float32's accuracy on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip, Launch, Plan, ceil_div, round_up

from ._dense import Connected
from ._layers import FullyConnected
from ._passes import text_of

#: Rows of a tile of x, products of one, and columns of y of a block at most: what its sums leave of the registers.
_ROWS, _PRODUCTS, _COLUMNS = 128, 64, 168
_STAGES = 3
_CAPABILITY = (9, 0)
#: Fewest rows, columns and products for which splitting wins.
_WORTH = (512, 64, 1024)


def worth_splitting(rows: int, columns: int, products: int, chip: Chip) -> bool:
    """Whether a product of that size is faster in split operands on that chip, which must be a Hopper."""
    sizes = zip((rows, columns, products), _WORTH)
    return chip.capability == _CAPABILITY and all(size >= least for size, least in sizes)


def wgmma(columns: int) -> str:
    """The body of ``multiply``: 64 x 16 times 16 x columns, both from shared memory, added to ``sums`` or not."""
    sums = columns // 2
    registers = ", ".join(f"%{number}" for number in range(sums))
    outputs = ", ".join(f'"+f"(sums[{number}])' for number in range(sums))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    operands = f"{{{registers}}}, %{sums}, %{sums + 1}, p, 1, 1, 0, 0"
    text = f"{{.reg .pred p; setp.ne.b32 p, %{sums + 2}, 0; {name} {operands};}}"
    return f'asm volatile("{text}" : {outputs} : "l"(a), "l"(b), "r"(more));'


class Split:
    """FullyConnected in split operands; weights whose range does not allow it are taken in float32."""

    def __init__(self, settings: FullyConnected, rows: int, products: int, activation: str | None, device: int) -> None:
        self._plain = Connected(settings, rows, products, activation, device)
        columns = settings.hidden
        tiles = ceil_div(columns, _COLUMNS)
        width = round_up(ceil_div(columns, tiles), 8)
        blocks = ceil_div(products, _PRODUCTS)
        self._bias, self._columns = settings.bias, columns
        defines: dict[str, int | str] = {"K": products, "KB": blocks, "N": columns, "BIAS": int(settings.bias)}
        names = ("x", "parts", "scales", "marks")
        self._split = _program("split", {**defines, "SPLIT": 1, "T": _ROWS}, rows, 256, names)
        self._split_weights = _program("split", {**defines, "SPLIT": 1, "T": width}, columns, 256, names)
        self._product = _program(
            "product",
            {**defines, "PRODUCT": 1, "T": width, "COLUMN_TILES": tiles, "MULTIPLY": wgmma(width)},
            ceil_div(rows, _ROWS) * tiles,
            3 * _ROWS,
            ("x", "w", "x_scales", "w_scales", "bias", "y", np.int32(rows)),
            activation,
            shared=_STAGES * (_ROWS + width) * 4 * _PRODUCTS + 1024,
        )
        self._repair = _program(
            "repair", {**defines, "REPAIR": 1}, rows, 256, ("marks", "x", "w", "bias", "y"), activation
        )
        self.programs = (self._split, self._split_weights, self._product, self._repair)
        #: Bytes of both parts of the weights; of both parts of x, of its scales, and of its marks.
        self._weight_bytes = tiles * width * blocks * _PRODUCTS * 4
        parts = round_up(rows, _ROWS) * blocks * _PRODUCTS * 4
        self._sizes = (parts, round_up(rows * ITEM_BYTES, 256), round_up(rows * ITEM_BYTES, 256))
        self.scratch = sum(self._sizes)
        self._weights: tuple[Any, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Split the weights; where their range does not allow it, or they are no parameters, remember that."""
        self._plain.prepare(inputs)
        w, cp = inputs[1], cuda.cupy()
        self._weights = None
        if w is None:
            return
        # Columns beyond the last are zero.
        parts = cp.zeros(self._weight_bytes, np.uint8)
        scales, marks = cp.empty(self._columns, np.float32), cp.empty(self._columns, np.int32)
        cuda.execute(self._split_weights, 1, {"x": w, "parts": parts, "scales": scales, "marks": marks}, None)
        if not bool(marks.any()):
            self._weights = parts, scales

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """Split x, multiply, and compute anew the rows that are marked."""
        if self._weights is None:
            return self._plain.bind(inputs, out, scratch)
        starts = np.cumsum((0, *self._sizes[:-1])) // ITEM_BYTES
        parts, scales, marks = (scratch[int(start) :] for start in starts)
        x, w, w_parts, w_scales = *inputs[:2], *self._weights
        bias = inputs[2] if self._bias else w_scales
        calls = (
            cuda.prepared_launch(self._split, 1, {"x": x, "parts": parts, "scales": scales, "marks": marks}),
            cuda.prepared_launch(
                self._product,
                1,
                {"x": parts, "w": w_parts, "x_scales": scales, "w_scales": w_scales, "bias": bias, "y": out},
            ),
            cuda.prepared_launch(self._repair, 1, {"marks": marks, "x": x, "w": w, "bias": bias, "y": out}),
        )

        def fill() -> None:
            for call in calls:
                call()

        return fill


def _program(
    entry: str,
    defines: dict[str, int | str],
    blocks: int,
    threads: int,
    names: tuple[Any, ...],
    activation: str | None = None,
    shared: int = 0,
) -> cuda.Program:
    launch = Launch(entry, (blocks, 1, 1), (threads, 1, 1), names, shared)
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,))
    options = ("--gpu-architecture=sm_90a",)
    return cuda.Program(entry, text_of("split_precision.cu", defines, activation), options, plan)
