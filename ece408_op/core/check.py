"""Compare an output with a float64 convolution, within the kernel's error bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem, WeightGradient

from . import reference
from .kernel import SMALLEST32, Kernel, float32_bound

#: The most bytes of the images' float64 windows and results that ``compare`` computes at a time.
STEP_BYTES = 32 << 20

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        worst: the largest error divided by the error bound at its element. Above 1 the output is wrong; infinite if
            only one of the output and the exact result is finite.
        scaled: the largest error divided by the sum of the magnitudes there, mostly that of |x||w|; infinite if the
            output is not finite where the exact result is, or if not_finite_elsewhere is not 0.
        index: the index (b, m, i, j) of the worst element.
        got: the output there.
        expected: the exact result there.
        wrong: the number of wrong elements.
        compared: the number of compared elements.
        not_finite_elsewhere: the number of values that are not finite among the elements that were not compared.
    """

    worst: float
    scaled: float
    index: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    compared: int
    not_finite_elsewhere: int

    @property
    def passed(self) -> bool:
        """Return whether no element is wrong and the elements that were not compared are finite."""
        return self.wrong == 0 and self.not_finite_elsewhere == 0

    def __str__(self) -> str:
        """Return a line with the worst element and the number of wrong ones."""
        text = (
            f"{'right' if self.passed else 'WRONG'}: worst element {list(self.index)}: got {self.got:.9g}, expected "
            f"{self.expected:.9g}, {self.worst:.3g} of the error bound; {self.wrong} of {self.compared} wrong "
            f"({100 * self.wrong / max(1, self.compared):.3g} %)"
        )
        elsewhere = self.not_finite_elsewhere
        return f"{text}; {elsewhere} values elsewhere are not finite" if elsewhere else text


def agreement(classes: np.ndarray, others: np.ndarray) -> float:
    """Return the share of images with the same class, of two arrays of integers, (B,) each.

    It is the accuracy if one side has the true classes. Raises ValueError where they differ in length or are empty.
    """
    if classes.shape != others.shape or classes.size == 0:
        raise ValueError(f"classes: expected as many as there are others, got {classes.shape} and {others.shape}")
    return int((classes == others).sum()) / classes.size


class Reference:
    """The exact results of some images of a problem, for any number of outputs.

    Args:
        x: the input, (B, C, H, W), float32, of NumPy or of CuPy on the current GPU.
        w: the filters, (M, C, K, K), likewise.
        images: the number of images to compare, evenly spread, including the first and the last; by default all. The
            outputs of the others must be finite if x and w are. A weight gradient, which is the result of all images,
            is compared for as many filters and channels, and whole where there are groups.
        problem: the problem, by default the plain convolution of x and w. For a gradient, x and w are the problem's
            first two operands.

    Raises:
        ProblemError: the shapes of x and w are not those of a convolution.
    """

    def __init__(self, x: Any, w: Any, images: int | None = None, problem: ConvProblem | None = None) -> None:
        self._problem = self._part = problem = problem or ConvProblem.from_shapes(x.shape, w.shape)
        #: The indices of the output's first axes that are compared.
        self._axes: list[np.ndarray] = [np.arange(problem.shapes[2][0])]
        #: The indices of the first axis whose outputs may be infinite or NaN where they are not compared.
        self._unknown: np.ndarray = np.zeros(0, int)
        if not isinstance(problem, WeightGradient):
            self._axes = [_spread(problem.batch, images)]
            if len(self._axes[0]) < problem.batch:
                self._unknown = _unknown_images(x, w)
            x, self._part = x[self._axes[0]], problem.with_batch(len(self._axes[0]))
        elif images is not None and problem.groups == 1:
            filters, channels = self._axes = [_spread(n, images) for n in (problem.filters, problem.channels)]
            if not (np.isfinite(x).all() and np.isfinite(w).all()):
                self._unknown = np.arange(problem.filters)
            x, w = x[:, channels], w[:, filters]
            self._part = replace(problem, filters=len(filters), channels=len(channels))
        self._x, self._w = _numpy(x), _numpy(w)
        with np.errstate(invalid="ignore", over="ignore"):
            self._exact = reference.convolve(self._x, self._w, self._part)
        self._magnitudes: dict[tuple[Callable[[Any], Any], ...], np.ndarray] = {}

    def compare(
        self, out: Any, kernel: Kernel | None = None, least: float = 0.0, bound: float | None = None
    ) -> Comparison:
        """Compare an output, (B, M, OH, OW), within the error bound of the kernel, or of a float32 sum without one.

        Where the exact result is infinite or NaN, out must be the same infinity or NaN.

        Args:
            least: an absolute error to add to every element's bound.
            bound: another factor of the sum of |x||w|, or of the kernel's magnitudes, than the kernel's.

        Raises:
            ValueError: out does not have the shape of the result.
        """
        if out.shape != self._problem.shapes[2]:
            raise ValueError(_misshapen(out, self._problem))
        got, expected = _numpy(out[np.ix_(*self._axes)]), self._exact
        if not got.size:
            return Comparison(0.0, 0.0, (0, 0, 0, 0), np.nan, np.nan, 0, 0, 0)
        if bound is None:
            bound = kernel.error_bound(self._problem) if kernel else float32_bound(self._problem)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            wide = self._magnitude(kernel.magnitude_images, kernel.magnitude_weights) if kernel else self._magnitude()
            # A product below float32's range is rounded to a multiple of its smallest number.
            allowed = bound * wide + (self._problem.products * SMALLEST32 + least)
            error = np.abs(got - expected)
            share, scaled = error / allowed, np.divide(error, wide, out=error)
        if not (np.isfinite(share.max()) and np.isfinite(scaled.max())):
            self._decide_not_finite(got, share, scaled, allowed)
        worst = np.unravel_index(int(np.argmax(share)), share.shape)
        elsewhere = _not_finite_elsewhere(out, self._axes, self._unknown) if got.size < out.size else 0
        return Comparison(
            worst=float(share[worst]),
            scaled=math.inf if elsewhere else float(scaled.max()),
            index=(*(int(axis[i]) for axis, i in zip(self._axes, worst)), *map(int, worst[len(self._axes) :])),
            got=float(got[worst]),
            expected=float(expected[worst]),
            wrong=int((share > 1).sum()),
            compared=got.size,
            not_finite_elsewhere=elsewhere,
        )

    @np.errstate(all="ignore")
    def _decide_not_finite(self, got: np.ndarray, share: np.ndarray, scaled: np.ndarray, allowed: np.ndarray) -> None:
        """Decide, in place, where a share is not finite: on values that are not, and on sums of zeros."""
        undecided = ~(np.isfinite(share) & np.isfinite(scaled))
        values, exact, shares = got[undecided], self._exact[undecided], share[undecided]
        # A float32 sum may pass its range on the way, or by an allowed error, and end as an infinity or NaN.
        largest = self._magnitude()[undecided] + allowed[undecided]
        passed_range = (largest > _LARGEST) & ~np.isfinite(values) & np.isfinite(exact)
        right = (values == exact) | (np.isnan(values) & np.isnan(exact)) | passed_range
        share[undecided] = shares = np.where(right, 0.0, np.where(np.isfinite(shares), shares, np.inf))
        # Where nothing is added up, no precision excuses anything but a product below float32's range.
        scaled[undecided] = np.where(shares <= 1, 0.0, np.inf)

    def _magnitude(self, *key: Callable[[Any], Any]) -> np.ndarray:
        """Return the sums of the magnitudes of images and weights, by default of |x||w|."""
        key = () if key == (abs, abs) else key
        if key not in self._magnitudes:
            of_images, of_weights = key or (abs, abs)
            with np.errstate(invalid="ignore", over="ignore"):
                sums = reference.magnitude(of_images(self._x), of_weights(self._w), self._part)
            # An infinite weight makes it infinite or NaN.
            self._magnitudes[key] = np.where(np.isfinite(sums), sums, self._magnitude()) if key else sums
        return self._magnitudes[key]


def compare(
    out: np.ndarray,
    x: np.ndarray,
    w: np.ndarray,
    kernel: Kernel,
    images: int | None = None,
    least: float = 0.0,
    problem: ConvProblem | None = None,
) -> Comparison:
    """Compare an output as ``Reference`` does, a group of images at a time, in NumPy's memory.

    The float64 arrays of all images would take gigabytes. A weight gradient is compared as a whole.

    Raises:
        ProblemError: the shapes of x and w are not those of a convolution.
        ValueError: out does not have the shape of the result.
    """
    problem = problem or ConvProblem.from_shapes(x.shape, w.shape)
    if isinstance(problem, WeightGradient):
        return Reference(x, w, problem=problem).compare(out, kernel, least)
    if out.shape != problem.shapes[2]:
        raise ValueError(_misshapen(out, problem))
    chosen, found = _spread(problem.batch, images), []
    taps = problem.channels * problem.kernel * problem.kernel_width
    values = taps * problem.output_height * problem.output_width + math.prod(out.shape[1:])
    step = max(1, STEP_BYTES // max(1, 8 * values))
    for first in range(0, max(1, len(chosen)), step):
        group = chosen[first : first + step]
        this = Reference(x[group], w, problem=problem.with_batch(len(group))).compare(out[group], kernel, least)
        found.append(replace(this, index=(int(group[this.index[0]]), *this.index[1:])) if this.compared else this)
    elsewhere = _not_finite_elsewhere(out, [chosen], _unknown_images(x, w)) if len(chosen) < problem.batch else 0
    return replace(
        max(found, key=lambda this: this.worst),
        scaled=math.inf if elsewhere else max(this.scaled for this in found),
        wrong=sum(this.wrong for this in found),
        compared=sum(this.compared for this in found),
        not_finite_elsewhere=elsewhere,
    )


def _spread(count: int, most: int | None) -> np.ndarray:
    """Return ``most`` of the indices below ``count``, evenly spread with the first and the last; by default all."""
    return np.unique(np.linspace(0, count - 1, count if most is None else min(most, count)).round().astype(int))


def _unknown_images(x: Any, w: Any) -> np.ndarray:
    """Return the images whose outputs may be infinite or NaN, since an operand is."""
    return np.flatnonzero(~_numpy(np.isfinite(x).all(axis=(1, 2, 3)) & np.isfinite(w).all()))


def _not_finite_elsewhere(out: Any, axes: list[np.ndarray], unknown: np.ndarray) -> int:
    """Count what is not finite outside the indices ``axes`` of the first axes, and ``unknown`` of the first one."""
    if math.isfinite(out.min()) and math.isfinite(out.max()):
        return 0  # without the memory of a mask
    finite = np.isfinite(out)
    finite[np.ix_(*axes)] = True
    finite[unknown] = True
    return finite.size - int(finite.sum())


def _misshapen(out: Any, problem: ConvProblem) -> str:
    return f"out: expected shape {problem.shapes[2]} for {problem}, got {out.shape}"


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array if isinstance(array, (np.ndarray, np.generic)) else array.get())
