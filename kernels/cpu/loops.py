"""loops: the textbook's seven nested loops, compiled for the layer.

Arithmetic intensity: 2*C*K*K FLOP per output, one output at a time, its sum in a register. Memory: each pixel is read
M*K*K times, nearly always from L1. Each multiply-add waits for the previous one, so their latency limits it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ece408_op.core.kernel import CpuKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import memory
from ece408_op.runtime.host_cpu import Cpu, cpu
from ece408_op.runtime.llvm import Function, Module, Value, compiled_once
from ece408_op.runtime.thread_pool import parallel_for


@compiled_once
def _compiled(layer: ConvProblem, target: Cpu) -> Any:
    """Compile a ctypes function (x, w, y, images) for one layer; its batch does not matter."""
    with Function(Module("loops", target), "conv", "x w y", "images", exported=True) as f:
        x, w, y, images = f.arguments

        def at(array: Value, shape: tuple[int, ...], *indices: Value) -> Value:
            place = indices[0]
            for size, index in zip(shape[1:], indices[1:]):
                place = place * size + index
            return array[place]

        with (
            f.range(images) as image,
            f.range(layer.filters) as m,
            f.range(layer.output_height) as i,
            f.range(layer.output_width) as j,
        ):
            with f.loop(layer.channels, [f.scalar(0.0)]) as c:
                with f.loop(layer.kernel, c.values) as p:
                    with f.loop(layer.kernel, p.values) as q:
                        pixel = at(x, layer.x_shape, image, c.index, i + p.index, j + q.index)
                        weight = at(w, layer.w_shape, m, c.index, p.index, q.index)
                        q.values = [pixel.load().fma(weight.load(), q.values[0])]
                    p.values = q.values
                c.values = p.values
            at(y, layer.y_shape, image, m, i, j).store(c.values[0])
    return f.compiled()


def run(problem: ConvProblem, x: np.ndarray, w: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Fill out, shape (B, M, OH, OW): the threads share the images evenly."""
    conv = _compiled(problem, cpu())
    edges = [problem.batch * part // threads for part in range(threads + 1)]

    def work(part: int) -> None:
        first, last = edges[part], edges[part + 1]
        if first < last:
            conv(*map(memory.address, (x[first:], w, out[first:])), last - first)

    parallel_for(work, threads, threads)


KERNEL = CpuKernel("loops", "the textbook's seven loops, compiled", run, lambda problem, out: _compiled(problem, cpu()))
