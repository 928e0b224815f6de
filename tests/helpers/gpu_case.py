"""Shared by the GPU tests: CuPy, poisoned outputs, a float64 reference on the GPU, and the comparison with it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError, UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda


def require_gpu() -> Any:
    """Return CuPy; without a GPU, skip the test with the reason."""
    try:
        cuda.device_count()
    except DeviceError as error:
        pytest.skip(str(error))
    return cuda.cupy()


def refused(kernel: CudaKernel, problem: ConvProblem) -> bool:
    """Whether the kernel does not support the problem on this GPU; a call must then raise the same reasons."""
    reasons = kernel.not_supported_reasons(problem, cuda.chip())
    if reasons:
        cupy = cuda.cupy()
        shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
        with pytest.raises(UnsupportedError, match=re.escape("; ".join(reasons))):
            # These arrays have no memory: the call must not read or write any.
            kernel.run(problem, *(cupy.ndarray(shape, "f", cupy.cuda.alloc(4)) for shape in shapes))
    return bool(reasons)


def inputs(cupy: Any, problem: ConvProblem, seed: int = 0) -> tuple[Any, Any, Any]:
    """x uniform in [-1, 1], w normal, and an output full of NaN."""
    rng = cupy.random.default_rng(seed)
    x = 2 * rng.random(problem.x_shape, dtype=cupy.float32) - 1
    w = rng.standard_normal(problem.w_shape, dtype=cupy.float32)
    return x, w, cupy.full(problem.y_shape, cupy.nan, "f")


def reference(cupy: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """Return the convolution of x (B, C, H, W) and w (M, C, K, K) in float64, and the sum of |x||w|."""
    kernel = w.shape[2]
    rows, columns = x.shape[2] - kernel + 1, x.shape[3] - kernel + 1
    exact = cupy.zeros((x.shape[0], w.shape[0], rows * columns))
    magnitude = cupy.zeros_like(exact)
    for p in range(kernel):
        for q in range(kernel):
            shifted = x[:, :, p : p + rows, q : q + columns].reshape(*x.shape[:2], -1).astype("d")
            weight = w[:, :, p, q].astype("d")
            exact += cupy.matmul(weight, shifted)
            magnitude += cupy.matmul(abs(weight), abs(shifted))
    shape = (x.shape[0], w.shape[0], rows, columns)
    return exact.reshape(shape), magnitude.reshape(shape)


def assert_right(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, out: Any) -> None:
    """Assert that every element of out is within the kernel's error bound of float64; the message names the worst."""
    cupy = cuda.cupy()
    # A few images at a time: the reference needs at least 16 bytes per element.
    step = max(1, 2**27 // max(1, (x[:1].size + out[:1].size)))
    for first in range(0, problem.batch, step):
        exact, magnitude = reference(cupy, x[first : first + step], w)
        got = out[first : first + step]
        share = abs(got - exact) / cupy.maximum(kernel.error_bound(problem) * magnitude, 1e-40)
        share = cupy.where(cupy.isnan(share), cupy.inf, share)
        worst = int(share.argmax())
        if float(share.ravel()[worst]) > 1:
            b, m, i, j = (int(n) for n in cupy.unravel_index(worst, share.shape))
            raise AssertionError(
                f"{kernel.name}, {problem}: {int((share > 1).sum())} elements wrong from image {first} on; worst "
                f"[{first + b}, {m}, {i}, {j}]: expected {float(exact[b, m, i, j])}, got {float(got[b, m, i, j])}, "
                f"{float(share.ravel()[worst]):.3g} of the error bound"
            )


def check(kernel: CudaKernel, problem: ConvProblem, seed: int = 0) -> None:
    """Run the kernel once on random values and check its whole output against float64."""
    cupy = require_gpu()
    x, w, out = inputs(cupy, problem, seed)
    kernel.run(problem, x, w, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert_right(kernel, problem, x, w, out)
