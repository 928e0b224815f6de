"""Find layers by name, or by sizes and attributes, and draw layers at random."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from ece408_op.problem import COURSE_LAYERS, ITEM_BYTES, ConvProblem

#: Images of the course's data set.
IMAGES = 10_000

#: The most bytes that a random layer writes, and the most FLOP that it computes: about those of the course's layers.
_MOST_BYTES, _MOST_FLOPS = 1 << 30, 100e9

#: The channels, filters and kernel sizes that random layers are drawn from, both ends included.
Ranges = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
RANGES: Ranges = ((2, 32), (8, 64), (3, 9))
_HEIGHTS = (16, 80)


def random_layers(
    count: int, seed: int, ranges: Sequence[Ranges] = (RANGES,), most: int = IMAGES
) -> dict[str, ConvProblem]:
    """Return ``count`` layers by name, drawn from each of the ranges in turn, with at most ``most`` images.

    The same seed gives the same layers on every machine.
    """
    draw = random.Random(seed)
    layers: dict[str, ConvProblem] = {}
    while len(layers) < count:
        channels, filters, kernels = ranges[len(layers) % len(ranges)]
        kernel = draw.randint(*kernels)
        c, h, w, m = (draw.randint(*ends) for ends in (channels, _HEIGHTS, _HEIGHTS, filters))
        one = ConvProblem(1, c, h, w, m, kernel)
        image_bytes = ITEM_BYTES * one.filters * one.output_height * one.output_width
        images = int(min(most, _MOST_BYTES // image_bytes, _MOST_FLOPS // one.flops))
        layers[name_of(one)] = one.with_batch(max(1, images))
    return layers


#: A layer by its sizes, and the letters of its attributes.
_LAYER = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)x(\d+)(?:-(\d+))?((?:[spd]\d+(?:-\d+)?|g\d+)*)")
_ATTRIBUTES = {"s": ("stride", 1), "p": ("pad", 0), "d": ("dilate", 1)}
_EXAMPLE = "CxHxWxMxK such as 3x32x32x16x5, or 96x35x35x96x3s2p1 with a stride and padding"


def name_of(problem: ConvProblem) -> str:
    """Return CxHxWxMxK and the attributes, in the form that ``parse`` reads."""
    name = "x".join(str(n) for n in (problem.channels, problem.height, problem.width, problem.filters, problem.kernel))
    name += _pair((problem.kernel, problem.kernel_width)).removeprefix(str(problem.kernel))
    for letter, (attribute, plain) in _ATTRIBUTES.items():
        value = getattr(problem, attribute)
        name += letter + _pair(value) if value != (plain, plain) else ""
    return name + (f"g{problem.groups}" if problem.groups != 1 else "")


def _pair(value: tuple[int, int]) -> str:
    return str(value[0]) if value[0] == value[1] else f"{value[0]}-{value[1]}"


def parse(word: str, images: int) -> ConvProblem:
    """Return the layer of a name, or of sizes CxHxWxMxK ("3x32x32x16x5"), with ``images`` images.

    For filters of K x L, K is written "1-7"; after it, s, p, d and g give stride, padding, dilation and groups:
    "96x35x35x96x3s2p0-1". Raises ValueError if ``word`` is neither; ProblemError (a ValueError) if no convolution has
    these sizes.
    """
    if word in COURSE_LAYERS:
        return COURSE_LAYERS[word].with_batch(images)
    found = _LAYER.fullmatch(word)
    if not found:
        raise ValueError(f"--layer: expected {', '.join(COURSE_LAYERS)} or {_EXAMPLE}; got {word!r}")
    *sizes, kernel_width, attributes = found.groups()
    given: dict[str, Any] = {"kernel_width": int(kernel_width or 0)}
    for letter, first, second in re.findall(r"([spdg])(\d+)(?:-(\d+))?", attributes):
        pair = int(first), int(second or first)
        given.update({"groups": pair[0]} if letter == "g" else {_ATTRIBUTES[letter][0]: pair})
    channels, height, width, filters, kernel = map(int, sizes)
    return ConvProblem(images, channels, height, width, filters, kernel, **given)


#: Layers by set: the course's; and layers of ResNet, VGG, Inception and MobileNet, which are timed with 128 images.
SETS = {
    "course": list(COURSE_LAYERS),
    "resnet": [
        *("3x224x224x64x7s2p3", "64x56x56x64x1", "64x56x56x64x3p1", "64x56x56x256x1", "256x56x56x64x1"),
        *("256x56x56x128x1s2", "128x28x28x128x3p1", "128x56x56x128x3s2p1", "128x28x28x512x1", "256x14x14x256x3p1"),
        *("512x7x7x512x3p1", "1024x14x14x256x1", "64x224x224x64x3p1", "256x56x56x256x3p1", "512x28x28x512x3p1"),
        *("192x17x17x192x1-7p0-3", "96x35x35x96x3p1", "32x112x112x32x3p1g32", "384x14x14x384x3p1g384"),
        "32x112x112x64x1",
    ],
}
SET_IMAGES = {"course": IMAGES, "resnet": 128}
