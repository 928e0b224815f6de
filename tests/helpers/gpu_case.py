"""Shared by the GPU tests: CuPy, poisoned outputs, a float64 reference on the GPU, and the comparison with it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pooled_case
import pytest

from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError, UnsupportedError
from ece408_op.problem import TANH_POOL, ConvProblem, PooledProblem
from ece408_op.runtime import cuda


def require_gpu() -> Any:
    """Return CuPy; without a GPU, skip the test with the reason."""
    try:
        cuda.device_count()
    except DeviceError as error:
        pytest.skip(str(error))
    return cuda.cupy()


def require_gpus(count: int) -> Any:
    """Return CuPy; skip the test where there are fewer GPUs, with the reason."""
    cupy = require_gpu()
    if cuda.device_count() < count:
        pytest.skip(f"needs several GPUs: {count}")
    return cupy


def require_support(kernel: CudaKernel, problem: ConvProblem) -> Any:
    """Return CuPy; skip the test if the kernel does not take the problem here, after checking that a call says why."""
    cupy = require_gpu()
    if kernel.not_supported_reasons(problem, cuda.chip()):
        pytest.skip(f"{kernel.name} does not take the layer: {check_refusal(kernel, problem)}")
    return cupy


def check_refusal(kernel: CudaKernel, problem: ConvProblem) -> str:
    """Check that a call of a kernel that does not take the problem here says why; returns the reasons."""
    cupy, reasons = cuda.cupy(), "; ".join(kernel.not_supported_reasons(problem, cuda.chip()))
    with pytest.raises(UnsupportedError, match=re.escape(reasons)):
        # These arrays have no memory: the call must not read or write any.
        kernel.run(problem, *(cupy.ndarray(shape, "f", cupy.cuda.alloc(4)) for shape in problem.shapes))
    return reasons


def inputs(cupy: Any, problem: ConvProblem, seed: int = 0) -> tuple[Any, Any, Any]:
    """Operands, uniform in [-1, 1] and normal, and an output full of NaN. With pooling, w is small: tanh is not 1."""
    rng = cupy.random.default_rng(seed)
    a = 2 * rng.random(problem.shapes[0], dtype=cupy.float32) - 1
    b = rng.standard_normal(problem.shapes[1], dtype=cupy.float32)
    if isinstance(problem, PooledProblem):
        b /= np.float32(np.sqrt(problem.products))
    return a, b, cupy.full(problem.shapes[2], cupy.nan, "f")


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
    if problem.needs - {TANH_POOL} or kernel.magnitude_images is not abs:
        found = compare(out.get(), x.get(), w.get(), kernel, problem=problem)
        assert found.passed, f"{kernel.name}, {problem}: {found}"
        return
    # A few images at a time: the reference needs at least 16 bytes per element of the convolution.
    outputs = problem.filters * problem.output_height * problem.output_width
    step = max(1, 2**27 // max(1, x[:1].size + outputs))
    for first in range(0, problem.batch, step):
        exact, magnitude = reference(cupy, x[first : first + step], w)
        got = out[first : first + step]
        if isinstance(problem, PooledProblem):
            pooled_case.assert_right(got, problem, exact, magnitude, cupy)
            continue
        share = abs(got - exact) / cupy.maximum(kernel.error_bound(problem) * magnitude, 1e-40)
        share = cupy.where(cupy.isnan(share), cupy.inf, share)
        worst = int(share.argmax())
        if float(share.ravel()[worst]) > 1:
            b, m, i, j = (int(n) for n in np.unravel_index(worst, share.shape))
            raise AssertionError(
                f"{kernel.name}, {problem}: {int((share > 1).sum())} elements wrong from image {first} on; worst "
                f"[{first + b}, {m}, {i}, {j}]: expected {float(exact[b, m, i, j])}, got {float(got[b, m, i, j])}, "
                f"{float(share.ravel()[worst]):.3g} of the error bound"
            )


def check(kernel: CudaKernel, problem: ConvProblem, seed: int = 0) -> None:
    """Run the kernel on new values into poisoned memory, and compare its output with float64."""
    x, w, _ = inputs(require_gpu(), problem, seed)
    assert_right(kernel, problem, x, w, poisoned_run(kernel, problem, x, w))


def poisoned_run(kernel: CudaKernel, problem: ConvProblem, a: Any, b: Any) -> Any:
    """Return what the kernel computes into poisoned memory; the memory around it must stay unchanged."""
    cupy, shape = cuda.cupy(), problem.shapes[2]
    size = int(np.prod(shape))
    around = cupy.full(size + 64, 7.0, "f")
    out = around[32 : size + 32].reshape(shape)
    out[...] = cupy.nan
    kernel.run(problem, a, b, out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    assert bool((around[:32] == 7).all())
    assert bool((around[size + 32 :] == 7).all())
    return out
