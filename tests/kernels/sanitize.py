"""Run every CUDA kernel once on a few small layers: what compute-sanitizer is given to look at.

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/kernels/sanitize.py || echo $tool found something
    done

Arguments are kernel names; none means all. Exit codes: 0 all right, 1 a kernel was wrong, 3 no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from pooled_case import assert_right

from ece408_op.core import reference
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

#: Some tiles full and some cut off at each edge; more filters than a group; more images than one.
LAYERS = (
    ConvProblem(3, 1, 28, 28, 50, 5),
    ConvProblem(2, 12, 33, 33, 24, 7),
    ConvProblem(2, 5, 7, 45, 70, 3),
    ConvProblem(5, 2, 4, 5, 3, 2),
)
#: Several tiles for every block of kernels whose blocks go from tile to tile: what one leaves, another takes. strip has
#: its weights in constant memory from so many operations on.
MANY = {"fp16x3_mma_sync": (ConvProblem(450, 6, 30, 30, 16, 5), ConvProblem(300, 1, 72, 72, 12, 7))}
#: Where a row is a strip it asks for weights a row ahead, of an even and of an odd number of rows.
AHEAD = ConvProblem(450, 6, 30, 30, 16, 5), ConvProblem(450, 3, 30, 30, 16, 5)
MANY |= {"fp16x1_mma_sync": MANY["fp16x3_mma_sync"], "register_blocked": (ConvProblem(500, 12, 33, 33, 24, 7), *AHEAD)}


def main(names: list[str]) -> int:
    """Run the kernels of those names, or all; returns the exit code."""
    try:
        chip = cuda.chip()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    cupy = cuda.cupy()
    # No pool: every array is an allocation of its own, so that an access beyond it is one beyond an allocation.
    cupy.cuda.set_allocator(None)
    wrong = 0
    rng = np.random.default_rng(408)
    for kernel in KERNELS:
        if not isinstance(kernel, CudaKernel) or (names and kernel.name not in names):
            continue
        for problem in LAYERS + MANY.get(kernel.name.partition("_")[0], ()):
            if kernel.not_supported_reasons(problem, chip):
                continue
            x = rng.uniform(-1, 1, problem.x_shape).astype(np.float32)
            w = rng.standard_normal(problem.w_shape, dtype=np.float32)
            found = compare(_run(kernel, problem, x, w), x, w, kernel)
            wrong += not found.passed
            print(f"{kernel.name}, {problem}: {found}")
            if kernel.fuses_pooling:
                pooled = problem.pooled(full=problem.batch > 2)
                if not kernel.not_supported_reasons(pooled, chip):
                    out = _run(kernel, pooled, x, w)
                    assert_right(out, pooled, reference.convolve(x, w), reference.magnitude(x, w))
    return 1 if wrong else 0


def _run(kernel: CudaKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    cupy = cuda.cupy()
    out = cupy.asarray(np.full(problem.y_shape, np.nan, np.float32))
    kernel.run(problem, cupy.asarray(x), cupy.asarray(w), out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    result: np.ndarray = out.get()
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
