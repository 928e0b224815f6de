"""Layers by name, by their sizes, and at random."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ece408_op.problem import COURSE_LAYERS, ITEM_BYTES, ConvProblem

#: Images of the course's data set.
IMAGES = 10_000

#: The most that a random layer writes, and computes: about what the course's layers do.
_MOST_BYTES, _MOST_FLOPS = 1 << 30, 100e9

#: Channels, filters and kernel sizes that random layers are drawn from, both ends included.
RANGES = "C=1-32,M=4-64,K=2-9"
_HEIGHTS = (16, 80)

Range = tuple[int, int]


def parse_ranges(word: str) -> tuple[Range, Range, Range]:
    """The ranges of channels, filters and kernel sizes in a word such as "C=1-32,M=4-64,K=2-9"; else ValueError."""
    found = re.fullmatch(r"C=(\d+)-(\d+),M=(\d+)-(\d+),K=(\d+)-(\d+)", word)
    ends = [int(end) for end in found.groups()] if found else []
    ranges = [(low, high) for low, high in zip(ends[::2], ends[1::2]) if 1 <= low <= high]
    if len(ranges) != 3 or ranges[2][1] > _HEIGHTS[0]:
        raise ValueError(f"--ranges: expected a word like {RANGES}, K at most {_HEIGHTS[0]}; got {word!r}")
    return ranges[0], ranges[1], ranges[2]


def random_layers(
    count: int, seed: int, ranges: Sequence[str] = (RANGES,), most: int = IMAGES
) -> dict[str, ConvProblem]:
    """``count`` layers by name, drawn from each of the ranges in turn, with at most ``most`` images.

    The same seed gives the same layers everywhere. Raises ValueError for a word that is no range.
    """
    parsed = [parse_ranges(word) for word in ranges]
    draw = random.Random(seed)
    layers: dict[str, ConvProblem] = {}
    while len(layers) < count:
        channels, filters, kernels = parsed[len(layers) % len(parsed)]
        kernel = draw.randint(*kernels)
        one = ConvProblem(
            1, draw.randint(*channels), draw.randint(*_HEIGHTS), draw.randint(*_HEIGHTS), draw.randint(*filters), kernel
        )
        image_bytes = ITEM_BYTES * one.filters * one.output_height * one.output_width
        images = int(min(most, _MOST_BYTES // image_bytes, _MOST_FLOPS // one.flops))
        layers[name_of(one)] = one.with_batch(max(1, images))
    return layers


def name_of(problem: ConvProblem) -> str:
    """CxHxWxMxK, as parse takes it."""
    return "x".join(str(n) for n in (problem.channels, problem.height, problem.width, problem.filters, problem.kernel))


def parse(word: str, images: int) -> ConvProblem:
    """A layer by its name, or by its sizes CxHxWxMxK ("3x32x32x16x5"), with that many images.

    Raises ValueError where the word is neither; ProblemError (a ValueError) where no convolution has these sizes.
    """
    if word in COURSE_LAYERS:
        return COURSE_LAYERS[word].with_batch(images)
    sizes = word.split("x")
    if len(sizes) != 5 or not all(size.isdecimal() for size in sizes):
        names = ", ".join(COURSE_LAYERS)
        raise ValueError(f"--layer: expected {names} or CxHxWxMxK such as 3x32x32x16x5, got {word!r}")
    channels, height, width, filters, kernel = map(int, sizes)
    return ConvProblem(images, channels, height, width, filters, kernel)
