"""The convolution that every kernel of this package computes, as numbers.

The letters, here and in every kernel:

    B  batch      images                        x  (B, C, H, W)    input
    C  channels   input feature maps            w  (M, C, K, K)    filters
    H  height     rows of an input map          y  (B, M, OH, OW)  output
    W  width      columns of an input map
    M  filters    output feature maps           OH = H - K + 1
    K  kernel     rows and columns of a filter  OW = W - K + 1

    y[b, m, i, j] = sum over c, p, q of x[b, c, i + p, j + q] * w[m, c, p, q]

A cross-correlation with stride 1, no padding, one group and no bias, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from .errors import ProblemError

Shape4 = tuple[int, int, int, int]

#: The bytes of one float32.
ITEM_BYTES = 4


@dataclass(frozen=True)
class ConvProblem:
    """One convolution's sizes, checked once when it is made.

    Raises ProblemError where a size is no positive integer (a batch may be 0) or where the kernel
    is larger than the image.
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
        """The problem of an input of shape (B, C, H, W) and filters of shape (M, C, K, K)."""
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
        """Products summed into one output element."""
        return self.channels * self.kernel * self.kernel

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiplication and an addition for each product."""
        return 2 * self.products * self.batch * self.filters * self.output_height * self.output_width

    @property
    def bytes(self) -> int:
        """The fewest bytes to move: each input read once, each output written once."""
        x = self.batch * self.channels * self.height * self.width
        w = self.filters * self.products
        y = self.batch * self.filters * self.output_height * self.output_width
        return ITEM_BYTES * (x + w + y)

    def with_batch(self, batch: int) -> ConvProblem:
        """The same layer for another number of images."""
        return ConvProblem(batch, self.channels, self.height, self.width, self.filters, self.kernel)

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.channels} x {self.height} x {self.width} "
            f"with {self.filters} filters of {self.kernel} x {self.kernel}"
        )


_LEAST = {"batch": 0, "channels": 1, "height": 1, "width": 1, "filters": 1, "kernel": 1}
