"""Matrix products on the GPU by cuBLAS: in float32, and in float32's accuracy on fp16 tensor cores (``split.cu``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import cuda
from ..errors import DeviceError
from ..launch import Launch, Plan, ceil_div, round_up
from ..problem import ITEM_BYTES
from .layers import FullyConnected
from .passes import affine, text_of

#: cuBLAS's numbers for types, for float32 sums, for its own choice of algorithm, and for a transposed operand.
_FLOAT, _HALF, _SUM_FLOAT, _DEFAULT, _PLAIN, _TRANSPOSED = 0, 2, 68, -1, 0, 1

#: Products of one partial sum at most, and the multiple that its length is: aligned loads.
CHUNK, _MULTIPLE = 1024, 32
_THREADS = 256
#: Fewest rows, columns and products for which splitting wins.
_WORTH = (512, 64, 1024)


class Blas:
    """cuBLAS on one GPU: a handle of our own, since CuPy keeps one a thread and MXNet's threads come and go."""

    def __init__(self) -> None:
        try:
            from cupy_backends.cuda.libs import cublas

            self._handle = cublas.create()
        except ImportError as error:
            raise DeviceError(
                f"the GPU: expected cuBLAS, which networks need, got {error}; install nvidia-cublas for your CUDA"
            ) from error
        self._cublas = cublas
        self._one, self._zero = np.ones((), np.float32), np.zeros((), np.float32)

    def multiply(
        self,
        a: Any,
        b: Any,
        out: int,
        sizes: tuple[int, int, int],
        leading: tuple[int, int],
        strides: tuple[int, int, int] = (0, 0, 0),
        count: int = 1,
        halves: bool = False,
        transposed: bool = True,
    ) -> None:
        """out = a b^T (or a b), row by row in float32, for each of ``count`` products, on the current stream.

        sizes: rows, columns, products; a (rows, products), b (columns, products) or, not transposed, (products,
        columns), as addresses; leading: elements from row to row of a and b; strides: from product to product of
        a, b and out. halves: a and b are fp16.
        """
        rows, columns, products = sizes
        kind = _HALF if halves else _FLOAT
        # cuBLAS counts by columns: it is asked for the transposed product.
        self._cublas.gemmStridedBatchedEx(
            self._handle,
            _TRANSPOSED if transposed else _PLAIN,
            _PLAIN,
            columns,
            rows,
            products,
            self._one.ctypes.data,
            b,
            kind,
            leading[1],
            strides[1],
            a,
            kind,
            leading[0],
            strides[0],
            self._zero.ctypes.data,
            out,
            _FLOAT,
            columns,
            strides[2],
            count,
            _SUM_FLOAT,
            _DEFAULT,
        )


@cache
def blas(device: int) -> Blas:
    """The handle of the GPU of that number, which is the current one."""
    return Blas()


class GpuArrays:
    """CuPy on the current device and stream, as the operators' own functions ask for it."""

    def __init__(self, device: int) -> None:
        self.xp: Any = cuda.cupy()
        self._blas = blas(device)

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """The product of two stacks of matrices, float32, of which one may be a stack of one."""
        a, b = (self.xp.ascontiguousarray(array) for array in (a, b))
        count, rows, columns = out.shape
        products = a.shape[2]
        target = out if out.flags.c_contiguous else self.xp.empty(out.shape, np.float32)
        strides = (a[0].size if len(a) > 1 else 0, b[0].size if len(b) > 1 else 0, rows * columns)
        self._blas.multiply(
            a.data.ptr,
            b.data.ptr,
            target.data.ptr,
            (rows, columns, products),
            (products, columns),
            strides,
            count,
            transposed=False,
        )
        if target is not out:
            out[...] = target

    def erf(self, x: Any, out: Any) -> None:
        """The error function."""
        from cupyx.scipy.special import erf

        out[...] = erf(x)


class Connected:
    """FullyConnected in float32 by cuBLAS; bias and activation in one pass after it."""

    scratch = 0

    def __init__(self, settings: FullyConnected, rows: int, products: int, activation: str | None, device: int) -> None:
        self._blas = blas(device)
        self._sizes = (rows, settings.hidden, products)
        self._bias = settings.bias
        elements = rows * settings.hidden
        self._after = affine(settings.hidden, 1, elements, False, activation) if settings.bias or activation else None
        self._none: Any = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """A bias of zeros where there is none but an activation follows."""
        if self._after is not None and not self._bias:
            self._none = cuda.cupy().zeros(self._sizes[1], np.float32)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Any) -> None:
        """Fill the output."""
        x, w = inputs[:2]
        products = self._sizes[2]
        self._blas.multiply(x.data.ptr, w.data.ptr, out.data.ptr, self._sizes, (products, products))
        if self._after is not None:
            bias = inputs[2] if self._bias else self._none
            self._after.run(x=out, scale=bias, shift=bias, y=out)


def worth_splitting(rows: int, columns: int, products: int) -> bool:
    """Whether a product of that size is faster in split operands."""
    return all(size >= least for size, least in zip((rows, columns, products), _WORTH))


class Split:
    """FullyConnected in split operands; weights whose range does not allow it are taken in float32."""

    def __init__(
        self,
        settings: FullyConnected,
        rows: int,
        products: int,
        activation: str | None,
        device: int,
        chunk: int = CHUNK,
    ) -> None:
        self._blas = blas(device)
        self._plain = Connected(settings, rows, products, activation, device)
        self._rows, self._columns, self._bias = rows, settings.hidden, settings.bias
        self._chunks = ceil_div(products, chunk)
        self._chunk = round_up(ceil_div(products, self._chunks), _MULTIPLE)
        padded = self._chunk * self._chunks
        self._padded = padded
        defines: dict[str, int | str] = {
            "K": products,
            "KP": padded,
            "N": settings.hidden,
            "CHUNKS": self._chunks,
            "THREADS": _THREADS,
            "BIAS": int(settings.bias),
        }
        self._split = self._program("split", defines, rows, ("x", "parts", "scales", "marks"))
        self._split_weights = [
            self._program("split", {**defines, "SWAP": swap}, settings.hidden, ("x", "parts", "scales", "marks"))
            for swap in (0, 1)
        ]
        names = ("sums", "rest", "x_scales", "w_scales", "marks", "x", "w", "bias", "y", np.int64(rows * self._columns))
        self._finish = self._program("finish", defines, rows, names, activation)
        #: What is launched around cuBLAS, in order.
        self.programs = (*self._split_weights, self._split, self._finish)
        #: In turn: both parts of x, partial sums and the rest, scales and marks.
        self._sizes = (
            round_up(rows * 2 * padded * 2, 256),
            round_up((self._chunks + 1) * rows * self._columns * ITEM_BYTES, 256),
            round_up(rows * ITEM_BYTES, 256),
            round_up(rows * ITEM_BYTES, 256),
        )
        self.scratch = sum(self._sizes)
        self._weights: Any = None

    @staticmethod
    def _program(
        entry: str, defines: dict[str, int | str], blocks: int, names: tuple[Any, ...], activation: str | None = None
    ) -> cuda.Program:
        launch = Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), names)
        plan = Plan(defines={}, images=1, steps=lambda images: (launch,))
        return cuda.Program(entry, text_of("split.cu", {"SWAP": 0, **defines}, activation), (), plan)

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Split the weights; where their range does not allow it, remember that."""
        self._plain.prepare(inputs)
        w, cp = inputs[1], cuda.cupy()
        if w is None:
            self._weights = None
            return
        planes = [cp.empty((self._columns, 2 * self._padded), np.uint16) for _ in range(2)]
        scales, marks = cp.empty(self._columns, np.float32), cp.empty(self._columns, np.int32)
        for program, plane in zip(self._split_weights, planes):
            cuda.execute(program, 1, {"x": w, "parts": plane, "scales": scales, "marks": marks}, None)
        self._weights = None if bool(marks.any()) else (*planes, scales)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Any) -> None:
        """Fill the output."""
        if self._weights is None:
            self._plain.run(inputs, out, scratch)
            return
        starts = np.cumsum((0, *self._sizes[:-1])) // ITEM_BYTES
        parts, sums, scales, marks = (scratch[int(start) :] for start in starts)
        w_parts, w_swapped, w_scales = self._weights
        cuda.execute(self._split, 1, {"x": inputs[0], "parts": parts, "scales": scales, "marks": marks}, None)
        rows, columns, chunk, row = self._rows, self._columns, self._chunk, 2 * self._padded
        plane = rows * columns
        self._blas.multiply(
            parts.data.ptr,
            w_parts.data.ptr,
            sums.data.ptr,
            (rows, columns, chunk),
            (row, row),
            (chunk, chunk, plane),
            self._chunks,
            halves=True,
        )
        rest = sums[self._chunks * plane :]
        self._blas.multiply(
            parts.data.ptr, w_swapped.data.ptr, rest.data.ptr, (rows, columns, row), (row, row), halves=True
        )
        arrays = {
            "sums": sums,
            "rest": rest,
            "x_scales": scales,
            "w_scales": w_scales,
            "marks": marks,
            "x": inputs[0],
            "w": inputs[1],
            "bias": inputs[2] if self._bias else w_scales,
            "y": out,
        }
        cuda.execute(self._finish, 1, arrays, None)
