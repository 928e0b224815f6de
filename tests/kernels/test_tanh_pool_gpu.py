"""Convolution fused with tanh and 2 x 2 max-pooling on the GPU, against float64, by kernels and in both contexts."""

import numpy as np
import pooled_case
import pytest
from cuda_layers import CUDA_KERNELS
from gpu_case import assert_right, inputs, reference, require_gpu

from ece408_op.core import dispatch
from ece408_op.kernels.cpu.direct import TANH_ULPS
from ece408_op.plugin import _device_context, host_context
from ece408_op.problem import TANH_POOL, ConvProblem
from ece408_op.runtime import cuda

pytest.importorskip("mxnet")

pytestmark = pytest.mark.gpu

POOLING = [kernel for kernel in CUDA_KERNELS if TANH_POOL in kernel.features]
KERNEL = pytest.mark.parametrize("kernel", POOLING, ids=lambda kernel: kernel.name)


@KERNEL
def test_a_maximum_leaves_nan_out(kernel):
    cupy = require_gpu()
    problem = ConvProblem(3, 2, 18, 16, 5, 3).pooled(False)
    x, w, out = inputs(cupy, problem)
    x[0, 0, 5, 5], x[1, 1, 9, 7], x[2, 0, 4:12, 3:11] = cupy.nan, cupy.inf, cupy.nan
    kernel.run(problem, x, w, out)
    convolved, _ = reference(cupy, x, w)
    exact = pooled_case.maxima(convolved, False, cupy)
    assert bool((cupy.isnan(out) == cupy.isnan(exact)).all())
    assert bool(cupy.isnan(out).any())
    assert bool((abs(out)[cupy.isinf(exact)] == 1).all())


@KERNEL
def test_tanh_keeps_to_its_error(kernel):
    """Every 997th float32 from 0 to 32 and the negative ones, each as the maximum of four."""
    cupy = require_gpu()
    bits = np.arange(np.float32(2.0**-126).view(np.uint32), np.float32(32).view(np.uint32), 997, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    values = values[: len(values) // 1000 * 1000].reshape(-1, 1, 10, 100)
    problem = ConvProblem(len(values), 1, 20, 200, 1, 1).pooled(False)
    x = cupy.asarray(values.repeat(2, axis=2).repeat(2, axis=3))
    out = cupy.full(problem.y_shape, cupy.nan, "f")
    kernel.run(problem, x, cupy.ones(problem.w_shape, "f"), out)
    exact = np.tanh(values.astype(np.float64))
    below = np.nextafter(np.abs(exact).astype(np.float32), np.float32(0))
    error = np.abs(out.get() - exact) / np.spacing(below).astype(np.float64)
    assert error.max() < TANH_ULPS, f"{error.max()} units in the last place at {values.ravel()[error.argmax()]}"


# ---------------------------------------------------------------------------------------------- in both contexts


@pytest.mark.parametrize(("context", "add"), [("host", False), ("device", False), ("device", True)])
@pytest.mark.parametrize("batch", [1, 700, 6001])
def test_both_contexts_fill_and_add(context, add, batch):
    cupy = require_gpu()
    problem = ConvProblem(batch, 1, 29, 30, 50, 5).pooled(False)
    kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
    x, w, _ = inputs(cupy, problem)
    y = cupy.full(problem.y_shape, 3 if add else cupy.nan, "f")
    cuda.wait("the test's arrays", cupy.cuda.get_current_stream())  # both contexts have streams of their own
    if context == "host":
        x_host, w_host, y_host = x.get(), w.get(), y.get()
        timing = host_context.convolve(kernel, problem, x_host, w_host, y_host)
        y = cupy.asarray(y_host)
        assert timing.copy_seconds > 0
    else:
        timing = _device_context.convolve(kernel, problem, (x.data.ptr, w.data.ptr, y.data.ptr), 0, add)
    assert timing.seconds > 0
    if add:
        plain = cupy.empty_like(y)
        kernel.run(problem, x, w, plain)
        assert bool((y == plain + 3).all())
    else:
        assert_right(kernel, problem, x, w, y)
