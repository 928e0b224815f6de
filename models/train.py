"""Train the networks on the real training set of Fashion-MNIST.

Training uses ``gpu_network`` on a GPU and the operator ``New`` elsewhere. It uses Adam (Kingma and Ba, 2015), a
learning rate that falls to zero along a cosine, and images that are mirrored and shifted at random. It divides the
pixels by 255; the exported weights include that division in the first layer, so that the networks take raw pixels, 0 to
255.

The exported weights are those after the last epoch, rounded to half precision. The test set selects nothing, except
that the number of training images of ece408-low was chosen for its low accuracy. The seed determines the first weights,
the order of the images and the shifts. On another processor, or with another number of threads, sums are rounded
differently, so the weights differ, with the same quality.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ece408_op.data import TrainingSet, load_training
from ece408_op.data.atomic import output_folder, replacing
from ece408_op.errors import Ece408Error
from ece408_op.graph import params_io
from ece408_op.graph.symbol_graph import Graph
from ece408_op.plugin import bridge, mxnet_import

from .files import FOLDER, find, read_graph
from .shapes import info, load_symbol, with_convolutions

Weights = dict[str, np.ndarray]

PIXEL_MAX = 255.0


@dataclass(frozen=True)
class Recipe:
    """The first `images` of the training set, and how to train on them; `rate` is the initial learning rate."""

    seed: int
    images: int
    epochs: int
    batch: int = 100
    rate: float = 0.001
    augment: bool = True


RECIPES: Mapping[str, Recipe] = {
    "baseline": Recipe(seed=2017, images=60000, epochs=10),
    "ece408-high": Recipe(seed=408, images=60000, epochs=10),
    "ece408-low": Recipe(seed=483, images=32, epochs=30, batch=8, augment=False),
    "ece408-2018sp": Recipe(seed=20181, images=60000, epochs=8),
    "ece408-2018fa": Recipe(seed=20182, images=60000, epochs=6),
}


def first_weights(shapes: Mapping[str, tuple[int, ...]], random: np.random.RandomState) -> Weights:
    """Return Glorot and Bengio's uniform weights (2010) and zero biases, float32, for arrays of these shapes."""
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("_bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            bound = math.sqrt(6.0 / ((shape[0] + shape[1]) * math.prod(shape[2:])))
            weights[name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def augmented(images: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Return uint8 images (B, S, S), half of them mirrored, each shifted by up to S // 28 pixels, zeros moving in."""
    size = images.shape[-1]
    reach = size // 28
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach)))
    mirrored = random.randint(0, 2, len(images))
    shifts = random.randint(0, 2 * reach + 1, (len(images), 2))
    out = np.empty_like(images)
    for i, (row, column) in enumerate(shifts):
        image = padded[i, row : row + size, column : column + size]
        out[i] = image[:, ::-1] if mirrored[i] else image
    return out


def train(
    graph: Graph, recipe: Recipe, data: TrainingSet, name: str = "network", device: str = "cpu"
) -> Iterator[Weights]:
    """Yield the weights of a network's graph, float32 for pixels 0 to 1, before training and after each epoch.

    device: "cpu" computes the convolutions with ``New``; "gpu" computes the whole step. After each epoch, a line on
    stderr has the share of images whose predicted class was right during training.
    """
    mx = mxnet_import.load()
    from ece408_op.graph.api import replace_convolution  # these need MXNet
    from ece408_op.network.api import gpu_network

    images, labels = data.images[: recipe.images, 0], data.labels[: recipe.images]
    built_in = load_symbol(with_convolutions(graph, name), Path(name))
    inputs = {"data": (recipe.batch, 1, *images.shape[1:]), "softmax_label": (recipe.batch,)}
    sizes = dict(zip(built_in.list_arguments(), built_in.infer_shape(**inputs)[0]))
    shapes = {argument: size for argument, size in sizes.items() if argument not in inputs}
    first = first_weights(shapes, np.random.RandomState(recipe.seed))
    weights = {argument: mx.nd.array(value) for argument, value in first.items()}
    if device == "gpu":
        symbol, weights, _ = gpu_network(built_in, weights, {}, for_training=True, gradients="gpu")
    else:
        symbol = replace_convolution(built_in, device=device, renames=False, warn=False).symbol
    given = {argument: mx.nd.zeros(shape) for argument, shape in inputs.items()}
    gradients = {argument: mx.nd.zeros(array.shape) for argument, array in weights.items()}
    executor = symbol.bind(mx.cpu(), {**given, **weights}, gradients)
    adam = mx.optimizer.create("gpuadam" if device == "gpu" else "adam", rescale_grad=1.0 / recipe.batch)
    update = mx.optimizer.get_updater(adam)
    yield {argument: array.asnumpy() for argument, array in weights.items()}
    steps = len(images) // recipe.batch
    for epoch in range(recipe.epochs):
        random = np.random.RandomState([recipe.seed, epoch])
        order = random.permutation(len(images))
        right = 0
        for step in tqdm(range(steps), desc=f"{name} {epoch + 1}/{recipe.epochs}", mininterval=1):
            chosen = order[step * recipe.batch : (step + 1) * recipe.batch]
            pixels = augmented(images[chosen], random) if recipe.augment else images[chosen]
            given["data"][:] = pixels[:, None].astype(np.float32) / np.float32(PIXEL_MAX)
            given["softmax_label"][:] = labels[chosen]
            (scores,) = executor.forward(is_train=True)
            executor.backward()
            done = epoch * steps + step
            adam.set_learning_rate(recipe.rate * 0.5 * (1 + math.cos(math.pi * done / (recipe.epochs * steps))))
            update(list(weights), list(gradients.values()), list(weights.values()))
            right += int((scores.asnumpy().argmax(axis=1) == labels[chosen]).sum())
        print(f"{name}: epoch {epoch + 1}, {right / (steps * recipe.batch):.4f} right while training", file=sys.stderr)
        yield {argument: array.asnumpy() for argument, array in weights.items()}


def export(weights: Weights, path: Path) -> None:
    """Write the weights in half precision, the first layer's for pixels 0 to 255."""
    first = next(iter(weights))
    raw = {**weights, first: weights[first] / np.float32(PIXEL_MAX)}
    halves = {f"arg:{name}": weight.astype(np.float16) for name, weight in raw.items()}
    with replacing(path) as file:
        file.write(params_io.write(halves, str(path)))


def main(argv: Sequence[str] | None = None) -> int:
    """Train the named networks and write NAME-EPOCHS.params for each; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.models.train",
        description=__doc__,
        epilog="example: ECE408_DATA=/data/fashion-mnist python -m ece408_op.models.train ece408-high",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all of: {', '.join(RECIPES)}")
    where: Any = {"type": output_folder, "default": str(FOLDER), "metavar": "FOLDER"}
    parser.add_argument("--out", **where, help="where weights go (default: models)")
    arguments = parser.parse_args(argv)
    unknown = ", ".join(name for name in arguments.names if name not in RECIPES)
    if unknown:
        parser.error(f"expected names among {', '.join(RECIPES)}; got {unknown}")
    device = "gpu" if bridge.gpu_problem("host") is None else "cpu"
    try:
        for name in arguments.names or RECIPES:
            recipe = RECIPES[name]
            network = find(name)
            data = load_training(info(network).image[1])
            *_, weights = train(read_graph(network.symbol), recipe, data, name, device)
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / f"{name}-{recipe.epochs:04d}.params"
            export(weights, path)
            print(path)
    except Ece408Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("models.train", main))
