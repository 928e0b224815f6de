"""register_blocked on the CPU, against float64, with race detection: weights in shared and in constant memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cuda_layers import chip_of
from plan_runs import assert_right

from ece408_op.kernels.cuda.float32 import register_blocked
from ece408_op.problem import ConvProblem

CHIP = replace(chip_of(90), multiprocessors=1)

#: Strips that end a row and do not, several groups, passes, chunks, row tiles, filters left over, items per block.
CASES = [
    ((3, 1, 12, 13, 5, 5), {}),
    ((2, 3, 9, 12, 7, 3), {}),
    ((2, 5, 11, 14, 9, 4), {"channels": 2, "passes": 1, "keep_weights": False}),
    ((2, 4, 10, 11, 24, 7), {"filter_groups": 3, "filters": 4, "passes": 1, "channels": 2}),
    ((3, 2, 8, 9, 20, 3), {"filter_groups": 2, "passes": 3, "filters": 4}),
    ((1, 2, 5, 300, 5, 2), {}),
    ((67, 2, 12, 13, 7, 5), {"blocks": 1}),
]


@pytest.mark.parametrize("weights", ["shared", "uniform"])
def test_it_is_right(weights: str, programs: Path) -> None:
    cases = []
    for shape, changes in CASES:
        problem = ConvProblem(*shape)
        tile = register_blocked.best_tile(problem.with_batch(1), CHIP, 16)
        assert tile is not None
        plan = register_blocked.plan_of(replace(tile, **changes, uniform=weights == "uniform"), problem, CHIP, 16)
        cases.append((register_blocked.KERNEL, problem, plan))
    assert_right(cases, programs)
