"""The float32 kernels of general convolutions and gradients on the CPU, against float64, with race detection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_emulator import EmulatedPlan, can_emulate
from cuda_layers import PROBLEMS, chip_of

from ece408_op.core.check import compare
from ece408_op.kernels.cuda.float32 import blocked_gemm, data_gradient_tiles, depthwise, weight_gradient_rows
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.skipif(not can_emulate(), reason="no g++ that knows 16-bit floats (13 or newer)")

KERNELS = tuple(m.KERNEL for m in (depthwise, weight_gradient_rows, data_gradient_tiles, blocked_gemm))


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [(k, p) for k in KERNELS for p in PROBLEMS if not k.not_supported_reasons(p)],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_it_is_right(kernel, problem: ConvProblem, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2])
    aligned = 16 if problem.batch % 2 else 4
    plan = kernel.plan(problem, chip_of(90), aligned)
    emulated = EmulatedPlan(kernel.text(plan), plan, problem, tmp_path, races=True)
    found = compare(emulated.run(a, b, aligned), a, b, kernel, problem=problem)
    assert found.passed, found
    assert emulated.races == 0


def test_every_kernel_takes_some_of_the_problems() -> None:
    for kernel in KERNELS:
        assert sum(not kernel.not_supported_reasons(problem) for problem in PROBLEMS) >= 3, kernel.name
