#!/usr/bin/env python3
"""Compare MXNet's Convolution and its gradients with the kernels that auto chooses, layer by layer, on the CPU.

examples: OMP_NUM_THREADS=2 python benchmarks/gradients.py --images 10000
          python benchmarks/gradients.py --networks --images 8 --cpu-time

Each cell is MXNet's time divided by the kernel's, the least of some calls each, which alternate; below 1, MXNet is
faster. Both fill arrays that are there. With --cpu-time the times are the process's own on one core, for a machine that
others use.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1" if "--cpu-time" in sys.argv else str(len(os.sched_getaffinity(0))))

import numpy as np

import ece408_op  # noqa: F401 - before MXNet
from ece408_op.bench import _layer_names
from ece408_op.core import dispatch
from ece408_op.plugin import bridge
from ece408_op.problem import COURSE_LAYERS

#: Layers of ResNet, VGG, Inception and MobileNet.
NETWORKS = [_layer_names.parse(name, 1) for name in _layer_names.SETS["resnet"]]


def main() -> int:
    """Print the table as Markdown; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--networks", action="store_true", help="layers of image classifiers, not the course's")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    print("| layer | forward | data gradient | weight gradient |\n| --- | --- | --- | --- |")
    ratios: list[list[float]] = []
    for problem in NETWORKS if options.networks else COURSE_LAYERS.values():
        cells = list(_compare(problem.with_batch(options.images), clock, options.repeats))
        ratios.append([ratio for ratio, _ in cells])
        print(f"| {problem.with_batch(options.images)} |", " | ".join(text for _, text in cells), "|", flush=True)
    means = np.exp(np.mean(np.log(ratios), axis=0))
    print("| geometric mean |", " | ".join(f"{mean:.2f}" for mean in means), "|")
    return 0


def _compare(problem, clock, repeats):
    """Yield the ratio and a cell's text of the convolution and of both gradients."""
    import mxnet as mx

    operands = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    arrays = {name: mx.nd.random.normal(shape=shape) for name, shape in operands.items()}
    attributes = {"kernel": problem.w_shape[2:], "num_filter": problem.filters, "num_group": problem.groups}
    attributes |= {"stride": problem.stride, "pad": problem.pad, "dilate": problem.dilate, "no_bias": True}

    def seconds(call):
        start = clock()
        call()
        return clock() - start

    for result in (problem, problem.data_gradient, problem.weight_gradient):
        kernel = dispatch.select(result)
        a, b = (bridge.cpu_view(arrays[name]) for name in result.operands[:2])
        filled = mx.nd.zeros(result.shapes[2])
        out = bridge.cpu_view(filled)
        wanted = arrays[result.operands[2]].copy()
        inputs = {**arrays, result.operands[2]: wanted}
        weight = inputs["w"] if inputs["w"] is wanted else inputs["w"].copy()  # oneDNN may reorder it in place

        def prepared(result=result, inputs=inputs, weight=weight, wanted=wanted):
            """Return MXNet's call, and do what precedes it."""
            if result is problem:
                return lambda: mx.nd.Convolution(inputs["x"], weight, out=wanted, **attributes).wait_to_read()
            wanted.attach_grad()
            with mx.autograd.record():
                y = mx.nd.Convolution(inputs["x"], weight, **attributes)
            y.wait_to_read()

            def backward():
                y.backward(inputs["y"])
                wanted.grad.wait_to_read()

            return backward

        def ours(kernel=kernel, result=result, a=a, b=b, out=out):
            kernel.run(result, a, b, out, dispatch.thread_count(result))

        times = [(seconds(prepared()), seconds(ours)) for _ in range(repeats + 1)][1:]  # the first compiles
        theirs, own = (min(column) for column in zip(*times))
        yield theirs / own, f"{theirs * 1e3:.2f} / {own * 1e3:.2f} ms = {theirs / own:.2f} {kernel.name}"


if __name__ == "__main__":
    sys.exit(main())
