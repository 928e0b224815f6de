"""Matrix products in float32 by cuBLAS, and CuPy as the array library of operators."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda

from ._definition import Arrays

#: cuBLAS's constants CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_OP_N and CUBLAS_OP_T.
_FLOAT, _COMPUTE_FLOAT, _DEFAULT, _PLAIN, _TRANSPOSED = 0, 68, -1, 0, 1

#: The bytes that cuBLAS's manual recommends for a workspace on Hopper, the most for any GPU (cublasSetWorkspace).
_WORKSPACE_BYTES = 32 << 20

_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "cublasSetStream_v2": [_POINTER, _POINTER],
    "cublasSetWorkspace_v2": [_POINTER, _POINTER, ctypes.c_size_t],
    "cublasGemmStridedBatchedEx": [
        *(_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER),
        *(_POINTER, _INT, _INT, _LONG, _POINTER, _INT, _INT, _LONG, _POINTER),
        *(_POINTER, _INT, _INT, _LONG, _INT, _INT, _INT),
    ],
}


class Blas:
    """cuBLAS on the current GPU, with its own handle: CuPy has one per thread, and MXNet's threads come and go.

    CuPy refuses to call cuBLAS during the capture of a CUDA graph. cuBLAS itself allows it if the caller provides the
    workspace.
    """

    def __init__(self) -> None:
        try:
            from cupy_backends.cuda.libs import cublas

            self._handle = cublas.create()
            library = ctypes.CDLL(f"libcublas.so.{cublas.getVersion(self._handle) // 10_000}")  # which CuPy has loaded
        except (ImportError, OSError) as error:
            raise DeviceError(
                f"the GPU: expected cuBLAS, which networks need, got {error}; install nvidia-cublas-cu12 or, "
                "for CUDA 13, nvidia-cublas"
            ) from error
        self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        for name, types in _ARGUMENTS.items():
            self._functions[name].argtypes = types
        self._workspace = cuda.cupy().cuda.alloc(_WORKSPACE_BYTES)
        self._one, self._zero = np.ones((), np.float32), np.zeros((), np.float32)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](self._handle, *arguments)
        if status:
            raise DeviceError(f"{name}: expected status 0 of cuBLAS, got {status}")

    def multiply(self, a: Any, b: Any, out: Any, transposed: bool) -> None:
        """Compute out = a b, or a b^T, on the current stream for stacks of C-contiguous float32 matrices.

        a (count, rows, length), b (count, length, columns) or, transposed, (count, columns, length), and out (count,
        rows, columns); the count of a or b may be 1.
        """
        (count, rows, columns), length = out.shape, a.shape[2]
        strides = [array[0].size if len(array) > 1 else 0 for array in (a, b)]
        self._call("cublasSetStream_v2", cuda.cupy().cuda.get_current_stream().ptr)
        # cublasSetStream resets the workspace to cuBLAS's own.
        self._call("cublasSetWorkspace_v2", self._workspace.ptr, _WORKSPACE_BYTES)
        # cuBLAS stores matrices by columns: it computes the transposed product.
        second = (_TRANSPOSED, length) if transposed else (_PLAIN, columns)
        self._call(
            "cublasGemmStridedBatchedEx", second[0], _PLAIN, columns, rows, length, self._one.ctypes.data,
            b.data.ptr, _FLOAT, second[1], strides[1], a.data.ptr, _FLOAT, length, strides[0], self._zero.ctypes.data,
            out.data.ptr, _FLOAT, columns, rows * columns, count, _COMPUTE_FLOAT, _DEFAULT,
        )  # fmt: skip


@cache
def blas(device: int) -> Blas:
    """Return cuBLAS for the GPU of that number, the current one."""
    return Blas()


class GpuArrays(Arrays):
    """CuPy on the current device and stream, for the operators' own methods."""

    @property
    def xp(self) -> Any:  # type: ignore[override]
        """The module CuPy."""
        return cuda.cupy()

    def matmul(self, a: Any, b: Any, out: Any, transposed: bool = False) -> None:
        """Multiply two stacks of float32 matrices, or a and the transposed b; a stack of one matrix is broadcast."""
        a, b = (self.xp.ascontiguousarray(array) for array in (a, b))
        blas(cuda.cupy().cuda.runtime.getDevice()).multiply(a, b, out, transposed)

    def erf(self, x: Any, out: Any) -> None:
        """Compute the error function."""
        from cupyx.scipy.special import erf

        out[...] = erf(x)
