"""Compare losses in training with MXNet's.

    python benchmarks/training_losses.py --out benchmarks/results/training-losses-cpu.txt
    python benchmarks/training_losses.py --gpu --out benchmarks/results/training-losses-h200.txt

With --gpu, whole networks train on the GPU (gluon.on_gpu), with their updates. Both runs of a training have the same
weights, images, order and optimizer. Rounding errors grow from step to step, by as much as the network amplifies them,
so the tolerance is measured: further runs of MXNet's own Convolution begin with weights that a relative noise of 2^-23,
float32's precision, has changed. A loss may be as far from MXNet's as four times the furthest of these runs at any step
so far, or 2^-20 of the loss, 16 roundings.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import numpy as np

import ece408_op
from ece408_op.plugin import mxnet_import
from ece408_op.runtime import cuda

#: The networks and their learning rates. With larger ones, rounding errors grow a hundredfold at each step.
NETWORKS = {"resnet18_v1": 1e-4, "mobilenetv2_1.0": 1e-5}
STEPS, BATCH, SIZE, CLASSES = 20, 32, 64, 10
NOISE, NOISY_RUNS = 2.0**-23, 6
FACTOR, LEAST = 4, 2.0**-20


def losses(name: str, where: str, noise: int = 0) -> tuple[list[float], int]:
    """Return the loss at each step, and how many convolutions were replaced.

    where: ``"MXNet"``, ``"operator"`` (New in MXNet's network) or ``"GPU"`` (the whole network); ``noise`` seeds the
    weights' noise.
    """
    mx = mxnet_import.load()
    mx.random.seed(408)
    random = np.random.RandomState(408)
    images = random.standard_normal((STEPS * BATCH, 3, SIZE, SIZE)).astype(np.float32)
    labels = random.randint(0, CLASSES, STEPS * BATCH).astype(np.float32)
    net = mx.gluon.model_zoo.vision.get_model(name, classes=CLASSES, prefix="net_")
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(images[:BATCH]))
    for parameter in net.collect_params(".*weight").values():
        value = random.standard_normal(parameter.shape) * np.sqrt(2 / np.prod(parameter.shape[1:]))
        if noise:
            value *= 1 + NOISE * np.random.RandomState(noise).uniform(-1, 1, parameter.shape)
        parameter.set_data(mx.nd.array(value))
    replaced = ece408_op.gluon.replace(net) if where == "operator" else None
    assert replaced is None or not replaced.left, replaced
    if where == "GPU":
        net = ece408_op.gluon.on_gpu(net, mx.nd.array(images[:BATCH]), gradients="gpu")
    else:
        net.hybridize()
    rule = "gpusgd" if where == "GPU" else "sgd"
    trainer = mx.gluon.Trainer(net.collect_params(), rule, {"learning_rate": NETWORKS[name]})
    measure, found = mx.gluon.loss.SoftmaxCrossEntropyLoss(), []
    for step in range(STEPS):
        chosen = slice(step * BATCH, (step + 1) * BATCH)
        with mx.autograd.record():
            loss = measure(net(mx.nd.array(images[chosen])), mx.nd.array(labels[chosen])).mean()
        loss.backward()
        trainer.step(1)
        found.append(float(loss.asscalar()))
    return found, len(replaced.replaced) if replaced else 0


def compare(name: str, where: str) -> tuple[list[str], bool]:
    """Return the table of one network's losses, and whether all of them are within the tolerance."""
    mine, count = losses(name, where)
    own, _ = losses(name, "MXNet")
    noisy = np.array([losses(name, "MXNet", noise=seed)[0] for seed in range(1, NOISY_RUNS + 1)])
    spread = np.maximum.accumulate(np.abs(noisy - own).max(axis=0))
    tolerance = np.maximum(FACTOR * spread, LEAST * np.abs(own))
    right = bool((np.abs(np.subtract(mine, own)) <= tolerance).all())
    parts = f"{count} convolutions" if where == "operator" else "whole network"
    lines = [f"{name}: {parts}, {STEPS} steps, {BATCH} images of {SIZE} x {SIZE}, rate {NETWORKS[name]:g}"]
    lines += [f"{'step':>4} {'MXNet':>12} {where:>12} {'difference':>12} {'tolerance':>12}"]
    for step, row in enumerate(zip(own, mine, np.abs(np.subtract(mine, own)), tolerance), start=1):
        lines.append(f"{step:4} {row[0]:12.8f} {row[1]:12.8f} {row[2]:12.2e} {row[3]:12.2e}")
    return [*lines, "within the tolerance" if right else "OUT OF the tolerance", ""], right


def main() -> int:
    """Print the tables, write them to a file if asked, and return 1 if a loss is out of the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="train whole networks on the GPU")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    arguments = parser.parse_args()
    mx = mxnet_import.load()
    chip = cuda.chip().name if arguments.gpu else "the CPU"
    lines = [f"MXNet {mx.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {chip}", ""]
    results = [compare(name, "GPU" if arguments.gpu else "operator") for name in NETWORKS]
    text = "\n".join([*lines, *(line for table, _ in results for line in table)])
    print(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if all(right for _, right in results) else 1


if __name__ == "__main__":
    sys.exit(main())
