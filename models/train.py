"""Train the networks on the real training set of Fashion-MNIST.

Adam (Kingma and Ba, 2015) through MXNet's own Convolution, the learning rate falling to zero along a cosine,
images mirrored and shifted at random. The networks take raw pixels, 0 to 255, while training sees them divided
by 255: the weights written have that division folded into the first layer.

The weights kept are those after the last epoch, rounded to half precision; the test set chooses nothing, save
that ece408-low's number of images was picked for its low accuracy. The seed fixes first weights, order and
shifts; another processor or number of threads rounds sums differently and gives weights of the same quality,
not the same weights.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ece408_op.data import TrainingSet, load_training
from ece408_op.data.atomic import replacing
from ece408_op.errors import Ece408Error, GraphError
from ece408_op.graph import params_io
from ece408_op.plugin import mxnet_import

from .build import NETWORKS, graph
from .files import FOLDER
from .shapes import load_symbol, with_convolutions

PIXEL_MAX = 255.0

#: Adam's decay rates, of the gradients' mean and of their mean square.
BETA1, BETA2 = 0.9, 0.999


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, on the first `images` of the training set; `rate` is the first learning rate."""

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


def first_weights(shapes: Mapping[str, tuple[int, ...]], random: np.random.RandomState) -> dict[str, np.ndarray]:
    """Glorot and Bengio's uniform weights (2010) and biases of zero, in float32."""
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("_bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            bound = math.sqrt(6.0 / ((shape[0] + shape[1]) * math.prod(shape[2:])))
            weights[name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return weights


def augmented(images: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Images (B, S, S), uint8: half of them mirrored, each shifted by up to S // 28 pixels, zeros moving in."""
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


class Trainer:
    """One network's training, from its first epoch or from where its checkpoint stands.

    data: images (N, 1, S, S) of uint8 and labels (N,). Raises GraphError where the checkpoint is broken or was
    made by another recipe.
    """

    def __init__(self, name: str, recipe: Recipe, data: TrainingSet, checkpoint: Path) -> None:
        """Bind the network, with its first weights or with the checkpoint's where there is one."""
        self.mx = mxnet_import.load()
        self.name, self.recipe, self.checkpoint = name, recipe, checkpoint
        self.images, self.labels = data.images[: recipe.images, 0], data.labels[: recipe.images]
        symbol = load_symbol(with_convolutions(graph(NETWORKS[name]), name), Path(name))
        trained = [argument for argument in symbol.list_arguments() if argument not in ("data", "softmax_label")]
        self.executor = symbol.simple_bind(
            self.mx.cpu(),
            grad_req={argument: "write" if argument in trained else "null" for argument in symbol.list_arguments()},
            data=(recipe.batch, 1, *self.images.shape[1:]),
            softmax_label=(recipe.batch,),
        )
        self.epoch = 0
        self.state = {
            kind: {argument: self.mx.nd.zeros(self.executor.arg_dict[argument].shape) for argument in trained}
            for kind in ("mean", "square")
        }
        self.state["weight"] = {argument: self.executor.arg_dict[argument] for argument in trained}
        shapes = {argument: weight.shape for argument, weight in self.state["weight"].items()}
        for argument, value in first_weights(shapes, np.random.RandomState(recipe.seed)).items():
            self.state["weight"][argument][:] = value
        if checkpoint.is_file():
            self._resume()

    def run(self) -> None:
        """Train to the last epoch. After each, the checkpoint holds weights, Adam's means and the epochs done."""
        while self.epoch < self.recipe.epochs:
            share = self._one_epoch()
            self.epoch += 1
            self._save()
            print(f"{self.name}: epoch {self.epoch}, {share:.4f} right while training", file=sys.stderr)

    def export(self, folder: Path) -> Path:
        """Write NAME-EPOCHS.params in half precision, for raw pixels; returns its path."""
        weights = {name: weight.asnumpy() for name, weight in self.state["weight"].items()}
        first = next(iter(weights))
        weights[first] = weights[first] / np.float32(PIXEL_MAX)
        path = folder / f"{self.name}-{self.epoch:04d}.params"
        halves = {f"arg:{name}": weight.astype(np.float16) for name, weight in weights.items()}
        with replacing(path) as file:
            file.write(params_io.write(halves, str(path)))
        return path

    def _one_epoch(self) -> float:
        """The share of right answers, each given before its image was learnt from."""
        recipe = self.recipe
        steps = len(self.images) // recipe.batch
        # Seeded anew for each epoch, so that a resumed training goes on as one never stopped.
        random = np.random.RandomState([recipe.seed, self.epoch])
        order = random.permutation(len(self.images))
        right = 0
        bar = tqdm(range(steps), desc=f"{self.name} {self.epoch + 1}/{recipe.epochs}", mininterval=1)
        for step in bar:
            chosen = order[step * recipe.batch : (step + 1) * recipe.batch]
            images = augmented(self.images[chosen], random) if recipe.augment else self.images[chosen]
            self.executor.arg_dict["data"][:] = images[:, None].astype(np.float32) / np.float32(PIXEL_MAX)
            self.executor.arg_dict["softmax_label"][:] = self.labels[chosen]
            self.executor.forward(is_train=True)
            self.executor.backward()
            self._update(self.epoch * steps + step, recipe.epochs * steps)
            right += int((self.executor.outputs[0].asnumpy().argmax(axis=1) == self.labels[chosen]).sum())
            bar.set_postfix(right=f"{right / ((step + 1) * recipe.batch):.4f}", refresh=False)
        return right / (steps * recipe.batch)

    def _update(self, step: int, steps: int) -> None:
        rate = self.recipe.rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        rate *= math.sqrt(1 - BETA2 ** (step + 1)) / (1 - BETA1 ** (step + 1))
        for argument, weight in self.state["weight"].items():
            self.mx.nd.adam_update(
                weight,
                self.executor.grad_dict[argument],
                self.state["mean"][argument],
                self.state["square"][argument],
                out=weight,
                lr=rate,
                beta1=BETA1,
                beta2=BETA2,
                rescale_grad=1.0 / self.recipe.batch,
            )

    def _recipe(self) -> np.ndarray:
        return np.array(astuple(self.recipe), np.float64)

    def _save(self) -> None:
        arrays = {"epoch": np.array([self.epoch], np.int64), "recipe": self._recipe()}
        for kind, values in self.state.items():
            arrays.update({f"{kind}:{argument}": value.asnumpy() for argument, value in values.items()})
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.checkpoint) as file:
            file.write(params_io.write(arrays, str(self.checkpoint)))

    def _resume(self) -> None:
        arrays = params_io.read(self.checkpoint.read_bytes(), str(self.checkpoint))
        if not np.array_equal(arrays.get("recipe", np.empty(0)), self._recipe()):
            raise GraphError(f"{self.checkpoint}: expected a checkpoint of {self.recipe}, got another's; remove it")
        self.epoch = int(arrays["epoch"][0])
        for kind, values in self.state.items():
            for argument, value in values.items():
                value[:] = arrays[f"{kind}:{argument}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train the networks named; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ece408_op.models.train",
        description=__doc__,
        epilog="example: ECE408_DATA=/data/fashion-mnist python -m ece408_op.models.train ece408-high",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all of: {', '.join(RECIPES)}")
    parser.add_argument(
        "--state", type=Path, default=Path("build/training"), metavar="FOLDER",
        help="where checkpoints are; a training that was stopped goes on from there (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where weights go (default: models)")
    arguments = parser.parse_args(argv)
    unknown = ", ".join(name for name in arguments.names if name not in RECIPES)
    if unknown:
        parser.error(f"expected names among {', '.join(RECIPES)}; got {unknown}")
    try:
        for name in arguments.names or RECIPES:
            data = load_training(NETWORKS[name].size)
            trainer = Trainer(name, RECIPES[name], data, arguments.state / f"{name}.checkpoint")
            trainer.run()
            print(trainer.export(arguments.out))
    except Ece408Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from ece408_op import commands

    sys.exit(commands.guard("models.train", main))
