"""The split-precision kernels for wide layers with every attribute, and for the data gradient."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cuda_layers import H200
from gpu_case import poisoned_run, require_support

from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import UnsupportedError
from ece408_op.kernels.cuda.split_precision import wide
from ece408_op.problem import ConvProblem, DataGradient

POINTWISE, GENERAL = wide.FP16X3

#: Padding, strides, dilation, rectangular filters, groups whose channels fill no multiple of TMA's eight, filters as
#: large as the padded image, more padding than filter.
LAYERS = [
    ConvProblem(3, 64, 13, 17, 96, 3, pad=(1, 1)),
    ConvProblem(3, 64, 13, 17, 96, 3, stride=(2, 2), pad=(1, 1)),
    ConvProblem(2, 40, 19, 15, 70, 3, 5, stride=(3, 2), pad=(1, 3)),
    ConvProblem(3, 192, 17, 17, 64, 1, 7, pad=(0, 3)),
    ConvProblem(2, 64, 20, 21, 64, 3, pad=(2, 4), dilate=(2, 4)),
    ConvProblem(2, 84, 12, 11, 60, 3, stride=(2, 1), pad=(1, 0), groups=6),
    ConvProblem(2, 32, 12, 11, 32, 3, pad=(1, 1), groups=32),
    ConvProblem(2, 3, 40, 44, 64, 7, stride=(2, 2), pad=(3, 3)),
    ConvProblem(3, 64, 11, 13, 64, 1, pad=(1, 2)),
    ConvProblem(3, 64, 11, 13, 64, 1, stride=(2, 3)),
    ConvProblem(3, 96, 11, 13, 66, 1, groups=3),
    ConvProblem(2, 24, 9, 8, 30, 2, pad=(4, 3)),
    ConvProblem(4, 48, 5, 6, 30, 9, 8, pad=(2, 1)),
]
PROBLEMS = [*LAYERS, *(layer.data_gradient for layer in LAYERS if layer.stride == (1, 1))]
CASES = [
    (kernel, problem)
    for kernel in (*wide.FP16X3, wide.FP16X1[1])
    for problem in PROBLEMS
    if not kernel.not_supported_reasons(problem)
]


def test_general_takes_every_attribute_and_pointwise_all_with_one_unpadded_tap():
    assert [problem for kernel, problem in CASES if kernel is GENERAL] == PROBLEMS
    taken = [problem for kernel, problem in CASES if kernel is POINTWISE]
    assert taken == [problem for problem in PROBLEMS if problem.kernel_width == 1 and problem.pad == (0, 0)]
    assert len(taken) == 3


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (GENERAL, ConvProblem(1, 64, 9, 9, 64, 3, stride=(2, 2)).data_gradient, "stride: expected (1, 1) for a data"),
        (GENERAL, ConvProblem(1, 64, 99, 99, 64, 3, stride=(9, 1)), "stride: at most 8, got (9, 1)"),
        (GENERAL, ConvProblem(1, 64, 99, 99, 64, 1, pad=(0, 129)), "windows: expected to begin within 127 pixels"),
        (GENERAL, ConvProblem(1, 64, 99, 400, 64, 1, 300), "kernel: at most 256 rows and columns when dilated"),
        (GENERAL, ConvProblem(1, 5_000_000, 1, 1, 8, 3, pad=(1, 1)), "channels: at most 4194240"),
        (GENERAL, ConvProblem(1, 64, 9, 9, 64, 3).weight_gradient, "it does not support weight gradient"),
        (POINTWISE, ConvProblem(1, 64, 9, 9, 64, 1, pad=(1, 1)), "padding: expected none, got (1, 1)"),
        (POINTWISE, ConvProblem(1, 64, 9, 9, 64, 1, 3), "kernel: expected 1, got (1, 3)"),
    ],
)
def test_a_refusal_has_its_reason(kernel, problem, reason):
    assert any(each.startswith(reason) for each in kernel.not_supported_reasons(problem))


def test_a_block_without_room_for_two_stages_is_refused():
    with pytest.raises(UnsupportedError, match="two stages, got 65536 bytes"):
        GENERAL.plan(LAYERS[0], replace(H200, shared_bytes=1 << 16), 16)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (ConvProblem(128, 64, 56, 56, 64, 3, pad=(1, 1)), GENERAL),
        (ConvProblem(128, 128, 56, 56, 128, 3, stride=(2, 2), pad=(1, 1)), GENERAL),
        (ConvProblem(128, 192, 17, 17, 192, 1, 7, pad=(0, 3)), GENERAL),
        (ConvProblem(128, 512, 7, 7, 512, 3, pad=(1, 1)).data_gradient, GENERAL),
        (ConvProblem(128, 256, 56, 56, 128, 1, stride=(2, 2)), POINTWISE),
        (ConvProblem(128, 256, 56, 56, 64, 1).data_gradient, POINTWISE),
    ],
)
def test_auto_takes_them_for_layers_of_real_networks(problem, expected):
    assert dispatch.select(problem, "gpu", chip=H200) is expected


def least_error(kernel: CudaKernel, problem: ConvProblem, a: np.ndarray, b: np.ndarray) -> float:
    """Return what small values may add to an error: a data gradient's are split as well (docs/numerics.md)."""
    if not isinstance(problem, DataGradient):
        return 0.0
    largest = [float(np.abs(array[np.isfinite(array)]).max()) for array in (a, b)]
    return 2 * problem.products * math.prod(largest) * (2.0**-50 if kernel.precision == "float32" else 2.0**-39)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "problem"), CASES, ids=[f"{kernel.name}-{problem}" for kernel, problem in CASES])
def test_it_is_right_and_computes_what_cannot_be_split_in_float32(kernel, problem):
    cupy = require_support(kernel, problem)
    rng = np.random.default_rng(408)
    plain = [rng.standard_normal(shape).astype(np.float32) for shape in problem.shapes[:2]]
    special = [array.copy() for array in plain]
    special[0][0, 0, -1, -1], special[0][-1, -1, 0, 0] = np.inf, np.nan
    spread = [array.copy() for array in plain]
    spread[0][-1, :, :2] *= np.float32(1e-12)
    weight = [array.copy() for array in plain]
    weight[1][0, 0, 0, 0] = 1e-20
    for a, b in (plain, special, spread, weight):
        out = poisoned_run(kernel, problem, cupy.asarray(a), cupy.asarray(b))
        with np.errstate(invalid="ignore"):
            found = compare(out.get(), a, b, kernel, problem=problem, least=least_error(kernel, problem, a, b))
        assert found.passed, f"{kernel.name}, {problem}: {found}"
