"""The course's networks, and which of them the constants of a submission point to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime.source_text import without_comments

#: channels, height, width, filters, kernel
Layer = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Net:
    """The convolutions of one network, in order."""

    name: str
    layers: tuple[Layer, ...]

    def problems(self, images: int) -> list[ConvProblem]:
        """Each layer's problem for that number of images."""
        return [ConvProblem(images, *layer) for layer in self.layers]


NETS = tuple(
    Net(term, tuple(tuple(layer.sizes.values())[1:] for name, layer in COURSE_LAYERS.items() if name.startswith(term)))
    for term in ("2017", "2018sp", "2018fa")
)

#: Those of 2019, whose sizes the course's scripts and its submissions tell. This project has no weights for them, and
#: most files can do any network: they are tried where a file points to them, or can do none of the others.
LATER = (
    Net("2019sp", ((1, 48, 48, 6, 5), (6, 22, 22, 16, 5))),
    Net("2019fa", ((1, 70, 70, 12, 5), (12, 33, 33, 24, 5))),
)
KNOWN = NETS + LATER
#: The course's terms.
TERMS = {net.name: f"{net.name[:4]} {'spring' if net.name.endswith('sp') else 'fall'}" for net in KNOWN}

#: Sizes that block widths have too, and small numbers that loops have: alone they point nowhere.
_COMMON = frozenset({*range(9), 10, 15, 16, 20, 25, 32, 64, 100, 128, 256, 512, 1000, 1024, 10000})
#: Batch sizes that the course spoke of, to which a file may be tied.
_BATCHES = frozenset({10, 100, 500, 1000, 2000, 5000, 10000})
#: A whole number, 66.0 and 66.f too.
_NUMBER = re.compile(r"(?<![\w.])(\d{1,9})(?:\.0*f?)?(?![\w.])")
_PRODUCT = re.compile(r"(?<![\w.])\d{1,9}(?: {0,4}\* {0,4}\d{1,9}){1,7}(?![\w.])")
#: A name and the number that it stands for. A block's width may be any size less a kernel's: it points nowhere.
_NAMED = re.compile(r"\b([A-Za-z_]\w{0,80})[ \t]{0,8}=?[ \t]{0,8}\d{1,9}\b")
_WIDTH = re.compile(r"TILE|BLOCK|BATCH|STREAM", re.IGNORECASE)


def batches_in(source: str) -> list[int]:
    """The numbers of a C++ file's code that may be a batch size to which it is tied, in order."""
    return sorted(_BATCHES & _numbers(without_comments(source)))


def _numbers(code: str) -> set[int]:
    return {int(text) for text in _NUMBER.findall(code)}


def pointed_to(source: str) -> list[Net]:
    """The networks, those that the file's constants point to most strongly first; empty where they point to none.

    A number points to a network where it is a size, or a product of sizes, of that network and of no other.
    """
    # Without the widths of blocks, and with products such as 24 * 12 * 7 * 7.
    code = _NAMED.sub(lambda one: " " if _WIDTH.search(one[1]) else one[0], without_comments(source))
    found = _numbers(code)
    for chain in _PRODUCT.findall(code):
        factors = [int(factor) for factor in chain.split("*")]
        found |= {prod(factors[i:j]) for i in range(len(factors)) for j in range(i + 2, len(factors) + 1)}
    sizes = {net: set().union(*map(_sizes, net.layers)) - _COMMON for net in KNOWN}
    nets_with = Counter(size for own in sizes.values() for size in own)
    score = {net: sum(nets_with[size] == 1 for size in found & own) for net, own in sizes.items()}
    return sorted(filter(score.get, KNOWN), key=lambda net: -score[net])


def _sizes(layer: Layer) -> set[int]:
    """The numbers that a file for this layer may hold."""
    channels, height, width, filters, kernel = layer
    rows, columns, area = height - kernel + 1, width - kernel + 1, kernel * kernel
    of_w = {area, channels * filters, channels * area, filters * area, filters * channels * area}
    of_y = {rows, columns, rows * columns, columns * filters, filters * rows * columns}
    return {*layer, height * width, channels * height * width} | of_w | of_y
