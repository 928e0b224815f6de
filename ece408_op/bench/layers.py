"""The layers that the benchmark runs: the course's five, and random ones of about their size."""

from __future__ import annotations

import random

from ece408_op.problem import ITEM_BYTES, ConvProblem

#: Images of the course's data set.
IMAGES = 10_000

#: The convolutions of the course's three networks.
LAYERS = {
    "2017": ConvProblem(IMAGES, 1, 28, 28, 50, 5),
    "2018sp-1": ConvProblem(IMAGES, 1, 64, 64, 6, 5),
    "2018sp-2": ConvProblem(IMAGES, 6, 30, 30, 16, 5),
    "2018fa-1": ConvProblem(IMAGES, 1, 72, 72, 12, 7),
    "2018fa-2": ConvProblem(IMAGES, 12, 33, 33, 24, 7),
}

#: The most that a random layer writes, and computes: about what the five do.
_MOST_BYTES, _MOST_FLOPS = 1 << 30, 100e9


def random_layers(count: int, seed: int) -> dict[str, ConvProblem]:
    """``count`` layers, named by their sizes C x H x W x M x K; as many images as keep to the five's size.

    The same seed gives the same layers everywhere.
    """
    draw = random.Random(seed)
    layers: dict[str, ConvProblem] = {}
    while len(layers) < count:
        kernel = draw.randint(2, 9)
        one = ConvProblem(
            1, draw.randint(1, 32), draw.randint(16, 80), draw.randint(16, 80), draw.randint(4, 64), kernel
        )
        image_bytes = ITEM_BYTES * one.filters * one.output_height * one.output_width
        images = int(min(IMAGES, _MOST_BYTES // image_bytes, _MOST_FLOPS // one.flops))
        layers[name_of(one)] = one.with_batch(max(1, images))
    return layers


def name_of(problem: ConvProblem) -> str:
    """C x H x W x M x K, as parse takes it."""
    return "x".join(str(n) for n in (problem.channels, problem.height, problem.width, problem.filters, problem.kernel))


def parse(word: str, images: int) -> ConvProblem:
    """A layer by its name, or by its sizes C x H x W x M x K ("3x32x32x16x5"), with that many images.

    Raises ValueError where the word is neither; ProblemError (a ValueError) where no convolution has these sizes.
    """
    if word in LAYERS:
        return LAYERS[word].with_batch(images)
    sizes = word.split("x")
    if len(sizes) != 5 or not all(size.isdecimal() for size in sizes):
        raise ValueError(f"layer: expected {', '.join(LAYERS)} or CxHxWxMxK such as 3x32x32x16x5, got {word!r}")
    channels, height, width, filters, kernel = map(int, sizes)
    return ConvProblem(images, channels, height, width, filters, kernel)
