#!/usr/bin/env python3
"""Compare chains of up to three layers with MXNet's Convolution and with New, on the CPU.

example: python benchmarks/replaced_layers.py

In a network, MXNet keeps arrays in oneDNN's blocked layout and fuses BatchNorm and activations into a convolution; the
benchmark of single layers does not show the time that this saves. dispatch.slower_than_mxnet follows this table: below
1, New is slower.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")

import ece408_op  # before MXNet
from ece408_op.core import dispatch, timer

#: Channels, filters, the filters' size, rows and columns of an image, and other attributes of the convolutions.
LAYERS = [
    (1, 50, 5, 28, {}), (6, 16, 5, 30, {}), (12, 24, 7, 33, {}), (20, 50, 5, 28, {}), (8, 16, 3, 56, {}),
    (16, 32, 3, 56, {}), (64, 64, 3, 28, {}), (32, 64, 1, 56, {}), (64, 128, 1, 28, {}), (96, 24, 1, 28, {}),
    (256, 256, 1, 14, {}), (50, 20, 3, 28, {}),
    (64, 64, 3, 56, {"pad": (1, 1)}), (128, 128, 3, 28, {"pad": (1, 1)}), (32, 32, 3, 56, {"pad": (1, 1)}),
    (20, 50, 3, 28, {"pad": (1, 1)}), (3, 64, 7, 112, {"stride": (2, 2)}),
    (3, 20, 7, 112, {"stride": (2, 2)}), (64, 64, 3, 56, {"dilate": (2, 2)}), (20, 30, 3, 56, {"dilate": (2, 2)}),
    (32, 32, 3, 112, {"num_group": 32}), (30, 30, 3, 56, {"num_group": 30}), (128, 128, 3, 28, {"num_group": 32}),
    (15, 15, 3, 28, {"num_group": 3}),
]  # fmt: skip
#: The layers after each convolution.
ACTIVATIONS = ("relu", "tanh", "BatchNorm, relu")
IMAGES = (16, 128)
#: The channels of a network's images.
FIRST = 3


def main() -> int:
    """Print the table as Markdown; returns the exit code."""
    import mxnet as mx

    print(f"| channels, filters, size, image, attributes | expected slower | {' | '.join(ACTIVATIONS)} |")
    print("| --- | --- |" + " --- |" * len(ACTIVATIONS))
    for channels, filters, kernel, side, others in LAYERS:
        cells = []
        for activation in ACTIVATIONS:
            mxnet, new = (_chain(mx, own, activation, channels, filters, kernel, others) for own in (False, True))
            shapes = [(images, channels, side, side) for images in IMAGES]
            cells.append(", ".join(f"{_seconds(mx, mxnet, shape) / _seconds(mx, new, shape):.2f}" for shape in shapes))
        groups = others.get("num_group", 1)
        dense = not others.keys() & {"stride", "dilate"}
        slower = dispatch.slower_than_mxnet((filters, channels // groups, kernel, kernel), "cpu", groups, dense)
        named = "".join(f", {name} {value}" for name, value in others.items())
        print(f"| {channels}, {filters}, {kernel}, {side}{named} | {'yes' if slower else 'no'} | {' | '.join(cells)} |")
    return 0


def _chain(mx, own, activation, channels, filters, kernel, others):
    out = mx.sym.Variable("data")
    # A layer on images (three channels or fewer) is not chained: it is the first of its network.
    for layer, count in enumerate((filters, channels, filters)[: 1 if channels <= FIRST else 3]):
        attributes = {"kernel": (kernel, kernel), "num_filter": count, "name": f"conv{layer}", **others}
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
