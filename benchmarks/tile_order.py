#!/usr/bin/env python3
"""Time the split-precision kernels' candidate tiles on random layers, which shows how good their predicted order is.

example: python benchmarks/tile_order.py --layers 32 --seed 408      # on a GPU; half of the time compiles

The first candidate is what a call takes for a layer that is not in the tuning table. The constants of
kernels/cuda/split_precision/_tiles.py and _candidate_tiles.py that estimate times should make it fast: change one, run
this before and after, and confirm the result with another seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor

from tqdm import tqdm

import ece408_op  # noqa: F401  (before MXNet)
from ece408_op.bench import _layer_names
from ece408_op.core import dispatch, timer, tuning
from ece408_op.runtime import cuda

KERNELS = ("fp16x3_mma_sync", "fp16x3_warpgroup", "fp16x1_mma_sync", "fp16x1_warpgroup")
#: Compilation needs few images.
FEW_IMAGES, REPEATS = 16, 5


def arrays(problem):
    """Return random x and w, and out, on the GPU."""
    cp = cuda.cupy()
    x, w, out = problem.shapes
    return cp.random.random(x, dtype="float32"), cp.random.random(w, dtype="float32"), cp.empty(out, "float32")


def runs(name, problem):
    """Yield the kernel's tiles for a layer, and for each a call that uses it."""
    kernel, (x, w, out) = dispatch.find(name), arrays(problem)
    for tile in kernel.tiles(problem, cuda.chip(), 16):
        tuning.use_tile(name, problem, cuda.chip(), tile)
        yield tile, lambda: kernel.run(problem, x, w, out)


def compiled(case):
    """Run each tile once, which leaves its program in CuPy's cache on disk."""
    name, problem = case
    for _, run in runs(name, problem.with_batch(FEW_IMAGES)):
        run()


def times(name, problem):
    """Return the tiles' milliseconds: the least of several calls each."""
    found = []
    for tile, run in runs(name, problem):
        run()
        clock = timer.gpu_clock(name)
        found.append((tile, 1000 * min(clock(run)[0] for _ in range(REPEATS))))
    return found


def main() -> int:
    """Print a table of the layers and one of the kernels as Markdown; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="random layers (default: 32)")
    parser.add_argument("--seed", type=int, default=408)
    options = parser.parse_args()
    layers = _layer_names.random_layers(options.layers, options.seed).items()
    cases = {
        (name, kernel): problem
        for name, problem in layers
        for kernel in KERNELS
        if not dispatch.find(kernel).not_supported_reasons(problem, cuda.chip())
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        jobs = [(kernel, problem) for (_, kernel), problem in cases.items()]
        list(tqdm(pool.map(compiled, jobs), "compile", len(jobs), disable=None))
    ratios = {kernel: [] for kernel in KERNELS}
    print("| layer, kernel | tiles | first / fastest | fastest, ms: 8 math warps | 12 math warps |")
    print("| --- | --- | --- | --- | --- |")
    for (name, kernel), problem in tqdm(cases.items(), "time", disable=None):
        found = times(kernel, problem)
        fastest = min(time for _, time in found)
        ratios[kernel].append(found[0][1] / fastest)
        of_warps = [[time for tile, time in found if tile.get("math_warps") == warps] for warps in (8, 12)]
        cells = " | ".join(f"{min(some):.3f}" if some else "" for some in of_warps)
        print(f"| {name}, {kernel} | {len(found)} | {ratios[kernel][-1]:.3f} | {cells} |", flush=True)
    print("\n| kernel | layers | first / fastest, geometric mean | most |\n| --- | --- | --- | --- |")
    for kernel, some in ratios.items():
        if some:
            print(f"| {kernel} | {len(some)} | {statistics.geometric_mean(some):.3f} | {max(some):.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
