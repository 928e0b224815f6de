"""The tiles that register_blocked and sliding_window pick cover the layer and fit the chip, whatever the layer."""

import pytest
from cuda_layers import ARCHITECTURES, COURSE, chip_of, random_layers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ece408_op.kernels.cuda.float32 import register_blocked, sliding_window
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import ceil_div

layers = random_layers([1], 100)


def _rows_read(problem: ConvProblem, tile: register_blocked.RegisterBlockedTile, start: int) -> int:
    """Input rows from the first to the last that a block's strips read, counted one strip after another."""
    height, kernel = problem.output_height, problem.kernel
    rows = [place // tile.strips_in_row(problem) for place in range(start, start + tile.strips)]
    read = [row // height * problem.height + row % height for row in rows]
    return max(read) + kernel - min(read)


@settings(max_examples=60)
@given(
    problem=layers,
    architecture=st.sampled_from(ARCHITECTURES),
    aligned=st.sampled_from([4, 8, 16]),
    uniform=st.booleans(),
)
def test_a_register_blocked_tile_fits_the_chip_and_its_rows_fit_the_tile(problem, architecture, aligned, uniform):
    chip = chip_of(architecture)
    tile = register_blocked.best_tile(problem, chip, aligned, uniform)
    assert uniform or tile is not None
    assume(tile is not None)
    assert tile.uniform == uniform
    assert not uniform or tile.constant_bytes(problem) <= 65536
    assert tile.shared_bytes(problem) <= chip.shared_bytes
    assert tile.threads <= 1024
    assert tile.threads % 32 == 0
    strips_in_row = tile.strips_in_row(problem)
    for block in range(60):
        start = block * tile.strips % (problem.output_height * strips_in_row)
        assert _rows_read(problem, tile, start) <= tile.rows
    read = strips_in_row * tile.strip_pixels + problem.kernel - 1
    assert read <= tile.row_pitch + tile.input_slack(problem)
    assert tile.row_pitch % tile.input_vector == 0
    assert strips_in_row == 1 or tile.strip_pixels % tile.input_vector == 0, "a strip would begin at an unaligned float"
    assert tile.passes == 1 or tile.channels == problem.channels


@settings(max_examples=60)
@given(problem=layers, aligned=st.sampled_from([4, 8, 16]))
def test_a_sliding_window_tile_lies_within_the_map_and_its_vectors_are_aligned(problem, aligned):
    tile = sliding_window.best_tile(problem, aligned)
    assert tile is not None
    assert tile.rows <= problem.output_height
    assert tile.columns <= problem.output_width
    begins = [
        min(n * tile.columns, problem.output_width - tile.columns)
        for n in range(ceil_div(problem.output_width, tile.columns))
    ]
    for begin in begins:
        assert begin % tile.load_vector == 0
        assert begin % tile.store_vector == 0
    assert problem.width % tile.load_vector == 0
    assert problem.output_width % tile.store_vector == 0
    assert 4 * max(tile.load_vector, tile.store_vector) <= aligned


def test_a_kernel_that_does_not_fit_is_refused_with_the_reason():
    problem = ConvProblem(1, 1, 150, 150, 1, 150)
    assert "shared memory" in register_blocked.KERNEL.not_supported_reasons(problem, chip_of(50))[0]
    assert len(sliding_window.KERNEL.not_supported_reasons(ConvProblem(1, 5, 150, 150, 1, 150))) == 2


@pytest.mark.parametrize("pooled", [False, True])
def test_the_largest_kernel_of_sliding_window_is_the_one_that_its_refusal_names(pooled):
    def reasons(kernel: int) -> list[str]:
        plain = ConvProblem(1, 1, 40, 40, 2, kernel)
        return sliding_window.KERNEL.not_supported_reasons(plain.pooled(False) if pooled else plain)

    largest = next(kernel for kernel in range(1, 40) if reasons(kernel + 1))
    assert f"at most {largest} x {largest}" in reasons(largest + 1)[0]


@pytest.mark.parametrize("problem", COURSE, ids=str)
def test_most_of_a_course_layers_multiply_adds_are_wanted(problem):
    tile = register_blocked.best_tile(problem.with_batch(1), chip_of(90), 16)
    done = tile.strips_in_row(problem) * tile.strip_pixels * ceil_div(problem.filters, tile.filters) * tile.filters
    assert problem.output_width * problem.filters / done > 0.9
