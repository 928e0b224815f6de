"""The decomposition of filters for ``winograd``, and a layer's tiling by a cost model. No code is generated here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from ece408_op.core.kernel import sum_bound
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.launch import ceil_div, round_up

from ._direct_plan import LATENCY, PER_CYCLE, fastest_tiling, tile_sizes, total_cycles
from ._ir import LINE_FLOATS, Partition, packed, whole_lines

#: The transposed rows per channel of the image that are kept: the number of rows that a form covers.
RAW_ROWS = 4

#: Terms of a sum, as (position, sign) pairs.
Terms = tuple[tuple[int, int], ...]

#: Classes of products along an axis, by the outputs that they belong to: see ``_winograd_code.outputs``.
FIRST, SECOND, BOTH, OPPOSITE = "first", "second", "both", "opposite"


@dataclass(frozen=True)
class Slot:
    """One product of two neighbouring outputs of one row (or column), y[2 i] and y[2 i + 1].

    Its input is ``Cut.forms[form]`` at position ``2 (i + shift)``; its weight is the sum of the filter's taps times
    ``factors``.
    """

    family: str
    form: int
    shift: int
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Cut:
    """A filter's K taps in groups of three, two and one, which take 4, 3 and 2 products for two outputs.

    ``forms`` are the sums of inputs that products need: form f at position s is the sum of sign * x[s + position] over
    its terms.
    """

    groups: tuple[int, ...]
    forms: tuple[Terms, ...]
    slots: tuple[Slot, ...]

    @property
    def shifts(self) -> int:
        """The largest shift."""
        return max(slot.shift for slot in self.slots)

    @property
    def reach(self) -> int:
        """The farthest position of a form."""
        return max(position for form in self.forms for position, _ in form)

    def family(self, name: str) -> list[int]:
        """Return the numbers of the slots of one class."""
        return [number for number, slot in enumerate(self.slots) if slot.family == name]


def _products(group: int, at: int) -> list[tuple[str, dict[int, int], dict[int, float]]]:
    """Return (class, inputs with their signs, taps with their factors) of each product of taps at, at + 1, ...

    This is the Toom-Cook algorithm at the points 0, 1, infinity and, for three taps, -1: the smallest points, whose
    sums cancel least. For two outputs, three taps give Winograd's F(2, 3), two taps Karatsuba's products.
    """
    zero, one, two, three = range(at, at + 4)
    if group == 1:
        return [(FIRST, {zero: 1}, {zero: 1}), (SECOND, {one: 1}, {zero: 1})]
    if group == 2:
        return [
            (FIRST, {zero: 1, one: -1}, {zero: 1}),
            (BOTH, {one: 1}, {zero: 1, one: 1}),
            (SECOND, {two: 1, one: -1}, {one: 1}),
        ]
    half = 0.5
    return [
        (FIRST, {zero: 1, two: -1}, {zero: 1}),
        (BOTH, {one: 1, two: 1}, {zero: half, one: half, two: half}),
        (OPPOSITE, {two: 1, one: -1}, {zero: half, one: -half, two: half}),
        (SECOND, {three: 1, one: -1}, {two: 1}),
    ]


@cache
def make_cut(groups: tuple[int, ...]) -> Cut:
    """Return the products of a filter cut into those groups."""
    kernel, at = sum(groups), 0
    forms: list[Terms] = []
    slots = []
    for group in groups:
        for family, inputs, taps in _products(group, at):
            shift = min(inputs) // 2
            first = inputs[min(inputs)]
            terms = tuple(sorted((position - 2 * shift, sign * first) for position, sign in inputs.items()))
            if terms not in forms:
                forms.append(terms)
            factors = tuple(first * taps.get(tap, 0.0) for tap in range(kernel))
            slots.append(Slot(family, forms.index(terms), shift, factors))
        at += group
    return Cut(groups, tuple(forms), tuple(slots))


def _stride(floats: int) -> int:
    """Return a stride of at least ``floats``; a multiple of many cache lines would use only a few cache sets."""
    return floats + LINE_FLOATS * (floats % (4 * LINE_FLOATS) == 0)


class WinogradPlan:
    """The tiling of one layer, for vectors of ``lanes`` images.

    blocks         filters per block
    tiles          neighbouring pairs of columns per tile
    rows, columns  pairs of output rows (the last pair may have only one row), pairs of output columns
    ring           rows of inputs that a pair of output rows needs
    wide           pairs of columns of inputs
    raw_width      columns of the image that forms read: more than the image has
    rows_together  whether the outputs of two rows are contiguous, as in y: no column is left out
    classes        the classes of products, down and across, in the order of their computation
    product_count  products per channel for two by two outputs
    values_seen    values of an image that are transposed, some of them twice
    offsets        the offset of each part of a thread's scratch, in floats; "end" is the size of the scratch

    The inputs are [row of a ring][form down][form across][pair of columns][channel][image], where a row stands for two
    output rows; ``pair_stride``, ``form_stride`` (of a form across) and ``row_stride`` are their strides.
    ``output_row_stride`` is the floats between rows of outputs, ``output_stride`` those between filters' outputs of two
    rows. The sums are [filter of a block][class][pair of columns of a tile][image]; ``sum_stride`` and
    ``class_stride`` are their strides.
    """

    def __init__(self, layer: ConvProblem, lanes: int, cut: Cut, blocks: Partition, tiles: Partition) -> None:
        self.layer, self.lanes, self.cut, self.blocks, self.tiles = layer, lanes, cut, blocks, tiles
        self.rows, self.columns = ceil_div(layer.output_height, 2), ceil_div(layer.output_width, 2)
        self.ring, self.wide = cut.shifts + 1, self.columns + cut.shifts
        self.pair_stride = _stride(layer.channels * lanes)
        self.form_stride = _stride(self.wide * self.pair_stride)
        self.row_stride = len(cut.forms) ** 2 * self.form_stride
        self.raw_width = 2 * self.wide + cut.reach
        self.rows_together = layer.output_width % 2 == 0
        self.output_row_stride, self.output_stride = 2 * self.columns * lanes, (4 * self.columns + 1) * lanes
        families = [name for name in (FIRST, BOTH, OPPOSITE, SECOND) if cut.family(name)]
        self.classes = list(product(families, repeat=2))
        self.class_stride = tiles[0][0] * lanes
        self.sum_stride = _stride(len(self.classes) * self.class_stride)
        self.product_count = len(cut.slots) ** 2
        rows_seen = 2 * (self.rows + self.ring - 2) + cut.reach + 1
        self.values_seen = layer.channels * rows_seen * round_up(layer.width, lanes)
        self.offsets = self._offsets()

    def _offsets(self) -> dict[str, int]:
        filters, lanes = self.layer.filters, self.lanes
        sizes = {
            "table": 2 * self.product_count,
            "raw": RAW_ROWS * self.layer.channels * self.raw_width * lanes,
            "y": filters * self.output_stride,
            "sums": self.blocks[0][0] * self.sum_stride,
            "ring": self.ring * self.row_stride,
        }
        found, end = {}, 0
        for name, size in sizes.items():
            found[name] = end
            end += whole_lines(size)
        return {**found, "end": end}

    def products(self, down: str, across: str) -> list[tuple[int, int]]:
        """Return the (slot down, slot across) indices of a class's products, in order."""
        return list(product(self.cut.family(down), self.cut.family(across)))

    @property
    def cycles(self) -> float:
        """Predicted cycles for ``lanes`` images on a Zen 3.

        The terms are products; loads and stores of a class's sums; forms, which are stored in L2; the transposition of
        outputs. Each was fitted to times of the code with some of these parts removed.
        """
        channels, filters = self.layer.channels, self.layer.filters
        products = self.product_count * channels * total_cycles(self.blocks, self.tiles, _tile_cycles) / self.columns
        sums = 4.3 * len(self.classes) * filters
        inputs = 4 * len(self.cut.forms) ** 2 * channels * self.wide / self.columns
        return self.rows * self.columns * (products + sums + inputs + 17 * filters)

    @property
    def plain_cycles(self) -> float:
        """Predicted cycles of ``direct``: a tenth more than those of its multiply-adds."""
        return 1.11 * self.layer.flops / 2 / PER_CYCLE

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch per thread."""
        return ITEM_BYTES * self.offsets["end"]


def _cuts(kernel: int) -> set[tuple[int, ...]]:
    """Return the cuts of the K taps of a row into groups: twos, and threes."""
    threes, rest = divmod(kernel, 3)
    in_threes = (3,) * (threes - 1) + (2, 2) if rest == 1 and threes else (3,) * threes + (rest,) * (rest > 0)
    return {(2,) * (kernel // 2) + (1,) * (kernel % 2), in_threes}


def _tile_cycles(filters: int, pairs: int) -> float:
    """Return the cycles for one product of a tile."""
    return max(filters * pairs / PER_CYCLE, (filters + pairs) / PER_CYCLE, LATENCY) + (filters + pairs) / 16


def make_plan(layer: ConvProblem, lanes: int, registers: int) -> WinogradPlan:
    """Return the fastest predicted tiling for vectors of ``lanes`` images and ``registers`` vector registers."""
    columns = ceil_div(layer.output_width, 2)
    # Registers: one per sum, one per vector of inputs, and one for a weight.
    blocks, tiles = fastest_tiling(layer.filters, columns, tile_sizes(registers, 1), _tile_cycles)
    plans = [WinogradPlan(layer, lanes, make_cut(groups), blocks, tiles) for groups in sorted(_cuts(layer.kernel))]
    return min(plans, key=lambda plan: plan.cycles)


def magnitude_matrix(groups: tuple[int, ...]) -> np.ndarray:
    """Return (K, K): how often, at most, |w[column]| occurs in the products of an input under tap ``row``."""
    cut = make_cut(groups)
    kernel = sum(groups)
    found = np.zeros((2, kernel, kernel))
    for output, families in enumerate(((FIRST, BOTH, OPPOSITE), (SECOND, BOTH, OPPOSITE))):
        for slot in cut.slots:
            for position, _ in cut.forms[slot.form]:
                tap = 2 * slot.shift + position - output
                if slot.family in families:
                    found[output, tap] += np.abs(slot.factors)
    return found.max(axis=0)


def magnitude_weights(w: np.ndarray) -> np.ndarray:
    """Return weights (M, C, K, K), float64: the sum of |x| times them bounds the sum of |products| of an output."""
    matrices = [magnitude_matrix(groups) for groups in sorted(_cuts(w.shape[-1]))]
    return np.maximum.reduce([matrix @ np.abs(w.astype(np.float64)) @ matrix.T for matrix in matrices])


def bound(problem: ConvProblem) -> float:
    """Return the largest |y - exact| as a share of the sum of |x| times ``magnitude_weights``.

    A class has less than half of a plain sum's products. Besides the class's additions, each product takes part in
    seven roundings: two of its input, one of its weight, four when classes are added (N. Higham, Accuracy and Stability
    of Numerical Algorithms, section 3.1).
    """
    return sum_bound(problem.products + 6)


def packed_weights(plan: WinogradPlan, w: np.ndarray) -> np.ndarray:
    """Return the weights, shape (M, C, K, K), as [block][product][channel][filter], flat; rounded once, from float64.

    Values too large for float32 become infinite.
    """
    layer, kernel = plan.layer, plan.layer.kernel
    factors = np.array([slot.factors for slot in plan.cut.slots])
    taps = w.transpose(2, 3, 1, 0).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        down = (factors @ taps.reshape(kernel, -1)).reshape(len(factors), kernel, -1)
        combined = np.matmul(factors, down).astype(np.float32)  # (slots down, slots across, C M)
    pairs = [pair for families in plan.classes for pair in plan.products(*families)]
    ordered = combined[tuple(zip(*pairs))]  # (products, C M)
    return np.ascontiguousarray(packed(plan.blocks, ordered.reshape(-1, layer.filters).T))
