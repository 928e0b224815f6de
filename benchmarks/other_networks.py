#!/usr/bin/env python3
"""Compare gpu_network with eager PyTorch on networks whose operators Gluon's model zoo lacks, with images on the GPU.

example: python benchmarks/other_networks.py efficientnet darknet53

They have squeeze-and-excitation (Hu et al., 2018), swish, hard swish, LeakyReLU, PReLU, and grouped and dilated
convolutions. Weights are random. Prints a Markdown table of milliseconds, medians, in float32 without TF32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from itertools import count
from math import prod

import numpy as np
from tqdm import tqdm

import ece408_op  # noqa: F401  (before MXNet)
from ece408_op.bench import _networks, layers
from ece408_op.core import timer
from ece408_op.models import inference

import mxnet as mx  # isort: skip

S = mx.sym
SIDE, REPEATS = 224, 15
_numbers = count()


def conv(x, filters, kernel, stride=1, groups=1, dilate=1, bias=False):
    """Return a convolution whose padding keeps the size of an image with stride 1."""
    pad = kernel // 2 * dilate
    pairs = {"kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate}
    words = {name: (value, value) for name, value in pairs.items()}
    return S.Convolution(
        x, num_filter=filters, num_group=groups, no_bias=not bias, name=f"conv{next(_numbers)}", **words
    )


def norm(x):
    """Return a BatchNorm."""
    return S.BatchNorm(x, fix_gamma=False, eps=1e-5, name=f"norm{next(_numbers)}")


def relu(x):
    """Return max(x, 0)."""
    return S.Activation(x, act_type="relu")


def swish(x):
    """Return x sigmoid(x)."""
    return x * S.sigmoid(x)


def hard_sigmoid(x):
    """Return a piecewise linear sigmoid."""
    return S.clip(x + 3, 0, 6) / 6


def leaky(x):
    """Return x, or a tenth of it below zero."""
    return S.LeakyReLU(x, act_type="leaky", slope=0.1)


def average(x):
    """Return each image's mean."""
    return S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))


def excited(x, channels, hidden, activation, gate):
    """Return x times factors of its channels, computed from their means."""
    return S.broadcast_mul(x, gate(conv(activation(conv(average(x), hidden, 1, bias=True)), channels, 1, bias=True)))


def classified(x):
    """Return 1,000 scores, without a softmax: one score of random weights is so large that it would hide errors."""
    return S.FullyConnected(S.Flatten(average(x)), num_hidden=1000, name="classes")


def stem():
    """Return the first layers of a ResNet."""
    return S.Pooling(
        relu(norm(conv(S.Variable("data"), 64, 7, 2))), kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max"
    )


def resnet(groups=1, width=64, squeezed=False):
    """Return ResNeXt-50 (Xie et al., 2017), or a ResNet-50 with squeeze-and-excitation."""
    x = stem()
    for stage, blocks in enumerate((3, 4, 6, 3)):
        middle, filters = groups * width << stage, 256 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = relu(norm(conv(relu(norm(conv(x, middle, 1))), middle, 3, stride, groups)))
            y = norm(conv(y, filters, 1))
            y = excited(y, filters, filters // 16, relu, S.sigmoid) if squeezed else y
            x = relu(y + (x if block else norm(conv(x, filters, 1, stride))))
    return classified(x)


def inverted(rows, first, last, squeeze):
    """Return a network of inverted residuals. rows: kernel, expanded and own channels, squeezed, activation, stride."""
    activation = rows[0][4]
    channels, x = first, activation(norm(conv(S.Variable("data"), first, 3, 2)))
    for kernel, expanded, filters, squeezed, act, stride in rows:
        y = act(norm(conv(x, expanded, 1))) if expanded != channels else x
        y = act(norm(conv(y, expanded, kernel, stride, expanded)))
        y = norm(conv(squeeze(y, expanded, channels) if squeezed else y, filters, 1))
        x = x + y if stride == 1 and filters == channels else y
        channels = filters
    return classified(activation(norm(conv(x, last, 1))))


def efficientnet():
    """Return EfficientNet-B0 (Tan and Le, 2019)."""
    rows, channels = [], 32
    for expansion, kernel, stride, filters, blocks in (
        *[(1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)],
        *[(6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)],
    ):
        for block in range(blocks):
            rows.append((kernel, channels * expansion, filters, True, swish, 1 if block else stride))
            channels = filters
    return inverted(rows, 32, 1280, lambda y, expanded, own: excited(y, expanded, own // 4, swish, S.sigmoid))


def mobilenet_v3():
    """Return MobileNetV3-Large (Howard et al., 2019), whose blocks all have a hard swish here."""
    act = lambda x: x * hard_sigmoid(x)  # noqa: E731
    sizes = [(3, 16, 16, 0, 1), (3, 64, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 1, 2), (5, 120, 40, 1, 1)]
    sizes += [(3, 240, 80, 0, 2), (3, 200, 80, 0, 1), (3, 480, 112, 1, 1), (3, 672, 112, 1, 1)]
    sizes += [(5, 672, 160, 1, 2), (5, 960, 160, 1, 1)]
    rows = [(kernel, expanded, m, squeezed, act, stride) for kernel, expanded, m, squeezed, stride in sizes]
    return inverted(rows, 16, 960, lambda y, expanded, own: excited(y, expanded, expanded // 4, relu, hard_sigmoid))


def darknet53():
    """Return Darknet-53 (Redmon and Farhadi, 2018)."""
    x = leaky(norm(conv(S.Variable("data"), 32, 3)))
    for filters, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        x = leaky(norm(conv(x, filters, 3, 2)))
        for _ in range(blocks):
            x = x + leaky(norm(conv(leaky(norm(conv(x, filters // 2, 1))), filters, 3)))
    return classified(x)


def dilated():
    """Return layers as in DeepLab (Chen et al., 2018): dilated residuals, and a pyramid of dilations."""
    x = stem()
    for filters, dilate, stride in ((64, 1, 1), (128, 1, 2), (256, 2, 1), (512, 4, 1)):
        for block in range(2):
            steps = 1 if block else stride
            y = norm(conv(relu(norm(conv(x, filters, 3, steps, dilate=dilate))), filters, 3, dilate=dilate))
            x = relu(y + (norm(conv(x, filters, 1, steps)) if filters > 64 and not block else x))
    pyramid = [conv(x, 128, 1), *(conv(x, 128, 3, dilate=dilate) for dilate in (6, 12, 18))]
    return conv(relu(norm(conv(S.Concat(*(relu(norm(y)) for y in pyramid), dim=1), 128, 1))), 21, 1, bias=True)


def iresnet50():
    """Return the ResNet of ArcFace (Deng et al., 2019), whose activations are PReLUs."""
    prelu = lambda x: S.LeakyReLU(x, act_type="prelu", name=f"prelu{next(_numbers)}")  # noqa: E731
    x = prelu(norm(conv((S.Variable("data") - 0.5) * 0.0078125, 64, 3)))
    for filters, blocks in ((64, 3), (128, 4), (256, 14), (512, 3)):
        for block in range(blocks):
            stride = 1 if block else 2
            y = norm(conv(prelu(norm(conv(norm(x), filters, 3))), filters, 3, stride))
            x = y + (x if block else norm(conv(x, filters, 1, stride)))
    return S.FullyConnected(S.Flatten(norm(x)), num_hidden=512, name="embedding")


NETWORKS = {
    "resnext50": partial(resnet, 32, 4),
    "se_resnet50": partial(resnet, squeezed=True),
    "efficientnet": efficientnet,
    "mobilenet_v3": mobilenet_v3,
    "darknet53": darknet53,
    "dilated": dilated,
    "iresnet50": iresnet50,
}
#: The sizes of images that are not SIDE.
SIDES = {"iresnet50": 112}


def loaded(symbol, shape, seed=0):
    """Return the symbol with random parameters."""
    stream = np.random.RandomState(seed)
    arguments, _, states = symbol.infer_shape(data=shape)
    ranges = {"gamma": (0.5, 1.5), "beta": (-0.1, 0.1), "bias": (-0.1, 0.1), "mean": (-0.1, 0.1), "var": (0.8, 1.2)}

    def value(name, sizes):
        if name.endswith("weight"):
            return mx.nd.array(stream.normal(0, (1.6 / prod(sizes[1:])) ** 0.5, sizes))
        return mx.nd.array(stream.uniform(*ranges[name.rpartition("_")[2]], sizes))

    named = [
        {name: value(name, sizes) for name, sizes in zip(names, of_sizes) if name != "data"}
        for names, of_sizes in ((symbol.list_arguments(), arguments), (symbol.list_auxiliary_states(), states))
    ]
    return inference.Loaded(symbol, *named)


def milliseconds(call):
    """Return the median time of a call that returns when the GPU has finished."""
    return 1000 * statistics.median(timer.measure(call, timer.cpu_clock, repeats=REPEATS).seconds)


def main() -> int:
    """Print the table; return 1 if an output differs from PyTorch's by more than a ten-thousandth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--images", type=int, default=128)
    options = parser.parse_args()
    torch, largest = layers.pytorch(), 0.0
    print("| network | gpu_network | PyTorch | PyTorch, channels last | ratio | difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in tqdm(options.networks or list(NETWORKS), disable=None):
        side = SIDES.get(name, SIDE)
        pixels = np.random.RandomState(1).uniform(-1, 1, (options.images, 3, side, side)).astype(np.float32)
        network = loaded(NETWORKS[name](), pixels.shape)
        calls = _networks._gpu_network(network, pixels, "auto")
        calls[_networks.FORWARD]()  # gives the engine its parameters
        ours = calls[_networks.ON_GPU]
        got, times = ours().get(), [milliseconds(ours)]
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.from_numpy(pixels).cuda().contiguous(memory_format=layout)
            run = _networks.torch_module(network, "cuda", layout)

            def theirs(x=x, run=run):
                with torch.inference_mode():
                    found = run(x)
                torch.cuda.synchronize()
                return found

            exact = theirs().cpu().numpy().reshape(got.shape)
            times.append(milliseconds(theirs))
        difference = abs(got - exact).max() / abs(exact).max()
        largest = max(largest, difference)
        cells = " | ".join(f"{one:.2f}" for one in times)
        print(f"| {name} | {cells} | {min(times[1:]) / times[0]:.2f} | {difference:.1e} |", flush=True)
        del calls, ours, theirs, run, x
        _networks.free_gpu()
        torch.cuda.empty_cache()
    return int(not largest <= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
