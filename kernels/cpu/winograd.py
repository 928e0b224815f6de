"""winograd: a convolution of fewer multiplications, compiled for the layer, with images in the lanes.

The K taps of a filter's row are cut into groups of three and two (and one). For two neighbouring outputs a group of
three takes four products instead of six, one of two takes three instead of four; what is added up for that lies in the
outputs' own windows:

    y[0] = x0 w0 + x1 w1 = (x0 - x1) w0 + x1 (w0 + w1)          three taps: Winograd's F(2, 3)
    y[1] = x1 w0 + x2 w1 = (x2 - x1) w1 + x1 (w0 + w1)

Down and across both, so that five taps of five take 64 or 49 products for two by two outputs instead of 100, seven of
seven 121 or 100 instead of 196, three of three 16 instead of 36. Products are kept apart by the outputs that they
belong to (winograd_plan.Step): of each class a tile of F filters x P pairs of columns stays in registers while the
class's products and all channels run, as in ``direct``. A vector holds one value of as many images as it has lanes:
what is added up is whole vectors, wherever it lies.

Arithmetic: as above. Bytes: x and y once. For two rows of outputs at a time, the image's rows are turned
(winograd_code), and what inputs are added up to is kept in a ring of rows in the second-level cache; outputs are turned
back. Limits: at least as many images and columns of outputs as a vector has lanes; K of 2 to 16.

Error: each product of a window's value has a weight that others of its group are added to. Against that sum the bound
is that of any float32 sum (``_winograd_plan``; no algorithm of fewer multiplications keeps the plain one: W.
Miller, Computational complexity and numerical stability, SIAM J. Comput. 4, 1975). A window of zeros has the sum 0
exactly, and no sum has a value in it that its output does not see. On dense data the error is smaller than a plain
sum's, since fewer numbers are added one after the other; where next to nothing is added up, it may be larger. So images
of which most is zero are computed by ``direct``, and all of them where so many are sparse that computing them twice
would take longer. So are images with an output that is not finite, and layers with a weight that is not or so small
that a quarter of it may be rounded.

Sources: S. Winograd, Arithmetic Complexity of Computations, SIAM, 1980; A. Lavin and S. Gray, Fast Algorithms for
Convolutional Neural Networks, CVPR 2016; filters cut into groups: D. Huang et al., DWM: A Decomposable Winograd Method
for Convolution Acceleration, AAAI 2020.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.errors import UnsupportedError
from ece408_op.problem import ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.llvm import Cpu, compile_function, compiled_once, cpu
from ece408_op.runtime.thread_pool import share

from . import _winograd_code, direct
from ._winograd_plan import WinogradPlan, bound, magnitude_weights, make_plan, packed_weights

#: An image of which about so much is zero has windows with next to nothing in them.
ZEROS = 0.75

#: Zeros of an image beyond this are not counted: their number is a float32.
MOST_COUNTED = 2**24 - 1

#: Images that are looked at before any is computed, and bytes of those that ``direct`` gets at a time.
SAMPLE, AGAIN_BYTES = 32, 16 << 20

#: A share of sparse images that is always computed twice.
LEAST_SPARSE = 0.1

#: A weight below this loses digits when a quarter of it is a float32.
SMALLEST_WEIGHT = 2.0**-100

#: Larger filters have products by the thousand, which are written out one by one.
MOST_KERNEL = 16

#: Groups of images, as many as there are lanes, from which on cores have enough to do: so many, and so many each.
GROUPS, GROUPS_EACH = 32, 4

#: Products of an output below which the plain sum's bound is too near to be kept by numbers that others are added to.
PRODUCTS = 128

#: How much faster than ``direct`` it is to be by the plan's count, which was fitted with AVX2, and scratch that was
#: measured: of more, the caches' part is not in the count. With AVX-512 on AMD's chips, which have units for additions
#: beside those for multiply-adds; on a Xeon, which has not, it was not faster.
GAIN, SCRATCH_BYTES = {"avx2": 1.1, "avx512": 1.4}, 4 << 20


@compiled_once
def _compiled(plan: WinogradPlan, target: Cpu) -> Any:
    arguments = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4
    return compile_function(_winograd_code.build(plan, target), "conv", arguments, target)


@lru_cache(maxsize=1024)
def _layer(layer: ConvProblem, target: Cpu) -> tuple[WinogradPlan, Any]:
    plan = make_plan(layer, target.lanes, target.registers)
    return plan, _compiled(plan, target)


def reasons(problem: ConvProblem) -> list[str]:
    """Why the kernel cannot take the problem."""
    lanes = cpu().lanes
    sizes = {"batch": problem.batch, "output width": problem.output_width}
    found = [f"{name}: at least {lanes} on this CPU, got {size}" for name, size in sizes.items() if size < lanes]
    if not 2 <= problem.kernel <= MOST_KERNEL:
        found.append(f"kernel: 2 to {MOST_KERNEL}, got {problem.kernel}")
    return found


def suits(problem: ConvProblem) -> bool:
    """Whether it is expected to be faster than ``direct``, whose sums it is held to on all but contrived data.

    Measured on Zen 3, Zen 5 and an Intel Xeon (docs/performance.md); on CPUs of other kinds ``direct`` is chosen.
    """
    target = cpu()
    if target.level not in GAIN or (target.level == "avx512" and not target.by_amd):
        return False
    groups = max(GROUPS, GROUPS_EACH * len(os.sched_getaffinity(0)))
    if problem.products < PRODUCTS or problem.batch < groups * target.lanes or reasons(problem):
        return False
    plan = make_plan(problem.with_batch(1), target.lanes, target.registers)
    return plan.scratch_bytes <= SCRATCH_BYTES and plan.plain_cycles > GAIN[target.level] * plan.cycles


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done: also what ``direct`` needs for all images, and for some."""
    _layer(problem.with_batch(1), cpu())
    direct.prepare(problem, out)
    direct.prepare(problem, np.empty(1, np.float32))


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): groups of images are shared out among the threads, some megabytes at a time.

    Raises UnsupportedError for a problem that it cannot take.
    """
    found_reasons = reasons(problem)
    if found_reasons:
        raise UnsupportedError(f"winograd cannot take {problem}: {'; '.join(found_reasons)}")
    plan, conv = _layer(problem.with_batch(1), cpu())
    packed = packed_weights(plan, w)
    # Of more sparse images than what is saved on all, computing them twice would take longer.
    too_sparse = _sparse_share(x) > max(LEAST_SPARSE, 1 - plan.cycles / plan.plain_cycles)
    if too_sparse or _too_small(w) or not np.isfinite(packed).all():
        direct.run(problem, x, w, out, threads)
        return
    memory.advise_huge_pages(out)
    counter = np.zeros(1, np.int64)
    groups = -(-problem.batch // plan.lanes)
    found = memory.aligned(groups * 2 * plan.lanes)
    most = max(1, direct.CHUNK_BYTES * problem.batch // (out.nbytes * plan.lanes))

    def work(part: int) -> None:
        held = (x, packed, out, memory.aligned(plan.places["end"]), counter, found)
        conv(*map(memory.address, held), problem.batch, groups, most, 2 * threads)

    share(work, threads, threads)
    _again(problem, (x, w, out), _doubtful(plan, found.reshape(groups, 2, plan.lanes), problem.batch), threads)


def _too_small(w: np.ndarray) -> bool:
    sizes = np.abs(w)
    return bool(((sizes < SMALLEST_WEIGHT) & (sizes > 0)).any())


def _sparse_share(x: np.ndarray) -> float:
    """Of some images, the share that is sparse."""
    some = x[:: -(-len(x) // SAMPLE)]
    return float(np.mean([np.mean(image == 0) > ZEROS for image in some]))


def _doubtful(plan: WinogradPlan, found: np.ndarray, batch: int) -> np.ndarray:
    """The numbers of images that are sparse, or have an output that is not finite: see winograd_code.build."""
    starts = np.minimum(np.arange(len(found)) * plan.lanes, batch - plan.lanes)
    images = starts[:, None] + np.arange(plan.lanes)
    many = min(ZEROS * plan.values_seen, MOST_COUNTED)
    wrong = ~np.isfinite(found[:, 0]) | (found[:, 1] > many)
    return np.unique(images[wrong])


def _again(problem: ConvProblem, arrays: tuple[np.ndarray, ...], images: np.ndarray, threads: int) -> None:
    """Compute these images by ``direct``."""
    x, w, out = arrays
    count = max(1, AGAIN_BYTES // (max(x.nbytes, out.nbytes) // problem.batch))
    for first in range(0, len(images), count):
        some = images[first : first + count]
        part = problem.with_batch(len(some))
        outputs = np.empty(part.y_shape, np.float32)
        direct.run(part, x[some], w, outputs, threads)
        out[some] = outputs


KERNEL = CpuKernel(
    "winograd",
    "fewer multiplications, images in the lanes, compiled for the layer",
    run,
    prepare,
    reasons,
    error_bound=bound,
    magnitude_weights=magnitude_weights,
    recommended=suits,
)
