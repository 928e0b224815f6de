"""The sizes of the convolution that every kernel of this package computes.

The letters in this module and in every kernel:

    B  batch      images                        x  (B, C, H, W)    input
    C  channels   input feature maps            w  (M, C, K, K)    filters
    H  height     rows of an input map          y  (B, M, OH, OW)  output
    W  width      columns of an input map
    M  filters    output feature maps           OH = H - K + 1
    K  kernel     rows and columns of a filter  OW = W - K + 1

    y[b, m, i, j] = sum over c, p, q of x[b, c, i + p, j + q] * w[m, c, p, q]

This is a cross-correlation with stride 1, no padding, one group and no bias, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TypeVar

from .errors import ProblemError

Shape4 = tuple[int, int, int, int]
Problem = TypeVar("Problem", bound="ConvProblem")

#: Bytes of a float32.
ITEM_BYTES = 4


@dataclass(frozen=True)
class ConvProblem:
    """The sizes of a convolution, checked when the object is made.

    Attributes:
        batch: B, the number of images, at least 0; all other sizes are at least 1.
        channels: C, the input channels.
        height: H, the rows of an image.
        width: W, the columns of an image.
        filters: M, the output channels.
        kernel: K, the rows and columns of a filter, at most H and W.

    Raises:
        ProblemError: a size is no integer or too small, or the kernel is larger than the image.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            try:
                whole = index(value)
            except TypeError:
                raise ProblemError(f"{name}: expected an integer, got {value!r}") from None
            if whole < least:
                raise ProblemError(f"{name}: expected at least {least}, got {whole}")
            object.__setattr__(self, name, whole)
        if self.kernel > min(self.height, self.width):
            raise ProblemError(
                f"kernel: expected at most the image's {self.height} rows and {self.width} columns, "
                f"got ({self.kernel}, {self.kernel}); use a smaller kernel or larger images"
            )

    @classmethod
    def from_shapes(cls, x: Sequence[int], w: Sequence[int]) -> ConvProblem:
        """Return the problem of an input of shape (B, C, H, W) and filters of shape (M, C, K, K).

        Raises:
            ProblemError: the shapes are not those of a convolution.
        """
        if len(x) != 4:
            raise ProblemError(f"data: expected 4 dimensions (batch, channels, height, width), got shape {tuple(x)}")
        if len(w) != 4:
            raise ProblemError(
                f"weight: expected 4 dimensions (filters, channels, kernel, kernel), got shape {tuple(w)}"
            )
        if w[2] != w[3]:
            raise ProblemError(f"weight: expected a square kernel, got {w[2]} x {w[3]} in shape {tuple(w)}")
        if w[1] != x[1]:
            raise ProblemError(f"weight: expected {x[1]} channels as in data of shape {tuple(x)}, got shape {tuple(w)}")
        return cls(batch=x[0], channels=x[1], height=x[2], width=x[3], filters=w[0], kernel=w[2])

    @property
    def output_height(self) -> int:
        """Rows of an output map, OH."""
        return self.height - self.kernel + 1

    @property
    def output_width(self) -> int:
        """Columns of an output map, OW."""
        return self.width - self.kernel + 1

    @property
    def x_shape(self) -> Shape4:
        """The input's shape, (B, C, H, W)."""
        return (self.batch, self.channels, self.height, self.width)

    @property
    def w_shape(self) -> Shape4:
        """The filters' shape, (M, C, K, K)."""
        return (self.filters, self.channels, self.kernel, self.kernel)

    @property
    def y_shape(self) -> Shape4:
        """The output's shape, (B, M, OH, OW)."""
        return (self.batch, self.filters, self.output_height, self.output_width)

    @property
    def products(self) -> int:
        """The reduction length C K K: products per output element."""
        return self.channels * self.kernel * self.kernel

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication and an addition per product."""
        return 2 * self.products * self.batch * self.filters * self.output_height * self.output_width

    @property
    def bytes(self) -> int:
        """The least memory traffic in bytes: each input read once, each output written once."""
        return ITEM_BYTES * sum(map(math.prod, (self.x_shape, self.w_shape, self.y_shape)))

    def with_batch(self: Problem, batch: int) -> Problem:
        """Return the same layer for another number of images."""
        return replace(self, batch=batch)

    def pooled(self, full: bool) -> PooledProblem:
        """Return this convolution fused with tanh and 2 x 2 max-pooling."""
        return PooledProblem(self.batch, self.channels, self.height, self.width, self.filters, self.kernel, full)

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.channels} x {self.height} x {self.width} "
            f"with {self.filters} filters of {self.kernel} x {self.kernel}"
        )


@dataclass(frozen=True)
class PooledProblem(ConvProblem):
    """A convolution fused with tanh and 2 x 2 max-pooling of stride 2; y has the shape (B, M, PH, PW).

    The pooling ignores a NaN if the window has a number. The reduction length and the operations are those of the
    convolution.

    Attributes:
        full: with False, an odd last row or column is left out and PH = OH // 2 (MXNet's convention "valid"); with True
            its windows are smaller and PH = (OH + 1) // 2 ("full"). PW is computed alike.

    Raises:
        ProblemError: as in ConvProblem, or the output of the pooling is empty.
    """

    full: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("rows", self.output_height), ("columns", self.output_width)):
            check_pooled(name, size, self.full)

    @property
    def pooled_height(self) -> int:
        """Rows of an output map, PH."""
        return (self.output_height + self.full) // 2

    @property
    def pooled_width(self) -> int:
        """Columns of an output map, PW."""
        return (self.output_width + self.full) // 2

    @property
    def y_shape(self) -> Shape4:
        """The output's shape, (B, M, PH, PW)."""
        return (self.batch, self.filters, self.pooled_height, self.pooled_width)

    @property
    def convolution(self) -> ConvProblem:
        """The convolution alone."""
        return ConvProblem(self.batch, self.channels, self.height, self.width, self.filters, self.kernel)

    def __str__(self) -> str:
        return f"{super().__str__()}, then tanh of 2 x 2 maxima"


def check_pooled(name: str, size: int, full: bool) -> None:
    """Raise ProblemError if ``size`` rows or columns of a convolution are too few for 2 x 2 max-pooling."""
    if size < 2 and not full:
        raise ProblemError(f"fuse: expected at least 2 {name} of the convolution for 2 x 2 max-pooling, got {size}")


_LEAST = {"batch": 0, "channels": 1, "height": 1, "width": 1, "filters": 1, "kernel": 1}

#: The convolutions of the course's three networks, by term, for its 10,000 images.
COURSE_LAYERS = {
    "2017": ConvProblem(10_000, 1, 28, 28, 50, 5),
    "2018sp-1": ConvProblem(10_000, 1, 64, 64, 6, 5),
    "2018sp-2": ConvProblem(10_000, 6, 30, 30, 16, 5),
    "2018fa-1": ConvProblem(10_000, 1, 72, 72, 12, 7),
    "2018fa-2": ConvProblem(10_000, 12, 33, 33, 24, 7),
}
