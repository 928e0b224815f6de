"""Run every CUDA kernel once on a few small layers, for compute-sanitizer.

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/kernels/sanitize.py || echo $tool found something
    done

Arguments are kernel names; none means all. Exit codes: 0 all right, 1 a kernel was wrong or not checked, 3 no GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from cuda_layers import PROBLEMS
from pooled_case import assert_right

from ece408_op.core import reference
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError
from ece408_op.kernels import KERNELS
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

#: Complete tiles, and tiles that reach over each edge; more filters than a group; several images; a pointwise layer.
LAYERS = (
    ConvProblem(3, 1, 28, 28, 50, 5),
    ConvProblem(2, 12, 33, 33, 24, 7),
    ConvProblem(2, 5, 7, 45, 70, 3),
    ConvProblem(5, 2, 4, 5, 3, 2),
    ConvProblem(5, 131, 23, 19, 70, 1),
)
#: Several work items per block for the persistent kernels: a block reuses what its previous item left in memory.
PERSISTENT = [
    ConvProblem(450, 6, 30, 30, 16, 5),
    ConvProblem(300, 1, 72, 72, 12, 7),
    ConvProblem(500, 12, 33, 33, 24, 7),
    ConvProblem(300, 6, 30, 30, 16, 5).data_gradient,
    ConvProblem(300, 6, 30, 30, 16, 5).weight_gradient,
]
_PREFIXES = ("fp16x", "register_blocked", "sliding_window")


def main(names: list[str]) -> int:
    """Run the kernels of those names, or all; returns the exit code."""
    try:
        chip = cuda.chip()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    cupy = cuda.cupy()
    # No pool: every array is an allocation of its own, so that the tools see accesses beyond an array.
    cupy.cuda.set_allocator(None)
    wrong, checked = 0, Counter[str]()
    rng = np.random.default_rng(408)
    kernels = [k for k in KERNELS if isinstance(k, CudaKernel) and k.runs_on(chip) and (not names or k.name in names)]
    for kernel in kernels:
        for problem in [*LAYERS, *PROBLEMS, *(PERSISTENT if kernel.name.startswith(_PREFIXES) else [])]:
            if kernel.not_supported_reasons(problem, chip):
                continue
            checked[kernel.name] += 1
            x, w = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in problem.shapes[:2])
            found = compare(_run(kernel, problem, x, w), x, w, kernel, problem=problem)
            wrong += not found.passed
            print(f"{kernel.name}, {problem}: {found}")
            pooled = None if problem.needs else problem.pooled(full=problem.batch > 2)
            if pooled and not kernel.not_supported_reasons(pooled, chip):
                out = _run(kernel, pooled, x, w)
                assert_right(out, pooled, reference.convolve(x, w), reference.magnitude(x, w))
    unchecked = [kernel.name for kernel in kernels if not checked[kernel.name]]
    print(f"{sum(checked.values())} cases of {len(checked)} kernels; not checked: {', '.join(unchecked) or 'none'}")
    return 1 if wrong or unchecked or not kernels else 0


def _run(kernel: CudaKernel, problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    cupy = cuda.cupy()
    out = cupy.asarray(np.full(problem.shapes[2], np.nan, np.float32))
    kernel.run(problem, cupy.asarray(x), cupy.asarray(w), out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    result: np.ndarray = out.get()
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
