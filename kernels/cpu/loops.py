"""loops: the textbook's seven nested loops, compiled for the layer.

Arithmetic intensity: 2*C*K*K FLOP per output, one output at a time, its sum in a register. Memory: each pixel is read
M*K*K times, nearly always from L1. Each multiply-add waits for the one before, so their latency limits it.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.llvm import (
    F32,
    F32_PTR,
    I64,
    Cpu,
    compile_function,
    compiled_once,
    cpu,
    element,
    fma,
    for_range,
    new_function,
    offset,
)
from ece408_op.runtime.thread_pool import share


@compiled_once
def _compiled(layer: ConvProblem, target: Cpu) -> Any:
    """Compile a ctypes function (x, w, y, images) for one layer; its batch does not matter."""
    module = ir.Module("loops")
    b, (x, w, y, images) = new_function(module, "conv", {"x": F32_PTR, "w": F32_PTR, "y": F32_PTR, "images": I64})

    def offset_in(shape: tuple[int, ...], *indices: Any) -> Any:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return offset(b, *zip(indices, strides))

    loop = partial(for_range, b)
    zero = [ir.Constant(F32, 0.0)]
    with (
        loop(images) as image,
        loop(layer.filters) as m,
        loop(layer.output_height) as i,
        loop(layer.output_width) as j,
    ):
        with loop(layer.channels, zero) as c:
            with loop(layer.kernel, c.values) as p:
                with loop(layer.kernel, p.values) as q:
                    row, column = b.add(i.index, p.index), b.add(j.index, q.index)
                    pixel = element(b, x, offset_in(layer.x_shape, image.index, c.index, row, column))
                    weight = element(b, w, offset_in(layer.w_shape, m.index, c.index, p.index, q.index))
                    q.values = [fma(b, target, b.load(pixel, align=4), b.load(weight, align=4), q.values[0])]
                p.values = q.values
            c.values = p.values
        output = element(b, y, offset_in(layer.y_shape, image.index, m.index, i.index, j.index))
        b.store(c.values[0], output, align=4)
    b.ret_void()
    return compile_function(module, "conv", [ctypes.c_void_p] * 3 + [ctypes.c_int64], target)


def prepare(problem: ConvProblem, out: np.ndarray) -> None:
    """Compile for the layer, if that has not been done."""
    _compiled(problem.with_batch(1), cpu())


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): the threads share the images evenly."""
    conv = _compiled(problem.with_batch(1), cpu())
    edges = [problem.batch * part // threads for part in range(threads + 1)]
    x_bytes, y_bytes = x.nbytes // problem.batch, out.nbytes // problem.batch
    x_start, w_start, y_start = x.ctypes.data, w.ctypes.data, out.ctypes.data

    def work(part: int) -> None:
        first, last = edges[part], edges[part + 1]
        if first < last:
            conv(x_start + first * x_bytes, w_start, y_start + first * y_bytes, last - first)

    share(work, threads, threads)


KERNEL = CpuKernel("loops", "the textbook's seven loops, compiled", run, prepare)
