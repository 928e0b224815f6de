"""Split precision on a GPU: values of every size, infinities and NaN, and the error of long sums."""

from typing import Any, Callable

import numpy as np
import pytest
from cuda_layers import CUDA_KERNELS
from gpu_case import require_gpu

from ece408_op.core import reference, tuning
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

pytestmark = pytest.mark.gpu


def _kernels(*arithmetics: str) -> pytest.MarkDecorator:
    """Parametrise over the kernels that compute products so."""
    chosen = [kernel for kernel in CUDA_KERNELS if kernel.arithmetic in arithmetics]
    assert len(chosen) >= 6 * len(arithmetics)
    return pytest.mark.parametrize("kernel", chosen, ids=lambda kernel: kernel.name)


#: Layers in order of preference; a test takes the first that the kernel supports: long sums, and what the
#: kernels for one channel, for short sums and for 1 x 1 filters take.
LONG_SUMS = [(12, 34, 34, 24, 7), (6, 34, 34, 24, 5), (1, 34, 34, 24, 7), (64, 34, 34, 24, 1)]
SMALL = [(3, 20, 22, 9, 5), (1, 20, 22, 9, 5), (30, 20, 22, 9, 1)]


def _layer(kernel: CudaKernel, batch: int, layers: list[tuple[int, ...]]) -> ConvProblem:
    """Return the first layer that the kernel supports on this GPU; skip the test, with the reasons, without one."""
    reasons: list[str] = []
    for layer in layers:
        problem = ConvProblem(batch, *layer)
        reasons = kernel.not_supported_reasons(problem, cuda.chip())
        if not reasons:
            return problem
    pytest.skip(f"the kernel does not take the layer: {'; '.join(reasons)}")


def _run(kernel: CudaKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, times: int = 1) -> np.ndarray:
    cupy = cuda.cupy()
    out = cupy.full(problem.y_shape, cupy.nan, "f")
    for _ in range(times):
        kernel.run(problem, cupy.asarray(x), cupy.asarray(w), out)
    result: np.ndarray = out.get()
    return result


def _random(problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(408)
    return rng.uniform(-1, 1, problem.x_shape).astype(np.float32), rng.standard_normal(problem.w_shape).astype(
        np.float32
    )


Change = Callable[[np.ndarray, np.ndarray], Any]


def _scaled(x: float, w: float) -> Change:
    return lambda a, b: (a.__imul__(np.float32(x)), b.__imul__(np.float32(w)))


def _put(which: int, place: Any, value: float) -> Change:
    return lambda *arrays: arrays[which].__setitem__(place, np.float32(value))


def _tiny_windows(x: np.ndarray, w: np.ndarray) -> None:
    x[5, :, :10] *= np.float32(1e-12)
    x[5, :, 10:] *= np.float32(1e8)


CASES: dict[str, Change] = {
    "NaN in x": _put(0, (3, 0, 4, 5), np.nan),
    "infinity in the last pixel": _put(0, (36, 0, 19, 21), np.inf),
    "NaN in w": _put(1, (2, 0, -1, -1), np.nan),
    "infinity in w": _put(1, (8, 0, -1, -1), np.inf),
    "x 1e30": _scaled(1e30, 1),
    "x 1e38": _scaled(1e38, 1),
    "x 1e-30": _scaled(1e-30, 1),
    "x 1e-37": _scaled(1e-37, 1),
    "w 1e-30": _scaled(1, 1e-30),
    "both 1e18": _scaled(1e18, 1e18),
    "both 1e-19": _scaled(1e-19, 1e-19),
    "1e30 and 1e-30": _scaled(1e30, 1e-30),
    "1e-35 and 1e35": _scaled(1e-35, 1e35),
    "x of zeros": _scaled(0, 1),
    "w of zeros": _scaled(1, 0),
    "images of zeros": _put(0, slice(4, 8), 0),
    "an image of denormals": _put(0, 7, 1e-40),
    "one value of 1e-20": _put(0, (9, 0, 3, 3), 1e-20),
    "a filter of zeros": _put(1, 4, 0),
    "one weight of 1e-12": _put(1, (3, 0, 0, 0), 1e-12),
    "windows of tiny values next to large ones": _tiny_windows,
}


@_kernels("fp16x3", "fp16x1")
def test_special_values_are_right(kernel):
    require_gpu()
    problem = _layer(kernel, 37, SMALL)
    wrong = {}
    for name, change in CASES.items():
        x, w = _random(problem)
        with np.errstate(all="ignore"):
            change(x, w)
        found = compare(_run(kernel, problem, x, w), x, w, kernel)
        if not found.passed:
            wrong[name] = str(found)
    assert not wrong


@_kernels("fp16x3")
@pytest.mark.parametrize("positive", [False, True], ids=["mixed", "positive"])
def test_the_error_is_of_float32s_class(kernel, positive):
    require_gpu()
    problem = _layer(kernel, 20, LONG_SUMS)
    rng = np.random.default_rng(408)
    x, w = _random(problem)
    if positive:
        x = rng.integers(0, 256, problem.x_shape).astype(np.float32)
        w = rng.uniform(0, 1, problem.w_shape).astype(np.float32)
    found = compare(_run(kernel, problem, x, w), x, w, kernel)
    assert found.passed
    # Far below the bound, which adds up errors that cancel in fact: twice what cuDNN's float32 was seen to err here.
    assert found.scaled < (3.5e-6 if positive else 7e-7)


@pytest.mark.parametrize("name", ["fp16x3_warpgroup", "fp16x3_mma_sync"])
def test_promoted_sums_of_positive_products_do_not_fall_short(name):
    # Of 588 products, added up by tensor cores alone, they did by 21 units of 2^-23 in the mean; with promotion, by 2.
    require_gpu()
    kernel = next(kernel for kernel in CUDA_KERNELS if kernel.name == name)
    problem = _layer(kernel, 8, [(12, 34, 34, 16, 7)])
    rng = np.random.default_rng(408)
    x, w = (rng.uniform(0, 1, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    out, exact = _run(kernel, problem, x, w), reference.convolve(x, w)
    assert abs(((exact - out) * exact).sum() / (exact * exact).sum()) < 4 * 2.0**-23


@_kernels("fp16x3")
def test_sums_of_small_integers_are_exact(kernel):
    require_gpu()
    problem = _layer(kernel, 8, LONG_SUMS)
    rng = np.random.default_rng(408)
    x = rng.integers(0, 256, problem.x_shape).astype(np.float32)
    w = rng.integers(-8, 9, problem.w_shape).astype(np.float32)
    assert np.array_equal(_run(kernel, problem, x, w), reference.convolve(x, w))


@_kernels("fp16x3")
def test_images_that_cannot_be_split_leave_the_others_alone(kernel):
    require_gpu()
    problem = _layer(kernel, 600, SMALL[1:])
    x, w = _random(problem)
    x[::7, 0, 3, 3] = np.inf
    # Three times: the list of images is emptied each time.
    assert compare(_run(kernel, problem, x, w, times=3), x, w, kernel).passed


@_kernels("fp16x3")
def test_tuning_keeps_the_fastest_tile_which_is_right(kernel):
    cp = require_gpu()
    problem = _layer(kernel, 40, [(6, 31, 29, 17, 4), (1, 32, 28, 17, 5), (30, 20, 22, 9, 1)])
    x, w = _random(problem)
    tile = tuning.tune(kernel, problem, cp.asarray(x), cp.asarray(w), cp.empty(problem.y_shape, np.float32))
    assert tile in (kernel.tiles(problem, cuda.chip(), 4) or [{}])  # some kernels have no choice
    assert tuning.recorded_tile(kernel.name, problem, cuda.chip()) == tile
    assert compare(_run(kernel, problem, x, w), x, w, kernel).passed
