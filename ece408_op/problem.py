"""The sizes of a convolution and of its gradients, as every kernel of this package computes them.

The letters in this module and in every kernel:

    B  batch      images                        x  (B, C, H, W)       input
    C  channels   input feature maps            w  (M, C / G, K, L)   filters
    H  height     rows of an input map          y  (B, M, OH, OW)     output
    W  width      columns of an input map
    M  filters    output feature maps           OH = (H + 2 pad - dilate (K - 1) - 1) // stride + 1
    K  kernel     rows of a filter              OW = the same of W, L and the second stride, pad and dilate
    L  kernel     columns of a filter, usually K
    G  groups     of channels and of filters; C and M are multiples of G

    y[b, m, i, j] = sum over c, p, q of x[b, c, i stride + p dilate - pad, j stride + q dilate - pad] * w[m, c, p, q]

with zeros outside x, and c over the channels of the filter's group. This is a cross-correlation without a bias, in
float32. The course's layers are plain: K = L, stride 1, no padding, no dilation and one group, so OH = H - K + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import index
from typing import Any, ClassVar, TypeVar

from .errors import ProblemError

Shape4 = tuple[int, int, int, int]
Pair = tuple[int, int]
Problem = TypeVar("Problem", bound="ConvProblem")

#: Bytes of a float32.
ITEM_BYTES = 4

#: The features beyond a plain convolution that a problem may need from a kernel, as worded in error messages.
RECTANGULAR, STRIDE, PAD = "a rectangular kernel", "a stride", "padding"
DILATE, GROUPS = "dilation", "several groups"
ATTRIBUTES = frozenset({RECTANGULAR, STRIDE, PAD, DILATE, GROUPS})
TANH_POOL, DATA_GRADIENT, WEIGHT_GRADIENT = "tanh and 2 x 2 maxima in the same pass", "data gradient", "weight gradient"
GRADIENTS = frozenset({DATA_GRADIENT, WEIGHT_GRADIENT})


@dataclass(frozen=True)
class ConvProblem:
    """The sizes of a convolution, checked when the object is made.

    Attributes:
        batch: B, the number of images, at least 0; all other sizes are at least 1.
        channels: C, the input channels.
        height: H, the rows of an image.
        width: W, the columns of an image.
        filters: M, the output channels.
        kernel: K, the rows of a filter.
        kernel_width: L, the columns of a filter; by default K.
        stride: rows and columns from one output to the next, at least 1.
        pad: rows of zeros above and below the image, and columns on both sides, at least 0.
        dilate: rows and columns from one element of a filter to the next, at least 1.
        groups: G; each filter reads the C / G channels of its group.

    Raises:
        ProblemError: a size is not an integer or too small, G does not divide C and M, or the dilated kernel is larger
            than the padded image.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: int
    kernel_width: int = 0
    stride: Pair = (1, 1)
    pad: Pair = (0, 0)
    dilate: Pair = (1, 1)
    groups: int = 1

    #: The names of the two arrays that a kernel reads, and of the array that it fills.
    operands: ClassVar[tuple[str, str, str]] = ("x", "w", "y")
    #: The feature that a subclass needs from a kernel besides ATTRIBUTES, empty for none.
    feature: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.kernel_width:
            object.__setattr__(self, "kernel_width", self.kernel)
        for name, least in _LEAST.items():
            object.__setattr__(self, name, _integer(name, getattr(self, name), least))
        for name, least in _LEAST_OF_PAIRS.items():
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise ProblemError(f"{name}: expected two integers, for rows and columns, got {value!r}")
            object.__setattr__(self, name, tuple(_integer(name, each, least) for each in value))
        if self.channels % self.groups or self.filters % self.groups:
            raise ProblemError(
                f"groups: expected a divisor of {self.channels} channels and {self.filters} filters, got {self.groups}"
            )
        if self.output_height < 1 or self.output_width < 1:
            size = f"{self.height} rows and {self.width} columns"
            dilated = "" if self.dilate == (1, 1) else f", dilated by {self.dilate}"
            raise ProblemError(
                f"kernel: expected at most the image's {size}{f' with padding {self.pad}' if any(self.pad) else ''}, "
                f"got {(self.kernel, self.kernel_width)}{dilated}; use a smaller kernel or larger images"
            )

    @classmethod
    def from_shapes(
        cls: type[Problem],
        x: Sequence[int],
        w: Sequence[int],
        stride: Pair = (1, 1),
        pad: Pair = (0, 0),
        dilate: Pair = (1, 1),
        groups: int = 1,
    ) -> Problem:
        """Return the problem of an input of shape (B, C, H, W) and filters of shape (M, C / G, K, L).

        Raises:
            ProblemError: the shapes are not those of a convolution.
        """
        if len(x) != 4:
            raise ProblemError(f"data: expected 4 dimensions (batch, channels, height, width), got shape {tuple(x)}")
        if len(w) != 4:
            raise ProblemError(
                f"weight: expected 4 dimensions (filters, channels, rows, columns), got shape {tuple(w)}"
            )
        if w[1] * groups != x[1]:
            of_group = f" / {groups} groups" if groups != 1 else ""
            raise ProblemError(
                f"weight: expected {x[1]}{of_group} channels as in data of shape {tuple(x)}, got shape {tuple(w)}"
            )
        batch, channels, height, width = x
        return cls(batch, channels, height, width, w[0], w[2], w[3], stride, pad, dilate, groups)

    @property
    def output_height(self) -> int:
        """Rows of an output map, OH."""
        return _windows(self.height, self.kernel, self.stride[0], self.pad[0], self.dilate[0])

    @property
    def output_width(self) -> int:
        """Columns of an output map, OW."""
        return _windows(self.width, self.kernel_width, self.stride[1], self.pad[1], self.dilate[1])

    @property
    def x_shape(self) -> Shape4:
        """The input's shape, (B, C, H, W)."""
        return (self.batch, self.channels, self.height, self.width)

    @property
    def w_shape(self) -> Shape4:
        """The filters' shape, (M, C / G, K, L)."""
        return (self.filters, self.channels // self.groups, self.kernel, self.kernel_width)

    @property
    def y_shape(self) -> Shape4:
        """The output's shape, (B, M, OH, OW)."""
        return (self.batch, self.filters, self.output_height, self.output_width)

    @cached_property
    def shapes(self) -> tuple[Shape4, Shape4, Shape4]:
        """The shapes of the operands: the two arrays that a kernel reads, and the array that it fills."""
        shapes = {"x": self.x_shape, "w": self.w_shape, "y": self.y_shape}
        first, second, filled = (shapes[name] for name in self.operands)
        return first, second, filled

    @property
    def products(self) -> int:
        """The reduction length (C / G) K L: products per output element."""
        return self.channels // self.groups * self.kernel * self.kernel_width

    @property
    def flops(self) -> int:
        """The floating-point operations: two per product. Each gradient needs as many as the convolution."""
        return 2 * math.prod(self.w_shape) * self.batch * self.output_height * self.output_width

    @property
    def bytes(self) -> int:
        """The least memory traffic in bytes: each input is read once, and each output written once."""
        return ITEM_BYTES * sum(map(math.prod, self.shapes))

    @property
    def needs(self) -> frozenset[str]:
        """The features beyond a plain convolution that a kernel must support: of ATTRIBUTES, and ``feature``."""
        found = {
            RECTANGULAR: self.kernel != self.kernel_width,
            STRIDE: self.stride != (1, 1),
            PAD: self.pad != (0, 0),
            DILATE: self.dilate != (1, 1),
            GROUPS: self.groups != 1,
            self.feature: bool(self.feature),
        }
        return frozenset(name for name, needed in found.items() if needed)

    @property
    def sizes(self) -> dict[str, Any]:
        """The keywords for ConvProblem of this convolution, without attributes that have their default."""
        plain = ConvProblem(self.batch, self.channels, self.height, self.width, self.filters, self.kernel)
        return {name: value for name, value in self._sizes.items() if name in _PLAIN or value != getattr(plain, name)}

    def with_batch(self: Problem, batch: int) -> Problem:
        """Return the same problem for ``batch`` images."""
        return self if batch == self.batch else replace(self, batch=batch)

    @property
    def convolution(self) -> ConvProblem:
        """This problem's convolution as a ConvProblem: that of a gradient, or without the fused tanh and pooling."""
        return ConvProblem(**self._sizes)

    @cached_property
    def data_gradient(self) -> DataGradient:
        """The problem of the gradient to x of this convolution."""
        return DataGradient(**self._sizes)

    @cached_property
    def weight_gradient(self) -> WeightGradient:
        """The problem of the gradient to w of this convolution."""
        return WeightGradient(**self._sizes)

    def pooled(self, full: bool) -> PooledProblem:
        """Return this convolution fused with tanh and 2 x 2 max-pooling."""
        return PooledProblem(**self._sizes, full=full)

    @property
    def _sizes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(ConvProblem)}

    def __str__(self) -> str:
        of = f"the {self.feature} of " if self.feature in GRADIENTS else ""
        named = {"stride": self.stride, "padding": self.pad, "dilation": self.dilate, "groups": self.groups}
        plain = {"padding": (0, 0), "groups": 1}
        attributes = [f", {name} {value}" for name, value in named.items() if value != plain.get(name, (1, 1))]
        return (
            f"{of}{self.batch} x {self.channels} x {self.height} x {self.width} "
            f"with {self.filters} filters of {self.kernel} x {self.kernel_width}{''.join(attributes)}"
        )


@dataclass(frozen=True)
class DataGradient(ConvProblem):
    """The gradient to the input of a convolution: x[b, c, h, w] = sum of y * w over all products that read the pixel.

    A kernel reads y, the gradient to the output, and w, and fills x, the gradient to the input.
    """

    operands: ClassVar[tuple[str, str, str]] = ("y", "w", "x")
    feature: ClassVar[str] = DATA_GRADIENT

    @property
    def products(self) -> int:
        """The most products per element of x, (M / G) K L."""
        return self.filters // self.groups * self.kernel * self.kernel_width


@dataclass(frozen=True)
class WeightGradient(ConvProblem):
    """The gradient to the filters of a convolution: w[m, c, p, q] = sum over b, i, j of y[b, m, i, j] * x.

    A kernel reads x and y, the gradient to the output, and fills w, the gradient to the filters.
    """

    operands: ClassVar[tuple[str, str, str]] = ("x", "y", "w")
    feature: ClassVar[str] = WEIGHT_GRADIENT

    @property
    def products(self) -> int:
        """The most products per element of w, B OH OW."""
        return self.batch * self.output_height * self.output_width


@dataclass(frozen=True)
class PooledProblem(ConvProblem):
    """A convolution fused with tanh and 2 x 2 max-pooling of stride 2; y has the shape (B, M, PH, PW).

    The pooling ignores a NaN if the window has a number. ``products`` and ``flops`` are those of the convolution.

    Attributes:
        full: with False, an odd last row or column is left out and PH = OH // 2 (MXNet's convention "valid"); with
            True, windows at an odd edge are smaller and PH = (OH + 1) // 2 ("full"). PW is computed in the same way.

    Raises:
        ProblemError: as in ConvProblem, or the output of the pooling is empty.
    """

    full: bool = False
    feature: ClassVar[str] = TANH_POOL

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("rows", self.output_height), ("columns", self.output_width)):
            if size < 2 and not self.full:
                raise ProblemError(
                    f"fuse: expected at least 2 {name} of the convolution for 2 x 2 max-pooling, got {size}"
                )

    @property
    def y_shape(self) -> Shape4:
        """The output's shape, (B, M, PH, PW)."""
        rows, columns = ((size + self.full) // 2 for size in (self.output_height, self.output_width))
        return (self.batch, self.filters, rows, columns)

    def __str__(self) -> str:
        return f"{super().__str__()}, then tanh of 2 x 2 maxima"


def _integer(name: str, value: Any, least: int) -> int:
    try:
        whole = index(value)
    except TypeError:
        raise ProblemError(f"{name}: expected an integer, got {value!r}") from None
    if whole < least:
        raise ProblemError(f"{name}: expected at least {least}, got {whole}")
    return whole


def _windows(size: int, kernel: int, stride: int, pad: int, dilate: int) -> int:
    """Return the number of positions of a dilated kernel along a padded axis."""
    return (size + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


_LEAST = {"batch": 0, "channels": 1, "height": 1, "width": 1, "filters": 1, "kernel": 1, "kernel_width": 1, "groups": 1}
_PLAIN = ("batch", "channels", "height", "width", "filters", "kernel")
_LEAST_OF_PAIRS = {"stride": 1, "pad": 0, "dilate": 1}


@dataclass(frozen=True)
class Net:
    """The convolutions of one network, in order. layers: (channels, height, width, filters, kernel) of each."""

    name: str
    layers: tuple[tuple[int, int, int, int, int], ...]

    def problems(self, images: int) -> list[ConvProblem]:
        """Return each layer's problem for that number of images."""
        return [ConvProblem(images, *layer) for layer in self.layers]


def layer_name(layer: Sequence[int]) -> str:
    """Return a layer's channels, height, width, filters and kernel in words."""
    channels, height, width, filters, kernel = layer
    return f"{channels} x {height} x {width}, {filters} filters of {kernel} x {kernel}"


#: The course's networks that this project has trained, by term.
NETS = (
    Net("2017", ((1, 28, 28, 50, 5),)),
    Net("2018sp", ((1, 64, 64, 6, 5), (6, 30, 30, 16, 5))),
    Net("2018fa", ((1, 72, 72, 12, 7), (12, 33, 33, 24, 7))),
)
#: The course's networks of 2019, with sizes from its scripts and submissions; this project has no weights for them.
LATER_NETS = (
    Net("2019sp", ((1, 48, 48, 6, 5), (6, 22, 22, 16, 5))),
    Net("2019fa", ((1, 70, 70, 12, 5), (12, 33, 33, 24, 5))),
)
KNOWN_NETS = NETS + LATER_NETS
#: The course's terms in words.
TERMS = {net.name: f"{net.name[:4]} {'spring' if net.name.endswith('sp') else 'fall'}" for net in KNOWN_NETS}
#: The problems of NETS for the course's 10,000 images, by term, and for a network of several layers also by number.
COURSE_LAYERS = {
    f"{net.name}-{number}" if len(net.layers) > 1 else net.name: layer
    for net in NETS
    for number, layer in enumerate(net.problems(10_000), 1)
}
