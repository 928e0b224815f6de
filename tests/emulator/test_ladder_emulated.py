"""The ladder's kernels on the CPU: values, bounds and races of all, and the counters that Nsight Compute measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from cuda_layers import chip_of

from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.emulator.plans import Case, Plans
from ece408_op.problem import ConvProblem

ROOT = Path(__file__).parents[2]
KERNELS = {
    kernel.name: kernel
    for kernel in map(dispatch.find, dispatch.names("gpu"))
    if kernel.sources and kernel.sources[-1].parent.name == "ladder"
}
#: Several tiles and filter groups; sizes that divide nothing.
PROBLEMS = (ConvProblem(3, 2, 11, 13, 5, 3), ConvProblem(2, 1, 19, 18, 17, 5))


@pytest.fixture(scope="module")
def plans(programs: Path) -> Plans:
    """All kernels and layers in one program."""
    cases = []
    for kernel in KERNELS.values():
        for problem in PROBLEMS:
            plan = kernel.plan(problem, chip_of(90), 16)
            buffers = ("x", "w", "y", *plan.scratch)
            cases.append(Case(f"{kernel.name} {problem}", kernel.text(plan), plan, buffers, problem.batch))
    return Plans(cases, programs, races=True)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_it_is_right(name: str, problem: ConvProblem, plans: Plans) -> None:
    case = plans.cases[f"{name} {problem}"]
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.1, 1, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
    arrays = {"x": x, "w": w, "y": np.full(problem.y_shape, np.nan, np.float32)}
    arrays |= {key: np.full(size, 0xFF, np.uint8) for key, size in case.plan.scratch.items()}
    report = plans.run(case.name, arrays, dict.fromkeys("xwy", 16))
    # register_tiled reads the padding of its filters, whose products no thread stores.
    assert [finding for finding in report.findings if finding.kind != "uninitialised"] == []
    found = compare(report.buffers["y"], x, w, KERNELS[name])
    assert found.passed, found


#: Kernels with coalesced and other accesses, bank conflicts, wide loads, divergence; the rest take longer.
@pytest.mark.parametrize("name", ["implicit_gemm", "register_tiled", "half", "tensor_core"])
def test_counters_agree_with_nsight_compute(name: str, programs: Path) -> None:
    script = ROOT / "benchmarks" / "emulator_counters.py"
    measured = ROOT / "benchmarks" / "results" / "emulator-counters-h200.json"
    if not measured.is_file():
        pytest.skip("not a checkout")
    layer = "1x28x28x50x5"
    theirs = json.loads(measured.read_text())["layers"][layer][name]
    ours = runpy.run_path(str(script))["emulate"](KERNELS[name], layer, programs)
    for key, count in ours.items():
        assert count == pytest.approx(theirs[key], rel=0.02), key
