"""The split-precision kernels' tiles fit the chip and cover the layer; bounds, refusals and their reasons."""

from dataclasses import replace

import pytest
from cuda_layers import COURSE, chip_of, random_layers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.kernels.cuda.split_precision import split_precision
from ece408_op.kernels.cuda.split_precision._candidate_tiles import tile_for
from ece408_op.kernels.cuda.split_precision._tiles import ImplicitGemmTile, MmaSyncTile, OneChannelTile, WarpgroupTile
from ece408_op.problem import ConvProblem

KERNEL_OF = dict(zip((OneChannelTile, ImplicitGemmTile, WarpgroupTile, MmaSyncTile), split_precision.FP16X3))
#: The kernels that read words by tap tables.
WITH_TAPS = [kind for kind in KERNEL_OF if kind is not ImplicitGemmTile]


@pytest.mark.parametrize("sizes", [(19, 19, 63, 12, 8), (24, 24, 17, 49, 5), (20, 28, 71, 40, 4), (1, 28, 28, 16, 5)])
def test_no_tile_is_measured_twice(sizes):
    layer = ConvProblem(1000, *sizes)
    found = [kernel.tiles(layer, chip_of(90), 16) for kernel in (*split_precision.FP16X3, *split_precision.FP16X1)]
    assert len(found) == 8
    assert sum(map(len, found)) >= 12
    for tiles in found:
        assert len({tuple(tile.items()) for tile in tiles}) == len(tiles)


@pytest.mark.parametrize("kind", KERNEL_OF, ids=lambda kind: kind.__name__)
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much])
@given(problem=random_layers([16], 100), components=st.sampled_from([1, 2]), aligned=st.sampled_from([4, 16]))
def test_a_tile_fits_the_chip_and_covers_the_layer(kind, problem, components, aligned):
    chip = chip_of(90)
    tile = tile_for(kind, problem, chip, aligned, components)
    assume(tile is not None)
    assert tile.shared_bytes <= chip.shared_bytes
    assert tile.threads <= 1024
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
    expected = {
        OneChannelTile: [problem.channels == 1 for problem in COURSE],
        ImplicitGemmTile: [False, True, True, True, False],  # few filters, and sums that need no promotion
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
        bias = split_precision.plan_of(long, problem, chip).config["same_sign_bias"]
        assert 0 < bias * long.k_steps <= 0.2 * problem.products * (1 + 1e-9)


@pytest.mark.parametrize("aligned", [4, 8, 16])
def test_a_layer_that_fits_unaligned_arrays_has_a_plan_for_aligned_ones_too(aligned):
    problem, chip = ConvProblem(16, 30, 86, 5, 6, 2), chip_of(90)
    assert not split_precision.MMA_SYNC.not_supported_reasons(problem, chip)
    assert split_precision.MMA_SYNC.plan(problem, chip, aligned).steps(16)
