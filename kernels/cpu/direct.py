"""direct: a convolution blocked for registers and caches, compiled for the layer.

The output plane of an image is one row of OH*OW pixels, cut into vectors. Shifted copies of the image make a
tap's pixels contiguous there, with nothing wasted at the ends of rows:

    shifted[q][c][r*OW + j] = x[c][r][j + q]                       for q in 0..K-1, j in 0..OW-1
    y[m][o] = sum over c, p, q of w[m][c][p][q] * shifted[q][c][p*OW + o]

A tile of F filters x P vectors stays in registers while c, p and q run: each tap loads P vectors and F
weights (one number to all lanes) and does F*P multiply-adds. What is left at the plane's end is a vector that
overlaps the one before it.

Arithmetic: 2*C*K*K operations an output. Bytes: shifting writes K times the image, into the second-level cache; a
large image goes in units, passes over some channels, which add to y, of bands of rows. While a unit computes, the next
unit's rows are shifted, a few in each row of a tile's taps, so that these loads and stores fill the slots that
arithmetic leaves; the rows of the unit after that, and the lines of y where the next tile ends, are asked for from
memory. Weights are packed [block][c][p][q][filter]: a tap's lie side by side. Outputs are written once, past the
caches where planes are whole cache lines and the output is large.

Where an image takes several units, layers whose filters fill vectors go another way: see _direct_filters.py.

Measured on one core of a Zen 5 (AVX-512), share of the FMA peak: 2018sp-2 went from 0.76 to 0.94 with 1386 images
whose rows were all shifted between units before; without any shifting it was 0.97.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel, TanhPool
from ece408_op.problem import ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.llvm import Cpu, compile_function, compiled_once, cpu
from ece408_op.runtime.thread_pool import share

from . import _direct_code, _direct_filters
from ._direct_filters import FilterPlan, make_filter_plan
from ._direct_plan import Plan, make_plan
from ._tanh_pool import Pooling

#: Bytes of output that a thread fills before it asks for more work; fewer towards the end.
CHUNK_BYTES = 4 << 20

#: Outputs from this size on are written past the caches, which could not keep them anyway.
STREAMED_BYTES = 32 << 20


@compiled_once
def _compiled(plan: Plan | FilterPlan, target: Cpu, streamed: bool, pooling: Pooling | None = None) -> Any:
    if isinstance(plan, Plan):
        module = _direct_code.build(plan, target, streamed, pooling)
    else:
        module = _direct_filters.build(plan, target, pooling)
    return compile_function(module, "conv", [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3, target)


def pack(plan: Plan | FilterPlan, w: np.ndarray) -> np.ndarray:
    """The weights, shape (M, C, K, K), block by block as [block][c][p][q][filter], flat."""
    packed, flat, products = np.empty(w.size, np.float32), w.reshape(-1), plan.layer.products
    start = 0
    for filters, blocks in plan.blocks:
        stop = start + filters * blocks * products
        blocked = flat[start:stop].reshape(blocks, filters, products)
        packed[start:stop].reshape(blocks, products, filters)[...] = blocked.transpose(0, 2, 1)
        start = stop
    return packed


@lru_cache(maxsize=1024)
def _plan(problem: ConvProblem, target: Cpu) -> Plan | FilterPlan:
    layer = problem.with_batch(1)
    plan = make_plan(layer, target.lanes, target.registers, memory.l2_bytes())
    if plan.units == 1:  # its tiles are as quick as those with filters in the lanes, or quicker
        return plan
    return make_filter_plan(layer, target.lanes, target.registers) or plan


@lru_cache(maxsize=1024)
def _code(problem: ConvProblem, target: Cpu, large: bool) -> tuple[Plan | FilterPlan, Any]:
    plan = _plan(problem, target)
    return plan, _compiled(plan, target, large and isinstance(plan, Plan) and plan.whole_lines)


def _layer(problem: ConvProblem, out: np.ndarray) -> tuple[Plan | FilterPlan, Any]:
    """The layer's plan, and the compiled function for outputs of that size and alignment."""
    large = out.nbytes >= STREAMED_BYTES and memory.address(out) % memory.LINE == 0
    return _code(problem, cpu(), large)


def _pooled_layer(problem: ConvProblem, full: bool) -> tuple[Plan | FilterPlan, Pooling, Any]:
    target = cpu()
    plan, pooling = _plan(problem, target), Pooling(problem.with_batch(1), full)
    return plan, pooling, _compiled(plan, target, False, pooling)


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done."""
    _layer(problem, out)


def prepare_tanh_pool(problem: ConvProblem, full: bool) -> None:
    """The same for run_tanh_pool."""
    _pooled_layer(problem, full)


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): the images are shared out among the threads, some megabytes at a time."""
    plan, conv = _layer(problem, out)
    _share(plan, conv, (x, w, out), plan.scratch, threads)


def run_tanh_pool(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int, full: bool
) -> None:
    """Fill out, shape (B, M, rows, columns), with the tanh of the largest of each 2 x 2 outputs, two apart.

    ``full``: at an odd edge, of those that are there; otherwise an odd last row or column is left out.
    """
    plan, pooling, conv = _pooled_layer(problem, full)
    _share(plan, conv, (x, w, out), plan.scratch + pooling.scratch(cpu().lanes), threads)


def _share(plan: Plan | FilterPlan, conv: Any, arrays: tuple[np.ndarray, ...], scratch: int, threads: int) -> None:
    x, w, out = arrays
    batch = x.shape[0]
    memory.advise_huge_pages(out)
    packed = pack(plan, w)
    counter = np.zeros(1, np.int64)
    most = max(1, CHUNK_BYTES // (out.nbytes // batch))

    def work(part: int) -> None:
        held = (x, packed, out, memory.aligned(scratch), counter)
        conv(*map(memory.address, held), batch, most, 2 * threads)

    share(work, threads, threads)


KERNEL = CpuKernel(
    "direct",
    "tiles of filters x pixels in registers, compiled for the layer",
    run,
    prepare,
    tanh_pool=TanhPool(run_tanh_pool, prepare_tanh_pool),
)
