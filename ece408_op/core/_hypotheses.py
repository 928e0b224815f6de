"""The table of mistakes: what a plain convolution's output would be if the code made each of them.

A hypothesis of LOCAL says which windows and filters are multiplied: it is cheap to try on one image and a few filters.
One of WHOLE needs the whole exact output. Letters as in ``ece408_op.problem``; p and q are a filter's row and column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ece408_op.problem import ConvProblem

from .kernel import EPS16, EPS32

#: Tiles whose missing halo is tried.
TILES = (32, 16, 8, 4, 28, 24, 20, 14, 12, 10)
#: The error of a sum of 11-bit products, divided by the sum of their absolute values: 7 times their rounding unit.
HALF_SUMS = 7 * EPS16
#: The fewest sums of a stride that show that they are not reset.
_FEWEST_SUMS = 8
#: Bits of an index that wraps around.
_BITS = (8, 16, 32)


@dataclass(frozen=True)
class Case:
    """A wrong output y; its inputs, the content of y before the call and the exact result in float64."""

    problem: ConvProblem
    x: np.ndarray
    w: np.ndarray
    y: np.ndarray
    before: np.ndarray
    exact: np.ndarray


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis: a name for the search of its line in the source, what it says, and the output that it predicts.

    ``other``: a second value that each element may have, where threads race. ``tolerance``: what float32 may err in
    sums that grow from element to element.
    """

    name: str
    text: str
    predicted: np.ndarray
    other: np.ndarray | None = None
    tolerance: float = 0.0


def windows(x: np.ndarray, problem: ConvProblem) -> np.ndarray:
    """Return the pixels of each output's window, (B, OH, OW, C, K, K), as a view of x (B, C, H, W)."""
    size = (problem.kernel, problem.kernel)
    view = np.lib.stride_tricks.sliding_window_view(x, size, (2, 3))  # type: ignore[call-overload]
    return np.asarray(view.transpose(0, 2, 3, 1, 4, 5))


def products(pixels: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the sums (B, M, OH, OW) of windows (B, OH, OW, C, K, K) times filters (M, C, K, K)."""
    sums = pixels.reshape(*pixels.shape[:3], -1) @ w.reshape(len(w), -1).T
    return np.moveaxis(sums, -1, 1)


Local = tuple[str, str, Callable[[np.ndarray, np.ndarray, ConvProblem], tuple[np.ndarray, np.ndarray]]]


def _filters(change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return lambda x, w, problem: (windows(x, problem), change(w))


def _pixels(change: Callable[[np.ndarray, ConvProblem], np.ndarray]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return lambda x, w, problem: (change(x, problem), w)


def _without(axis: int, at: int, w: np.ndarray) -> np.ndarray:
    """The filters with zeros at one index of an axis, so that its products are missing."""
    changed = w.copy()
    changed[(slice(None),) * axis + (at,)] = 0
    return changed


def _only(at: tuple[int, ...], w: np.ndarray) -> np.ndarray:
    """The filters with zeros but at these indices: channel, row, column."""
    changed, kept = np.zeros_like(w), (slice(None),) + at
    changed[kept] = w[kept]
    return changed


def _whole_tiles(tile: int, w: np.ndarray) -> np.ndarray:
    """The filters as rows of C * K * K weights, without the last, partial tile of each row."""
    flat = w.reshape(len(w), -1).copy()
    flat[:, flat.shape[1] // tile * tile :] = 0
    return flat.reshape(w.shape)


def _centred(x: np.ndarray, problem: ConvProblem) -> np.ndarray:
    pad = problem.kernel // 2
    padded = np.pad(x, ((0, 0), (0, 0), (pad, 0), (pad, 0)))
    return windows(padded[:, :, : problem.height, : problem.width], problem)


def _in_tiles(rows: int, columns: int, x: np.ndarray, problem: ConvProblem) -> np.ndarray:
    """The windows with zeros where a pixel lies beyond its output's tile; 0: the tile has no end there."""
    tap, sizes = np.arange(problem.kernel), (rows or problem.height, columns or problem.width)
    outputs = (np.arange(size)[:, None] for size in problem.y_shape[2:])
    in_rows, in_columns = (output % size + tap < size for output, size in zip(outputs, sizes))
    return np.asarray(windows(x, problem) * (in_rows[:, None, None, :, None] & in_columns[:, None, None]))


def _without_parentheses(x: np.ndarray, problem: ConvProblem) -> np.ndarray:
    """The pixels at h + p * W + w + q of each map, for (h + p) * W + w + q."""
    i, j, r, s = np.ogrid[: problem.output_height, : problem.output_width, : problem.kernel, : problem.kernel]
    maps = x.reshape(len(x), problem.channels, -1)
    return maps.take(i + r * problem.width + j + s, 2, mode="clip").transpose(0, 2, 3, 1, 4, 5)


def _rows_for_columns(x: np.ndarray, w: np.ndarray, problem: ConvProblem) -> tuple[np.ndarray, np.ndarray]:
    square = problem.height == problem.width
    return windows(x.swapaxes(2, 3) if square else np.full_like(x, np.nan), problem), w


def _first_channel(x: np.ndarray, problem: ConvProblem) -> np.ndarray:
    return windows(np.broadcast_to(x[:, :1], x.shape), problem)


#: The loops of a sum: the mistake's name, what is added, the filters' axis, and the loop's end.
_LOOPS = (
    ("channel_loop", "channel", 1, "C"),
    ("row_loop", "row of each filter", 2, "K"),
    ("column_loop", "column of each filter", 3, "K"),
)
_HALO = "without the products beyond a tile of {}: its halo of K - 1 {} is missing"
#: The mistake's name, the words that follow "the convolution", and the windows and filters that are multiplied.
LOCAL: tuple[Local, ...] = (
    ("filter_pq", "with p and q exchanged in the filter's index", _filters(lambda w: w.swapaxes(2, 3))),
    ("flipped", "with flipped filters: this layer does not flip them", _filters(lambda w: w[:, :, ::-1, ::-1])),
    ("flipped", "with the rows of each filter in reverse order", _filters(lambda w: w[:, :, ::-1])),
    ("flipped", "with the columns of each filter in reverse order", _filters(lambda w: w[:, :, :, ::-1])),
    ("x_rows_columns", "with rows and columns exchanged in x's index", _rows_for_columns),
    (
        *("x_parentheses", "with h + p * W for (h + p) * W in x's index: put a macro's parameters in parentheses"),
        _pixels(_without_parentheses),
    ),
    ("centred", "with windows that begin K/2 rows and columns too early", _pixels(_centred)),
    ("x_channel", "with channel 0 of x for each channel: c is missing in x's index", _pixels(_first_channel)),
    (
        *("w_channel", "with channel 0 of each filter for each channel: c is missing in the filter's index"),
        _filters(lambda w: np.broadcast_to(w[:, :1], w.shape)),
    ),
    ("w_channels", "with the channels of x in reverse order", _filters(lambda w: w[:, ::-1])),
    *(
        (name, f"without the {which} {what}: its loop must {at}", _filters(partial(_without, axis, place)))
        for name, what, axis, end in _LOOPS
        for which, place, at in (("last", -1, f"end at {end}"), ("first", 0, "begin at 0"))
    ),
    ("channel_loop", "of channel 0 alone: its loop must end at C", _filters(partial(_only, (0,)))),
    ("assigned", "with each sum's last product alone: a sum takes +=", _filters(partial(_only, (-1, -1, -1)))),
    ("restarted", "of the last channel alone: the sum begins again at each channel", _filters(partial(_only, (-1,)))),
    ("restarted", "of the last filter row alone: the sum begins again at each row", _filters(partial(_only, (-1, -1)))),
    *(
        (
            *("unrolled", f"without each filter's last products, beyond whole tiles of {tile}: round their number up"),
            _filters(partial(_whole_tiles, tile)),
        )
        for tile in TILES
    ),
    *(
        (
            "halo",
            _HALO.format(text.format(tile=tile), missing),
            _pixels(partial(_in_tiles, rows * tile, columns * tile)),
        )
        for text, missing, rows, columns in (
            ("{tile} x {tile} outputs", "rows and columns", 1, 1),
            ("{tile} rows", "rows", 1, 0),
            ("{tile} columns", "columns", 0, 1),
        )
        for tile in TILES
    ),
)


def whole(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypotheses about filters, images, the output's index, its sums and what it held before."""
    factor = float(np.vdot(case.exact, case.y) / max(np.vdot(case.exact, case.exact), 1e-300))
    if np.isfinite(factor):
        # As many sums as a filter may have products, no more: else the room for their errors would hold all.
        length = min(max(1, abs(factor)), 1e4) * case.problem.products
        errors = 4 * EPS32 * math.sqrt(length) * float(np.abs(case.y).max())
        yield Hypothesis("scaled", f"times {factor:.6g}", factor * case.exact, None, errors)
    for function, changed in (("ReLU", np.maximum(case.exact, 0)), ("tanh", np.tanh(case.exact))):
        yield Hypothesis("activated", f"with {function} of each output: this layer has none", changed)
    yield from _exchanged(case)
    yield from _running_sums(case)
    # In some elements, if only a part of y was set to 0.
    text = "plus what y held before: the sum must replace it"
    yield Hypothesis("accumulated", text, case.before + case.exact, case.exact)
    yield _copied_by_bytes(case)
    yield from _strides(case)
    yield from _wrapped(case)


def _exchanged(case: Case) -> Iterator[Hypothesis]:
    p, w, exact = case.problem, case.w, case.exact
    one_filter, one_image = (np.broadcast_to(part, exact.shape) for part in (exact[:, :1], exact[:1]))
    rows_columns, images_filters = (exact.swapaxes(*axes).reshape(exact.shape) for axes in ((2, 3), (0, 1)))
    yield Hypothesis("w_filter", "with filter 0 for each filter: m is missing in the filter's index", one_filter)
    yield Hypothesis("x_image", "of image 0 for each image: b is missing in x's index", one_image)
    yield Hypothesis("w_channels", "with the filters in reverse order", exact[:, ::-1])
    yield Hypothesis("y_rows_columns", "with rows and columns exchanged in y's index", rows_columns)
    yield Hypothesis("y_filter", "with images and filters exchanged in y's index", images_filters)
    if p.channels > 1 and p.filters > 1:
        pixels, taps = windows(case.x, p), w.reshape(-1, p.kernel, p.kernel)
        m, c = np.ogrid[: p.filters, : p.channels]
        for layout, at in (("", c * p.channels + m), (", as in a layout (C, M, K, K)", c * p.filters + m)):
            text = f"with c and m exchanged in the filter's index{layout}"
            yield Hypothesis("w_channels", text, products(pixels, taps.take(at, 0, mode="wrap")))


def _running_sums(case: Case) -> Iterator[Hypothesis]:
    exact, shape = case.exact, case.exact.shape
    wrong = ~(np.abs(case.y - exact) <= 1e-4 * np.abs(exact).max())
    axes = [("that of the filter", "", (shape[0], shape[1], -1)), ("that of the image", "", (1, shape[0], -1))]
    for first, name in ((3, "the row"), (2, "the map"), (1, "the image"), (0, "all of y")):
        axes.append(("the one", f" in {name}", (-1, math.prod(shape[first:]), 1)))
    for added, where, axis in axes:
        values = exact.reshape(axis)
        outer, length, inner = values.shape
        # The first ones have nothing to add to, and those behind them seem right where they add to 0. A few sums may be
        # right by chance.
        first = int(wrong.reshape(values.shape).any((0, 2)).argmax())
        for step in sorted({1, first if outer * (length - first) * inner >= _FEWEST_SUMS else 1} - {0}):
            rows = np.pad(values, ((0, 0), (0, -length % step), (0, 0))).reshape(outer, -1, step, inner)
            sums = rows.cumsum(1).reshape(outer, -1, inner)[:, :length].reshape(shape)
            errors = 4 * EPS32 * math.sqrt(length * case.problem.products) * float(np.abs(sums).max())
            steps = f" {step}" * (step > 1)
            text = f"with sums that are not reset: each output adds to {added}{steps} before it{where}"
            yield Hypothesis("sum", text, sums, None, errors)


def _copied_by_bytes(case: Case) -> Hypothesis:
    read = case.w.reshape(-1).copy()
    read[len(read) // 4 :] = 0
    text = "with a quarter of the filters, and 0 for the rest: a copy's size is in bytes, sizeof(float) per element"
    return Hypothesis("copied_bytes", text, products(windows(case.x, case.problem), read.reshape(case.w.shape)))


def _strides(case: Case) -> Iterator[Hypothesis]:
    """Wrong strides of y, such as x's, and of x; and loops to H and W, where a row's surplus lands in the next row."""
    p, exact = case.problem, case.exact
    b, m, i, j = np.ogrid[: p.batch, : p.filters, : p.output_height, : p.output_width]
    area = p.output_height * p.output_width
    own = "y has H - K + 1 rows of W - K + 1"
    image = b * p.filters
    for name, start, width, what in (
        ("strides", (image + m) * area, p.width, f"the row length W of x in y's index: {own}"),
        ("strides", (image + m) * p.height * p.width, p.width, f"the sizes H and W of x in y's index: {own}"),
        ("images", (b + m) * area, p.output_width, "one map per image in y's index: an image has M of them"),
        ("images", 0 * b + m * area, p.output_width, "all images in image 0's place: b is missing in y's index"),
    ):
        at = start + i * width + j
        inside, moved = at < exact.size, case.before.copy().reshape(-1)
        moved[at[inside]] = exact[inside]
        yield Hypothesis(f"y_{name}", f"with {what}", moved.reshape(exact.shape))
    for rows, columns, what in ((1, 0, "H - K rows"), (0, 1, "rows of W - K"), (1, 1, "H - K rows of W - K")):
        smaller = exact[:, :, : p.output_height - rows, : p.output_width - columns]
        moved = case.before.copy().reshape(-1)
        moved[: smaller.size] = smaller.reshape(-1)
        yield Hypothesis("y_sizes", f"with {what} per map of y: {own}", moved.reshape(exact.shape))
    b, c, i, j = np.ogrid[: p.batch, : p.channels, : p.height, : p.width]
    own = "an image has C maps of H rows of W"
    map_ = b * p.channels + c
    for name, start, width, what in (
        ("strides", map_ * p.height * p.output_width, p.output_width, "the row length W - K + 1 of y"),
        ("strides", map_ * area, p.output_width, "the sizes of y"),
        ("strides", (map_ - c) * p.height * p.width + c * area, p.width, "the size of y's maps"),
        ("images", (b + c) * p.height * p.width, p.width, "one map per image"),
    ):
        pixels = windows(case.x.take(start + i * width + j), p)
        yield Hypothesis(f"x_{name}", f"with {what} in x's index: {own}", products(pixels, case.w))
    m, c, r, s = np.ogrid[: p.filters, : p.channels, : p.kernel, : p.kernel]
    for map_, what in (
        ((m + c) * p.kernel**2, "one map per filter"),
        ((m * p.channels + c) * p.kernel, "K for K * K"),
        (m * p.channels * p.kernel**2 + c * p.kernel, "K for K * K"),
    ):
        taps = case.w.take(map_ + r * p.kernel + s)
        text = f"with {what} in the filter's index: a filter has C maps of K rows of K"
        yield Hypothesis("w_strides", text, products(windows(case.x, p), taps))
    if p.kernel == 1:  # y has as many columns as x
        return
    # x is read on beyond the row's end, as the code does, or a tile has zeros there.
    beyond = min(p.kernel - 1, p.output_width)
    flat = np.pad(case.x.reshape(p.batch, p.channels, -1), ((0, 0), (0, 0), (0, p.width + p.kernel)))
    tap = np.arange(p.kernel)
    start = (np.arange(p.output_height)[:, None] * p.width + p.output_width + np.arange(beyond))[..., None, None]
    read_on = flat[:, :, start + tap[:, None] * p.width + tap].transpose(0, 2, 3, 1, 4, 5)
    with_zeros = np.pad(case.x[..., p.output_width :], ((0, 0), (0, 0), (0, 0), (0, p.kernel - 1)))
    text = "but for threads beyond a row's end, which write into the next row: threads and loops end at W - K + 1"
    for pixels in (read_on, windows(with_zeros, p)[:, :, :beyond]):
        other = exact.copy()
        # Behind the last row of a map comes the next map.
        other.reshape(-1, p.output_width)[1:, :beyond] = products(pixels, case.w).reshape(-1, beyond)[:-1]
        yield Hypothesis("loops_to_w", text, exact, other)


def _wrapped(case: Case) -> Iterator[Hypothesis]:
    p, exact, size = case.problem, case.exact, case.exact.size
    for bits in _BITS:
        most = 1 << bits
        text = f"with an index of {bits} bits in {{}}, which begins again at 0 after {most - 1}"
        if size > most:
            last = np.arange(most) + (size - 1 - np.arange(most)) // most * most
            flat = case.before.copy().reshape(-1)
            flat[:most] = exact.reshape(-1)[last]
            # Without an order among the writes, any of them may be the last.
            first = exact.reshape(-1)[np.arange(size) % most].reshape(exact.shape)
            yield Hypothesis("overflow", text.format("y"), flat.reshape(exact.shape), first)
        for name, array in (("x", case.x), ("w", case.w)):
            if array.size > most:
                read = array.reshape(-1)[np.arange(array.size) % most].reshape(array.shape)
                x, w = (read, case.w) if name == "x" else (case.x, read)
                yield Hypothesis("overflow", text.format(name), products(windows(x, p), w))


def roundings(case: Case, size: np.ndarray) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yield the name of each way to round, the largest error that it allows, and their largest root mean square.

    size: the sums of the products' absolute values. For the root mean square, each error is divided by the root of the
    sum of its products' squares.

    The bounds are those of the grader's classes: transforms err in proportion to the largest pixel and weight. Of 11 or
    8 bits, with u = 2^-11 or 2^-8, the root mean square is 2.3 u for truncated factors and products, and for n rounded
    sums 0.31 sqrt(n) u: all measured on random data. An offset or a missing product makes it larger.
    """
    largest = np.abs(case.x).max((1, 2, 3))[:, None] * np.abs(case.w).max((1, 2, 3))
    n = case.problem.products
    yield "of transforms such as Winograd's", 600 * EPS32 * math.sqrt(n) * largest[..., None, None], math.inf
    for name, unit in (("half precision (fp16) or TF32", EPS16), ("bfloat16", 2.0**-8)):
        yield f"of {name}", 7 * unit * size, unit * max(2.5, 1.3 + 0.32 * math.sqrt(n))
