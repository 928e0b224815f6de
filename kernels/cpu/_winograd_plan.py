"""How ``winograd`` cuts a filter, and a layer, into what its code runs through. No code is made here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from ece408_op.core.kernel import EPS32
from ece408_op.problem import ITEM_BYTES, ConvProblem

from ._direct_plan import LATENCY, LINE_FLOATS, PER_CYCLE, Pieces, share_out

#: Terms of a sum, as (place, sign) pairs.
Terms = tuple[tuple[int, int], ...]

#: Classes of products, by the outputs that they belong to: y0 = a + c + d, y1 = b + c - d.
FIRST, SECOND, BOTH, OPPOSITE = "abcd"


@dataclass(frozen=True)
class Slot:
    """One product of two neighbouring outputs of one row (or column), y[2 i] and y[2 i + 1].

    Its input is form number ``form`` (see ``Cut.forms``) of place ``2 (i + shift)``; its weight is the sum of the
    filter's taps times ``factors``.
    """

    family: str
    form: int
    shift: int
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Cut:
    """A filter's K taps in groups of three, two and one, of which each makes 4, 3 or 2 products for two outputs.

    ``forms`` are what inputs are added up to: form f of place s is the sum of sign * x[s + place] over its terms.
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
        """The farthest place of a form."""
        return max(place for form in self.forms for place, _ in form)

    def family(self, name: str) -> list[int]:
        """The numbers of the slots of one class."""
        return [number for number, slot in enumerate(self.slots) if slot.family == name]


def _products(group: int, at: int) -> list[tuple[str, dict[int, int], dict[int, float]]]:
    """(class, inputs with their signs, taps with their factors) of each product of taps at, at + 1, ...

    Toom's and Cook's algorithm at the points 0, 1 (for three taps -1) and infinity: the smallest, whose sums cancel
    least. For two outputs of three taps it is Winograd's F(2, 3), for two Karatsuba's.
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
    """The products of a filter cut into those groups."""
    kernel, at = sum(groups), 0
    forms: list[Terms] = []
    slots = []
    for group in groups:
        for family, inputs, taps in _products(group, at):
            shift = min(inputs) // 2
            first = inputs[min(inputs)]
            terms = tuple(sorted((place - 2 * shift, sign * first) for place, sign in inputs.items()))
            if terms not in forms:
                forms.append(terms)
            factors = tuple(first * taps.get(tap, 0.0) for tap in range(kernel))
            slots.append(Slot(family, forms.index(terms), shift, factors))
        at += group
    return Cut(groups, tuple(forms), tuple(slots))


@dataclass(frozen=True)
class Step:
    """One class of products down and one across, of all channels: their sum, what it begins with, where it goes.

    ``begin`` and ``add`` are sums of earlier steps, or None; the result goes to ``to``; where there is a ``less``,
    what it gets is ``add`` less than the sum instead of more. "y00" to "y11" are the four outputs.
    """

    down: str
    across: str
    begin: str | None
    add: str | None
    to: str
    less: str | None = None

    @property
    def last(self) -> bool:
        """The result is an output."""
        return self.to.startswith("y")


def make_steps(opposite: bool) -> tuple[Step, ...]:
    """All steps, in an order in which each sum goes on from one before it; ``opposite``: there is such a class."""
    steps = []
    for down in (OPPOSITE, BOTH, FIRST, SECOND)[not opposite :]:
        if opposite:
            steps += [Step(down, OPPOSITE, None, None, "other"), Step(down, BOTH, None, "other", "even", "odd")]
        else:
            steps += [Step(down, BOTH, None, None, "even")]
        for column, (across, begin) in enumerate(((FIRST, "even"), (SECOND, "odd" if opposite else "even"))):
            if down == OPPOSITE:
                steps.append(Step(down, across, begin, None, f"opposite{column}"))
            elif down == BOTH and opposite:
                steps.append(Step(down, across, begin, f"opposite{column}", f"upper{column}", f"lower{column}"))
            elif down == BOTH:
                steps.append(Step(down, across, begin, None, f"upper{column}"))
            else:
                both = f"{'upper' if down == FIRST or not opposite else 'lower'}{column}"
                steps.append(Step(down, across, begin, both, f"y{int(down == SECOND)}{column}"))
    return tuple(steps)


def _apart(floats: int) -> int:
    """A stride of at least so many floats: those of many cache lines would all fall into the same few sets."""
    return floats + LINE_FLOATS * (floats % (4 * LINE_FLOATS) == 0)


@dataclass(frozen=True)
class WinogradPlan:
    """The cut of one layer for vectors of as many images as there are ``lanes``.

    ``blocks`` and ``tiles`` are (size, count) pairs, larger ones first: filters in a block, and in a tile the
    neighbouring pairs of columns. Of inputs, a row stands for two rows of the image and K - 1 more that their outputs
    need: [row of a ring][form down][form across][pair of columns][channel][image].
    """

    layer: ConvProblem
    lanes: int
    cut: Cut
    blocks: Pieces
    tiles: Pieces

    @property
    def rows(self) -> int:
        """Pairs of output rows; of the last, one may not be there."""
        return -(-self.layer.output_height // 2)

    @property
    def columns(self) -> int:
        """Pairs of output columns."""
        return -(-self.layer.output_width // 2)

    @property
    def ring(self) -> int:
        """Rows of inputs that a row of outputs needs."""
        return self.cut.shifts + 1

    @property
    def wide(self) -> int:
        """Pairs of columns of inputs."""
        return self.columns + self.cut.shifts

    @property
    def pair_stride(self) -> int:
        """Floats from the inputs of a pair of columns, of all channels, to those of the next."""
        return _apart(self.layer.channels * self.lanes)

    @property
    def form_stride(self) -> int:
        """Floats from one form across to the next."""
        return _apart(self.wide * self.pair_stride)

    @property
    def row_stride(self) -> int:
        """Floats of a row of the ring."""
        return len(self.cut.forms) ** 2 * self.form_stride

    @property
    def raw_width(self) -> int:
        """Columns of the image that forms reach to: more than it has."""
        return 2 * self.wide + self.cut.reach

    @property
    def rows_together(self) -> bool:
        """The outputs of two rows lie one after the other, as they do in y: no column is left out."""
        return self.layer.output_width % 2 == 0

    @property
    def output_row_stride(self) -> int:
        """Floats from the outputs of a row to those of the next."""
        return 2 * self.columns * self.lanes

    @property
    def output_stride(self) -> int:
        """Floats from one filter's outputs of two rows to the next's."""
        return (4 * self.columns + 1) * self.lanes

    @property
    def sum_stride(self) -> int:
        """Floats from one filter's sums between two steps to the next's."""
        return (self.tiles[0][0] | 1) * self.lanes

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What is summed up, in order."""
        return make_steps(bool(self.cut.family(OPPOSITE)))

    def products(self, step: Step) -> list[tuple[Slot, Slot]]:
        """The slots down and across of a step's products, in order."""
        down, across = (self.cut.family(name) for name in (step.down, step.across))
        return [(self.cut.slots[i], self.cut.slots[j]) for i in down for j in across]

    @property
    def product_count(self) -> int:
        """Products of a channel for two by two outputs."""
        return len(self.cut.slots) ** 2

    @property
    def values_seen(self) -> int:
        """Values of an image that are turned, some of them twice."""
        rows = 2 * (self.rows + self.ring - 2) + self.cut.reach + 1
        return self.layer.channels * rows * -(-self.layer.width // self.lanes) * self.lanes

    @property
    def cycles(self) -> float:
        """About how many cycles as many images as there are lanes take, on a Zen 3.

        Fitted to times with the parts left out one by one: a step begins and ends with its sums; what inputs are added
        up to is stored in the second-level cache; outputs are turned.
        """
        channels, filters = self.layer.channels, self.layer.filters
        products = self.product_count * channels * _tile_cycles(self.blocks, self.tiles) / self.columns
        steps = 4.3 * len(self.steps) * filters
        inputs = 4 * len(self.cut.forms) ** 2 * channels * self.wide / self.columns
        return self.rows * self.columns * (products + steps + inputs + 17 * filters)

    @property
    def plain_cycles(self) -> float:
        """The same of ``direct``, which takes a tenth more than its multiply-adds do."""
        return 1.11 * self.layer.flops / 2 / PER_CYCLE

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a thread's scratch."""
        return ITEM_BYTES * self.places["end"]

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each part of a thread's scratch begins, in floats, and under "end" what all take."""
        filters, lanes = self.layer.filters, self.lanes
        sums = sorted({name for step in self.steps for name in (step.to, step.less) if name and name[0] != "y"})
        sizes = {
            "table": 2 * self.product_count,
            "raw": 4 * self.layer.channels * self.raw_width * lanes,
            "y": filters * self.output_stride,
            **dict.fromkeys(sums, filters * self.sum_stride),
            "ring": self.ring * self.row_stride,
        }
        found, place = {}, 0
        for name, size in sizes.items():
            found[name] = place
            place += -(-size // LINE_FLOATS) * LINE_FLOATS
        return {**found, "end": place}


def _cuts(kernel: int) -> set[tuple[int, ...]]:
    """How the K taps of a row may be cut: in twos, or in threes."""
    threes, rest = divmod(kernel, 3)
    in_threes = (3,) * (threes - 1) + (2, 2) if rest == 1 and threes else (3,) * threes + (rest,) * (rest > 0)
    return {(2,) * (kernel // 2) + (1,) * (kernel % 2), in_threes}


def _tile_cycles(blocks: Pieces, tiles: Pieces) -> float:
    """Cycles for one product of a row of pairs, of all filters."""
    total = 0.0
    for filters, many in blocks:
        for pairs, times in tiles:
            tap = max(filters * pairs / PER_CYCLE, (filters + pairs) / PER_CYCLE, LATENCY)
            total += many * times * (tap + (filters + pairs) / 16)
    return total


@cache
def make_plan(layer: ConvProblem, lanes: int, registers: int) -> WinogradPlan:
    """The cheapest cut for vectors of ``lanes`` images and that many registers."""
    columns = -(-layer.output_width // 2)
    # A register for each sum and for each vector of inputs, and one for a weight.
    sizes = [(f, p) for f in range(1, registers) for p in range(1, registers) if f * p + p + 1 <= registers]
    shapes = [(share_out(layer.filters, f), share_out(columns, p)) for f, p in sizes]
    blocks, tiles = min(shapes, key=lambda shape: _tile_cycles(*shape))
    plans = [WinogradPlan(layer, lanes, make_cut(groups), blocks, tiles) for groups in sorted(_cuts(layer.kernel))]
    return min(plans, key=lambda plan: plan.cycles)


def _spread(groups: tuple[int, ...]) -> np.ndarray:
    """(K, K): how often, at most, |w[column]| is in the products that a value under tap ``row`` is in."""
    cut = make_cut(groups)
    kernel = sum(groups)
    found = np.zeros((2, kernel, kernel))
    for output, families in enumerate(((FIRST, BOTH, OPPOSITE), (SECOND, BOTH, OPPOSITE))):
        for slot in cut.slots:
            for place, _ in cut.forms[slot.form]:
                tap = 2 * slot.shift + place - output
                if slot.family in families:
                    found[output, tap] += np.abs(slot.factors)
    return found.max(axis=0)


def magnitude_weights(w: np.ndarray) -> np.ndarray:
    """Weights (M, C, K, K), float64, for which the sum of |x| times them bounds what is added up for an output."""
    return np.maximum.reduce(
        [spread @ np.abs(w.astype(np.float64)) @ spread.T for spread in map(_spread, sorted(_cuts(w.shape[-1])))]
    )


def bound(problem: ConvProblem) -> float:
    """The largest |y - exact| as a share of the sum of |x| times ``magnitude_weights`` weights.

    Each product passes no more sums than a plain one would, and a few roundings before and behind them: two of its
    input, one of its weight, three where classes are added up (N. Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1).
    """
    n = problem.products + 6
    return n * EPS32 / (1 - n * EPS32)


def packed_weights(plan: WinogradPlan, w: np.ndarray) -> np.ndarray:
    """The weights, shape (M, C, K, K), as [block][product][channel][filter], flat; rounded once, from float64.

    What is too large for a float32 becomes an infinity.
    """
    layer, kernel = plan.layer, plan.layer.kernel
    factors = np.array([slot.factors for slot in plan.cut.slots])
    taps = w.transpose(2, 3, 1, 0).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        down = (factors @ taps.reshape(kernel, -1)).reshape(len(factors), kernel, -1)
        combined = np.matmul(factors, down).astype(np.float32)  # (slots down, slots across, C M)
    places = {id(slot): place for place, slot in enumerate(plan.cut.slots)}
    pairs = [(places[id(one)], places[id(other)]) for step in plan.steps for one, other in plan.products(step)]
    ordered = combined[tuple(zip(*pairs))].reshape(len(pairs), layer.channels, layer.filters)
    packed, start, first = np.empty(ordered.size, np.float32), 0, 0
    for filters, count in plan.blocks:
        last = first + filters * count
        stop = start + ordered[:, :, first:last].size
        blocked = ordered[:, :, first:last].reshape(len(pairs), layer.channels, count, filters)
        packed[start:stop].reshape(count, len(pairs), layer.channels, filters)[...] = blocked.transpose(2, 0, 1, 3)
        start, first = stop, last
    return packed
