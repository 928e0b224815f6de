#!/usr/bin/env python3
"""Compare auto's gradients with cuDNN's in float32, through PyTorch, on arrays on the GPU, in one run.

example: python benchmarks/gradients_gpu.py --set real > benchmarks/results/gradients-h200-real.md

The table is in Markdown: medians in milliseconds, L2 overwritten before each call, and the largest error of a few
images as a share of sum |x||w|. PyTorch searches for cuDNN's fastest algorithm (benchmark mode), with TF32 off.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
from functools import partial

from ece408_op.core import dispatch, timer
from ece408_op.core.check import compare
from ece408_op.problem import COURSE_LAYERS, ConvProblem, WeightGradient
from ece408_op.runtime import cuda

#: Layers of image classifiers with 128 images; the last three are depthwise.
REAL = {
    str(p): p
    for p in (
        ConvProblem(128, 3, 224, 224, 64, 7, stride=(2, 2), pad=(3, 3)),
        ConvProblem(128, 64, 56, 56, 64, 3, pad=(1, 1)),
        ConvProblem(128, 256, 56, 56, 128, 1, stride=(2, 2)),
        ConvProblem(128, 128, 56, 56, 128, 3, stride=(2, 2), pad=(1, 1)),
        ConvProblem(128, 512, 7, 7, 512, 3, pad=(1, 1)),
        ConvProblem(128, 128, 28, 28, 512, 1),
        ConvProblem(128, 3, 224, 224, 64, 11, stride=(4, 4), pad=(2, 2)),
        ConvProblem(128, 64, 27, 27, 192, 5, pad=(2, 2)),
        ConvProblem(128, 32, 112, 112, 32, 3, pad=(1, 1), groups=32),
        ConvProblem(128, 384, 14, 14, 384, 3, pad=(1, 1), groups=384),
        ConvProblem(128, 96, 112, 112, 96, 3, stride=(2, 2), pad=(1, 1), groups=96),
    )
}
SETS = {"course": COURSE_LAYERS, "real": REAL}
#: Images whose gradients are compared with float64.
CHECKED = 3


def main() -> int:
    """Print the table; returns the exit code: 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="course", help="the layers (default: the course's)")
    layers = SETS[parser.parse_args().set]
    import torch

    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False
    print("| layer | gradient | kernel | ms | cuDNN, ms | ratio | error | cuDNN's error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios, right = [], True
    for name, plain in layers.items():
        for problem in (plain.data_gradient, plain.weight_gradient):
            ours, peer = _milliseconds(torch, problem, True), _milliseconds(torch, problem, False)
            kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
            few = problem.with_batch(CHECKED)
            found, other = _error(torch, few, True), _error(torch, few, False)
            ratios.append(peer / ours)
            right &= found.passed
            cells = (name, "w" if isinstance(problem, WeightGradient) else "data", kernel.name, f"{ours:.3f}",
                     f"{peer:.3f}", f"{peer / ours:.2f}", f"{found.scaled:.1e}", f"{other.scaled:.1e}")  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    versions = f"Python {platform.python_version()}, CuPy {cuda.cupy().__version__}, PyTorch {torch.__version__}"
    versions += f", cuDNN {torch.backends.cudnn.version()}"
    mean = math.prod(ratios) ** (1 / len(ratios))
    print(f"\nGeometric mean {mean:.2f}, least {min(ratios):.2f}. {cuda.chip().name}; {versions}.")
    return 0 if right else 1


def _call(torch, problem, own):
    """Return the operands, and a function that returns the gradient, by our kernel or by cuDNN."""
    cupy = cuda.cupy()
    torch.manual_seed(408)
    given = {name: torch.randn(shape, device="cuda") for name, shape in zip(problem.operands, problem.shapes[:2])}
    a, b = (cupy.from_dlpack(given[name]) for name in problem.operands[:2])
    if own:
        kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
        out = cupy.full(problem.shapes[2], cupy.nan, "f")

        def call():
            kernel.run(problem, a, b, out)
            return out
    else:
        shapes = {"x": problem.x_shape, "w": problem.w_shape}
        x, w = (given[n] if n in given else torch.empty(shapes[n], device="cuda") for n in "xw")
        wanted = [problem.operands[2] == "x", problem.operands[2] == "w", False]
        attributes = (problem.stride, problem.pad, problem.dilate, False, (0, 0), problem.groups)
        backward = partial(torch.ops.aten.convolution_backward, given["y"], x, w, None, *attributes, wanted)

        def call():
            return cupy.from_dlpack(backward()[wanted.index(True)])

    return (a, b), call


def _milliseconds(torch, problem, own):
    _, call = _call(torch, problem, own)
    for _ in range(3):
        call()
    milliseconds = 1000 * timer.measure(call, timer.GpuClock("gradient"), before=timer.Eviction(), repeats=20).median
    del call
    cuda.cupy().get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    return milliseconds


def _error(torch, problem, own):
    operands, call = _call(torch, problem, own)
    kernel = dispatch.select(problem, "gpu", chip=cuda.chip())
    return compare(call().get(), *(array.get() for array in operands), kernel, problem=problem)


if __name__ == "__main__":
    sys.exit(main())
