"""What Nsight Compute prints, summed up for each kernel; and how often a plan launches."""

from __future__ import annotations

import pytest

from ece408_op.core import dispatch
from ece408_op.errors import DataError
from ece408_op.problem import ConvProblem
from ece408_op.report import counters, kernels
from ece408_op.runtime.launch import Chip, Launch, Plan

METRICS = ",".join(f'"{name}"' for name in counters.METRICS.values())
LINES = [
    "==PROF== Connected to process 1",
    f'"ID","Kernel Name",{METRICS}',
    '"","","byte","byte","byte","%"',
    '"0","unroll","1,000","20","300","50.0"',
    '"1","multiply","1","2","3","100"',
    '"2","naive","7","8","9","25"',
    "==PROF== Disconnected",
]
MADE = [
    {"kernel": "im2col_gemm", "launches": 2, "reason": ""},
    {"kernel": "im2col_gemm_one", "launches": 0, "reason": "too many"},
    {"kernel": "naive", "launches": 1, "reason": ""},
]


def test_lines_are_summed_up_for_each_kernel_in_order() -> None:
    first, none, last = counters.parse(LINES, MADE)
    assert (first["read"], first["written"], first["cache"], first["occupancy"]) == (1001, 22, 303, 0.75)
    assert none == MADE[1]
    assert (last["kernel"], last["read"], last["occupancy"]) == ("naive", 7, 0.25)


def test_more_or_fewer_launches_than_made_are_an_error() -> None:
    with pytest.raises(DataError, match="expected 2 launches, got 3"):
        counters.parse(LINES, MADE[:1])


def test_counters_that_may_not_be_read_are_an_error() -> None:
    with pytest.raises(DataError, match="expected a number, got 'n/a'"):
        counters.parse([*LINES[:5], '"2","naive","n/a","8","9","25"'], MADE)


def test_the_command_leaves_the_clocks_alone(tmp_path) -> None:
    words = counters.command([1, 28, 28, 50, 5], 100, ["naive"], tmp_path / "made", tmp_path / "log")
    assert words[0] == "ncu"
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("ece408_op.report.launch_all") + 1 :][:5] == ["1", "28", "28", "50", "5"]


def test_launches_are_counted_over_rounds() -> None:
    def steps(images):
        return (Launch("f", (images, 1, 1), (32, 1, 1), ()), Launch("g", (1, 1, 1), (64, 1, 1), (), 48))

    found = kernels.launches(Plan({}, 4, steps), 10)
    assert found == {
        ("f", (4, 1, 1), (32, 1, 1), 0): 2,
        ("f", (2, 1, 1), (32, 1, 1), 0): 1,
        ("g", (1, 1, 1), (64, 1, 1), 48): 3,
    }


PROBLEM = ConvProblem(100, 3, 20, 21, 7, 3)
CHIP = Chip("H200", (9, 0), 132, 227 * 1024)


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in kernels.chosen(None) if not kernel.not_supported_reasons(PROBLEM, CHIP)],
    ids=lambda kernel: kernel.name,
)
def test_every_kernels_launches_can_be_counted(kernel) -> None:
    assert sum(kernels.launches(kernel.plan(PROBLEM, CHIP, 16), PROBLEM.batch).values()) >= 1


def test_kernels_are_chosen_in_the_lists_order() -> None:
    names = dispatch.names("gpu")
    assert [kernel.name for kernel in kernels.chosen(None)] == names
    assert [kernel.name for kernel in kernels.chosen(names[2::-1])] == names[:3]
