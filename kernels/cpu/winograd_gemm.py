"""winograd_gemm: 3 x 3 filters with fewer multiplications, as matrix products, compiled for the layer.

Winograd's F(2 x 2, 3 x 3), which is ``winograd``'s group of three taps down and across: a tile of 2 x 2 outputs takes
16 products per channel instead of 36. A product's factors are a sum of the tile's 4 x 4 inputs and a sum of a filter's
weights; there are 16 forms of each. Added up over the channels, the products of a form are a matrix product:

    x --sums--> inputs (form, C, tiles)
                                          products (form, M, tiles) = weights times inputs   --sums--> y
    w --sums--> weights (form, M, C)

A panel is three vectors of neighbouring tiles. It passes through all steps in L1 and L2, and the weights are read once
per panel. In the products, F filters x 3 vectors stay in registers for all channels. Rows of the image are copied
between zeros before their sums are computed, so padding costs nothing. A data gradient of stride 1 is a convolution of
y with filters rotated by 180 degrees.

Arithmetic intensity: as above. Memory: x four times, from L1 mostly; y once; 16 floats of weights per filter and
channel are written once, and read per panel. The multiply-adds limit it where there are many channels and filters.
Restrictions: 3 x 3 filters, stride 1, no dilation, one group.

Error: see ``winograd``. As a share of a plain sum's bound, outputs whose windows have few numbers other than zero have
the largest errors. So ``direct`` computes images whose windows have fewer than NUMBERS such numbers on average and are
three quarters zero, images with an output that is not finite, and layers with a weight so small that a quarter of it
may be rounded.

Sources: as in ``winograd``; the panels follow the blocking that ``direct`` names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel, sum_bound
from ece408_op.problem import DATA_GRADIENT, PAD, ConvProblem, DataGradient
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from . import _padded, direct
from ._direct_plan import PER_CYCLE
from ._ir import LINE_FLOATS
from ._winograd_gemm_code import FORMS, PANEL, GemmPlan, build, weights_function
from ._winograd_plan import magnitude_matrix
from .winograd import LEAST_SPARSE, PRODUCTS, SMALLEST_WEIGHT, ZEROS, recompute

#: The average numbers other than zero per window from which errors keep a plain sum's bound. The average is estimated
#: from SAMPLES groups of neighbouring pixels of an image, each as long as a cache line.
NUMBERS, SAMPLES = 20, 64

#: Cycles per vector of tiles to compute the inputs of a channel and the outputs of a filter, and cycles per filter and
#: channel to compute the weights; fitted to times of 14 layers on a Zen 4 (``ece408-bench layers --set resnet --impl
#: winograd_gemm direct auto`` shows whether auto takes the faster one).
INPUT_CYCLES, OUTPUT_CYCLES, WEIGHT_CYCLES = 100, 60, 18


@compiled_once
def _layer(problem: ConvProblem, target: Cpu) -> tuple[GemmPlan, Any, Any]:
    """Return the plan and the functions that convolve and that transform weights."""
    plan, turned = GemmPlan(_padded.forward(problem), target.lanes), isinstance(problem, DataGradient)
    return plan, build(plan, target).compiled(), weights_function(plan, turned, target).compiled()


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support the problem; empty if it does."""
    if problem.w_shape[2:] != (3, 3):
        return [f"kernel: 3 x 3, got {problem.kernel} x {problem.kernel_width}"]
    return _padded.limits(problem)


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether this kernel is predicted to be faster than ``direct``, with errors as small."""
    if problem.products < PRODUCTS or KERNEL.not_supported_reasons(problem):
        return False
    plan = GemmPlan(_padded.forward(problem), cpu().lanes)
    channels, filters, lanes = plan.layer.channels, plan.layer.filters, plan.lanes
    vectors = max(PANEL - 1, ceil_div(problem.batch * plan.tiles, lanes))
    parts = problem.batch * plan.tiles // plan.tile_columns * ceil_div(plan.tile_columns, lanes)  # of vectors, in rows
    own = vectors * FORMS * channels * filters / PER_CYCLE + WEIGHT_CYCLES * channels * filters
    own += parts * (INPUT_CYCLES * channels + OUTPUT_CYCLES * filters)
    return own < problem.flops / (2 * lanes * PER_CYCLE)


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill the third operand; the threads share the chunks of weights, then claim panels."""
    plan, conv, weights = _layer(problem, cpu())
    sparse = _sparse(plan, x)
    packed = memory.aligned(plan.chunks * plan.chunk_weights)
    memory.advise_huge_pages(packed)
    least = np.full((threads, plan.block), -1, np.int32)

    def transform(part: int) -> None:
        first, last = (plan.chunks * edge // threads for edge in (part, part + 1))
        if first < last:
            weights(*map(memory.address, (w, packed, least[part])), first, last)

    if sparse.mean() <= LEAST_SPARSE:
        parallel_for(transform, threads, threads)
    if sparse.mean() > LEAST_SPARSE or (least.view(np.uint32) < np.float32(SMALLEST_WEIGHT).view(np.uint32)).any():
        direct.run(problem, x, w, out, threads)
        return
    memory.advise_huge_pages(out)
    tiles = plan.tiles * problem.batch
    vectors = ceil_div(tiles, plan.lanes)
    panels = min(vectors, ceil_div(vectors, PANEL * threads) * threads)  # as many for each thread
    counter, found = np.zeros(1, np.int64), np.empty((panels, plan.lanes), np.float32)

    def work(part: int) -> None:
        scratch = memory.aligned(plan.scratch)
        scratch.fill(0)
        arrays = (x, packed, out, scratch, counter, found)
        conv(*map(memory.address, arrays), tiles, vectors, panels)

    parallel_for(work, threads, threads)
    for panel in np.flatnonzero(~np.isfinite(found).all(axis=1)):
        first, end = (vectors * edge // panels * plan.lanes for edge in (panel, panel + 1))
        sparse[first // plan.tiles : ceil_div(end, plan.tiles)] = True
    recompute(problem, (x, w, out), np.flatnonzero(sparse), threads)


def _sparse(plan: GemmPlan, x: np.ndarray) -> np.ndarray:
    """Return a mask of the images whose windows have few numbers other than zero, by a sample of their pixels."""
    flat = x.reshape(len(x), -1)
    size = min(LINE_FLOATS, flat.shape[1])
    groups = flat[:, : flat.shape[1] // size * size].reshape(len(x), -1, size)
    some = groups[:, :: groups.shape[1] // SAMPLES | 1]
    least = min(NUMBERS / plan.layer.products, 1 - ZEROS)
    return np.count_nonzero(some, axis=(1, 2)) < least * some[0].size


def magnitude_weights(w: np.ndarray) -> np.ndarray:
    """Return weights (M, C, 3, 3), float64: the sum of |x| times them bounds the sum of |products| of an output."""
    return magnitude_matrix((3,)) @ np.abs(w.astype(np.float64)) @ magnitude_matrix((3,)).T


def bound(problem: ConvProblem) -> float:
    """Return the largest |y - exact| as a share of the sum of |x| times ``magnitude_weights``.

    Each product takes part in the additions over the channels. Two roundings precede it in its input, four in its
    weight, and four follow where outputs are added up.
    """
    return sum_bound(problem.products // 9 + 10)


KERNEL = CpuKernel(
    "winograd_gemm",
    "3 x 3 filters with fewer multiplications, as matrix products, compiled for the layer",
    run,
    lambda problem, out: _layer(problem, cpu()),  # not what ``direct`` needs for rare images
    limits,
    features=frozenset({PAD, DATA_GRADIENT}),
    error_bound=bound,
    magnitude_weights=magnitude_weights,
    recommended=is_profitable,
)
