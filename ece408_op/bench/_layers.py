"""The layers that the benchmark runs: the course's five, and random ones of about their size."""

from __future__ import annotations

import random
import re

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

#: Channels, filters and kernel sizes that random layers are drawn from, both ends included, as parse_ranges takes them.
RANGES = "C=1-32,M=4-64,K=2-9"
_HEIGHTS = (16, 80)

Range = tuple[int, int]


def parse_ranges(word: str) -> tuple[Range, Range, Range]:
    """The ranges of channels, filters and kernel sizes in a word such as "C=1-32,M=4-64,K=2-9"; else ValueError."""
    found = re.fullmatch(r"C=(\d+)-(\d+),M=(\d+)-(\d+),K=(\d+)-(\d+)", word)
    ends = [int(end) for end in found.groups()] if found else []
    ranges = [(low, high) for low, high in zip(ends[::2], ends[1::2]) if 1 <= low <= high]
    if len(ranges) != 3 or ranges[2][1] > _HEIGHTS[0]:
        raise ValueError(f"ranges: expected a word like {RANGES}, K at most {_HEIGHTS[0]}; got {word!r}")
    return ranges[0], ranges[1], ranges[2]


def random_layers(count: int, seed: int, ranges: str = RANGES) -> dict[str, ConvProblem]:
    """``count`` layers, named by their sizes C x H x W x M x K; as many images as keep to the five's size.

    The same seed gives the same layers everywhere. Raises ValueError where the ranges are none.
    """
    channels, filters, kernels = parse_ranges(ranges)
    draw = random.Random(seed)
    layers: dict[str, ConvProblem] = {}
    while len(layers) < count:
        kernel = draw.randint(*kernels)
        one = ConvProblem(
            1, draw.randint(*channels), draw.randint(*_HEIGHTS), draw.randint(*_HEIGHTS), draw.randint(*filters), kernel
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
