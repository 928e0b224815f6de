"""Matrix products on the GPU by cuBLAS, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda

from ._layers import FullyConnected
from ._passes import affine

#: cuBLAS's numbers for float32, for sums in it, for its own choice of algorithm, and for a transposed operand.
_FLOAT, _SUM_FLOAT, _DEFAULT, _PLAIN, _TRANSPOSED = 0, 68, -1, 0, 1


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
        transposed: bool = True,
    ) -> None:
        """out = a b^T (or a b), row by row in float32, for each of ``count`` products, on the current stream.

        sizes: rows, columns, products; a (rows, products), b (columns, products) or, not transposed, (products,
        columns), as addresses; leading: elements from row to row of a and b; strides: from product to product of
        a, b and out.
        """
        rows, columns, products = sizes
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
            _FLOAT,
            leading[1],
            strides[1],
            a,
            _FLOAT,
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

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Callable[[], None]:
        """The product, and the pass after it."""
        products, after = self._sizes[2], None
        addresses = inputs[0].data.ptr, inputs[1].data.ptr, out.data.ptr
        if self._after is not None:
            bias = inputs[2] if self._bias else self._none
            after = self._after.bind(x=out, scale=bias, shift=bias, y=out)

        def fill() -> None:
            self._blas.multiply(*addresses, self._sizes, (products, products))
            if after is not None:
                after()

        return fill
