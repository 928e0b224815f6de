"""register_blocked as C++ on the CPU, block by block, against float64: weights in shared and in constant memory.

Indices, edges, barriers and sums are a GPU's; what is copied asynchronously there is copied at once here.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_layers import chip_of

from ece408_op.core.check import compare
from ece408_op.kernels.cuda.float32 import register_blocked
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Launch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

HERE = Path(__file__).parent
CHIP = chip_of(90)
ENTRY = """
static const float *x_, *w_;
static float *y_;
static int images_;
extern "C" int run(const float *x, const float *w, float *y, int images, int grid, int threads) {
    x_ = x, w_ = w, y_ = y, images_ = images;
#if UNIFORM
    gridDim.x = 3;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        if (run_block(256, [] { register_blocked_weights(w_, uniform_weights); })) return 1;
#endif
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        if (run_block(threads, [] { register_blocked(x_, w_, y_, 0, images_); })) return 2;
    return 0;
}
"""

#: Strips that end a row and do not, several groups, passes, chunks and stages, row tiles, filters left over.
CASES = [
    ((3, 1, 12, 13, 5, 5), {}),
    ((2, 3, 9, 12, 7, 3), {}),
    ((2, 5, 11, 14, 9, 4), {"channels": 2, "passes": 1, "keep_weights": False}),
    ((2, 5, 11, 14, 9, 4), {"channels": 2, "passes": 1, "keep_weights": False, "stages": 2}),
    ((2, 4, 10, 11, 24, 7), {"groups": 3, "filters": 4, "passes": 1, "channels": 2}),
    ((3, 2, 8, 9, 20, 3), {"groups": 2, "passes": 3, "filters": 4}),
    ((1, 2, 5, 300, 5, 2), {}),
]


def _built(text: str, folder: Path) -> ctypes.CDLL:
    text = text.replace(
        "extern __shared__ __align__(16) float shared[];", "float *const shared = reinterpret_cast<float *>(memory);"
    )
    text = re.sub(r'^ *asm volatile\("" : "\+r".*\n', "", text, flags=re.M)
    text = re.sub(r"__constant__ __align__\(16\)", "alignas(16) static", text)
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(f'#include <utility>\n#include "cuda_on_cpu.h"\n{text}{ENTRY}')
    flags = ["-O1", "-std=c++17", "-w", "-fno-gnu-unique", "-shared", "-fPIC", f"-I{HERE}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True, capture_output=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("weights", ["shared", "uniform"])
@pytest.mark.parametrize(("shape", "changes"), CASES, ids=str)
def test_it_is_right(shape: tuple[int, ...], changes: dict, weights: str, tmp_path: Path) -> None:
    problem = ConvProblem(*shape)
    tile = register_blocked.best_tile(problem.with_batch(1), CHIP, 16)
    assert tile is not None
    tile = replace(tile, **changes, uniform=weights == "uniform")
    plan = register_blocked.plan_of(tile, problem, CHIP, 16)
    (launch,) = (step for step in plan.steps(problem.batch) if isinstance(step, Launch))
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, problem.x_shape).astype(np.float32)
    w = rng.standard_normal(problem.w_shape).astype(np.float32)
    room = np.full(np.prod(problem.y_shape) + 64, np.nan, np.float32)
    start = -room.ctypes.data % 64 // 4
    out = room[start : start + np.prod(problem.y_shape)].reshape(problem.y_shape)
    copies = []
    for array in (x, w):
        copy = np.full(array.size + 64, np.nan, np.float32)
        first = -copy.ctypes.data % 64 // 4
        copy[first : first + array.size] = array.ravel()
        copies.append(copy[first:])
    places = [ctypes.c_void_p(array.ctypes.data) for array in (*copies, out)]
    run = _built(register_blocked.KERNEL.text(plan), tmp_path).run
    assert run(*places, problem.batch, launch.grid[0], launch.block[0]) == 0
    found = compare(out, x, w, register_blocked.KERNEL)
    assert found.passed, found
    assert np.isnan(room).sum() == room.size - out.size
