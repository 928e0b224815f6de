"""Is an output right? Held against float64, within the kernel's own error bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ece408_op.problem import ConvProblem

from . import reference
from .kernel import Kernel

#: Bytes of float64 windows that one step of the comparison may take.
STEP_BYTES = 64 << 20

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    ``worst`` is the largest error as a share of the error allowed at that element: above 1 is wrong, infinite where
    one of both is no number. ``scaled`` is the largest error as a share of the sum of |x||w|. ``index`` is the worst
    element's place (b, m, i, j), ``got`` and ``expected`` its values. ``wrong`` of the ``compared`` elements are wrong.
    ``holes`` counts values that are not finite among the elements that were not compared.
    """

    worst: float
    scaled: float
    index: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    compared: int
    holes: int

    @property
    def passed(self) -> bool:
        """Nothing is wrong, and no value is missing where none was compared."""
        return self.wrong == 0 and self.holes == 0

    def __str__(self) -> str:
        """One line for people."""
        text = (
            f"{'right' if self.passed else 'WRONG'}: worst element {list(self.index)}: got {self.got:.9g}, expected "
            f"{self.expected:.9g}, {self.worst:.3g} of the error allowed; {self.wrong} of {self.compared} wrong "
            f"({100 * self.wrong / max(1, self.compared):.3g} %)"
        )
        return f"{text}; {self.holes} values elsewhere are not finite" if self.holes else text


@dataclass(frozen=True)
class Agreement:
    """Of ``compared`` images, how many have the ``same`` class on both sides."""

    same: int
    compared: int

    @property
    def share(self) -> float:
        """That as a share: the accuracy, where one side is the truth."""
        return self.same / self.compared


def agreement(classes: np.ndarray, others: np.ndarray) -> Agreement:
    """Compare two lists of classes, (B,) of integers each.

    Raises ValueError where they differ in length or are empty.
    """
    if classes.shape != others.shape or classes.size == 0:
        raise ValueError(f"classes: expected as many as there are others, got {classes.shape} and {others.shape}")
    return Agreement(int((classes == others).sum()), classes.size)


def compare(
    out: np.ndarray, x: np.ndarray, w: np.ndarray, kernel: Kernel, images: int | None = None, least: float = 0.0
) -> Comparison:
    """Compare out, shape (B, M, OH, OW), with the convolution of x (B, C, H, W) and w (M, C, K, K) in float64.

    Where the exact result is not finite, out must be the same infinity, or NaN. ``images`` compares that many,
    evenly spread, the first and the last among them; the others must be finite where x and w are. ``least`` is added
    to every element's bound.
    Raises ProblemError where the shapes are no convolution, ValueError where out's shape is not its result's.
    """
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    if out.shape != problem.y_shape:
        raise ValueError(f"out: expected shape {problem.y_shape} for {problem}, got {out.shape}")
    count = problem.batch if images is None else min(images, problem.batch)
    chosen = np.unique(np.linspace(0, problem.batch - 1, count).round().astype(int))
    step = max(1, STEP_BYTES // (8 * problem.products * problem.output_height * problem.output_width))
    found = Comparison(0.0, 0.0, (0, 0, 0, 0), np.nan, np.nan, 0, 0, 0)
    for first in range(0, len(chosen), step):
        part = chosen[first : first + step]
        found = _worse(found, _compare_part(out[part], x[part], w, kernel, part, least))
    holes = 0
    if len(chosen) < problem.batch and np.isfinite(w).all():
        holes = _holes(out, x, np.setdiff1d(np.arange(problem.batch), chosen))
    return replace(found, holes=holes)


def _compare_part(
    out: np.ndarray, x: np.ndarray, w: np.ndarray, kernel: Kernel, places: np.ndarray, least: float
) -> Comparison:
    problem = ConvProblem.from_shapes(x.shape, w.shape)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        expected = reference.convolve(x, w)
        size = reference.magnitude(x, w)
        wide = size if kernel.magnitude_weights is abs else reference.magnitude(x, kernel.magnitude_weights(w))
        error = np.abs(out - expected)
        # A product below float32's range is rounded to a multiple of its smallest number.
        share = error / (kernel.error_bound(problem) * wide + problem.products * _SMALLEST + least)
        scaled = error / size
    same = (out == expected) | (np.isnan(out) & np.isnan(expected))
    # A float32 sum may pass its range on the way, and end as an infinity or NaN.
    passed_range = (size > _LARGEST) & ~np.isfinite(out) & np.isfinite(expected)
    share = np.where(same | passed_range, 0.0, np.where(np.isfinite(share), share, np.inf))
    # Where nothing is added up, no precision excuses anything.
    scaled = np.where(size > 0, np.where(np.isfinite(scaled), scaled, 0.0), np.where(share > 1, np.inf, 0.0))
    worst = np.unravel_index(int(np.argmax(share)), share.shape)
    return Comparison(
        worst=float(share[worst]),
        scaled=float(scaled.max()),
        index=(int(places[worst[0]]), *(int(i) for i in worst[1:])),
        got=float(out[worst]),
        expected=float(expected[worst]),
        wrong=int((share > 1).sum()),
        compared=out.size,
        holes=0,
    )


def _worse(a: Comparison, b: Comparison) -> Comparison:
    """Both parts as one: the worst element of either, the sums of the counts."""
    worst = a if a.compared and a.worst >= b.worst else b
    return Comparison(
        worst.worst,
        max(a.scaled, b.scaled),
        worst.index,
        worst.got,
        worst.expected,
        a.wrong + b.wrong,
        a.compared + b.compared,
        0,
    )


def _holes(out: np.ndarray, x: np.ndarray, places: np.ndarray) -> int:
    return sum(out[place].size - int(np.isfinite(out[place]).sum()) for place in places if np.isfinite(x[place]).all())
