"""Convolutions in NumPy that each make one mistake, in code of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ece408_op.problem import ConvProblem

PROBLEMS = [ConvProblem(4, 3, 20, 17, 5, 3), ConvProblem(3, 1, 28, 28, 6, 5), ConvProblem(2, 4, 21, 21, 8, 7)]
BEFORE = 4096.5


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The seven loops in float32, each index a function; a sum is kept where ``written`` says so."""

    words: str
    pixel: Callable[..., Any] = lambda p, b, c, i, j, r, s: (b, c, i + r, j + s)
    tap: Callable[..., Any] = lambda p, m, c, r, s: (m, c, r, s)
    product: Callable[..., Any] = lambda p, c, r, s, i, j: np.float32(1)
    output: Callable[..., Any] = lambda p, y, sums: y.__setitem__(slice(None), sums)
    takes: Callable[[ConvProblem], bool] = lambda p: True

    def __call__(self, p: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        b, m, i, j = np.ogrid[: p.batch, : p.filters, : p.output_height, : p.output_width]
        sums, y = np.zeros(p.y_shape, np.float32), np.full(p.y_shape, BEFORE, np.float32)
        for c in range(p.channels):
            for r in range(p.kernel):
                for s in range(p.kernel):
                    pixels, taps = x[self.pixel(p, b, c, i, j, r, s)], w[self.tap(p, m, c, r, s)]
                    sums += pixels * taps * self.product(p, c, r, s, i, j)
        self.output(p, y, sums)
        return y


def several(p: ConvProblem) -> bool:
    return p.channels > 1


def square(p: ConvProblem) -> bool:
    return p.height == p.width


def padded(p: ConvProblem, x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 0), (p.kernel // 2, 0), (p.kernel // 2, 0)))


def add_along(axis: int) -> Callable[..., None]:
    def output(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
        y[...] = np.cumsum(sums, axis, np.float32)

    return output


def every_second(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    for m in range(p.filters):
        y[:, m] = sums[:, m] + (y[:, m - 2] if m > 1 else 0)


def flat(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    y[...] = np.cumsum(sums, dtype=np.float32).reshape(y.shape)


def long_rows(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    b, m, i, j = np.ogrid[: p.batch, : p.filters, : p.output_height, : p.output_width]
    at = np.broadcast_to(((b * p.filters + m) * p.height + i) * p.width + j, y.shape)
    y.reshape(-1)[at[at < y.size]] = sums[at < y.size]


def one_map_per_image(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    for b, image in enumerate(sums):
        start = b * image[0].size
        y.reshape(-1)[start : start + image.size] = image.reshape(-1)


def without_an_image(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    y[0] = sums[-1]


def short(rows: int, columns: int) -> Callable[..., None]:
    def output(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
        part = sums[:, :, : p.output_height - rows, : p.output_width - columns]
        y.reshape(-1)[: part.size] = part.reshape(-1)

    return output


def half_added(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    y.reshape(-1)[: y.size // 2] = 0
    y += sums


def eight_bits(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
    for at, value in enumerate(sums.reshape(-1)):
        y.reshape(-1)[at % 256] = value


def part(*index: Any) -> Callable[..., None]:
    def output(p: ConvProblem, y: np.ndarray, sums: np.ndarray) -> None:
        y[index] = sums[index]

    return output


def first_of(axis: int, y: np.ndarray) -> np.ndarray:
    return y.reshape(int(np.prod(y.shape[:axis])), -1)


def in_tiles_of_16(p: ConvProblem, c: int, r: int, s: int) -> np.float32:
    last = p.channels * p.kernel**2 // 16 * 16
    return np.float32((c * p.kernel + r) * p.kernel + s < last)


def at(shape: tuple[int, ...], index: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.unravel_index(index, shape))


def halo(rows: int, columns: int) -> Callable[..., Any]:
    return lambda p, c, r, s, i, j: ((i % rows + r < rows) & (j % columns + s < columns)).astype(np.float32)


ALL = slice(None)
KERNELS = {
    "filter_pq": Kernel("p and q exchanged", tap=lambda p, m, c, r, s: (m, c, s, r)),
    "flipped": Kernel("flipped filters", tap=lambda p, m, c, r, s: (m, c, p.kernel - 1 - r, p.kernel - 1 - s)),
    "flipped rows": Kernel("rows of each filter in reverse", tap=lambda p, m, c, r, s: (m, c, p.kernel - 1 - r, s)),
    "x_rows_columns": Kernel("exchanged in x's", lambda p, b, c, i, j, r, s: (b, c, j + s, i + r), takes=square),
    "centred": Kernel("begin K/2 rows and columns too early"),  # its x is padded
    "x_channel": Kernel("c is missing in x's", lambda p, b, c, i, j, r, s: (b, 0, i + r, j + s), takes=several),
    "w_channel": Kernel("c is missing in the filter's", tap=lambda p, m, c, r, s: (m, 0, r, s), takes=several),
    "w_filter": Kernel("m is missing", tap=lambda p, m, c, r, s: (m * 0, c, r, s)),
    "x_image": Kernel("b is missing", lambda p, b, c, i, j, r, s: (b * 0, c, i + r, j + s)),
    "w_channels": Kernel(
        "c and m exchanged in the filter's index, as in a layout (C, M, K, K)",
        tap=lambda p, m, c, r, s: ((c * p.filters + m) // p.channels, (c * p.filters + m) % p.channels, r, s),
        takes=several,
    ),
    "channel_loop": Kernel("last channel", product=lambda p, c, *_: np.float32(c + 1 < p.channels), takes=several),
    "channel_loop 1": Kernel("first channel", product=lambda p, c, *_: np.float32(c > 0), takes=several),
    "channel_loop 0": Kernel("of channel 0 alone", product=lambda p, c, *_: np.float32(c == 0), takes=several),
    "assigned": Kernel(
        "with each sum's last product alone",
        product=lambda p, c, r, s, *_: np.float32((c, r, s) == (p.channels - 1, p.kernel - 1, p.kernel - 1)),
    ),
    "restarted": Kernel(
        "of the last channel alone",
        product=lambda p, c, *_: np.float32(c + 1 == p.channels),
        takes=several,
    ),
    "restarted in rows": Kernel(
        "of the last filter row alone",
        product=lambda p, c, r, *_: np.float32((c, r) == (p.channels - 1, p.kernel - 1)),
    ),
    "x_strides": Kernel(
        "the row length W - K + 1 of y in x's index",
        lambda p, b, c, i, j, r, s: at(p.x_shape, ((b * p.channels + c) * p.height + i + r) * p.output_width + j + s),
    ),
    "x_strides of maps": Kernel(
        "the size of y's maps in x's index",
        lambda p, b, c, i, j, r, s: at(
            p.x_shape,
            (b * p.channels * p.height + i + r) * p.width + c * p.output_height * p.output_width + j + s,
        ),
        takes=several,
    ),
    "w_strides": Kernel(
        "one map per filter in the filter's index",
        tap=lambda p, m, c, r, s: at(p.w_shape, ((m + c) * p.kernel + r) * p.kernel + s),
        takes=several,
    ),
    "w_strides of maps": Kernel(
        "K for K * K in the filter's index",
        tap=lambda p, m, c, r, s: at(p.w_shape, (m * p.channels + c + r) * p.kernel + s),
    ),
    "w_strides of channels": Kernel(
        "K for K * K in the filter's index",
        tap=lambda p, m, c, r, s: at(p.w_shape, (m * p.channels * p.kernel + c + r) * p.kernel + s),
        takes=several,
    ),
    "x_images": Kernel(
        "one map per image in x's index",
        lambda p, b, c, i, j, r, s: at(p.x_shape, ((b + c) * p.height + i + r) * p.width + j + s),
        takes=several,
    ),
    "row_loop": Kernel("without the last row", product=lambda p, c, r, *_: np.float32(r + 1 < p.kernel)),
    "column_loop": Kernel("without the first column", product=lambda p, c, r, s, *_: np.float32(s > 0)),
    "unrolled": Kernel("beyond whole tiles of", product=lambda p, c, r, s, *_: in_tiles_of_16(p, c, r, s)),
    "scaled": Kernel("times 25", output=lambda p, y, sums: y.__setitem__(ALL, 25 * sums)),
    "whole_numbers": Kernel("only whole numbers", output=lambda p, y, sums: y.__setitem__(ALL, np.trunc(sums))),
    "halo": Kernel("a tile of 8 x 8 outputs", product=halo(8, 8)),
    "halo rows": Kernel("a tile of 8 rows", product=halo(8, 1 << 20)),
    "y_rows_columns": Kernel(
        "exchanged in y's index", output=lambda p, y, sums: y.__setitem__(ALL, sums.swapaxes(2, 3)), takes=square
    ),
    "y_filter": Kernel(
        "images and filters exchanged",
        output=lambda p, y, sums: y.__setitem__(ALL, sums.swapaxes(0, 1).reshape(y.shape)),
    ),
    "y_strides": Kernel("the sizes H and W of x in y's index", output=long_rows),
    "y_images": Kernel("one map per image in y's index", output=one_map_per_image),
    "y_images in one": Kernel("b is missing in y's index", output=without_an_image),
    "y_sizes": Kernel("with H - K rows per map of y", output=short(1, 0)),
    "y_sizes of both": Kernel("with H - K rows of W - K per map of y", output=short(1, 1)),
    "sum": Kernel("adds to the one before it in the row", output=add_along(3)),
    "sum of images": Kernel("adds to that of the image before it", output=add_along(0)),
    "sum of all": Kernel("adds to the one before it in all of y", output=flat),
    "sum of filters": Kernel("adds to that of the filter 2 before it", output=every_second),
    "activated": Kernel("with ReLU of each output", output=lambda p, y, sums: np.maximum(sums, 0, out=y)),
    "activated by tanh": Kernel("with tanh of each output", output=lambda p, y, sums: np.tanh(sums, out=y)),
    "x_parentheses": Kernel(
        "h + p * W for (h + p) * W",
        lambda p, b, c, i, j, r, s: at(p.x_shape, (b * p.channels + c) * p.height * p.width + i + r * p.width + j + s),
    ),
    "accumulated": Kernel("plus what y held before", output=lambda p, y, sums: y.__iadd__(sums) is None),
    "accumulated half": Kernel("plus what y held before", output=half_added),
    "overflow": Kernel("an index of 8 bits in y", output=eight_bits),
    "unwritten": Kernel("does not write the last row", output=part(ALL, ALL, slice(-1))),
    "unwritten images": Kernel("does not write the first image", output=part(slice(1, None))),
    "unwritten but for a map": Kernel("and filters 1 to", output=part(slice(1), slice(1))),
    "unwritten elements": Kernel(
        "elements 70 to", output=lambda p, y, sums: y.reshape(-1).__setitem__(slice(70), sums.reshape(-1)[:70])
    ),
    "unwritten rest of the row": Kernel(
        "elements 2 to", output=lambda p, y, sums: y.reshape(-1).__setitem__(slice(2), sums.reshape(-1)[:2])
    ),
    "unwritten elements of maps": Kernel(
        "of each map: there may be too few blocks",
        output=lambda p, y, sums: first_of(2, y).__setitem__((ALL, slice(70)), first_of(2, sums)[:, :70]),
    ),
    "unwritten_tile": Kernel("the last, partial tile may be missing", output=part(ALL, ALL, slice(8), slice(8))),
}  # fmt: skip


def inputs(p: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(p.kernel)
    return rng.uniform(-1, 1, p.x_shape).astype(np.float32), rng.standard_normal(p.w_shape).astype(np.float32)
