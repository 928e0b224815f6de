"""The passes around the kernels: their source compiles, and sums right when it is emulated on the CPU."""

from __future__ import annotations

import numpy as np
import nvrtc
import pytest
from cuda_layers import each_architecture
from plan_runs import run_plan

from ece408_op.core.kernel import EPS32
from ece408_op.plugin import _passes
from ece408_op.problem import ConvProblem


@pytest.mark.skipif(bool(nvrtc.missing()), reason="NVRTC is not installed: pip install ece408-op[test]")
@each_architecture
def test_they_compile_and_spill_nothing(architecture):
    reports = nvrtc.compile_text(_passes.bias_gradient_program(ConvProblem(1, 1, 1, 1, 1, 1)).source, architecture)
    assert set(reports) == {"add", "add_bias", "accumulate", "round_sums", "sum_pixels", "sum_parts"}
    for name, report in reports.items():
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), name


@pytest.mark.parametrize("problem", [ConvProblem(2, 1, 17, 19, 300, 1), ConvProblem(3, 1, 2, 1, 2, 1)], ids=str)
def test_a_biass_gradient_is_right(problem, programs):
    y = np.random.RandomState(0).standard_normal(problem.y_shape).astype(np.float32)
    program = _passes.bias_gradient_program(problem)
    x, gradient = np.zeros(problem.x_shape, np.float32), problem.weight_gradient
    got = run_plan(program.source, program.plan, gradient, x, y, programs, 4).buffers["w"].reshape(-1)
    exact, scale = (part.astype(np.float64).sum(axis=(0, 2, 3)) for part in (y, abs(y)))
    pixels = problem.output_height * problem.output_width
    assert (abs(got - exact) <= (pixels // 256 + 3) * EPS32 * scale).all()
