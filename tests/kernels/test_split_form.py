"""Convolutions whose activations stay split, NHWC, between layers, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import nvrtc
import pytest
from cuda_layers import chip_of
from gpu_case import require_support
from test_split_form_emulated import RELU, joined

from ece408_op.core import reference
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cuda.split_precision import split_form, wide
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch

#: Padding, a stride, groups, channels and filters that are no multiples of eight, images that share a warp's pixels.
LAYERS = [
    ConvProblem(5, 64, 13, 17, 96, 3, pad=(1, 1)),
    ConvProblem(3, 40, 19, 15, 70, 3, 5, stride=(3, 2), pad=(1, 3)),
    ConvProblem(40, 30, 5, 3, 130, 1),
    ConvProblem(2, 64, 12, 11, 48, 3, stride=(2, 1), pad=(1, 0), groups=2),
]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ConvProblem(2, 24, 9, 9, 36, 3, groups=3), "groups: expected a multiple of 8 channels and filters each"),
        (ConvProblem(2**17, 24, 9, 9, 36, 3), "batch: at most 65535"),
        (ConvProblem(2, 24, 99, 99, 36, 3, stride=(9, 9)), "stride: at most 8"),
    ],
)
def test_a_refusal_has_its_reason(problem, reason):
    with pytest.raises(UnsupportedError, match=reason):
        split_form.convolution(problem, chip_of(90))


def test_no_pass_converts_activations_between_layers():
    program = split_form.convolution(LAYERS[0], chip_of(90), bias=True, activation=RELU)
    entries = [step.entry for step in program.plan.steps(LAYERS[0].batch) if isinstance(step, Launch)]
    assert entries == ["implicit_gemm_split"]
    assert not program.plan.scratch


EXHAUSTIVE = pytest.mark.exhaustive
#: Components, layers, and whether a bias, a residual and an activation follow.
COMPILED = [
    (2, LAYERS[0], True),
    (1, ConvProblem(128, 64, 64, 64, 256, 3, pad=(1, 1)), True),
    *(
        pytest.param(1, ConvProblem(128, 64, size, size, 4 * size, 3, pad=(1, 1)), True, marks=EXHAUSTIVE)
        for size in (32, 24, 16)
    ),
    # One stage, and with one component consumers that alternate.
    *((components, ConvProblem(128, 64, 56, 56, 64, 1), True) for components in (1, 2)),
    pytest.param(1, ConvProblem(128, 128, 28, 28, 512, 1), True, marks=EXHAUSTIVE),
    # The largest tiles: consumers that share filters, and two that alternate.
    (1, ConvProblem(128, 256, 56, 56, 256, 3, pad=(1, 1)), False),
    pytest.param(1, ConvProblem(128, 1024, 14, 14, 256, 1), False, marks=EXHAUSTIVE),
    pytest.param(1, ConvProblem(128, 96, 35, 35, 96, 3, pad=(1, 1)), False, marks=EXHAUSTIVE),
]


@nvrtc.needs_nvrtc
@pytest.mark.parametrize(("components", "problem", "more"), COMPILED, ids=str)
def test_it_keeps_its_values_in_registers(components, problem, more):
    program = split_form.convolution(problem, chip_of(90), components, more, more, RELU if more else None)
    report = nvrtc.compile_text(program.source, 90, program.options)["implicit_gemm_split"]
    assert (report.stack_bytes, report.spill_bytes, report.serialized) == (0, 0, False)


class _Layer:
    """The arrays of one convolution in split form on the GPU."""

    def __init__(self, problem: ConvProblem, components: int, w: np.ndarray, x: np.ndarray) -> None:
        cp, self.problem, self.components = cuda.cupy(), problem, components
        shape = split_form.activation_shape(problem.batch, problem.channels, problem.height, problem.width, components)
        self.x, self.x_scales = cp.full(shape, cp.nan, cp.float16), cp.zeros((problem.batch, 2), cp.int32)
        self.w = cp.asarray(w)
        self.split_w = cp.zeros(split_form.split_weight_bytes(problem, components) // 2, cp.float16)
        self.exponents = cp.zeros(problem.filters, cp.int32)
        program = split_form.split_activations(problem.x_shape, cuda.chip(), components)
        arrays = {"x": cp.asarray(x), "split_x": self.x, "x_scales": self.x_scales}
        cuda.execute(program, problem.batch, arrays, None)

    def run(self, activation: str | None = None, **added: Any) -> tuple[Any, Any]:
        """Return y and its scales."""
        cp, problem = cuda.cupy(), self.problem
        y = cp.full(
            split_form.activation_shape(problem.batch, *problem.y_shape[1:], self.components), cp.nan, cp.float16
        )
        y_scales = cp.zeros((problem.batch, 2), cp.int32)
        program = split_form.convolution(
            problem, cuda.chip(), self.components, "bias" in added, "residual" in added, activation
        )
        filters = {"w": self.w, "split_w": self.split_w, "w_exponents": self.exponents}
        cuda.execute(split_form.split_weights(program, problem), 1, filters, None)
        arrays = {**added, **filters, "limits": split_form.output_limits(self.w, added.get("bias"))}
        arrays |= {"x": self.x, "x_scales": self.x_scales, "y": y, "y_scales": y_scales}
        cuda.execute(program, problem.batch, arrays, None)
        cuda.wait(program.name, cp.cuda.get_current_stream())
        return y, y_scales


def _assert_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, layer: _Layer, added: Any, relu: bool) -> None:
    problem = layer.problem
    with np.errstate(invalid="ignore"):
        exact, magnitude = reference.convolve(x, w, problem) + added, reference.magnitude(x, w, problem) + abs(added)
        exact = np.where(exact < 0, 0, exact) if relu else exact
    assert (np.isfinite(y) == np.isfinite(exact)).all()
    finite = np.isfinite(exact) & np.isfinite(magnitude)
    kernel = (wide.FP16X1 if layer.components == 1 else wide.FP16X3)[1]
    stored = 2.0**-22 if layer.components == 2 else 2.0**-11
    allowed = (kernel.error_bound(problem) + 2 * stored) * magnitude + 1e-6 * stored * np.nanmax(magnitude[finite])
    assert (abs(y[finite] - exact[finite]) <= allowed[finite]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("components", [2, 1])
@pytest.mark.parametrize("problem", LAYERS, ids=str)
@pytest.mark.parametrize("special", ["", "infinity", "tiny", "infinite weight", "tiny weight"])
def test_it_is_right_with_bias_residual_and_relu(problem, special, components):
    cp = require_support(wide.FP16X3[1], problem)  # the split form runs where this kernel does
    rng = np.random.default_rng(408)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2])
    if special == "infinity":
        x[0, 0, 2, 2], x[-1, -1, -1, -1] = np.inf, np.nan
    if special == "tiny":
        x[-1] *= np.float32(1e-30)
    if special.endswith("weight"):
        w[0, 0, 0, 0] = np.inf if special == "infinite weight" else 1e-20
    layer = _Layer(problem, components, w, x)
    split_x = joined(layer.x.get(), layer.x_scales.get(), problem.channels)
    plain, plain_scales = layer.run()
    y = joined(plain.get(), plain_scales.get(), problem.filters)
    _assert_close(y, split_x, w, layer, 0.0, relu=False)
    with np.errstate(invalid="ignore"):
        largest = np.abs(y).reshape(len(y), -1).max(axis=1)
    recorded = plain_scales.get()[:, 1].view(np.float32)
    finite = np.isfinite(largest)
    assert (recorded >= largest * (1 - 2.0**-20))[finite].all()
    assert (recorded <= largest * (1 + 2.0**-9))[finite].all()
    assert not np.isfinite(recorded[~finite]).any()
    bias = rng.standard_normal(problem.filters).astype(np.float32)
    arrays = {"bias": cp.asarray(bias), "residual": plain, "residual_scales": plain_scales}
    out = joined(*(array.get() for array in layer.run(RELU, **arrays)), problem.filters)
    _assert_close(out, split_x, w, layer, y + bias[:, None, None], relu=True)
