"""The precision that a caller asks for: never less than that, and reduced only where it was asked for."""

from dataclasses import replace
from itertools import count

import pytest
from cuda_layers import COURSE, chip_of

from ece408_op.core import dispatch, tuning
from ece408_op.problem import ConvProblem


@pytest.mark.parametrize("problem", COURSE, ids=str)
def test_a_reduced_precision_serves_only_where_it_was_asked_for(problem):
    chip = chip_of(90)
    assert dispatch.select(problem, "gpu", chip=chip).precision == "float32"
    for asked in ("tf32", "fp16"):
        assert dispatch.select(problem, "gpu", precision=asked, chip=chip).precision in dispatch.SERVES[asked]
        assert dispatch.select(problem, "cpu", precision=asked).precision == "float32"


@pytest.fixture
def chosen(monkeypatch):
    """What auto chooses where a table has this order."""

    def choose(order, problem, precision="float32"):
        monkeypatch.setattr(
            tuning, "ranked_by_time", lambda problem, chip, names, estimate: [n for n in order if n in names]
        )
        chip = replace(chip_of(90), name=f"chip {next(numbers)}")  # one that no other test chooses for
        return dispatch.select(problem, "gpu", precision=precision, chip=chip).name

    numbers = count()
    return choose


def test_kernels_whose_parts_err_by_more_than_a_short_sum_come_last_for_one(chosen):
    order = ["fp16x3_one_channel", "sliding_window"]
    assert [chosen(order, ConvProblem(10_000, 1, 60, 60, 8, kernel)) for kernel in (5, 3)] == order


def test_kernels_that_were_not_timed_with_that_number_of_channels_or_filters_come_last(chosen):
    layers = [ConvProblem(10_000, c, 30, 30, m, 5) for c, m in ((6, 16), (48, 16), (6, 80))]
    order = ["fp16x3_mma_sync", "register_blocked"]
    assert [chosen(order, layer) for layer in layers] == [*order, "register_blocked"]


def test_the_fastest_measured_kernel_is_taken_whatever_serves_better(chosen):
    order = ["tensor_core", "tensor_core_tf32", "register_blocked"]
    names = {asked: chosen(order, COURSE[-1], asked) for asked in dispatch.SERVES}
    assert names == {"float32": "register_blocked", "tf32": "tensor_core_tf32", "fp16": "tensor_core"}
