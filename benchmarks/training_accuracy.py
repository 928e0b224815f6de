"""Train a network of the course on a GPU from new weights, as models/train.py does, and print its accuracy.

python benchmarks/training_accuracy.py ece408-high --out benchmarks/results/training-accuracy-h200.txt

The whole step is on the GPU: gpu_network with gradients="gpu", and gpuadam. Weights, order, shifts, batches and rates
are those of the network's recipe. MXNet's own operators on the CPU then predict the classes of the 10,000 test images.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ece408_op import data  # noqa: E402 - from the checkout
from ece408_op.bench import results  # noqa: E402
from ece408_op.models import files, inference, shapes, train  # noqa: E402


def trained(network: Any, name: str, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the weights after all epochs, for pixels 0 to 1."""
    import mxnet as mx

    import ece408_op

    recipe, known = train.RECIPES[name], data.load_training(shapes.info(files.find(name)).image[1])
    pixels, labels = known.images[: recipe.images, 0], known.labels[: recipe.images]
    sizes = {key: network.arg_params[key].shape for key in network.symbol.list_arguments() if key in network.arg_params}
    first = train.first_weights(sizes, np.random.RandomState(recipe.seed))
    weights = {key: mx.nd.array(value) for key, value in first.items()}
    node, weights, _ = ece408_op.gpu_network(network.symbol, weights, {}, for_training=True, gradients="gpu")
    given = {
        "data": mx.nd.zeros((recipe.batch, 1, *pixels.shape[1:])),
        "softmax_label": mx.nd.zeros((recipe.batch,)),
    }
    gradients = {key: mx.nd.zeros(array.shape) for key, array in weights.items()}
    requests = {key: "write" if key in gradients else "null" for key in (*given, *weights)}
    executor = node.bind(mx.cpu(), {**given, **weights}, gradients, requests)
    adam = mx.optimizer.create("gpuadam", rescale_grad=1.0 / recipe.batch)
    update, numbers = mx.optimizer.get_updater(adam), list(range(len(weights)))
    steps = len(pixels) // recipe.batch
    for epoch in range(recipe.epochs):
        random = np.random.RandomState([recipe.seed, epoch])
        order, right, began = random.permutation(len(pixels)), 0, time.perf_counter()
        for step in range(steps):
            chosen = order[step * recipe.batch : (step + 1) * recipe.batch]
            images = train.augmented(pixels[chosen], random) if recipe.augment else pixels[chosen]
            given["data"][:] = images[:, None].astype(np.float32) / np.float32(train.PIXEL_MAX)
            given["softmax_label"][:] = labels[chosen]
            (scores,) = executor.forward(is_train=True)
            executor.backward()
            done = epoch * steps + step
            adam.set_learning_rate(recipe.rate * 0.5 * (1 + math.cos(math.pi * done / (recipe.epochs * steps))))
            update(numbers, list(gradients.values()), list(weights.values()))
            right += int((scores.asnumpy().argmax(axis=1) == labels[chosen]).sum())
        mx.nd.waitall()
        seconds = time.perf_counter() - began
        report(f"epoch {epoch + 1}: {right / (steps * recipe.batch):.4f} right while training, {seconds:.1f} s")
    return weights


def accuracy(network: Any, weights: dict[str, Any], side: int) -> float:
    """Return the share of the test images that MXNet's own operators put into the right class."""
    import mxnet as mx

    pixels, labels, _ = data.load_test(side, 10_000)
    loaded = inference.Loaded(network.symbol, weights, {})
    scores = inference.bound(loaded, pixels.shape, mx.cpu())(mx.nd.array(pixels / np.float32(train.PIXEL_MAX)))
    return float((scores.asnumpy().argmax(axis=1) == labels).mean())


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=train.RECIPES)
    parser.add_argument("--out", type=Path, help="a file for the output")
    arguments = parser.parse_args()
    network, lines = inference.built_in(files.find(arguments.name)), list[str]()

    def report(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    machine = results.this_machine(gpu=True)
    assert machine.gpu, "this_machine raises without one"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    report(f"python benchmarks/training_accuracy.py {arguments.name}")
    report(f"{machine.gpu.name}, CUDA {machine.gpu.runtime}, {versions}")
    side = shapes.info(files.find(arguments.name)).image[1]
    found = accuracy(network, trained(network, arguments.name, report), side)
    report(f"accuracy on 10,000 test images: {found:.4f}; models/README.md has that of the committed weights")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
