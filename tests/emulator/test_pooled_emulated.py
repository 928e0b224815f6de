"""The CUDA kernels fused with tanh and 2 x 2 max-pooling on the CPU, against float64: indices, edges, values, races."""

import numpy as np
import pytest
from cpu_kernels import arrays, assert_right
from cuda_layers import chip_of
from plan_runs import call_of, launch_all, run_plan

from ece408_op.errors import ProblemError
from ece408_op.kernels.cuda.float32 import sliding_window
from ece408_op.kernels.cuda.ladder import naive, register_tiled
from ece408_op.problem import ConvProblem

#: Layers, and what their arrays' addresses are multiples of, which only sliding_window looks at.
SHAPES = [
    ("sliding_window", (3, 1, 20, 20, 5, 5), 16),
    ("sliding_window", (3, 1, 20, 20, 5, 5), 4),
    ("sliding_window", (2, 1, 13, 17, 3, 4), 4),
    ("sliding_window", (2, 3, 9, 12, 6, 3), 16),
    ("sliding_window", (5, 1, 3, 3, 2, 2), 4),
    ("register_tiled", (3, 1, 12, 12, 5, 5), 16),
    ("register_tiled", (2, 5, 11, 14, 35, 4), 4),
    ("register_tiled", (7, 3, 6, 5, 70, 2), 4),
    ("register_tiled", (5, 2, 3, 3, 2, 3), 4),
    ("naive", (2, 3, 11, 12, 4, 4), 4),
    ("naive", (1, 1, 70, 71, 2, 3), 4),
]
KERNELS = {
    "naive": naive.NAIVE,
    "sliding_window": sliding_window.KERNEL,
    "register_tiled": register_tiled.REGISTER_TILED,
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_right(name, programs):
    kernel, calls, cases, multiples = KERNELS[name], [], [], []
    for full in (False, True):
        for plain, aligned in ((ConvProblem(*shape), aligned) for each, shape, aligned in SHAPES if each == name):
            if min(plain.y_shape[2:]) < 2 and not full:
                with pytest.raises(ProblemError, match="at least 2 rows of the convolution for 2 x 2 .*, got 1"):
                    plain.pooled(full)
                continue
            problem = plain.pooled(full)
            if name == "sliding_window" and full and (plain.output_height % 2 or plain.output_width % 2):
                assert "fuse" in kernel.not_supported_reasons(problem)[0]
                continue
            cases.append((problem, *arrays(problem)))
            plan = kernel.plan(problem, chip_of(80), aligned)
            calls.append(call_of(kernel.text(plan), plan, *cases[-1]))
            multiples.append(aligned)
    for case, report in zip(cases, launch_all(calls, programs, True, multiples, ("uninitialised",))):
        assert_right(kernel, *case, report.buffers["y"])


@pytest.mark.parametrize("name", KERNELS)
def test_a_maximum_leaves_nan_out(name, programs):
    kernel, plain = KERNELS[name], ConvProblem(2, 1, 8, 8, 3, 1)
    x, w = arrays(plain)
    x[0, 0, [0, 1, 2, 3], [0, 3, 4, 1]] = np.nan
    x[1, 0, 2:4, 2:4] = np.nan
    x[1, 0, 6, 6] = np.inf
    plan = kernel.plan(plain.pooled(False), chip_of(80), 16)
    got = run_plan(kernel.text(plan), plan, plain.pooled(False), x, w, programs).buffers["y"]
    convolved = (w[None, :, 0] * x).reshape(2, 3, 4, 2, 4, 2)
    want = np.tanh(np.fmax.reduce(np.fmax.reduce(convolved, axis=5), axis=3))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)
