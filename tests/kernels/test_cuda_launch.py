"""How CUDA kernels are launched: grids within CUDA's limits, arguments as the sources declare them."""

import re
from functools import cache
from itertools import product

import pytest
from cuda_layers import COURSE, CUDA_KERNELS, ODD, POOLED, PROBLEMS, check_args, chip_of, random_layers, random_problems
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.core import dispatch
from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels.cuda.ladder.shared import input_tile
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import (
    GRID_X,
    GRID_YZ,
    SCRATCH_BYTES,
    SHARED_BYTES,
    CopyToConstant,
    Launch,
    even_shares,
    images_per_launch,
)

KERNEL_IDS = pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
CHIP = chip_of(90)

BATCHES = [1, 2, 7, 1000, 100_000, 2**31]
layers = random_layers(BATCHES, 100)


def _also_pooled(problem: ConvProblem) -> list[ConvProblem]:
    """The problem, and a plain convolution's with fused pooling."""
    return [problem] if problem.needs else [problem, problem.pooled(True)]


@cache
def _supported(kernel: CudaKernel) -> list[ConvProblem]:
    problems = [*COURSE, *ODD, *POOLED, *PROBLEMS]
    found = [problem for problem in problems if not kernel.not_supported_reasons(problem, CHIP)]
    assert len(found) >= 3, f"{kernel.name} takes {len(found)} layers"
    return found


@KERNEL_IDS
def test_the_arguments_are_those_that_the_source_declares(kernel):
    for problem in _supported(kernel):
        plan = kernel.plan(problem, CHIP, 4)
        text = kernel.text(plan)
        buffers = {"x", "w", "y", *plan.scratch}
        for step in (*plan.setup, *plan.steps(min(plan.images_per_launch, problem.batch))):
            if isinstance(step, CopyToConstant):
                assert re.search(rf"__constant__ (__align__\(16\) )?float {step.symbol}\[", text)
                assert step.source in buffers
                continue
            check_args(text, step)
            assert {a for a in step.args if isinstance(a, str)} <= buffers | {"first", "images"}


@KERNEL_IDS
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(problem=st.one_of(layers, random_problems(BATCHES, 100)))
def test_every_launch_is_within_cudas_limits(kernel, problem):
    problems = [each for each in _also_pooled(problem) if not kernel.not_supported_reasons(each, CHIP)]
    assume(problems)
    for each in problems:
        plan = kernel.plan(each, CHIP, 4)
        assert plan.images_per_launch >= 1
        assert sum(plan.scratch.values()) <= 2 * SCRATCH_BYTES
        for images in {min(plan.images_per_launch, each.batch), 1}:
            for step in (*plan.setup, *plan.steps(images)):
                if isinstance(step, Launch):
                    assert 1 <= step.grid[0] <= GRID_X
                    assert all(1 <= size <= GRID_YZ for size in step.grid[1:])
                    assert 1 <= step.block[0] * step.block[1] * step.block[2] <= 1024
                    assert step.shared <= CHIP.shared_bytes


def test_depthwise_refuses_more_items_than_32_bits_count():
    kernel = dispatch.find("depthwise")
    few, many = (ConvProblem(2**log, 1056, 64, 64, 1056, 3, groups=1056).weight_gradient for log in (22, 23))
    assert not kernel.not_supported_reasons(few, CHIP)
    assert "at most 2147483519 work items" in "".join(kernel.not_supported_reasons(many, CHIP))


@KERNEL_IDS
def test_one_binary_serves_every_batch(kernel):
    for problem in _supported(kernel):
        texts = {kernel.text(kernel.plan(problem.with_batch(b), CHIP, 4)) for b in (1, 3, 10_000, 100_000)}
        assert len(texts) == 1


def test_even_shares_are_those_of_every_number_of_them():
    for total in range(1, 80):
        for most in (0, 1, 7, 64, 100):
            every = {-(-total // n) for n in range(1, total + 1)}
            assert even_shares(total, most) == sorted(share for share in every if share <= most)
    assert even_shares(10**12, 4) == [1, 2, 3, 4]  # at once


@KERNEL_IDS
def test_the_launches_take_every_image_once(kernel):
    for batch in (1, 5, 4097):
        plan = kernel.plan(_supported(kernel)[0].with_batch(batch), CHIP, 4)
        assert [first + i for first, n in plan.launch_ranges(batch) for i in range(n)] == list(range(batch))


@KERNEL_IDS
def test_an_old_chip_is_refused_for_its_capability(kernel):
    old = chip_of(50)
    problem = _supported(kernel)[0]
    reasons = kernel.not_supported_reasons(problem, old)
    assert any("compute capability" in reason for reason in reasons) == (kernel.capability > old.capability)
    assert kernel.precision == "float32" or kernel.error_bound(problem) > 2**-11


@settings(max_examples=100)
@given(problem=st.one_of(layers, random_problems(BATCHES, 30)))
def test_auto_refuses_no_problem_on_any_gpu(problem):
    for each, chip in product(_also_pooled(problem), (None, chip_of(50), chip_of(80), CHIP)):
        assert not dispatch.select(each, "gpu", chip=chip).not_supported_reasons(each, chip)


def test_a_launch_is_limited_by_the_grid_and_by_scratch_memory():
    assert images_per_launch(100_000, 1000) == 100_000
    assert images_per_launch(100_000, 2**20) == 2047
    assert images_per_launch(100_000, 1, SCRATCH_BYTES // 10) == 10
    assert images_per_launch(100_000, 1, 2 * SCRATCH_BYTES) == 1
    assert images_per_launch(0, 1) == 1


@settings(max_examples=100)
@given(problem=layers, other_bytes=st.integers(0, 16000))
def test_a_tile_fits_shared_memory_and_the_map(problem, other_bytes):
    tile = input_tile(problem, other_bytes)
    assert tile is not None, "64 channels of one 11 x 11 window are 30,976 bytes"
    (rows, columns), halo = tile, problem.kernel - 1
    assert rows <= problem.output_height
    assert columns <= problem.output_width
    assert 4 * problem.channels * (rows + halo) * (columns + halo) <= SHARED_BYTES - other_bytes


def test_a_window_that_does_not_fit_has_no_tile():
    assert input_tile(ConvProblem(1, 102, 11, 11, 1, 11)) is None
