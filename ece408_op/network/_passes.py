"""The launches of ``passes.cu``: the definitions in front of the text, and the number of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan, ceil_div

from ._definition import Shape
from ._pooling import Pooling
from ._schedule import Call

_FOLDER = Path(__file__).parent
_THREADS = 256
#: The largest grid; each thread computes further elements in turn.
_BLOCKS = 1 << 20

#: The activations in CUDA C++, for a float v. A NaN stays a NaN.
ACTIVATIONS = {
    "relu": "((v) < 0.f ? 0.f : (v))",
    "relu6": "((v) < 0.f ? 0.f : (v) > 6.f ? 6.f : (v))",
    "sigmoid": "(1.f / (1.f + expf(-(v))))",
    "tanh": "tanhf(v)",
    "softrelu": "((v) > 20.f ? (v) : log1pf(expf(v)))",
    "softsign": "((v) / (1.f + fabsf(v)))",
}


def program(
    file: str,
    launch: Launch,
    defines: Mapping[str, int | str],
    activation: str | None = None,
    options: tuple[str, ...] = (),
    config: Mapping[str, int] | None = None,
) -> cuda.Program:
    """Return the program of one launch: the file's text behind its definitions and the constants of struct Config."""
    if activation:
        defines = {**defines, "ACTIVATION(v)": ACTIVATIONS[activation]}
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    if config:
        constants = "".join(f"    static constexpr int {name} = {value};\n" for name, value in config.items())
        text += f"struct Config {{\n{constants}}};\n"
    text += f'#line 1 "{file}"\n{(_FOLDER / file).read_text(encoding="utf-8")}'
    plan = Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,))
    return cuda.Program(launch.entry, text, options, plan)


class Pass:
    """One launch of a function of ``passes.cu`` on arrays by name; "x" is among them."""

    def __init__(
        self,
        entry: str,
        arguments: tuple[Any, ...],
        defines: dict[str, int | str],
        elements: int,
        activation: str | None = None,
        threads_per_element: int = 1,
    ) -> None:
        threads = elements * threads_per_element
        defines = {"INDEX": "unsigned long long" if threads >= 1 << 31 else "unsigned int", **defines}
        blocks = max(1, min(_BLOCKS, ceil_div(threads, _THREADS)))
        launch = Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), (*arguments, np.int64(elements)))
        self.program = program("passes.cu", launch, defines, activation)

    def bind(self, **arrays: Any) -> Call:
        """Return the call that launches the pass on the current stream."""
        return cuda.prepared_launch(self.program, 1, arrays)


def pool(operator: Pooling, x: Shape, y: Shape, activation: str | None) -> Pass:
    """Pooling of x (B, C, H, W) into y; arrays x, y."""
    fitted = operator.fitted(x)
    # Whether a last window reaches over the lower or right edge.
    edges = zip(y[2:], fitted.stride, fitted.pad, fitted.kernel, x[2:])
    reaches_over = any((out - 1) * stride - pad + kernel > length for out, stride, pad, kernel, length in edges)
    names = ("WINDOW_ROWS", "WINDOW_COLUMNS", "STRIDE_ROWS", "STRIDE_COLUMNS", "PAD_ROWS", "PAD_COLUMNS")
    numbers = (*fitted.kernel, *fitted.stride, *fitted.pad, *x[2:], *y[2:])
    defines: dict[str, int | str] = dict(zip((*names, "H", "W", "OH", "OW"), numbers))
    defines.update(
        REACHES_OVER=int(reaches_over),
        MAXIMUM=int(operator.is_maximum),
        MEAN=int(operator.pool_type == "avg"),
        COUNT_PAD=int(operator.count_include_pad),
    )
    return Pass("pool", ("x", "y"), defines, prod(y), activation)


def affine(
    channels: int, inner: int, elements: int, activation: str | None, scaled: bool = False, residual: bool = False
) -> Pass:
    """y = activation(x scale + shift + residual) for each channel; y may be x.

    Arrays x, shift and y; scale and residual are left out where they are not asked for.
    """
    flags = {"SCALED": int(scaled), "RESIDUAL": int(residual)}
    defines: dict[str, int | str] = {"CHANNELS": channels, "INNER": inner, **flags}
    # What is not asked for is not read.
    arguments = ("x", "scale" if scaled else "shift", "shift", "residual" if residual else "x", "y")
    return Pass("affine", arguments, defines, elements, activation)


def border(pad: tuple[int, int], x: Shape) -> Pass:
    """x (B, C, H, W) with zeros around each image of each channel; arrays x, y."""
    defines: dict[str, int | str] = {"BORDER": 1, "H": x[2], "W": x[3], "PAD_ROWS": pad[0], "PAD_COLUMNS": pad[1]}
    return Pass("border", ("x", "y"), defines, x[0] * x[1] * (x[2] + 2 * pad[0]) * (x[3] + 2 * pad[1]))


def softmax(rows: int, length: int, temperature: float, logarithm: bool) -> Pass:
    """Softmax of each row of ``length`` elements; arrays x, y."""
    defines: dict[str, int | str] = {"N": length, "LOGARITHM": int(logarithm)}
    return Pass("softmax", ("x", "y", np.float32(temperature)), defines, rows, threads_per_element=32)


class Epilogue:
    """A shift for each channel, an array that is added, and an activation, in one pass over a layer's output."""

    def __init__(
        self, shifted: bool, residual: bool, activation: str | None, channels: int, inner: int, elements: int
    ) -> None:
        self._channels, wanted = channels, shifted or residual or activation
        self._pass = affine(channels, inner, elements, activation, residual=residual) if wanted else None
        self._zeros: Any = None

    def bind(self, out: Any, shift: Any = None, residual: Any = None) -> Call | None:
        """Return the call for an output in place, or None where there is nothing to do."""
        if self._pass is None:
            return None
        if shift is None:
            if self._zeros is None:
                self._zeros = cuda.cupy().zeros(self._channels, np.float32)
            shift = self._zeros
        given = {} if residual is None else {"residual": residual}
        return self._pass.bind(x=out, shift=shift, y=out, **given)
