"""Runs plans in the emulator; findings that no test expects fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from plans import Case, Plans

from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.emulator import Report
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Plan

#: Races are left to the tests. Padding of shared memory may be read before it is written.
EXPECTED = ("race", "uninitialised")


def launch_all(
    calls: Sequence[tuple[str, Plan, dict[str, np.ndarray], int]],
    folder: Path,
    check_races: bool = False,
    aligned: int | Sequence[int] = 64,
    expected: tuple[str, ...] | None = EXPECTED,
) -> list[Report]:
    """Run plans, each a text, a plan, its buffers by name and the images, one after another from one program.

    They change the arrays as the kernels do. x, w and y are at odd multiples of ``aligned`` bytes, for all plans or for
    each. Other findings than ``expected`` fail here: deadlocks, barriers that are left half used, writes outside an
    array. With None, all are the caller's to check.
    """
    cases = [Case(str(i), text, plan, tuple(arrays), batch) for i, (text, plan, arrays, batch) in enumerate(calls)]
    plans, reports, wrong = Plans(cases, folder, check_races), [], []
    multiples = [aligned] * len(cases) if isinstance(aligned, int) else aligned
    for case, (_, _, arrays, _), multiple in zip(cases, calls, multiples):
        report = plans.run(case.name, arrays, dict.fromkeys("xwy", multiple))
        for name, array in arrays.items():
            array[...] = report.buffers[name]
        reports.append(report)
        wrong += [f"plan {case.name}: {one}" for one in report.findings if expected and one.kind not in expected]
    assert not wrong, "\n".join(wrong)
    return reports


def call_of(
    text: str, plan: Plan, problem: ConvProblem, a: np.ndarray, b: np.ndarray
) -> tuple[str, Plan, dict[str, np.ndarray], int]:
    """Return a plan's call on the two arrays that its problem reads; the output and the scratch memory are NaN."""
    filled = np.full(problem.shapes[2], np.nan, np.float32)
    arrays = dict(zip(problem.operands, (a.copy(), b.copy(), filled)))
    arrays |= {name: np.full(size, 0xFF, np.uint8) for name, size in plan.scratch.items()}
    return text, plan, arrays, problem.batch


def operands(problem: ConvProblem, seed: int = 0) -> list[np.ndarray]:
    """Return the two arrays that a problem reads, float32, normally distributed."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2]]


def assert_right(
    cases: Sequence[tuple[CudaKernel, ConvProblem, Plan]],
    folder: Path,
    aligned: int | Sequence[int] = 16,
    inputs: Sequence[Sequence[np.ndarray]] = (),
    check_races: bool = True,
) -> None:
    """Run plans from one program on their operands, or on ``inputs``: outputs against float64, and no race."""
    inputs = inputs or [operands(problem) for _, problem, _ in cases]
    calls = [call_of(kernel.text(plan), plan, problem, *both) for (kernel, problem, plan), both in zip(cases, inputs)]
    reports = launch_all(calls, folder, check_races, aligned, ("uninitialised",))
    wrong = []
    for (kernel, problem, _), both, report in zip(cases, inputs, reports):
        found = compare(report.buffers[problem.operands[2]], *both, kernel, problem=problem)
        wrong += [] if found.passed else [f"{kernel.name}, {problem}: {found}"]
    assert not wrong, "\n".join(wrong)


def run_plan(
    text: str,
    plan: Plan,
    problem: ConvProblem,
    a: np.ndarray,
    b: np.ndarray,
    folder: Path,
    aligned: int = 16,
    races: bool = False,
    expected: tuple[str, ...] = EXPECTED,
) -> Report:
    """Run a plan on the two arrays that its problem reads."""
    return launch_all([call_of(text, plan, problem, a, b)], folder, races, aligned, expected)[0]


def races(report: Report) -> int:
    """Return the number of places at which threads raced."""
    return sum(finding.kind == "race" for finding in report.findings)
