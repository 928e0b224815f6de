"""The ladder's kernels on the CPU: values, bounds and races of all, and the counters that Nsight Compute measured."""

import json
from pathlib import Path

import numpy as np
import pytest
from cuda_layers import H200, chip_of
from plan_runs import assert_right
from plans import Case, Plans

from ece408_op.core import dispatch
from ece408_op.problem import ConvProblem

ROOT = Path(__file__).parents[2]
KERNELS = {
    kernel.name: kernel
    for kernel in map(dispatch.find, dispatch.names("gpu"))
    if kernel.sources and kernel.sources[-1].parent.name == "ladder"
}
#: Several tiles and filter groups; sizes that divide nothing.
PROBLEMS = (ConvProblem(3, 2, 11, 13, 5, 3), ConvProblem(2, 1, 19, 18, 17, 5))


def test_it_is_right(programs):
    cases = [
        (kernel, problem, kernel.plan(problem, chip_of(90), 16)) for kernel in KERNELS.values() for problem in PROBLEMS
    ]
    assert_right(cases, programs)


#: Kernels with coalesced and other accesses, bank conflicts, wide loads, divergence; the rest take longer.
SOON = [("1x28x28x50x5", name) for name in ("implicit_gemm", "register_tiled", "half", "tensor_core")]
MEASURED = ROOT / "benchmarks" / "results" / "emulator-counters-h200.json"
COUNTED = json.loads(MEASURED.read_text())["layers"] if MEASURED.is_file() else {}  # in a checkout
EVERY = [(layer, name) for layer, kernels in COUNTED.items() for name in kernels]


@pytest.mark.parametrize(
    ("layer", "name"), [one if one in SOON else pytest.param(*one, marks=pytest.mark.exhaustive) for one in EVERY]
)
def test_counters_are_within_one_percent_of_nsight_computes(layer, name, programs):
    problem, rng = ConvProblem(2, *map(int, layer.split("x"))), np.random.default_rng(0)
    plan = KERNELS[name].plan(problem, H200, 256)
    arrays = {key: rng.standard_normal(shape, np.float32) for key, shape in zip("xwy", problem.shapes)}
    arrays |= {key: np.zeros(size, np.uint8) for key, size in plan.scratch.items()}
    plans = Plans([Case(name, KERNELS[name].text(plan), plan, tuple(arrays), 2)], programs, counters=True)
    totals, theirs = plans.run(name, arrays, dict.fromkeys(arrays, 256)).totals, COUNTED[layer][name]
    assert totals.sectors == pytest.approx(theirs["sectors"], rel=0.01)
    assert totals.wavefronts == pytest.approx(theirs["wavefronts"], rel=0.01)
    assert totals.global_requests + totals.shared_requests == pytest.approx(theirs["instructions"], rel=0.01)
