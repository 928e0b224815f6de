"""The im2col tap tables: the sources' index arithmetic, done in NumPy, gives the convolution; tiles fit the chip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_layers import COURSE, chip_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.core import reference
from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.kernels.cuda.split_precision._cost_model import best_tile, candidates, tile_for
from ece408_op.kernels.cuda.split_precision._tiles import (
    ImplicitGemmTile,
    MmaSyncTile,
    OneChannelTile,
    Tile,
    WarpgroupTile,
)
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip, ceil_div

KERNEL_OF = dict(zip((OneChannelTile, ImplicitGemmTile, WarpgroupTile, MmaSyncTile), split_precision.FP16X3))
#: The kernels that read words by tap tables.
WITH_TAPS = [kind for kind in KERNEL_OF if kind is not ImplicitGemmTile]
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
    """Return the matrix of products, two per word in the taps' order, by filter columns."""
    kernel, odd = problem.kernel, problem.channels // 2 if problem.channels % 2 else -1
    matrix = np.zeros((2 * len(tile.taps), tile.gemm_columns))
    pairs_rows = tile.odd_channel_pairs_rows
    for number, (plane, row, column) in enumerate(tile.taps):
        for j in range(2) if plane >= 0 else ():
            for shift in range(tile.filter_shifts):
                if tile.one_channel:
                    c, p, q = 0, row, 2 * column + j - shift
                elif plane == odd:
                    c, p, q = 2 * plane, row + (j if pairs_rows else 0) - shift, column + (0 if pairs_rows else j)
                else:
                    c, p, q = 2 * plane + j, row - shift, column
                if 0 <= p < kernel and 0 <= q < kernel:
                    matrix[2 * number + j, shift :: tile.filter_shifts] = w[:, c, p, q]
    return matrix


def _words(problem: ConvProblem, tile: Tile, x: np.ndarray, row: int, column: int) -> np.ndarray:
    """Return a stage's words for the images x (n, C, H, W), from an input row and column on; NaN where unwritten."""
    words = np.full((tile.tile_images, tile.planes, tile.plane_stride, 2), np.nan)
    along, width = tile.position_columns, tile.input_columns
    rows = tile.position_rows * tile.tile_lines + problem.kernel - 1
    part = np.zeros((x.shape[0], 2 * tile.planes, rows + 1, width + 2))
    seen = x[:, :, row : row + rows, column : column + width]
    part[:, : x.shape[1], : seen.shape[2], : seen.shape[3]] = seen
    for plane in range(tile.planes):
        first, second = part[:, 2 * plane], part[:, 2 * plane + 1]
        if problem.channels % 2 and plane == problem.channels // 2:
            second = np.roll(first, -1, axis=1 if tile.odd_channel_pairs_rows else 2)
        pairs = np.stack([first, second], axis=-1)[:, :rows, :width:along]
        for line in range(rows):
            start = line * tile.row_stride
            words[: len(x), plane, start : start + pairs.shape[2]] = pairs[:, line]
    return words.reshape(-1, 2)


def by_tap_table(problem: ConvProblem, tile: Tile, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the output by the tile's index arithmetic, NaN where no position stands for an element."""
    out = np.full(problem.y_shape, np.nan)
    filters, shifts, along = _filters(problem, tile, w), tile.filter_shifts, tile.position_columns
    taps = np.array([0 if p < 0 else p * tile.plane_stride + i * tile.row_stride + j for p, i, j in tile.taps])
    at = np.arange(tile.positions)
    line = at // tile.tile_columns
    image, down = line // tile.tile_lines, line % tile.tile_lines
    base = image * tile.planes * tile.plane_stride
    base += down * tile.position_rows * tile.row_stride + at % tile.tile_columns
    for first in range(0, problem.batch, tile.tile_images):
        images = x[first : first + tile.tile_images]
        for row in range(0, problem.output_height, tile.position_rows * tile.tile_lines):
            for column in range(0, problem.output_width, along * tile.tile_columns):
                words = _words(problem, tile, images, row, column)
                for r in range(tile.row_accumulators):
                    sums = words[base[:, None] + taps + r * tile.row_stride].reshape(len(at), -1) @ filters
                    for shift in range(shifts):
                        i = row + down * tile.position_rows + (0 if tile.one_channel else r * shifts + shift)
                        j = column + at % tile.tile_columns * along + (shift if tile.one_channel else 0)
                        real = (image < len(images)) & (i < problem.output_height) & (j < problem.output_width)
                        out[first + image[real], :, i[real], j[real]] = sums[real, shift::shifts]
    return out


@pytest.mark.parametrize("chip", [chip_of(90), SMALL], ids=lambda chip: chip.name)
@pytest.mark.parametrize("kind", WITH_TAPS)
def test_every_product_is_found_and_none_twice(kind, chip):
    rng = np.random.default_rng(408)
    checked = 0
    for problem in LAYERS:
        x, w = (rng.integers(-8, 9, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
        expected = reference.convolve(x, w)
        different = {
            (t.position_rows, t.row_accumulators, t.tile_images, t.tile_lines, t.tile_columns, t.plane_stride): t
            for t in candidates(kind, problem, chip, 16, 2)
        }
        for tile in list(different.values())[:: ceil_div(len(different), 6) or 1]:
            np.testing.assert_array_equal(by_tap_table(problem, tile, x, w), expected, err_msg=f"{problem}: {tile}")
            checked += 1
    assert checked >= (4 if kind is OneChannelTile else 20)


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
    problem=layers,
    kind=st.sampled_from(list(KERNEL_OF)),
    components=st.sampled_from([1, 2]),
    aligned=st.sampled_from([4, 16]),
)
def test_a_tile_fits_the_chip_and_covers_the_layer(problem, kind, components, aligned):
    chip = chip_of(90)
    tile = best_tile(kind, problem, chip, aligned, components)
    if tile is None:
        return
    assert tile.shared_bytes <= chip.shared_bytes
    assert tile.threads <= 1024
    assert tile.filter_blocks <= chip.multiprocessors
    assert tile.padded_tiles >= tile.column_tiles
    # wgmma's columns: a multiple of 8, at most 256.
    assert kind is not WarpgroupTile or 8 * tile.group_tiles * components <= 256
    assert kind is not ImplicitGemmTile or (tile.wgmma_n % 8 == 0 and tile.wgmma_n <= 256)
    assert 16 * tile.k_steps >= problem.products
    if kind in WITH_TAPS:
        lines = tile.position_rows * tile.tile_lines + problem.kernel - 1
        assert tile.plane_stride >= (lines - 1) * tile.row_stride
    assert 4 * tile.copy_floats <= aligned
    assert 4 * tile.config.get("store_floats", 1) <= aligned


@pytest.mark.parametrize("kind", KERNEL_OF, ids=lambda kind: kind.__name__)
def test_each_kernel_takes_the_course_layers_that_are_for_it(kind):
    taken = [not KERNEL_OF[kind].not_supported_reasons(problem, chip_of(90)) for problem in COURSE]
    few_steps = [True, True, True, True, False]  # sums that need no promotion
    expected = {
        OneChannelTile: [problem.channels == 1 for problem in COURSE],
        ImplicitGemmTile: few_steps,
    }
    assert taken == expected.get(kind, [True] * 5)


def test_the_reasons_name_what_was_expected_and_what_came():
    last = COURSE[-1]
    assert "expected 1, got 12" in split_precision.ONE_CHANNEL.not_supported_reasons(last)[0]
    assert "capability: 9.0, got 10.0" in split_precision.WARPGROUP.not_supported_reasons(last, chip_of(100))[0]


def test_the_bound_is_of_float32s_class_and_with_one_component_of_tf32s():
    problem = COURSE[-1]
    for three, one in zip(split_precision.FP16X3, split_precision.FP16X1):
        assert 2**-22 < three.error_bound(problem) < 5 * problem.products * 2**-24
        assert one.error_bound(problem) > 2**-11


def test_the_same_sign_correction_stays_within_its_part_of_the_bound():
    problem, chip = COURSE[-1], chip_of(90)
    tile = tile_for(WarpgroupTile, problem, chip, 16, 2)
    for times in (1, 8):  # k-steps that hold 16 products, and two
        long = replace(tile, taps=tile.taps * times)
        bias = split_precision.plan_of(long, problem, chip, 16).config["same_sign_bias"]
        assert 0 < bias * long.k_steps <= 0.2 * problem.products * (1 + 1e-9)


@pytest.mark.parametrize("aligned", [4, 8, 16])
def test_a_layer_that_fits_unaligned_arrays_has_a_plan_for_aligned_ones_too(aligned):
    problem, chip = ConvProblem(16, 30, 86, 5, 6, 2), chip_of(90)
    assert not split_precision.MMA_SYNC.not_supported_reasons(problem, chip)
    assert split_precision.MMA_SYNC.plan(problem, chip, aligned).steps(16)
