"""direct: a direct convolution blocked for registers and caches, compiled for the layer.

The output plane of an image is treated as one row of OH*OW pixels, cut into vectors. Shifted copies of the image make
the pixels that a tap multiplies contiguous in that order, so no lane is wasted at the ends of rows:

    shifted[q][c][r*OW + j] = x[c][r][j + q]                       for q in 0..K-1, j in 0..OW-1
    y[m][o] = sum over c, p, q of w[m][c][p][q] * shifted[q][c][p*OW + o]

A tile of F filters x P vectors stays in registers while c, p and q run: each tap loads P vectors, broadcasts F weights
and does F*P multiply-adds. The last vector of the plane overlaps the one before it. If filters have one column, an
image is its own shifted copy.

Arithmetic intensity: 2*C*K*K FLOP per output. Memory: shifting writes K times the image to L2. A large image is
computed in units: a band of output rows for some of the channels; later channels add to y. While a unit is computed,
each tile also shifts a few rows of the next unit, so that these loads and stores fill the issue slots that arithmetic
leaves free. It also prefetches the rows of the unit after the next, and the lines of y that the next tile writes.
Weights are packed [block][c][p][q][filter], so a tap's weights are neighbours. Outputs are stored once; large outputs
with non-temporal stores, if planes are whole cache lines. The multiply-add units limit it: on one core of a Zen 5
(AVX-512), 2018sp-2 reaches 0.94 of their peak.

Padded layers, and data gradients of stride 1, are plain convolutions of padded copies: see ``_padded``. If an image
takes several units, layers whose filters fill vectors have filters in the lanes: see ``_direct_filters``.

Source: register and cache blocking of matrix products, K. Goto and R. van de Geijn, Anatomy of High-Performance Matrix
Multiplication, 2008; E. Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures, 2018.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import (
    DATA_GRADIENT,
    PAD,
    RECTANGULAR,
    TANH_POOL,
    ConvProblem,
    DataGradient,
    Pair,
    PooledProblem,
)
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from . import _direct_code, _direct_filters, _padded, _tanh_pool, im2col
from ._direct_filters import FilterPlan, make_filter_plan
from ._direct_plan import DirectPlan, make_plan
from ._few_images import sharing

#: The most bytes of output that a thread claims at a time.
CHUNK_BYTES = 4 << 20

#: Bytes of padded images that a thread copies at a time, unless one image is larger.
PADDED_BYTES = 512 << 10

#: The bytes of weights from which the threads share the packing.
SHARED_WEIGHTS = 256 << 10

#: The output pixels from which 1 x 1 filters are faster with pixels in the lanes, if an image takes more than two
#: units: 1.06 to 1.9 times as fast with AVX-512 on 14 layers of image classifiers, 1.00 to 1.36 times with AVX2.
LARGE_PLANE = 512

#: The bytes of output from which non-temporal stores are used: the caches could not hold so large an output anyway.
NONTEMPORAL_BYTES = 32 << 20


def pack(plan: DirectPlan | FilterPlan, w: np.ndarray, threads: int) -> np.ndarray:
    """Return the weights, shape (M, C, K, L), block by block as [block][c][p][q][filter], flat."""
    products = plan.layer.products
    packed, flat = np.empty(w.size, np.float32), w.reshape(-1)
    sizes = [filters for filters, blocks in plan.blocks for _ in range(blocks)]
    edges = [products * sum(sizes[:block]) for block in range(len(sizes) + 1)]
    transpose = _direct_filters.transpose_function(products, cpu()) if isinstance(plan, FilterPlan) else None

    def work(block: int) -> None:
        filters, (source, to) = sizes[block], (array[edges[block] : edges[block + 1]] for array in (flat, packed))
        if transpose:
            transpose(memory.address(source), memory.address(to), filters)
        else:
            to.reshape(products, filters)[...] = source.reshape(filters, products).T

    parallel_for(work, len(sizes), threads if w.nbytes >= SHARED_WEIGHTS else 1)
    return packed


class CompiledLayer(NamedTuple):
    """A plan, its compiled function, and the floats of scratch memory per thread."""

    plan: DirectPlan | FilterPlan
    conv: Any
    scratch: int


@compiled_once
def _compiled_layer(problem: ConvProblem, target: Cpu, large: bool) -> CompiledLayer:
    layer = _padded.plain(problem)
    if any(_padded.margins(problem)):
        _padded.copy_function(problem.shapes[0][2:], _padded.margins(problem), target)
    pooled = problem if isinstance(problem, PooledProblem) else None
    by_pixels, by_filters = make_plan(layer, target.lanes, target.registers, memory.l2_bytes()), None
    large_planes = layer.products == layer.channels and layer.output_height * layer.output_width >= LARGE_PLANE
    # With one unit, its tiles are at least as fast as FilterPlan's.
    if not pooled and by_pixels.units > 1 and not (large_planes and by_pixels.units > 2):
        by_filters = make_filter_plan(layer, target.lanes, target.registers)
    if large and (by_filters or pooled or not by_pixels.nontemporal):
        return _compiled_layer(problem, target, False)  # the same code
    if by_filters:
        _direct_filters.transpose_function(layer.products, target)
        return CompiledLayer(by_filters, _direct_filters.build(by_filters, target).compiled(), by_filters.scratch)
    scratch = by_pixels.scratch + (sum(_tanh_pool.scratch(pooled, target.lanes)) if pooled else 0)
    return CompiledLayer(by_pixels, _direct_code.build(by_pixels, target, large, pooled).compiled(), scratch)


def compiled(problem: ConvProblem) -> CompiledLayer:
    """Return the layer compiled for outputs that stay in caches."""
    return _compiled_layer(problem, cpu(), False)


def _is_large(out: np.ndarray) -> bool:
    return out.nbytes >= NONTEMPORAL_BYTES and memory.address(out) % memory.LINE == 0


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer and for outputs of the size and alignment of ``out``, if that has not been done."""
    _compiled_layer(problem, cpu(), _is_large(out))


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill the third operand; the threads claim images, some megabytes of output at a time."""
    if isinstance(problem, DataGradient) and not np.isfinite(w).all():
        im2col.run(problem, x, w, out, threads)  # infinity times the margins' zeros is NaN
        return
    layer = _compiled_layer(problem, cpu(), _is_large(out))
    plan, conv, scratch = layer
    batch = x.shape[0]
    memory.advise_huge_pages(out)
    packed = pack(plan, _padded.forward_weights(problem, w), threads)
    margin = _padded.margins(problem)
    if any(margin):
        _run_padded(layer, (x, packed, out), margin, threads)
        return
    counter = np.zeros(1, np.int64)
    # A thread claims a (2 * threads)-th of the remaining images, but at most this number.
    most = max(1, CHUNK_BYTES // (out.nbytes // batch))

    def work(_thread: int) -> None:
        arguments = (x, packed, out, memory.aligned(scratch), counter)
        conv(*map(memory.address, arguments), batch, most, 2 * threads)

    parallel_for(work, threads, threads)


def _run_padded(layer: CompiledLayer, arrays: tuple[np.ndarray, ...], margin: Pair, threads: int) -> None:
    """Run the layer on all images; each thread claims some images at a time and copies them into its padded images."""
    (plan, conv, scratch), (x, packed, out) = layer, arrays
    copy = _padded.copy_function(x.shape[2:], margin, cpu())
    batch, floats = len(x), math.prod(plan.layer.x_shape[1:])
    count = min(max(1, PADDED_BYTES // (4 * floats)), ceil_div(batch, threads))
    firsts = iter(range(0, batch, count))

    def work(_thread: int) -> None:
        images, own, counter = memory.aligned(count * floats), memory.aligned(scratch), np.zeros(1, np.int64)
        images.fill(0)
        pointers = list(map(memory.address, (images, packed, out, own, counter)))
        for first in firsts:  # next() is atomic
            some = min(count, batch - first)
            copy(memory.address(x[first:]), pointers[0], some * x.shape[1])
            counter[0] = 0
            conv(*pointers[:2], memory.address(out[first:]), *pointers[3:], some, some, 1)

    parallel_for(work, threads, threads)


KERNEL = CpuKernel(
    "direct",
    "tiles of filters x pixels in registers, compiled for the layer",
    *sharing(run, prepare),
    _padded.limits,
    features=frozenset({RECTANGULAR, PAD, DATA_GRADIENT, TANH_POOL}),
    recommended=_padded.is_profitable,
)
