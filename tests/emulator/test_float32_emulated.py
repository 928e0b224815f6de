"""The float32 kernels of convolutions and gradients on the CPU, against float64, with race detection."""

from dataclasses import replace

import numpy as np
import pytest
from cuda_layers import PROBLEMS, chip_of
from plan_runs import assert_right, operands, run_plan

from ece408_op.core import reference
from ece408_op.core.check import compare
from ece408_op.kernels.cuda.float32 import (
    blocked_gemm,
    data_gradient_tiles,
    depthwise,
    register_blocked,
    weight_gradient_rows,
)
from ece408_op.kernels.cuda.split_precision import split_precision, weight_gradient, wide_weight_gradient
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import SCRATCH_BYTES

SPLIT = (split_precision.WARPGROUP, split_precision.MMA_SYNC)
#: A GPU of one multiprocessor: a block has several items.
ALONE = replace(chip_of(90), multiprocessors=1)
KERNELS = (
    *(m.KERNEL for m in (depthwise, weight_gradient_rows, data_gradient_tiles, blocked_gemm, weight_gradient)),
    *SPLIT,
    wide_weight_gradient.KERNEL,
)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_it_is_right(kernel, half, programs):
    """By default on half of the problems that it takes, the smaller half of an odd number."""
    problems = [problem for problem in PROBLEMS if not kernel.not_supported_reasons(problem)]
    assert len(problems) >= 3
    problems = problems[(len(problems) + half) % 2 :: 2]
    aligned = [16 if problem.batch % 2 else 4 for problem in problems]
    plans = [kernel.plan(problem, chip_of(90), multiple) for problem, multiple in zip(problems, aligned)]
    assert_right([(kernel, *each) for each in zip(problems, plans)], programs, aligned)


@pytest.mark.parametrize("blocks", [5, pytest.param(13, marks=pytest.mark.exhaustive)])
def test_blocks_that_share_tiles_have_partial_sums_of_their_own(blocks, programs):
    kernel, problem = wide_weight_gradient.KERNEL, ConvProblem(3, 130, 9, 10, 140, 1, 2).weight_gradient
    plan = kernel.plan(problem, replace(chip_of(90), multiprocessors=blocks), 16)
    assert_right([(kernel, problem, plan)], programs)


def test_partial_sums_are_within_the_limit_of_scratch_memory():
    kernel, chip = wide_weight_gradient.KERNEL, chip_of(90)
    for filters in (512, 2500, 2700, 4096):
        problem = ConvProblem(1, filters, 14, 14, filters, 3).weight_gradient
        reasons = kernel.not_supported_reasons(problem, chip)
        assert bool(reasons) == (filters > 2500), reasons
        size = kernel.plan(problem, chip, 16).scratch["partials"]
        assert (size > SCRATCH_BYTES) == bool(reasons)
        assert size >= 4 * 9 * filters * filters
        if reasons:
            assert reasons == [f"partial sums: at most {SCRATCH_BYTES} bytes, got {size}"]


@pytest.mark.parametrize(
    ("operand", "value"),
    [
        (0, np.inf), (1, np.nan), (0, 1e-30), (1, 1e-30),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, np.inf), (0, np.nan))),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "kernel",
    [data_gradient_tiles.KERNEL, weight_gradient.KERNEL, wide_weight_gradient.KERNEL, *SPLIT],
    ids=lambda kernel: kernel.name,
)
def test_gradients_of_special_values_are_right(kernel, operand, value, programs):
    plain, chip = ConvProblem(3, 6, 9, 9, 7, 3, pad=(1, 0)), ALONE
    problem = plain.data_gradient if plain.data_gradient.needs <= kernel.features else plain.weight_gradient
    both = operands(problem)
    both[operand][1, 2, 0, 2] = value  # of y, it meets padding
    assert_right([(kernel, problem, kernel.plan(problem, chip, 16))], programs, inputs=[both], check_races=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["convolution", "data_gradient", "weight_gradient"])
@pytest.mark.parametrize("kernel", [depthwise.KERNEL, blocked_gemm.KERNEL], ids=["depthwise", "blocked_gemm"])
def test_infinities_reach_what_they_reach_in_mxnet(kernel, kind, programs):
    """In a data gradient, an infinite weight may make finite pixels of its channel NaN."""
    plain = ConvProblem(2, 3, 6, 7, 3, 3, stride=(1, 2), pad=(1, 1), groups=3 if kernel is depthwise.KERNEL else 1)
    problem = getattr(plain, kind)
    plan = kernel.plan(problem, chip_of(90), 16)
    for operand in (0, 1):
        both = operands(problem)
        both[operand][1, 0, 0, 2] = np.inf
        report = run_plan(kernel.text(plan), plan, problem, *both, programs)
        got, exact = report.buffers[problem.operands[2]], reference.convolve(*both, problem)
        if (kind, operand) == ("data_gradient", 1):
            channel = 1 if kernel is depthwise.KERNEL else 0
            got[:, channel] = np.where(np.isnan(got), exact, got)[:, channel]
        found = compare(got, *both, kernel, problem=problem)
        assert found.passed, found


@pytest.mark.parametrize("stages", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3)), 4])
@pytest.mark.parametrize("operand", ["x", "w"])
def test_a_block_that_computes_several_steps_is_right(operand, stages, programs):
    plain = ConvProblem(9, 2, 11, 14, 7, 3, 4, pad=(1, 2))
    problem = plain.data_gradient if operand == "x" else plain.weight_gradient
    one, chip = problem.with_batch(1), ALONE
    if operand == "x":
        kernel, tile = data_gradient_tiles.KERNEL, data_gradient_tiles.best_tile(one, 16)
        tile = replace(tile, images=2, step_filters=2, stages=stages, blocks=2)
        plan = data_gradient_tiles.plan_of(tile, problem, chip)
    else:
        kernel, tile = weight_gradient_rows.KERNEL, weight_gradient_rows.best_tile(one, 16)
        plan = weight_gradient_rows.plan_of(replace(tile, slices=2, step_rows=4, stages=stages), problem, blocks=2)
    assert_right([(kernel, problem, plan)], programs)
    a, b = operands(problem)
    hasty = kernel.text(plan).replace("wait_for_copies<STAGES - 2>", "wait_for_copies<STAGES - 1>")
    report = run_plan(hasty, plan, problem, a, b, programs)
    found = compare(report.buffers[operand], a, b, kernel, problem=problem)
    assert not found.passed, "the emulator copies when a thread waits, not before"


#: Strips that end a row and do not, several groups, passes, chunks, row tiles, filters left over, items per block.
REGISTER_BLOCKED = [
    ((3, 1, 12, 13, 5, 5), {}),
    ((2, 3, 9, 12, 7, 3), {}),
    ((2, 5, 11, 14, 9, 4), {"channels": 2, "passes": 1, "keep_weights": False}),
    ((2, 4, 10, 11, 24, 7), {"filter_groups": 3, "filters": 4, "passes": 1, "channels": 2}),
    ((3, 2, 8, 9, 20, 3), {"filter_groups": 2, "passes": 3, "filters": 4}),
    ((1, 2, 5, 300, 5, 2), {}),
    ((67, 2, 12, 13, 7, 5), {"blocks": 1}),
]


@pytest.mark.parametrize("weights", ["shared", "uniform"])
def test_register_blocked_is_right(weights, programs):
    cases = []
    for shape, changes in REGISTER_BLOCKED:
        problem = ConvProblem(*shape)
        tile = register_blocked.best_tile(problem.with_batch(1), ALONE, 16)
        assert tile is not None
        plan = register_blocked.plan_of(replace(tile, **changes, uniform=weights == "uniform"), problem, ALONE, 16)
        cases.append((register_blocked.KERNEL, problem, plan))
    assert_right(cases, programs)
