"""Explain a wrong output: compute the output of each likely mistake, and compare the two element by element.

    explanation = explain(x, w, y, source=text)
    explanation.sentence   "Your output equals the convolution with p and q exchanged in the filter's index"
    explanation.line       31

Where no mistake explains the output, the counts say where the wrong elements are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem

from . import _hypotheses
from ._hypotheses import HALF_SUMS, Case, Hypothesis
from .kernel import EPS32, SMALLEST32, float32_bound
from .source_lines import line_of

#: A hypothesis may leave this share of the wrong elements unexplained, or this many if they are a tenth or less.
_UNEXPLAINED_SHARE, _UNEXPLAINED_COUNT = 0.02, 2
#: A local hypothesis is tried on one image and this many filters first.
_TRIAL_FILTERS = 3
#: A row, column, filter or image counts as not written if this share of its elements was not.
_UNWRITTEN_SHARE = 0.9
#: The share of elements with errors above a float32 sum's usual ones, from which less precision is considered.
_ROUNDED_SHARE = 0.3
#: The share of results that are no whole numbers, from which an output of whole numbers is an int's.
_WHOLE_SHARE = 0.9
#: Behind images that are not written, where the next images are not known.
_MORE = " (and maybe more)"
#: The fewest elements whose errors are averaged.
_SAMPLE_SIZE = 100


#: The mistake's name where the output is right, in less than float32's precision; where it is right if y was 0; where
#: loops and threads go beyond the output; and where no element was written.
ROUNDED, ACCUMULATED, LOOPS, NOTHING_WRITTEN = "rounded", "accumulated", "loops_to_w", "nothing_written"


@dataclass(frozen=True)
class Explanation:
    """The errors of an output (B, M, OH, OW), and the mistake that explains them.

    Attributes:
        wrong: the number of wrong elements, of ``compared``.
        mistake: its name, ROUNDED for an output of less precision; empty if none explains the output.
        sentence: the mistake that explains the output; empty if none does.
        line: the line of the source that makes it, or None if it is not found.
        rest: the number of elements that the mistake does not explain.
        counts: the number of wrong elements at each row and column, (OH, OW).
        images: the number in each image, (B,). filters: the number in each filter, (M,).
        pattern: where in a tile the wrong elements are, if they repeat from tile to tile, or that none was written.
        worst: the index (b, m, i, j) of the element that is farthest from the exact result, got and expected; if some
            written elements are wrong, the farthest of these.
        written: whether that element was written.
    """

    wrong: int
    compared: int
    mistake: str = ""
    sentence: str = ""
    line: int | None = None
    rest: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), int))
    images: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    filters: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    pattern: str = ""
    worst: tuple[tuple[int, ...], float, float] = ((), 0.0, 0.0)
    written: bool = True

    @property
    def summary(self) -> str:
        """The sentence, with the number of elements that it does not explain and the line; empty without a sentence."""
        rest = f" (but for {self.rest} elements)" if self.rest else ""
        return f"{self.sentence}{rest}{f': see line {self.line}' if self.line else ''}"

    def lines(self, rows: int = 12, columns: int = 48) -> list[str]:
        """Return the explanation as lines of text: the sentence, or a map of at most rows x columns characters."""
        if not self.wrong:
            return []
        index, got, expected = self.worst
        share = 100 * self.wrong / max(1, self.compared)
        head = f"{self.wrong} of {self.compared} elements are wrong ({share:.3g} %), the worst is y{list(index)}: "
        found = [f"{head}{f'got {got:.6g}' if self.written else 'not written'}, expected {expected:.6g}"]
        if self.sentence:
            return [*found, f"{self.summary}."]
        found += [self.pattern] if self.pattern else []
        found += [text for text in (_only("image", self.images), _only("filter", self.filters)) if text]
        drawn = self.map(rows, columns)
        if set("".join(drawn)) == {"9"}:
            return [*found, "The wrong elements are everywhere."]
        height, width = (-(-size // most) for size, most in zip(self.counts.shape, (rows, columns)))
        each = f"{height} x {width} elements" if height * width > 1 else "an element"
        legend = f"Each character is {each} of all images and filters: . is right, 1 to 9 are the wrong ninths."
        return [*found, legend, *drawn]

    def map(self, rows: int = 1 << 30, columns: int = 1 << 30) -> list[str]:
        """Return a line per output row and a character per column, of several each where there are more.

        "." is right, 1 to 9 the share that is wrong, over all images and filters.
        """
        height, width = self.counts.shape
        down, across = (max(1, -(-size // most)) for size, most in ((height, rows), (width, columns)))
        each = self.compared // max(1, height * width)

        def character(i: int, j: int) -> str:
            part = self.counts[i : i + down, j : j + across]
            return str(-(-9 * int(part.sum()) // (each * part.size))) if part.any() else "."

        return ["".join(character(i, j) for j in range(0, width, across)) for i in range(0, height, down)]

    def as_data(self) -> dict[str, Any]:
        """Return the explanation for JSON; numbers that are not finite are None."""
        data = {name: getattr(self, name) for name in ("wrong", "compared", "mistake", "sentence", "line", "rest")}
        data.update(pattern=self.pattern, images=self.images.tolist(), filters=self.filters.tolist(), map=self.map())
        index, *values = self.worst
        got, expected = (value if np.isfinite(value) else None for value in values)
        return {**data, "worst": {"index": list(index), "got": got, "expected": expected}}


@np.errstate(all="ignore")  # an output may hold anything
def explain(
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    before: Any = 0.0,
    source: str = "",
    part_of: tuple[int, int] | None = None,
) -> Explanation:
    """Explain an output y (B, M, OH, OW) of the plain convolution of x (B, C, H, W) and w (M, C, K, K), float32.

    Args:
        x: the input. w: the filters. y: the output to explain.
        before: what y held before the call: a number, or an array of y's shape. NaN, or a number that no output has,
            shows what was not written; only a number shows what was added to it.
        source: the text of the code; the explanation names its line.
        part_of: where these are images of a larger batch, the number of the first one in it, and that of all.

    Returns:
        The explanation; with ``wrong`` 0 if each element is within float32's error bound.
    """
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    x, w = x.astype(np.float64), w.astype(np.float64)
    pixels = _hypotheses.windows(x, problem)
    exact, size = _hypotheses.products(pixels, w), _hypotheses.products(np.abs(pixels), np.abs(w))
    allowed = _allowed(problem, size)
    wrong = ~(np.abs(y - exact) <= allowed)
    if not wrong.any():
        return Explanation(wrong=0, compared=y.size)
    before = np.broadcast_to(np.asarray(before, np.float64), y.shape)
    case = Case(problem, x, w, y, before, exact)
    unwritten = wrong & ((y == before) | (np.isnan(y) & np.isnan(before)))
    name, sentence, rest = _best(case, wrong, unwritten, allowed, size, part_of or (0, len(y)))
    if not sentence and not unwritten.any():
        loose = allowed + HALF_SUMS * size
        far = ~(np.abs(y - exact) <= loose)
        if far.any():  # else the exact result fits as well as any mistake
            name, sentence, rest = _explained(case, far, loose, int(_UNEXPLAINED_SHARE * far.sum()), HALF_SUMS)
        sentence += ", in half precision (fp16) or TF32" if sentence else ""
    pattern = _pattern(wrong.any((0, 1)))
    if not (pattern or sentence) and (unwritten == wrong).all():
        pattern = "Your code does not write these elements: are there enough blocks?"
    error = np.where(np.isfinite(y), np.abs(y - exact), np.inf)
    error = np.where(wrong & ~unwritten, error, wrong - 2.0)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), y.shape))
    return Explanation(
        wrong=int(wrong.sum()),
        compared=y.size,
        mistake=name,
        sentence=sentence,
        line=line_of(name, source) if sentence else None,
        rest=rest,
        counts=wrong.sum((0, 1)),
        images=wrong.sum((1, 2, 3)),
        filters=wrong.sum((0, 2, 3)),
        pattern=pattern,
        worst=(worst, float(y[worst]), float(exact[worst])),
        written=not unwritten[worst],
    )


def _kind_of_values(case: Case, unwritten: np.ndarray, few: int) -> tuple[str, str, int]:
    """Return the mistake that all values of an output show, or all but few, as ``_best``."""
    written = case.y[~unwritten]
    value = np.sort(written)[written.size // 2]
    others = int((written != value).sum())
    if others <= few:
        where = "where it is written" if unwritten.any() else "everywhere"
        return "zeros" if value == 0 else "constant", f"Your output is {value + 0:g} {where}", others
    whole = (case.y == np.rint(case.y)) & (np.abs(case.y) < 1 << 24)  # a larger float32 is always whole
    if whole[~unwritten].all() and (case.exact != np.rint(case.exact)).mean() > _WHOLE_SHARE:
        text = "Your output holds only whole numbers: a sum or one of its terms is an int"
        return "whole_numbers", text, 0
    return "", "", 0


def _best(
    case: Case,
    wrong: np.ndarray,
    unwritten: np.ndarray,
    allowed: np.ndarray,
    size: np.ndarray,
    part_of: tuple[int, int],
) -> tuple[str, str, int]:
    """Return the hypothesis that explains the output: its name, the sentence, and the elements left; or empty ones."""
    few = max(int(_UNEXPLAINED_SHARE * wrong.sum()), min(_UNEXPLAINED_COUNT, int(wrong.sum()) // 10))
    left = int((wrong & ~unwritten).sum())
    if left <= few:
        name, where = _region(case, unwritten, wrong, *part_of)
        if where:
            return name, f"Your code does not write {where}", left
    if not left:  # but a written value may equal the old content, such as ReLU's 0
        return _explained(case, wrong, allowed, few) if (case.y != case.before).any() else ("", "", 0)
    found = _kind_of_values(case, unwritten, few)
    if found[0]:
        return found
    error = np.abs(case.y - case.exact)
    if (error > 2 * EPS32 * size).mean() > _ROUNDED_SHARE:
        share = _root_mean_square(case, error)
        for name, most, most_share in _hypotheses.roundings(case, size):
            if (error <= most + allowed).all() and share <= most_share:
                return ROUNDED, f"Your output equals the convolution with the rounding errors {name}", 0
    return _explained(case, wrong, allowed, few)


def _explained(case: Case, wrong: np.ndarray, allowed: np.ndarray, few: int, unit: float = 0.0) -> tuple[str, str, int]:
    """Return the hypothesis that explains all but few elements, as ``_best``; ``unit`` is a product's largest error."""
    found = ("", "", few + 1)
    for hypothesis in _hypotheses_to_try(case, wrong, few, unit):
        if unit and hypothesis.name == "scaled":  # within wide bounds, an added constant resembles a factor
            continue
        miss = np.ones(case.y.shape, bool)
        for predicted in (hypothesis.predicted, hypothesis.other):
            if predicted is not None:
                room = allowed + np.abs(predicted) * float32_bound(case.problem) + hypothesis.tolerance
                miss &= ~(np.abs(case.y - predicted) <= room)
        missed = int(miss.sum())
        if missed < found[2]:
            found = hypothesis.name, f"Your output equals the convolution {hypothesis.text}", missed
        if not missed:
            break
    return found if found[0] else ("", "", 0)


def _root_mean_square(case: Case, error: np.ndarray) -> float:
    """Return that of the errors, each divided by the root of the sum of its products' squares; 0 for few elements."""
    roots = np.sqrt(_hypotheses.products(_hypotheses.windows(case.x, case.problem) ** 2, case.w**2))
    some = roots > 0
    if some.sum() < _SAMPLE_SIZE:
        return 0.0
    return float(np.sqrt(np.mean((error[some] / roots[some]) ** 2)))


def _hypotheses_to_try(case: Case, wrong: np.ndarray, few: int, unit: float) -> Iterator[Hypothesis]:
    """Yield the hypotheses; the local ones only if they explain an image and a few filters that are wrong."""
    p, y = case.problem, case.y
    image = int(wrong.sum((1, 2, 3)).argmax())
    filters = np.argsort(-wrong[image].sum((1, 2)), kind="stable")[:_TRIAL_FILTERS]
    part = y[image : image + 1, filters]
    limit = max(_UNEXPLAINED_COUNT, few, int(_UNEXPLAINED_SHARE * wrong[image, filters].sum()))
    for name, text, change in _hypotheses.LOCAL:
        pixels, w = change(case.x[image : image + 1], case.w[filters], p)
        scale = _hypotheses.products(np.abs(pixels), np.abs(w))
        if (~(np.abs(part - _hypotheses.products(pixels, w)) <= _allowed(p, scale) + unit * scale)).sum() <= limit:
            yield Hypothesis(name, text, _hypotheses.products(*change(case.x, case.w, p)))
    yield from _hypotheses.whole(case)


def _allowed(problem: ConvProblem, size: np.ndarray) -> np.ndarray:
    return np.asarray(float32_bound(problem) * size + problem.products * SMALLEST32)


def _region(case: Case, unwritten: np.ndarray, wrong: np.ndarray, first: int, images: int) -> tuple[str, str]:
    """Return the mistake's name, and the images, filters, rows and columns that are not written, in words; or "".

    first: the number of the first image among all ``images``.
    """
    if np.array_equal(case.y, case.before, equal_nan=True):  # a sparse image has elements that are right nevertheless
        if not first:
            return NOTHING_WRITTEN, "any element of y"
        return "unwritten", _numbered("image", first + np.arange(len(unwritten)), images) + _MORE
    if unwritten.mean() > _UNWRITTEN_SHARE and wrong.all() and not first:
        return NOTHING_WRITTEN, "any element of y"
    # An element whose exact result is what y held before seems written: at first, none does.
    behind = _behind(unwritten, first, images)
    for most in (1 - 1e-9, _UNWRITTEN_SHARE):
        rest, parts, hint = unwritten.copy(), [], ""
        for axis, name in enumerate(("image", "filter", "row", "column")):
            others = tuple(a for a in range(4) if a != axis)
            which, count = np.flatnonzero(unwritten.mean(others) > most), unwritten.shape[axis]
            if 0 < len(which) < count:
                rest[(slice(None),) * axis + (which,)] = False
                unknown = (which[0] == 0 and first) or (which[-1] == count - 1 and first + count < images)
                more = _MORE if unknown else ""
                parts.append(_numbered(name, which, count) if axis else _numbered(name, which + first, images) + more)
                hint = hint or _tile_hint(name, which, count)
        if parts and not rest.any() and not (behind and len(parts) > 1):
            return "unwritten_tile" if hint else "unwritten", f"{' and '.join(parts)}{hint}"
        if behind:
            return "unwritten", f"{behind}: there may be too few blocks or threads"
    return "", ""


def _behind(unwritten: np.ndarray, first: int, images: int) -> str:
    """Return "elements 8 to 99 of 100 of each map" and the like, where those in front are written; or ""."""
    for name, axis in (("y", 0), ("each image", 1), ("each map", 2)):
        if name == "y" and (first or len(unwritten) < images):
            continue
        flat = unwritten.reshape(math.prod(unwritten.shape[:axis]), -1)
        written, count = int((~flat[0]).sum()), flat.shape[1]
        whole_maps = axis < 2 and written % math.prod(unwritten.shape[2:]) == 0  # images and filters tell more
        if 0 < written < count - 1 and not whole_maps and (flat == (np.arange(count) >= written)).all():
            return f"elements {written} to {count - 1} of {count} of {name}"
    return ""


def _numbered(name: str, which: np.ndarray, count: int) -> str:
    """Return "the last row", "rows 16 to 23 of 24" and the like."""
    first, last = int(which[0]), int(which[-1])
    if len(which) == 1 and first in (0, count - 1):
        return f"the {'first' if first == 0 else 'last'} {name}"
    if last - first + 1 == len(which):
        return f"{name}s {first} to {last} of {count}" if len(which) > 1 else f"{name} {first} of {count}"
    return f"{len(which)} of {count} {name}s, the first is {first}"


def _tile_hint(name: str, which: np.ndarray, count: int) -> str:
    """Return what to look for where the last rows or columns may be a partial tile."""
    at_the_end = which[0] > 0 and list(which) == list(range(which[0], count))
    if name not in ("row", "column") or not at_the_end or not 1 < len(which) < max(_hypotheses.TILES):
        return ""
    return f": the last, partial tile may be missing, since {count} outputs need {count} / tile tiles, rounded up"


def _pattern(wrong: np.ndarray) -> str:
    """Return where in each tile the wrong elements are, if the rows and columns (OH, OW) repeat; else empty."""
    for tile in sorted(_hypotheses.TILES):
        height, width = wrong.shape
        if 2 * tile > max(height, width) or wrong.all():
            continue
        folded = np.zeros((tile, tile), bool)
        i, j = np.nonzero(wrong)
        folded[i % tile, j % tile] = True
        rows, columns = np.flatnonzero(folded.any(1)), np.flatnonzero(folded.any(0))
        inside = folded[np.arange(height)[:, None] % tile, np.arange(width) % tile]
        if (inside == wrong).all() and len(rows) * len(columns) < tile * tile:
            parts = f"{_numbered('row', rows, tile)}, {_numbered('column', columns, tile)}"
            return f"The wrong elements repeat every {tile} rows and columns: {parts}"
    return ""


def _only(name: str, counts: np.ndarray) -> str:
    """Return which images or filters have wrong elements; empty if all do."""
    which = np.flatnonzero(counts)
    return "" if counts.all() else f"Only {_numbered(name, which, len(counts))}: {int(counts.sum())} elements"
