"""Compare an output with a float64 convolution, within the kernel's error bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ece408_op.problem import ConvProblem, WeightGradient

from . import reference
from .kernel import SMALLEST32, Kernel

#: The most bytes of float64 windows in one step of the comparison.
STEP_BYTES = 64 << 20

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        worst: the largest error divided by the error bound at its element. Above 1 the output is wrong; infinite if the
            output or the exact result alone is not finite.
        scaled: the largest error divided by the sum of |x||w|.
        index: the index (b, m, i, j) of the worst element.
        got: the output there.
        expected: the exact result there.
        wrong: the number of wrong elements.
        compared: the number of compared elements.
        holes: the number of values that are not finite among the elements that were not compared.
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
        """Whether no element is wrong and the elements that were not compared are finite."""
        return self.wrong == 0 and self.holes == 0

    def __str__(self) -> str:
        """Return a line with the worst element and the number of wrong ones."""
        text = (
            f"{'right' if self.passed else 'WRONG'}: worst element {list(self.index)}: got {self.got:.9g}, expected "
            f"{self.expected:.9g}, {self.worst:.3g} of the error bound; {self.wrong} of {self.compared} wrong "
            f"({100 * self.wrong / max(1, self.compared):.3g} %)"
        )
        return f"{text}; {self.holes} values elsewhere are not finite" if self.holes else text


@dataclass(frozen=True)
class Agreement:
    """The number of images with the same class on both sides, and the number of compared images."""

    same: int
    compared: int

    @property
    def share(self) -> float:
        """The share of images with the same class; the accuracy if one side has the true classes."""
        return self.same / self.compared


def agreement(classes: np.ndarray, others: np.ndarray) -> Agreement:
    """Compare two arrays of classes, (B,) of integers each.

    Raises:
        ValueError: they differ in length or are empty.
    """
    if classes.shape != others.shape or classes.size == 0:
        raise ValueError(f"classes: expected as many as there are others, got {classes.shape} and {others.shape}")
    return Agreement(int((classes == others).sum()), classes.size)


def compare(
    out: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    kernel: Kernel,
    images: int | None = None,
    least: float = 0.0,
    problem: ConvProblem | None = None,
) -> Comparison:
    """Compare an output with the convolution in float64, within the kernel's error bound.

    Where the exact result is infinite or NaN, out must be the same infinity or NaN.

    Args:
        out: the output, (B, M, OH, OW), float32.
        x: the input, (B, C, H, W), float32.
        w: the filters, (M, C, K, K), float32.
        kernel: the kernel that computed out.
        images: the number of images to compare, evenly spread, including the first and the last; by default all. The
            outputs of the others must be finite if x and w are.
        least: an absolute error to add to every element's bound.
        problem: the problem, by default the plain convolution of x and w. For a gradient, x, w and out are the
            problem's operands in their order, and a weight gradient is compared as a whole.

    Raises:
        ProblemError: the shapes of x and w are not those of a convolution.
        ValueError: out does not have the shape of the result.
    """
    problem = problem or ConvProblem.from_shapes(x.shape, w.shape)
    if out.shape != problem.shapes[2]:
        raise ValueError(f"out: expected shape {problem.shapes[2]} for {problem}, got {out.shape}")
    if isinstance(problem, WeightGradient):
        return _compare_part(out, x, w, kernel, np.arange(len(out)), least, problem)
    count = problem.batch if images is None else min(images, problem.batch)
    chosen = np.unique(np.linspace(0, problem.batch - 1, count).round().astype(int))
    step = max(1, STEP_BYTES * problem.batch * problem.filters // max(1, 4 * problem.flops))
    found = Comparison(0.0, 0.0, (0, 0, 0, 0), np.nan, np.nan, 0, 0, 0)
    for first in range(0, len(chosen), step):
        part = chosen[first : first + step]
        found = _worse(found, _compare_part(out[part], x[part], w, kernel, part, least, problem.with_batch(len(part))))
    holes = 0
    if len(chosen) < problem.batch and np.isfinite(w).all():
        holes = _holes(out, x, np.setdiff1d(np.arange(problem.batch), chosen))
    return replace(found, holes=holes)


def _compare_part(
    out: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    kernel: Kernel,
    places: np.ndarray,
    least: float,
    problem: ConvProblem,
) -> Comparison:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        expected = reference.convolve(x, w, problem)
        size = reference.magnitude(x, w, problem)
        plain = kernel.magnitude_images is kernel.magnitude_weights is abs
        images, weights = kernel.magnitude_images(x), kernel.magnitude_weights(w)
        wide = size if plain else reference.magnitude(images, weights, problem)
        wide = np.where(np.isfinite(wide), wide, size)  # an infinite weight makes it infinite or NaN
        error = np.abs(out - expected)
        # A product below float32's range is rounded to a multiple of its smallest number.
        share = error / (kernel.error_bound(problem) * wide + problem.products * SMALLEST32 + least)
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
