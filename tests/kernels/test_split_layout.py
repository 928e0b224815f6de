"""Where split's kernels find their products: the sources' index arithmetic, done in NumPy, gives the convolution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_layers import chip_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.core import reference
from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.kernels.cuda.split_precision._candidate_tiles import by_columns, by_rows, by_teams, by_warps
from ece408_op.kernels.cuda.split_precision._cost_model import best_tile, tile_for
from ece408_op.kernels.cuda.split_precision._tile import Tile
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div

WAYS = {"columns": by_columns, "rows": by_rows, "warps": by_warps, "teams": by_teams}
#: So little shared memory that tiles are bands and parts of bands.
SMALL = Chip("small", (9, 0), 4, 30 * 1024)

LAYERS = [
    ConvProblem(5, 1, 12, 12, 5, 5),
    ConvProblem(3, 1, 13, 15, 4, 4),
    ConvProblem(2, 2, 9, 11, 5, 3),
    ConvProblem(3, 3, 10, 9, 4, 2),
    ConvProblem(2, 5, 14, 30, 7, 3),
    ConvProblem(1, 16, 11, 12, 9, 3),
    ConvProblem(4, 1, 1, 1, 1, 1),
]


def _filters(problem: ConvProblem, tile: Tile, w: np.ndarray) -> np.ndarray:
    """The matrix of the products in the taps' order, two a word, and the columns, R for each filter."""
    kernel, odd = problem.kernel, problem.channels // 2 if problem.channels % 2 else -1
    matrix = np.zeros((2 * len(tile.taps), tile.rows * problem.filters))
    by_row = tile.row_steps == 0
    for number, (plane, row, column) in enumerate(tile.taps):
        for j in range(2) if plane >= 0 else ():
            for moved in range(tile.rows):
                if tile.folded:
                    c, p, q = 0, row, 2 * column + j - moved
                elif plane == odd:
                    c, p, q = 2 * plane, row + (j if by_row else 0) - moved, column + (0 if by_row else j)
                else:
                    c, p, q = 2 * plane + j, row - moved, column
                if 0 <= p < kernel and 0 <= q < kernel:
                    matrix[2 * number + j, moved :: tile.rows] = w[:, c, p, q]
    return matrix


def _planes(problem: ConvProblem, tile: Tile, x: np.ndarray, row: int, column: int) -> np.ndarray:
    """The words of the images x (n, C, H, W), from an input row and column on; NaN where nothing was written."""
    planes = np.full((tile.images, ceil_div(problem.channels, 2), tile.plane, 2), np.nan)
    along = tile.rows if tile.folded else 1
    width = problem.width if along * tile.columns == problem.output_width else tile.columns + problem.kernel - 1
    rows = tile.down * tile.super_rows + problem.kernel - 1
    part = np.zeros((x.shape[0], 2 * planes.shape[1], rows + 1, width + 2))
    seen = x[:, :, row : row + rows, column : column + width]
    part[:, : x.shape[1], : seen.shape[2], : seen.shape[3]] = seen
    for plane in range(planes.shape[1]):
        low, high = part[:, 2 * plane], part[:, 2 * plane + 1]
        if problem.channels % 2 and plane == problem.channels // 2:
            high = np.roll(low, -1, axis=1 if tile.row_steps == 0 and not tile.folded else 2)
        words = np.stack([low, high], axis=-1)[:, :rows, :width:along]
        for line in range(rows):
            start = line * tile.stride
            planes[: len(x), plane, start : start + words.shape[2]] = words[:, line]
    return planes.reshape(-1, 2)


def emulated(problem: ConvProblem, tile: Tile, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The output that the tile's index arithmetic gives, NaN where no position stands for an element."""
    out = np.full(problem.y_shape, np.nan)
    filters = _filters(problem, tile, w)
    taps = np.array([0 if p < 0 else p * tile.plane + i * tile.stride + j for p, i, j in tile.taps])
    at = np.arange(tile.images * tile.super_rows * tile.columns)
    line, along = at // tile.columns, tile.rows if tile.folded else 1
    image, down = line // tile.super_rows, line % tile.super_rows
    words = ceil_div(problem.channels, 2) * tile.plane
    base = image * words + down * tile.down * tile.stride + at % tile.columns
    for first in range(0, problem.batch, tile.images):
        images = x[first : first + tile.images]
        for row in range(0, problem.output_height, tile.down * tile.super_rows):
            for column in range(0, problem.output_width, along * tile.columns):
                planes = _planes(problem, tile, images, row, column)
                for r in range(tile.sets):
                    sums = planes[base[:, None] + taps + r * tile.stride].reshape(len(at), -1) @ filters
                    for moved in range(tile.rows):
                        i = row + down * tile.down + r * tile.rows + (0 if tile.folded else moved)
                        j = column + at % tile.columns * along + (moved if tile.folded else 0)
                        real = (image < len(images)) & (i < problem.output_height) & (j < problem.output_width)
                        out[first + image[real], :, i[real], j[real]] = sums[real, moved :: tile.rows]
    return out


@pytest.mark.parametrize("chip", [chip_of(90), SMALL], ids=lambda chip: chip.name)
@pytest.mark.parametrize("way", WAYS)
def test_every_product_is_found_and_none_twice(way, chip):
    rng = np.random.default_rng(408)
    checked = 0
    for problem in LAYERS:
        x, w = (rng.integers(-8, 9, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
        expected = reference.convolve(x, w)
        tiles = list(WAYS[way](problem, chip, 16, 2))
        different = {(t.rows, t.sets, t.images, t.super_rows, t.columns, t.quads): t for t in tiles}
        for tile in list(different.values())[:: ceil_div(len(different), 6) or 1]:
            np.testing.assert_array_equal(emulated(problem, tile, x, w), expected, err_msg=f"{problem}: {tile}")
            checked += 1
    assert checked > 0


layers = st.builds(
    lambda c, h, w, m, k: ConvProblem(16, c, h + k - 1, w + k - 1, m, k),
    st.integers(1, 64),
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(1, 256),
    st.integers(1, 11),
)


@settings(max_examples=40, deadline=None)
@given(
    problem=layers, way=st.sampled_from(sorted(WAYS)), parts=st.sampled_from([1, 2]), aligned=st.sampled_from([4, 16])
)
def test_a_tile_fits_the_chip_and_covers_the_layer(problem, way, parts, aligned):
    chip = chip_of(90)
    tile = best_tile(way, problem, chip, aligned, parts)
    if tile is None:
        return
    assert tile.shared_bytes(problem) <= chip.shared_bytes
    assert tile.threads <= 1024
    assert tile.filter_blocks <= chip.multiprocessors
    assert tile.groups(problem) * tile.tiles * tile.filter_blocks >= tile.column_tiles(problem)
    # wgmma's columns: a multiple of 8, at most 256.
    assert not tile.teams or 8 * tile.tiles * parts <= 256
    wanted = problem.channels * problem.kernel * problem.kernel * tile.rows
    assert 16 * tile.steps >= wanted / tile.rows
    lines = tile.down * tile.super_rows + problem.kernel - 1
    assert tile.plane >= (lines - 1) * tile.stride
    assert 4 * tile.vector <= aligned
    assert 4 * tile.y_vector <= aligned


def test_the_course_layers_have_a_tile_in_every_way_that_is_for_them():
    for way, kernel in (
        ("columns", split_precision.COLUMNS),
        ("warps", split_precision.WARPS),
        ("teams", split_precision.TEAMS),
    ):
        taken = [not kernel.not_supported_reasons(p, chip_of(90)) for p in COURSE_LAYERS]
        assert taken == [way != "columns" or p.channels == 1 for p in COURSE_LAYERS]
    assert "expected 1, got 12" in split_precision.COLUMNS.not_supported_reasons(COURSE_LAYERS[-1])[0]
    assert (
        "compute capability: 9.0, got 10.0"
        in split_precision.TEAMS.not_supported_reasons(COURSE_LAYERS[-1], chip_of(100))[0]
    )


COURSE_LAYERS = [
    ConvProblem(1, 1, 28, 28, 50, 5),
    ConvProblem(1, 1, 64, 64, 6, 5),
    ConvProblem(1, 6, 30, 30, 16, 5),
    ConvProblem(1, 1, 72, 72, 12, 7),
    ConvProblem(1, 12, 33, 33, 24, 7),
]


def test_the_bound_is_float32s_class_and_the_rounded_ones_tf32s():
    problem = COURSE_LAYERS[-1]
    assert 2**-22 < split_precision.WARPS.error_bound(problem) < 5 * problem.products * 2**-24
    assert split_precision.ROUNDED.error_bound(problem) > 2**-11


def test_what_is_made_good_of_one_sign_stays_within_what_the_bound_has_for_it():
    problem, chip = COURSE_LAYERS[-1], chip_of(90)
    tile = tile_for("teams", problem, chip, 16, 2)
    for times in (1, 8):  # steps that hold 16 products, and two
        long = replace(tile, taps=tile.taps * times)
        bias = float(split_precision.plan_of(long, problem, chip, 16).defines["ONE_SIGN_BIAS"].rstrip("f"))
        assert 0 < bias * long.steps <= 0.2 * problem.products * (1 + 1e-9)


@pytest.mark.parametrize("aligned", [4, 8, 16])
def test_a_layer_that_fits_whatever_arrays_has_a_plan_for_aligned_ones_too(aligned):
    problem, chip = ConvProblem(16, 30, 86, 5, 6, 2), chip_of(90)
    assert not split_precision.WARPS.not_supported_reasons(problem, chip)
    assert split_precision.WARPS.plan(problem, chip, aligned).steps(16)
