"""The passes and the split-precision product compile for every architecture, without a GPU, and spill nothing."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from unittest import mock

import numpy as np
import nvrtc
from cuda_layers import check_args, chip_of, each_architecture
from network_fake import Array
from numpy_operators import LAUNCHES

from ece408_op.kernels.cuda.split_precision import dense
from ece408_op.network import _gpu_update, _passes
from ece408_op.network._definition import Trained
from ece408_op.network._elementwise import Activation, Function, LeakyReLU
from ece408_op.network._fusion import Combination, Pointwise
from ece408_op.network._gpu_update import Rule, Update
from ece408_op.network._layers import BatchNorm, Pooling
from ece408_op.plugin import _passes as _operator_passes
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

pytestmark = nvrtc.needs_nvrtc
TANH, SIGMOID, TIMES = Activation("tanh"), Activation("sigmoid"), Function("elemwise_mul")
SWISH = Pointwise("", ((SIGMOID, (0,)), (TIMES, (0, 1))))
COURSE = Pooling("Pooling", kernel=(2, 2), stride=(2, 2))
OTHER = Pooling("Pooling", (3, 2), "avg", (2, 1), (1, 1), "full", count_include_pad=False)
PASSES = [
    _passes.pool(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), TANH),
    _passes.pool(OTHER, (10, 5, 25, 24), (10, 5, 13, 25), None),
    _passes.affine(50, 144, 10 * 50 * 144, Activation("relu"), scaled=True),
    _passes.affine(50, 1, 1 << 32, Activation("softrelu"), shifted=False, residual=True),
    _passes.affine(5, 3, 150, Activation("sigmoid")),
    _passes.elementwise(SWISH, [(1 << 16, 1 << 16)], (1 << 16, 1 << 16), None),
    _passes.elementwise(Combination("", True, True), [(4, 5, 6, 7), (4, 5, 1, 1), (4, 5, 6, 7)], (4, 5, 6, 7), TANH),
    _passes.elementwise(LeakyReLU("", "prelu"), [(4, 5, 6, 7), (5,)], (4, 5, 6, 7), None),
    _passes.border((1, 2), (2, 3, 4, 5)),
    _passes.softmax(100, 10, 1.0, False),
    _passes.softmax(100, 1000, 2.0, True),
]


@cache
def hopper():
    sizes = ((500, 7200), (65, 1030), (160, 17496))
    each = [dense.multiply(10000, *each, chip_of(90), True, "tanhf(v)") for each in sizes]
    return [program for programs in each for program in programs[:2]]


def launched_in_training():
    """Return the programs that passes and updates launch for arrays with and without whole float4s, and large ones."""
    found = list[cuda.Program]()
    fakes = {"execute": lambda program, *_: found.append(program), "cupy": lambda: SimpleNamespace(asarray=np.asarray)}
    with mock.patch.multiple(cuda, **fakes):
        for width, relu in ((12, True), (7, False)):
            norm, x = BatchNorm("BatchNorm", bias=relu), np.zeros((10, 64, 4, width), "f")
            inputs = x, *np.zeros((5 if relu else 4, 64), "f")
            saved = LAUNCHES.batch_norm(norm, relu, inputs, x)
            LAUNCHES.batch_norm_gradients(norm, relu, Trained(inputs, x, saved), x, True)
            for kind in ("relu", "softrelu", "softsign"):
                LAUNCHES.activation_gradient(kind, x, x)
            LAUNCHES.sum_relu([x, x], x)
        LAUNCHES.bias_gradient(np.broadcast_to(np.zeros((), "f"), (1 << 20, 64, 7, 7)))
        arrays = np.zeros((4, 3), "f").view(Array)
        for rule in (Rule(False, 1, 1, 0.9), Rule(True, 1, 1, beta1=0.9, beta2=0.999, epsilon=1e-8)):
            _gpu_update.apply(rule, [Update(arrays[0], arrays[1], arrays[2:], 0.1, 0)] * 3)
    return found


TRAINING = [
    *launched_in_training(),
    _passes.pool(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), TANH, save_argmax=True),
    _passes.pool_gradient(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), TANH),
    _passes.pool_gradient(OTHER, (10, 5, 25, 24), (10, 5, 13, 25), None),
]


#: The passes around the kernels of single operators.
OPERATOR = _operator_passes.bias_gradient_program(ConvProblem(1, 1, 1, 1, 1, 1))


@each_architecture
def test_passes_compile_and_spill_nothing(architecture):
    for one in {one.source: one for one in [*PASSES, *TRAINING, OPERATOR]}.values():
        reports = nvrtc.compile_text(one.source, architecture)
        assert {launch.entry for launch in one.plan.steps(1)} <= set(reports), (one.name, reports)
        assert all((each.stack_bytes, each.spill_bytes) == (0, 0) for each in reports.values()), (one.name, reports)


def test_the_split_precision_product_compiles_for_hopper():
    reports_of = cache(lambda text: nvrtc.compile_text(text, 90, ("--gpu-architecture=sm_90a",)))
    for program in hopper():
        reports = reports_of(program.source)
        for launch in program.plan.steps(1):
            report = reports[launch.entry]
            assert (report.stack_bytes, report.spill_bytes) == (0, 0), (launch.entry, report)
            assert launch.shared <= 227 * 1024
            assert report.registers * launch.block[0] <= 65536


def test_adam_gets_the_complements_of_its_betas_rounded_once():
    adam = [one for one in TRAINING if one.name == "update"][-1]
    (launch,) = adam.plan.steps(1)
    parameters = re.search(r"void update\(([^)]*)\)", adam.source).group(1)
    given = dict(zip((each.split()[-1] for each in parameters.split(",")), launch.args))
    assert (given["rest1"], given["rest2"]) == (np.float32(0.1), np.float32(0.001))


def test_launches_have_an_argument_of_its_type_for_each_parameter():
    for program in (*PASSES, *TRAINING, *hopper()):
        for launch in program.plan.steps(1):
            check_args(program.source, launch)
