"""The passes and the split-precision product compile for every architecture, without a GPU, and spill nothing."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import nvrtc
from cuda_layers import chip_of, each_architecture

from ece408_op.kernels.cuda.split_precision import dense
from ece408_op.network import _gpu_update, _passes, _training_gpu
from ece408_op.network._gpu_update import Rule
from ece408_op.network._layers import BatchNorm, Pooling
from ece408_op.plugin import _passes as _operator_passes
from ece408_op.problem import ConvProblem

pytestmark = nvrtc.needs_nvrtc
COURSE = Pooling("Pooling", kernel=(2, 2), stride=(2, 2))
OTHER = Pooling("Pooling", (3, 2), "avg", (2, 1), (1, 1), "full", count_include_pad=False)
PASSES = [
    _passes.pool(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), "tanh"),
    _passes.pool(OTHER, (10, 5, 25, 24), (10, 5, 13, 25), None),
    _passes.affine(50, 144, 10 * 50 * 144, "relu", scaled=True),
    _passes.affine(50, 1, 1 << 32, "softrelu", shifted=False, residual=True),
    _passes.affine(5, 3, 150, "sigmoid"),
    _passes.border((1, 2), (2, 3, 4, 5)),
    _passes.softmax(100, 10, 1.0, False),
    _passes.softmax(100, 1000, 2.0, True),
]


@cache
def hopper():
    sizes = ((500, 7200), (65, 1030), (160, 17496))
    each = [dense.multiply(10000, *each, chip_of(90), True, "tanhf(v)") for each in sizes]
    return [program for programs in each for program in programs[:2]]


ADAM = Rule(True, 1, 1, beta1=0.9, beta2=0.999, epsilon=1e-8)
TRAINING = [
    _training_gpu.sums_program((10, 64, 196), 4, 4),
    _training_gpu.sums_program((1 << 20, 64, 49), 4, 1),
    _training_gpu.parts_program(64, 4),
    *_training_gpu.norm_programs(BatchNorm("BatchNorm", bias=True), 64, 4, 1960),
    *(_training_gpu.mix_program((10, 64, 48), vector) for vector in (1, 4)),
    *(_training_gpu.activation_program(kind, 4096, 4) for kind in ("relu", "softrelu", "softsign")),
    *(_gpu_update.update_program(rule, 3) for rule in (Rule(False, 1, 1, 0.9), ADAM)),
    _passes.pool(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), "tanh", save_argmax=True),
    _passes.pool_gradient(COURSE, (10, 50, 24, 24), (10, 50, 12, 12), "tanh"),
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
    (launch,) = _gpu_update.update_program(ADAM, 1).plan.steps(1)
    parameters = re.search(r"void update\(([^)]*)\)", _gpu_update.update_program(ADAM, 1).source).group(1)
    given = dict(zip((each.split()[-1] for each in parameters.split(",")), launch.args))
    assert (given["rest1"], given["rest2"]) == (np.float32(0.1), np.float32(0.001))


def test_launches_have_an_argument_for_each_parameter():
    for program in (*PASSES, *TRAINING, *hopper()):
        for launch in program.plan.steps(1):
            (parameters,) = re.findall(rf"{launch.entry}\(([^)]*)\) ?{{", program.source)
            assert len(launch.args) == len(parameters.split(",")), launch.entry
