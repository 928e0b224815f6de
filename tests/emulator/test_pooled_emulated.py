"""The CUDA kernels with tanh and 2 x 2 maxima behind them, translated to C++ and run on the CPU, against float64.

Indices, edges and values are a GPU's; the order of threads and tanhf's last bits are not.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_layers import chip_of
from test_tanh_pool import arrays, assert_right

from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import ProblemError
from ece408_op.kernels.cuda.float32 import sliding_window
from ece408_op.kernels.cuda.ladder import naive, register_tiled
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Launch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

HERE = Path(__file__).parent
CHIP = chip_of(80)
#: A pattern of no number, around the output and in it.
POISON = np.float32(np.nan)

ENTRIES = {
    "naive": "naive(x_, w_, y_, 0)",
    "sliding_window": "sliding_window(x_, w_, y_, 0, images_)",
    "register_tiled": "register_tiled(x_, w_, y_, 0, images_)",
}
#: Threads of naive never wait for one another; a block of its 1024 would need as many stacks.
ENTRY = """
static const float *x_, *w_;
static float *y_;
static int images_;
extern "C" int run(const float *x, const float *w, float *y, int images, int grid, int across, int down) {
    x_ = x, w_ = w, y_ = y, images_ = images, gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        if (down > 1)
            for (int t = 0; t < across * down; t++) threadIdx.x = t %% across, threadIdx.y = t / across, %(call)s;
        else if (run_block(across, [] { %(call)s; }))
            return 1;
    }
    return 0;
}
"""


def run(kernel: CudaKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray, aligned: int, folder: Path):
    """The kernel's output, the elements around it untouched."""
    plan = kernel.plan(problem, CHIP, aligned)
    (launch,) = plan.steps(problem.batch)
    assert isinstance(launch, Launch)
    text = kernel.text(plan).replace(
        "extern __shared__ __align__(16) float weights[];", "float *const weights = reinterpret_cast<float *>(memory);"
    )
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(f'#include <utility>\n#include "cuda_on_cpu.h"\n{text}{ENTRY % {"call": ENTRIES[launch.entry]}}')
    flags = ["-O1", "-std=c++17", "-w", "-fno-gnu-unique", "-shared", "-fPIC", f"-I{HERE}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True, capture_output=True)
    placed = [_at(array, aligned) for array in (x, w, np.full(problem.y_shape, POISON))]
    status = ctypes.CDLL(str(library)).run(
        *(ctypes.c_void_p(inner.ctypes.data) for _, inner in placed), problem.batch, launch.grid[0], *launch.block[:2]
    )
    assert status == 0, "threads wait for ever"
    around, out = placed[2]
    assert np.isnan(around).sum() - np.isnan(out).sum() == around.size - out.size, "it wrote beyond its output"
    return out


def _at(array: np.ndarray, aligned: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory full of the pattern, and the array in the middle of it, at a multiple of so many bytes and no more."""
    around = np.full(array.size + 64, POISON)
    first = next(n for n in range(16, 48) if (around.ctypes.data + 4 * n) % 32 == aligned % 32)
    inner = around[first : first + array.size].reshape(array.shape)
    inner[...] = array
    return around, inner


#: Layers, and what their arrays' addresses are multiples of, which only sliding_window looks at.
SHAPES = [
    ("sliding_window", (3, 1, 20, 20, 5, 5), 16),
    ("sliding_window", (3, 1, 20, 20, 5, 5), 4),
    ("sliding_window", (2, 1, 13, 17, 3, 4), 4),
    ("sliding_window", (2, 3, 9, 12, 6, 3), 16),
    ("sliding_window", (5, 1, 3, 3, 2, 2), 4),
    ("register_tiled", (3, 1, 12, 12, 5, 5), 16),
    ("register_tiled", (2, 5, 11, 14, 35, 4), 4),
    ("register_tiled", (7, 3, 6, 5, 70, 2), 4),
    ("register_tiled", (5, 2, 3, 3, 2, 3), 4),
    ("naive", (2, 3, 11, 12, 4, 4), 4),
    ("naive", (1, 1, 70, 71, 2, 3), 4),
]
KERNELS = {
    "naive": naive.NAIVE,
    "sliding_window": sliding_window.KERNEL,
    "register_tiled": register_tiled.REGISTER_TILED,
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("name", "shape", "aligned"), SHAPES, ids=str)
def test_it_is_right(name, shape, aligned, full, tmp_path):
    plain = ConvProblem(*shape)
    if min(plain.y_shape[2:]) < 2 and not full:
        with pytest.raises(ProblemError, match="at least 2 rows of the convolution for 2 x 2 max-pooling, got 1"):
            plain.pooled(full)
        return
    kernel, problem = KERNELS[name], plain.pooled(full)
    if name == "sliding_window" and full and (plain.output_height % 2 or plain.output_width % 2):
        assert "fuse" in kernel.not_supported_reasons(problem)[0]
        return
    x, w = arrays(plain)
    assert_right(run(kernel, problem, x, w, aligned, tmp_path), x, w, full)


@pytest.mark.parametrize("name", KERNELS)
def test_a_maximum_leaves_nan_out(name, tmp_path):
    plain = ConvProblem(2, 1, 8, 8, 3, 1)
    x, w = arrays(plain)
    x[0, 0, [0, 1, 2, 3], [0, 3, 4, 1]] = np.nan
    x[1, 0, 2:4, 2:4] = np.nan
    x[1, 0, 6, 6] = np.inf
    got = run(KERNELS[name], plain.pooled(False), x, w, 16, tmp_path)
    convolved = (w[None, :, 0] * x).reshape(2, 3, 4, 2, 4, 2)
    want = np.tanh(np.fmax.reduce(np.fmax.reduce(convolved, axis=5), axis=3))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)
