"""winograd: a convolution with fewer multiplications, compiled for the layer, with images in the lanes.

The K taps of a filter's row are cut into groups of three and two (and one). For two neighbouring outputs, a group of
three takes four products instead of six, and a group of two takes three instead of four. This needs sums of inputs, all
of them in the windows of the outputs:

    y[0] = x0 w0 + x1 w1 = (x0 - x1) w0 + x1 (w0 + w1)          three taps: Winograd's F(2, 3)
    y[1] = x1 w0 + x2 w1 = (x2 - x1) w1 + x1 (w0 + w1)

Applied to rows and columns, 5 x 5 taps take 64 or 49 products for 2 x 2 outputs instead of 100, 7 x 7 take 121 or 100
instead of 196, and 3 x 3 take 16 instead of 36. Products form classes by the outputs that they belong to
(``_winograd_code.outputs``). A tile of F filters x P pairs of columns stays in registers for all products of a class
and all channels, as in ``direct``. A vector holds one value of each of several images, one per lane, so sums of inputs
and of outputs need only whole vectors.

    x --transpose--> rows of [column][image] --add inputs--> ring of rows in L2 --multiply--> outputs --transpose--> y

Arithmetic intensity: as above. Memory: x and y once, for two rows of outputs at a time. The multiply-adds take most of
the time (``_winograd_plan.WinogradPlan.cycles``).
Restrictions: at least as many images, and as many output columns, as a vector has lanes; K of 2 to 16.

Error: a product's weight is a sum of several weights of the filter. Relative to these sums, the bound is that of any
float32 sum (``_winograd_plan.bound``). No algorithm with fewer multiplications keeps the bound of the plain sum
(W. Miller, Computational complexity and numerical stability, SIAM J. Comput. 4, 1975). A window of zeros has the sum 0
exactly, and no sum contains an input outside of its output's window. On dense data the error is smaller than a plain
sum's, because there are fewer additions in a row; on sparse data it may be larger. So ``direct`` computes images that
are mostly zero, or all images if computing the sparse images twice would take longer. It also computes images with an
output that is not finite, and layers with a weight that is not finite or so small that a quarter of it may be rounded.

Sources: S. Winograd, Arithmetic Complexity of Computations, SIAM, 1980; A. Lavin and S. Gray, Fast Algorithms for
Convolutional Neural Networks, 2015 (CVPR 2016); filters cut into groups: D. Huang et al., DWM: A Decomposable Winograd
Method for Convolution Acceleration, AAAI 2020.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from . import _winograd_code, direct
from ._winograd_plan import WinogradPlan, bound, magnitude_weights, make_plan, packed_weights

#: The share of zeros from which an image counts as sparse.
ZEROS = 0.75

#: The most zeros of an image that can be counted, because the counter is a float32.
MOST_COUNTED = 2**24 - 1

#: The images that are sampled before any image is computed; the bytes of images that ``direct`` recomputes at a time.
SAMPLE, RECOMPUTED_BYTES = 32, 16 << 20

#: The share of sparse images up to which they are always computed twice.
LEAST_SPARSE = 0.1

#: From this magnitude on, weights are multiples of 2^-123, so that a quarter of a sum of them is normal or zero.
SMALLEST_WEIGHT = 2.0**-100

#: The largest kernel: larger filters would have thousands of products, all unrolled.
MOST_KERNEL = 16

#: The fewest groups (of as many images as lanes) with which all cores have enough to do: in all, and per core.
GROUPS, GROUPS_PER_CORE = 32, 4

#: The products per output below which the plain sum's bound is too small for sums of weights.
PRODUCTS = 128

#: The predicted speed-up over ``direct`` from which the kernel is recommended, by instruction set; the most scratch
#: memory that was measured: the cost model, fitted with AVX2, ignores the cost of caches beyond it. With AVX-512 the
#: kernel is profitable on AMD's chips, which add and multiply-add in different units; a Xeon does not, and it was not
#: faster there.
GAIN, SCRATCH_BYTES = {"avx2": 1.1, "avx512": 1.4}, 4 << 20


@compiled_once
def _layer(layer: ConvProblem, target: Cpu) -> tuple[WinogradPlan, Any]:
    plan = make_plan(layer, target.lanes, target.registers)
    return plan, _winograd_code.build(plan, target).compiled()


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support the problem; empty if it does."""
    lanes = cpu().lanes
    sizes = {"batch": problem.batch, "output width": problem.output_width}
    found = [f"{name}: at least {lanes} on this CPU, got {size}" for name, size in sizes.items() if size < lanes]
    if not 2 <= problem.kernel <= MOST_KERNEL:
        found.append(f"kernel: 2 to {MOST_KERNEL}, got {problem.kernel}")
    return found


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether this kernel is predicted to be faster than ``direct``.

    The thresholds were measured on Zen 3, Zen 5 and an Intel Xeon (docs/performance.md). The result is False for
    instruction sets without a threshold, and for AVX-512 on CPUs that are not AMD's.
    """
    target = cpu()
    if target.level not in GAIN or (target.level == "avx512" and not target.by_amd):
        return False
    groups = max(GROUPS, GROUPS_PER_CORE * len(os.sched_getaffinity(0)))
    if problem.products < PRODUCTS or problem.batch < groups * target.lanes or limits(problem):
        return False
    plan = make_plan(problem.with_batch(1), target.lanes, target.registers)
    return plan.scratch_bytes <= SCRATCH_BYTES and plan.plain_cycles > GAIN[target.level] * plan.cycles


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done; also compile ``direct`` for all images and for some."""
    _layer(problem, cpu())
    direct.prepare(problem, out)
    direct.prepare(problem, np.empty(1, np.float32))


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW); the threads claim groups of images, some megabytes of output at a time.

    Raises UnsupportedError for a problem that the kernel does not support.
    """
    reasons = limits(problem)
    if reasons:
        raise UnsupportedError(f"winograd cannot take {problem}: {'; '.join(reasons)}")
    plan, conv = _layer(problem, cpu())
    packed = packed_weights(plan, w)
    sparse = [np.mean(image == 0) > ZEROS for image in x[:: ceil_div(len(x), SAMPLE)]]
    # With a larger share of sparse images, computing these twice costs more time than winograd saves on all images.
    too_sparse = np.mean(sparse) > max(LEAST_SPARSE, 1 - plan.cycles / plan.plain_cycles)
    too_small = ((np.abs(w) < SMALLEST_WEIGHT) & (w != 0)).any()
    if too_sparse or too_small or not np.isfinite(packed).all():
        direct.run(problem, x, w, out, threads)
        return
    memory.advise_huge_pages(out)
    counter = np.zeros(1, np.int64)
    groups = ceil_div(problem.batch, plan.lanes)
    found = memory.aligned(groups * 2 * plan.lanes)
    most = max(1, direct.CHUNK_BYTES * problem.batch // (out.nbytes * plan.lanes))

    def work(part: int) -> None:
        arguments = (x, packed, out, memory.aligned(plan.offsets["end"]), counter, found)
        conv(*map(memory.address, arguments), problem.batch, groups, most, 2 * threads)

    parallel_for(work, threads, threads)
    starts = np.minimum(np.arange(groups) * plan.lanes, problem.batch - plan.lanes)
    images, (sums, zeros) = starts[:, None] + np.arange(plan.lanes), found.reshape(groups, 2, plan.lanes).swapaxes(0, 1)
    doubtful = ~np.isfinite(sums) | (zeros > min(ZEROS * plan.values_seen, MOST_COUNTED))
    recompute(problem, (x, w, out), np.unique(images[doubtful]), threads)


def recompute(problem: ConvProblem, arrays: tuple[np.ndarray, ...], images: np.ndarray, threads: int) -> None:
    """Compute these images again, with ``direct``."""
    x, w, out = arrays
    count = max(1, RECOMPUTED_BYTES // (max(x.nbytes, out.nbytes) // problem.batch))
    for first in range(0, len(images), count):
        some = images[first : first + count]
        part = problem.with_batch(len(some))
        outputs = np.empty(part.shapes[2], np.float32)
        direct.run(part, x[some], w, outputs, threads)
        out[some] = outputs


KERNEL = CpuKernel(
    "winograd",
    "fewer multiplications, images in the lanes, compiled for the layer",
    run,
    prepare,
    limits,
    error_bound=bound,
    magnitude_weights=magnitude_weights,
    recommended=is_profitable,
)
