"""The programs of ``passes.cu``, ``pooling.cu`` and ``training.cu``: macro definitions, source text and grid size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan, ceil_div

from ._definition import Shape
from ._elementwise import Elementwise
from ._layers import Pooling

_FOLDER = Path(__file__).parent
_THREADS = 256
#: The most blocks; each thread computes further elements in a grid-stride loop.
_BLOCKS = 1 << 20

#: The activations' derivatives, computed from the activation's output y.
DERIVATIVES = {
    "relu": "((y) > 0.f ? 1.f : 0.f)",
    "sigmoid": "((y) * (1.f - (y)))",
    "tanh": "(1.f - (y) * (y))",
    "softrelu": "(-expm1f(-(y)))",
    "softsign": "((1.f - fabsf(y)) * (1.f - fabsf(y)))",
}
#: The most arrays of an elementwise operator.
MOST_OPERANDS = 4
#: The limit of the windows over a patch, and of a patch's elements, which one thread of a pooling's gradient computes.
_PATCH_LIMIT = 16
#: The names of a pooling's sizes in pooling.cu.
_POOL_SIZES = (
    *("HEIGHT", "WIDTH", "OUTPUT_HEIGHT", "OUTPUT_WIDTH", "ROWS", "COLUMNS"),
    *("STRIDE_ROWS", "STRIDE_COLUMNS", "PAD_ROWS", "PAD_COLUMNS"),
    *("WINDOWS_DOWN", "WINDOWS_ACROSS", "PATCHES_DOWN", "PATCHES_ACROSS"),
)


@lru_cache(maxsize=4096)
def program(
    file: str,
    entry: str,
    arguments: tuple[Any, ...],
    elements: int,
    vector: int = 1,
    grid: tuple[int, int] | None = None,
    **defines: int | str,
) -> cuda.Program:
    """Return the program of one launch of the kernel ``entry`` in a file, with macro definitions in front of the text.

    elements: the number of elements; a thread computes ``vector`` of them per step of a grid-stride loop. grid: the
    blocks, for a kernel that is not launched by elements.
    """
    index = "unsigned long long" if elements >= 1 << 31 else "unsigned int"
    known = {"INDEX": index, "VECTOR": vector, **defines}
    text = "".join(f"#define {name} {value}\n" for name, value in known.items())
    text += f'#line 1 "{file}"\n{(_FOLDER / file).read_text(encoding="utf-8")}'
    blocks = grid or (max(1, min(_BLOCKS, ceil_div(elements // vector, _THREADS))), 1)
    launch = Launch(entry, (*blocks, 1), (_THREADS, 1, 1), arguments)
    return cuda.Program(entry, text, (), Plan(defines={}, images_per_launch=1, steps=lambda images: (launch,)))


def launch(entry: str, arrays: Mapping[str, Any], numbers: tuple[Any, ...], *sizes: Any, **options: Any) -> None:
    """Launch a kernel of training.cu on the arrays and then the numbers; the other arguments are ``program``'s."""
    cuda.execute(program("training.cu", entry, (*arrays, *numbers), *sizes, **options), 1, arrays, None)


def expression(activation: Elementwise | None) -> str | None:
    """Return an elementwise operator of one array in CUDA C++, for a float v; None for none."""
    return f"({activation.text('(v)')})" if activation else None


def argmax_type(fitted: Pooling) -> Any:
    """Return the type of an element's number in a window, uint8 or int32; -1 cast to it means a maximum of NaN."""
    return np.uint8 if prod(fitted.kernel) < 256 else np.int32


@lru_cache(maxsize=1024)
def pool(
    operator: Pooling, x: Shape, y: Shape, activation: Elementwise | None, save_argmax: bool = False
) -> cuda.Program:
    """Return the program of the pooling of x (B, C, H, W) into y; arrays x, y and with ``save_argmax`` argmax."""
    arguments = ("x", "y", "argmax" if save_argmax else "y", np.int64(prod(y)))
    defines = _pool_defines(operator, x, y, activation)
    fitted = operator.fitted(x)
    if (*fitted.kernel, *fitted.pad, *y[2:]) == (*x[2:], 0, 0, 1, 1) and not save_argmax:
        whole = ("x", "y", np.int64(prod(y)))
        return program("pooling.cu", "pool_planes", whole, 32 * prod(y), SAVE_ARGMAX=0, **defines)
    return program("pooling.cu", "pool", arguments, prod(y), SAVE_ARGMAX=int(save_argmax), **defines)


@lru_cache(maxsize=1024)
def pool_gradient(operator: Pooling, x: Shape, y: Shape, activation: Elementwise | None) -> cuda.Program:
    """Return the program of the gradient of a pooling; arrays argmax, y, dy and out."""
    defines = _pool_defines(operator, x, y, activation)
    count = prod(x[:2]) * int(defines["PATCHES_DOWN"]) * int(defines["PATCHES_ACROSS"])
    arguments = ("argmax", "y", "dy", "out", np.int64(count))
    return program("pooling.cu", "pool_gradient", arguments, count, SAVE_ARGMAX=0, **defines)


def _pool_defines(operator: Pooling, x: Shape, y: Shape, activation: Elementwise | None) -> dict[str, int | str]:
    fitted = operator.fitted(x)
    covering = [ceil_div(size, stride) for size, stride in zip(fitted.kernel, fitted.stride)]
    small = max(prod(covering), prod(fitted.stride)) <= _PATCH_LIMIT
    patched = small and covering[0] <= y[2] and covering[1] <= y[3]
    windows, patches = map(min, zip(covering, y[2:])), x[2:]
    if patched:
        patches = tuple(ceil_div(length + pad, stride) for length, pad, stride in zip(x[2:], fitted.pad, fitted.stride))
    return {
        **dict(zip(_POOL_SIZES, (*x[2:], *y[2:], *fitted.kernel, *fitted.stride, *fitted.pad, *windows, *patches))),
        "MAXIMUM": int(operator.is_maximum),
        "MEAN": int(operator.pool_type == "avg"),
        "COUNT_PAD": int(operator.count_include_pad),
        "ARGMAX_TYPE": "unsigned char" if argmax_type(fitted) is np.uint8 else "int",
        "ACTIVATION(v)": expression(activation) or "(v)",
        "DERIVATIVE(y)": DERIVATIVES.get(getattr(activation, "activation", ""), "1.f"),
        "PATCHED": int(patched),
    }


def affine(
    channels: int,
    inner: int,
    elements: int,
    activation: Elementwise | None,
    scaled: bool = False,
    shifted: bool = True,
    residual: bool = False,
) -> cuda.Program:
    """Return the program of y = activation(x scale + shift + residual) with a scale and a shift per channel.

    Arrays x and y, and those of scale, shift and residual that are asked for. y may be x.
    """
    asked = {"scale": scaled, "shift": shifted, "residual": residual}
    # x takes the place of an array that the kernel does not read.
    arrays = ("x", *(name if one else "x" for name, one in asked.items()), "y")
    defines: dict[str, int | str] = {"ACTIVATION(v)": expression(activation) or "(v)"}
    defines |= {"SCALED": int(scaled), "SHIFTED": int(shifted), "RESIDUAL": int(residual)}
    defines |= {"CHANNELS": channels, "INNER": inner}
    # The kernel loads four elements at a time under the same condition.
    vector = 4 if inner % 4 == 0 else 1
    return program("passes.cu", "affine", (*arrays, np.int64(elements)), elements, vector, **defines)


def elementwise(
    operator: Elementwise, shapes: Sequence[Shape], y: Shape, activation: Elementwise | None
) -> cuda.Program:
    """Return the program of an elementwise operator of at most MOST_OPERANDS arrays; arrays x, x1, ..., y."""
    names = [f"x{number or ''}" for number in range(len(shapes))]
    text = operator.text(*(f"v{number}" for number in range(len(shapes))))
    at = [_index(shape, y) for shape in operator.operand_shapes(shapes)]
    loads = "".join(f"const float v{number} = {names[number]}[{index}]; " for number, index in enumerate(at))
    defines = {"ELEMENT": f"{loads}const float v = {text};", "ACTIVATION(v)": expression(activation) or "(v)"}
    # x takes the place of an array that the operator does not read.
    arguments = (*names, *["x"] * (MOST_OPERANDS - len(names)), "y", np.int64(prod(y)))
    return program("passes.cu", "elementwise", arguments, prod(y), **defines)


def _index(shape: Shape, y: Shape) -> str:
    """Return the index, in an array that broadcasts to y, of the element for the i-th element of y."""
    lengths = (1,) * (len(y) - len(shape)) + tuple(shape)
    if lengths == tuple(y):
        return "i"
    terms, stride, inner, axis = [], 1, 1, len(y)
    while axis:
        # Neighbouring axes along which the array is repeated, or is not, are one axis.
        repeated, length = lengths[axis - 1] != y[axis - 1], 1
        while axis and (y[axis - 1] == 1 or (lengths[axis - 1] != y[axis - 1]) == repeated):
            axis -= 1
            length *= y[axis]
        if not repeated:
            terms.append(f"i / {inner}u % {length}u * {stride}u")
            stride *= length
        inner *= length
    return " + ".join(terms) or "0"


def border(pad: tuple[int, int], x: Shape) -> cuda.Program:
    """Return the program that pads each channel of x (B, C, H, W) with zeros on all sides; arrays x, y."""
    defines = {"BORDER": 1, "H": x[2], "W": x[3], "PAD_ROWS": pad[0], "PAD_COLUMNS": pad[1]}
    elements = x[0] * x[1] * (x[2] + 2 * pad[0]) * (x[3] + 2 * pad[1])
    return program("passes.cu", "border", ("x", "y", np.int64(elements)), elements, **defines)


def softmax(rows: int, length: int, temperature: float, logarithm: bool) -> cuda.Program:
    """Return the program of the softmax of each row of ``length`` elements, one warp per row; arrays x, y."""
    arguments = ("x", "y", np.float32(temperature), np.int64(rows))
    return program("passes.cu", "softmax", arguments, 32 * rows, N=length, LOGARITHM=int(logarithm))
