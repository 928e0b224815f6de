#!/usr/bin/env python3
"""Compare chains of three layers with MXNet's Convolution and with New, on the CPU.

example: python benchmarks/replaced_layers.py

In a network, MXNet keeps arrays in oneDNN's blocked layout and fuses BatchNorm and activations into a convolution; the
benchmark of single layers does not show what that saves. dispatch.slower_than_mxnet follows this table: below 1, New is
slower.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")

import ece408_op  # before MXNet
from ece408_op.core import dispatch, timer

#: Channels, filters, the filters' size, rows and columns of an image.
LAYERS = [
    (1, 50, 5, 28), (6, 16, 5, 30), (12, 24, 7, 33), (20, 50, 5, 28), (8, 16, 3, 56), (16, 32, 3, 56),
    (64, 64, 3, 28), (32, 64, 1, 56), (64, 128, 1, 28), (96, 24, 1, 28), (256, 256, 1, 14), (50, 20, 3, 28),
]  # fmt: skip
#: What follows each convolution.
ACTIVATIONS = ("relu", "tanh", "BatchNorm, relu")
IMAGES = (16, 128)


def main() -> int:
    """Print the table as Markdown; returns the exit code."""
    import mxnet as mx

    print(f"| channels, filters, size, image | expected slower | {' | '.join(ACTIVATIONS)} |")
    print("| --- | --- |" + " --- |" * len(ACTIVATIONS))
    for channels, filters, kernel, side in LAYERS:
        cells = []
        for activation in ACTIVATIONS:
            mxnet, new = (_chain(mx, own, activation, channels, filters, kernel) for own in (False, True))
            shapes = [(images, channels, side, side) for images in IMAGES]
            cells.append(", ".join(f"{_seconds(mx, mxnet, shape) / _seconds(mx, new, shape):.2f}" for shape in shapes))
        slower = dispatch.slower_than_mxnet((filters, channels, kernel, kernel), "cpu")
        print(f"| {channels}, {filters}, {kernel}, {side} | {'yes' if slower else 'no'} | {' | '.join(cells)} |")
    return 0


def _chain(mx, own, activation, channels, filters, kernel):
    out = mx.sym.Variable("data")
    for layer, count in enumerate((filters, channels, filters)):
        attributes = {"kernel": (kernel, kernel), "num_filter": count, "name": f"conv{layer}"}
        out = ece408_op.New(out, **attributes) if own else mx.sym.Convolution(out, no_bias=True, **attributes)
        if activation.startswith("BatchNorm"):
            out = mx.sym.BatchNorm(out, fix_gamma=False)
        out = mx.sym.Activation(out, act_type=activation.rpartition(" ")[2])
    return out


def _seconds(mx, chain, shape):
    executor = chain.simple_bind(mx.cpu(), data=shape, grad_req="null")
    for array in executor.arg_arrays:
        array[:] = mx.nd.random.normal(scale=0.05, shape=array.shape)
    mx.nd.waitall()

    def forward():
        (output,) = executor.forward(is_train=False)
        output.wait_to_read()

    return timer.measure(forward, timer.cpu_clock, repeats=7).median


if __name__ == "__main__":
    sys.exit(main())
