"""col2im: data gradients as one matrix product, whose columns are then added to the pixels of their windows.

    columns (C*K*L, OH*OW)  =  w as (M, C*K*L) transposed  times  y[b] as (M, OH*OW)
    x[b][c][i S + p D - P][j S + q D - P]  +=  columns[c, p, q][i, j]            S stride, D dilation, P padding

The product is a convolution of y with C*K*L filters of 1 x 1, by ``direct``. No product with a padding zero is
computed, and even for a layer of one channel the product has a row per filter element, enough to fill register tiles.

Arithmetic intensity: 2*M FLOP per element of columns, which is written once and read once, in L2 for small layers.
Memory: the columns have K*L times as many elements as y has pixels, which limits layers of many channels.
Source: as im2col.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import DATA_GRADIENT, DILATE, PAD, RECTANGULAR, STRIDE, ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.launch import ceil_div
from ece408_op.runtime.llvm import Function, Module, compiled_once
from ece408_op.runtime.thread_pool import parallel_for

from . import direct
from ._few_images import sharing
from ._ir import windows_inside

# ``ece408-bench layers --gradient data --impl col2im direct --random 24`` times these constants.
#: Bytes of columns that a thread computes at a time, unless one image has more: a part of a core's L2.
COLUMNS_BYTES = 256 << 10

#: The most elements of a filter: each element's additions are generated as separate code.
MOST_ELEMENTS = 256

#: Nanoseconds to store and add an element of columns; multiply-adds per nanosecond of the product. Multiply-adds per
#: nanosecond of ``direct`` with up to FEW_CHANNELS channels, where it loads more than it multiplies, and with more.
STORED, PRODUCT_RATE, FEW_CHANNELS, DIRECT_RATES = 0.15, 48, 3, (25, 53)


def _pieces(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, lanes) of vectors that cover each of ``count`` floats once; the last vectors are smaller."""
    start = 0
    while start < count:
        while lanes > count - start:
            lanes //= 2
        yield start, lanes
        start += lanes


@compiled_once
def _layer(problem: ConvProblem, target: Cpu) -> tuple[Any, direct.CompiledLayer]:
    """Compile (columns, x, images), which fills the images x with the sums of their columns, and the product."""
    layer = problem.convolution
    (top, left), (dh, dw), (sh, sw) = layer.pad, layer.dilate, layer.stride
    height, width, rows, columns = layer.height, layer.width, layer.output_height, layer.output_width
    elements, plane = layer.kernel * layer.kernel_width, rows * columns
    with Function(Module("col2im", target), "add", "columns x", "images", exported=True) as f:
        source, x, images = f.arguments
        with f.range(images * layer.channels) as c:
            image = x[c * (height * width)]
            with f.range(height * width) as pixel:
                image[pixel].store(f.scalar(0.0))
            for number in range(elements):
                p, q = divmod(number, layer.kernel_width)
                first, count = windows_inside(height, rows, sh, p * dh - top)
                first_column, column_count = windows_inside(width, columns, sw, q * dw - left)
                if not count or not column_count:
                    continue
                read = source[c * (elements * plane) + (number * plane + first * columns + first_column)]
                start = (first * sh + p * dh - top) * width + first_column * sw + q * dw - left
                with f.range(count) as i:
                    from_row, to_row = read[i * columns], image[i * (sh * width) + start]
                    if sw > 1:
                        with f.range(column_count) as j:
                            to = to_row[j * sw]
                            to.store(to.load() + from_row[j].load())
                    else:
                        for begin, lanes in _pieces(column_count, target.lanes):
                            to_row[begin].store(to_row[begin].load(lanes) + from_row[begin].load(lanes))
    product = ConvProblem(1, layer.filters, rows, columns, math.prod(layer.w_shape[1:]), 1)
    return f.compiled(), direct.compiled(product)


def run(problem: ConvProblem, y: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out (B, C, H, W) from the gradient of y and w; the threads claim some images at a time."""
    add, (plan, conv, scratch) = _layer(problem, cpu())
    packed = direct.pack(plan, np.ascontiguousarray(w.reshape(len(w), -1).T), threads)
    memory.advise_huge_pages(out)
    floats = math.prod(plan.layer.y_shape)
    count = min(max(1, COLUMNS_BYTES // (4 * floats)), ceil_div(problem.batch, threads))
    firsts = iter(range(0, problem.batch, count))

    def work(part: int) -> None:
        columns, own, counter = memory.aligned(count * floats), memory.aligned(scratch), np.zeros(1, np.int64)
        fixed = list(map(memory.address, (packed, columns, own, counter)))
        for first in firsts:  # next() is atomic
            some = min(count, problem.batch - first)
            counter[0] = 0
            conv(memory.address(y[first:]), *fixed, some, some, 1)
            add(fixed[1], memory.address(out[first:]), some)

    parallel_for(work, threads, threads)


def limits(problem: ConvProblem) -> list[str]:
    """Return why the kernel does not support a problem; empty if it does."""
    elements = problem.kernel * problem.kernel_width
    return [f"filters: at most {MOST_ELEMENTS} elements, got {elements}"] if elements > MOST_ELEMENTS else []


def is_profitable(problem: ConvProblem) -> bool:
    """Return whether this kernel is predicted to be faster than ``direct`` (fitted to times on a Zen 4)."""
    if direct.KERNEL.not_supported_reasons(problem):
        return True
    around = problem.height * problem.width / (problem.output_height * problem.output_width)
    own = problem.filters / PRODUCT_RATE + STORED
    return own < problem.filters * around / DIRECT_RATES[problem.channels > FEW_CHANNELS]


KERNEL = CpuKernel(
    "col2im",
    "data gradients: a matrix product, added to the pixels, compiled for the layer",
    *sharing(run, lambda problem, out: _layer(problem, cpu())),
    limits,
    features=frozenset({RECTANGULAR, STRIDE, PAD, DILATE, DATA_GRADIENT}),
    required=DATA_GRADIENT,
    recommended=is_profitable,
)
