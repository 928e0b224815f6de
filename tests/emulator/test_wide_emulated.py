"""The sources of the split-precision kernels for wide layers on the CPU, against float64: TMA, wgmma, barriers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_runs import launch_all, operands, races, run_plan

from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels.cuda.split_precision import dense, wide
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip

CHIP = Chip("two", (9, 0), 2, 227 * 1024)
POINTWISE, GENERAL = wide.FP16X3
EXHAUSTIVE = pytest.mark.exhaustive

#: More pixels than a tile; swizzles over 32, 64 and 128 bytes; every attribute; both kinds of tiles.
CASES = [
    (GENERAL, ConvProblem(2, 20, 9, 11, 12, 3, 2, stride=(2, 1), pad=(1, 2), dilate=(1, 2), groups=2)),
    (GENERAL, ConvProblem(2, 12, 9, 8, 40, 3, pad=(1, 0)).data_gradient),
    (POINTWISE, ConvProblem(3, 36, 9, 11, 10, 1, stride=(1, 2), groups=2)),
    pytest.param(GENERAL, ConvProblem(2, 64, 9, 8, 130, 2, pad=(1, 1)), marks=EXHAUSTIVE),
    pytest.param(GENERAL, ConvProblem(2, 6, 9, 8, 6, 3, pad=(3, 1), groups=6), marks=EXHAUSTIVE),
    pytest.param(wide.FP16X1[1], ConvProblem(2, 12, 9, 8, 8, 3, stride=(2, 3)), marks=EXHAUSTIVE),
    pytest.param(POINTWISE, ConvProblem(2, 130, 9, 11, 12, 1).data_gradient, marks=EXHAUSTIVE),
]


def _id(value: object) -> str:
    return value.name if isinstance(value, CudaKernel) else str(value)


def _run(
    kernel: CudaKernel, problem: ConvProblem, folder: Path, special: bool = False, without: str | None = None
) -> int:
    """Check the output, unless text is left out; return the images that were computed in float32.

    ``special``: an image has a NaN, and another a value that is too small. ``without``: text to leave out, "" for none;
    then return the number of races.
    """
    plan = kernel.plan(problem, CHIP, 16)
    text = kernel.text(plan)
    if without is not None:
        assert without in text
        text = text.replace(without, "", 1) if without else text
    a, b = operands(problem, 408)
    if special:
        a[-1, 0, 2, 2], a[0, 0, 0, 0] = np.nan, 1e-30
    report = run_plan(text, plan, problem, a, b, folder, races=without is not None)
    found = compare(report.buffers[problem.operands[2]], a, b, kernel, problem=problem)
    assert found.passed or without, str(found)
    return int(report.buffers["listed"].view(np.int32)[0]) if without is None else races(report)


@pytest.mark.parametrize(("kernel", "problem"), CASES, ids=_id)
def test_it_is_right(kernel, problem, programs):
    assert _run(kernel, problem, programs) == 0


#: The warps of a block share the channels of an image that is recomputed.
MANY_CHANNELS = POINTWISE, ConvProblem(2, 67, 5, 8, 11, 1)


@pytest.mark.parametrize(("kernel", "problem"), [*CASES[1:3], MANY_CHANNELS], ids=_id)
def test_images_that_cannot_be_split_are_computed_in_float32(kernel, problem, programs):
    # The value that is too small does not matter in a data gradient.
    assert _run(kernel, problem, programs, special=True) == (1 if kernel is GENERAL else 2)


@pytest.mark.parametrize("kernel", [POINTWISE, wide.FP16X1[0]], ids=_id)
def test_unscaled_sums_that_could_overflow_are_computed_in_float32(kernel, programs):
    # With 512 channels per group, images of 2^103 and more could.
    problem = ConvProblem(4, 1024, 1, 2, 2, 1, groups=2)
    x, w = np.full(problem.x_shape, 4e31, np.float32), np.full(problem.w_shape, 1.99, np.float32)
    x *= np.float32([1e-31, 1 / 4, 1 / 2, 1]).reshape(-1, 1, 1, 1)
    plan = kernel.plan(problem, CHIP, 16)
    report = run_plan(kernel.text(plan), plan, problem, x, w, programs)
    found = compare(report.buffers["y"], x, w, kernel, problem=problem)
    assert found.passed, str(found)
    assert sorted(report.buffers["listed"].view(np.int32)[:3]) == [2, 2, 3]


#: Two tiles per block, and two stages per tile.
RACING = [
    (POINTWISE, ConvProblem(3, 36, 9, 11, 10, 1, groups=2, stride=(1, 2))),
    (GENERAL, ConvProblem(3, 16, 9, 9, 8, 1, 2, pad=(0, 1))),
    pytest.param(*CASES[0], marks=EXHAUSTIVE),
]


@pytest.mark.parametrize(("kernel", "problem"), RACING, ids=_id)
def test_shared_memory_has_no_races(kernel, problem, programs):
    assert _run(kernel, problem, programs, without="") == 0


def test_recomputed_images_have_no_races(programs):
    assert _run(*MANY_CHANNELS, programs, special=True, without="") == 0


def test_a_missing_barrier_is_found(programs):
    # Staged outputs are overwritten while other warps still store them.
    assert _run(*RACING[1], programs, without="named_barrier(1 + consumer, 128);") > 0


@pytest.mark.parametrize(("length", "check_races"), [(133, False), (512, False), (70, True)])
def test_a_product_of_matrices(length, check_races, programs):
    rows, columns, _ = sizes = (140, 70, length)
    rng = np.random.default_rng(408)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, length), (columns, length)))
    x[3, 5], x[4, 6], x[5], x[139, 1] = np.nan, 1e-20, 0, 1e-9
    x[7], w[1] = 4e31, 1.99  # their unscaled sum, but not y, overflows in a long row
    w[2], bias = 0, rng.standard_normal(columns).astype(np.float32)
    program, split, filled = dense.multiply(*sizes, replace(CHIP, multiprocessors=4), True, "((v) < 0.f ? 0.f : (v))")
    arrays = {"w": w, **{name: np.zeros(size, np.uint8) for name, size in filled.items()}}
    arrays |= {"x": x, "bias": bias, "y": np.full((rows, columns), np.nan, np.float32)}
    arrays |= {name: np.full(n, 0xFF, np.uint8) for one in (split, program) for name, n in one.plan.scratch.items()}
    reports = launch_all([(one.source, one.plan, arrays, 1) for one in (split, program)], programs, check_races)
    assert [races(report) for report in reports] == [0, 0]
    recomputed = arrays["marks"].view(np.int32).reshape(-1, 256).any(axis=0)
    assert list(np.flatnonzero(recomputed)) == [3, 4] + [7] * (length > 128)
    exact = np.maximum(x.astype(np.float64) @ w.T + bias, 0)
    allowed = (
        wide.bound(2, ConvProblem(1, length, 1, 1, 1, 1)) * (abs(x).astype(np.float64) @ abs(w).T)
        + 2.0**-23 * abs(exact)
        + 1e-30
    )
    finite = np.isfinite(exact)
    assert np.array_equal(np.isfinite(arrays["y"]), finite) and not finite.all()
    assert (np.abs(arrays["y"] - exact) <= allowed)[finite].all()
