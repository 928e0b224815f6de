"""Matrix products on the GPU: in float32 by cuBLAS, large ones in split precision."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ece408_op.errors import DeviceError
from ece408_op.graph.symbol_graph import Node
from ece408_op.kernels.cuda.split_precision import dense
from ece408_op.problem import ITEM_BYTES
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

from ._definition import Arrays
from ._passes import ACTIVATIONS, Epilogue
from ._schedule import Call, Computation, in_order

#: cuBLAS's constants CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_OP_N and CUBLAS_OP_T.
_FLOAT, _COMPUTE_FLOAT, _DEFAULT, _PLAIN, _TRANSPOSED = 0, 68, -1, 0, 1

#: The bytes that cuBLAS's manual recommends for a workspace on Hopper, the most for any GPU (cublasSetWorkspace).
_WORKSPACE_BYTES = 32 << 20

#: The compute capability, and the fewest rows, columns and GEMM K, with which split precision is faster than cuBLAS.
_CAPABILITY, _PROFITABLE = (9, 0), (128, 64, 1024)

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

    def multiply(
        self,
        a: Any,
        b: Any,
        out: int,
        sizes: tuple[int, int, int],
        strides: tuple[int, int, int] = (0, 0, 0),
        count: int = 1,
        transposed: bool = False,
    ) -> None:
        """Compute out = a b, or a b^T, in float32 for ``count`` products, on the current stream.

        sizes: rows, columns and length of the sums. a (rows, length), b (length, columns) or, transposed, (columns,
        length), and out (rows, columns) are addresses of C-contiguous matrices. strides: elements from one product to
        the next in a, b and out.
        """
        rows, columns, length = sizes
        self._call("cublasSetStream_v2", cuda.cupy().cuda.get_current_stream().ptr)
        # cublasSetStream resets the workspace to cuBLAS's own.
        self._call("cublasSetWorkspace_v2", self._workspace.ptr, _WORKSPACE_BYTES)
        # cuBLAS stores matrices by columns: it computes the transposed product.
        second = (_TRANSPOSED, length) if transposed else (_PLAIN, columns)
        self._call(
            "cublasGemmStridedBatchedEx", second[0], _PLAIN, columns, rows, length, self._one.ctypes.data,
            b, _FLOAT, second[1], strides[1], a, _FLOAT, length, strides[0], self._zero.ctypes.data,
            out, _FLOAT, columns, strides[2], count, _COMPUTE_FLOAT, _DEFAULT,
        )  # fmt: skip


@cache
def blas(device: int) -> Blas:
    """Return cuBLAS for the GPU of that number, which the caller has made the current one."""
    return Blas()


class GpuArrays(Arrays):
    """CuPy on the current device and stream, for the operators' own methods."""

    def __init__(self, device: int) -> None:
        self._device = device

    @property
    def xp(self) -> Any:  # type: ignore[override]
        """The module CuPy."""
        return cuda.cupy()

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Multiply two stacks of float32 matrices; a stack of one matrix is broadcast."""
        a, b = (self.xp.ascontiguousarray(array) for array in (a, b))
        count, rows, columns = out.shape
        strides = (a[0].size if len(a) > 1 else 0, b[0].size if len(b) > 1 else 0, rows * columns)
        addresses = a.data.ptr, b.data.ptr, out.data.ptr
        blas(self._device).multiply(*addresses, (rows, columns, a.shape[2]), strides, count)

    def erf(self, x: Any, out: Any) -> None:
        """Compute the error function."""
        from cupyx.scipy.special import erf

        out[...] = erf(x)


class BlasFullyConnected(Computation):
    """FullyConnected in float32 by cuBLAS; bias and activation in one pass after it."""

    def __init__(self, node: Node, rows: int, length: int, device: int) -> None:
        biased, columns = not node.operator.no_bias, node.operator.num_hidden
        self._device, self._sizes = device, (rows, columns, length)
        self._after = Epilogue(biased, False, node.epilogue, columns, 1, rows * columns)

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the product, and the pass after it."""
        library, addresses = blas(self._device), (inputs[0].data.ptr, inputs[1].data.ptr, out.data.ptr)
        multiply = lambda: library.multiply(*addresses, self._sizes, transposed=True)  # noqa: E731
        return in_order(multiply, self._after.bind(out, inputs[2] if len(inputs) > 2 else None))


def is_profitable(rows: int, columns: int, length: int, chip: Chip) -> bool:
    """Return whether split precision is faster for a product of that size; only on Hopper."""
    sizes = zip((rows, columns, length), _PROFITABLE)
    return chip.capability == _CAPABILITY and all(size >= least for size, least in sizes)


class SplitFullyConnected(BlasFullyConnected):
    """FullyConnected in split precision, or in float32 by cuBLAS.

    cuBLAS computes it if the range of the weights is too wide for split precision, if the weights are not
    parameters, or if the input is not aligned to 16 bytes.
    """

    def __init__(self, node: Node, rows: int, length: int, device: int, chip: Chip) -> None:
        super().__init__(node, rows, length, device)
        following = ACTIVATIONS[node.epilogue] if node.epilogue else None
        options = chip, not node.operator.no_bias, following
        self._program, self._split, self._bytes = dense.multiply(*self._sizes, *options)
        self.scratch = self._program.plan.scratch_bytes
        self._parameters: dict[str, Any] | None = None

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Split the weights, if they are parameters and their range allows it."""
        w, cp = inputs[1], cuda.cupy()
        self._parameters = None
        if w is None:
            return
        split = {name: cp.zeros(size // ITEM_BYTES, np.int32) for name, size in self._bytes.items()}
        cuda.execute(self._split, 1, {"w": w, **split}, None)
        if not bool((split["w_exponents"] == dense.UNSPLITTABLE).any()):
            self._parameters = split

    def bind(self, inputs: Sequence[Any], out: Any, scratch: Any) -> Call:
        """Return the split-precision launches, or cuBLAS's call where split precision cannot be used."""
        if self._parameters is None or inputs[0].data.ptr % dense.ALIGNMENT:
            return super().bind(inputs, out, scratch)
        arrays = {**dict(zip(("x", "w", "bias"), inputs)), **self._parameters, "y": out}
        return cuda.prepared_launch(self._program, 1, arrays, scratch)
