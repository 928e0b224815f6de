"""The launches of ``passes.cu``: what is defined in front of the text, and how many blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan, ceil_div

from ._op_definition import Shape, size
from ._pooling import MAXIMUM, MEAN, Pooling

_FOLDER = Path(__file__).parent
_THREADS = 256
#: Blocks in a grid at most: threads take further elements by turns.
_BLOCKS = 1 << 20

#: Activations in CUDA C++, for a float v. A NaN stays one.
ACTIVATIONS = {
    "relu": "((v) < 0.f ? 0.f : (v))",
    "sigmoid": "(1.f / (1.f + expf(-(v))))",
    "tanh": "tanhf(v)",
    "softrelu": "((v) > 20.f ? (v) : log1pf(expf(v)))",
    "softsign": "((v) / (1.f + fabsf(v)))",
}


def text_of(file: str, defines: dict[str, int | str], activation: str | None) -> str:
    """The file's text behind its definitions."""
    if activation:
        defines = {**defines, "ACT(v)": ACTIVATIONS[activation]}
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + (
        f'#line 1 "{file}"\n{(_FOLDER / file).read_text(encoding="utf-8")}'
    )


class Pass:
    """One launch of a function of ``passes.cu`` on arrays by name; "x" is among them."""

    def __init__(
        self,
        entry: str,
        arguments: tuple[Any, ...],
        defines: dict[str, int | str],
        elements: int,
        activation: str | None = None,
        threads_each: int = 1,
    ) -> None:
        wide = elements * threads_each >= 1 << 31
        defines = {"INDEX": "unsigned long long" if wide else "unsigned int", **defines}
        blocks = max(1, min(_BLOCKS, ceil_div(elements * threads_each, _THREADS)))
        launch = Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), (*arguments, np.int64(elements)))
        plan = Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,))
        self.program = cuda.Program(entry, text_of("passes.cu", defines, activation), (), plan)

    def bind(self, **arrays: Any) -> Callable[[], None]:
        """What puts the launch on the current stream."""
        return cuda.prepared_launch(self.program, 1, arrays)


def pool(settings: Pooling, x: Shape, y: Shape, activation: str | None) -> Pass:
    """Pooling of x (B, C, H, W) into y; arrays x, y."""
    settings = settings.fitted(x)
    # Whether a last window reaches over the lower or right edge.
    cut = any(
        (outputs - 1) * stride - pad + kernel > length
        for outputs, stride, pad, kernel, length in zip(y[2:], settings.stride, settings.pad, settings.kernel, x[2:])
    )
    names = ("KH", "KW"), ("SH", "SW"), ("PH", "PW"), ("H", "W"), ("OH", "OW")
    values = settings.kernel, settings.stride, settings.pad, x[2:], y[2:]
    defines: dict[str, int | str] = {n: v for pair, numbers in zip(names, values) for n, v in zip(pair, numbers)}
    defines.update(
        CUT=int(cut),
        MAXIMUM=int(settings.kind == MAXIMUM),
        MEAN=int(settings.kind == MEAN),
        COUNT_PAD=int(settings.count_pad),
    )
    return Pass("pool", ("x", "y"), defines, size(y), activation)


def affine(channels: int, inner: int, elements: int, scaled: bool, activation: str | None) -> Pass:
    """y = activation(x scale + shift) for each channel; arrays x, scale, shift, y, of which y may be x."""
    defines: dict[str, int | str] = {"CHANNELS": channels, "INNER": inner, "SCALED": int(scaled)}
    return Pass("affine", ("x", "scale", "shift", "y"), defines, elements, activation)


def border(pad: tuple[int, int], x: Shape) -> Pass:
    """x (B, C, H, W) with zeros around each map; arrays x, y."""
    defines: dict[str, int | str] = {"BORDER": 1, "H": x[2], "W": x[3], "PH": pad[0], "PW": pad[1]}
    return Pass("border", ("x", "y"), defines, x[0] * x[1] * (x[2] + 2 * pad[0]) * (x[3] + 2 * pad[1]))


def softmax(rows: int, length: int, temperature: float, logarithm: bool) -> Pass:
    """Softmax of each row of so many elements; arrays x, y."""
    defines: dict[str, int | str] = {"N": length, "LOGARITHM": int(logarithm)}
    return Pass("softmax", ("x", "y", np.float32(temperature)), defines, rows, threads_each=32)
