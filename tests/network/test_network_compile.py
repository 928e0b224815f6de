"""The passes and the split product compile for every architecture, without a GPU, and spill nothing."""

from __future__ import annotations

import re

import nvrtc
import pytest
from cuda_layers import ARCHITECTURES

from ece408_op.network import _dense, _passes, _split_precision
from ece408_op.network._layers import FullyConnected
from ece408_op.network._pooling import Pooling

pytestmark = pytest.mark.skipif(
    bool(nvrtc.missing()), reason=f"NVRTC {', '.join(nvrtc.missing())} not installed: pip install ece408-op[test]"
)


def programs(monkeypatch):
    monkeypatch.setattr(_dense, "blas", lambda device: None)
    course = Pooling("max", (2, 2), (2, 2), (0, 0), False, False, True)
    other = Pooling("avg", (3, 2), (2, 1), (1, 1), True, False, False)
    return [
        _passes.pool(course, (10, 50, 24, 24), (10, 50, 12, 12), "tanh").program,
        _passes.pool(other, (10, 5, 25, 24), (10, 5, 13, 25), None).program,
        _passes.affine(50, 144, 10 * 50 * 144, True, "relu").program,
        _passes.affine(50, 1, 1 << 32, False, "softrelu").program,
        _passes.affine(5, 3, 150, False, "sigmoid").program,
        _passes.affine(5, 3, 150, False, "softsign").program,
        _passes.border((1, 2), (2, 3, 4, 5)).program,
        _passes.softmax(100, 10, 1.0, False).program,
        _passes.softmax(100, 1000, 2.0, True).program,
    ]


def hopper(monkeypatch):
    monkeypatch.setattr(_dense, "blas", lambda device: None)
    sizes = ((500, 7200, "tanh"), (65, 1030, None), (160, 17496, "relu"))
    layers = [_split_precision.Split(FullyConnected(n, act != "relu", True), 10000, k, act, 0) for n, k, act in sizes]
    return [program for layer in layers for program in layer.programs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_and_spills_nothing(architecture, monkeypatch):
    for program in programs(monkeypatch):
        (report, *_) = [r for n, r in nvrtc.compile_text(program.text, architecture).items() if n == program.name]
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), (program.name, report)


def test_the_split_product_compiles_for_hopper(monkeypatch):
    for program in hopper(monkeypatch):
        (report,) = nvrtc.compile_text(program.text, 90, program.options).values()
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), (program.name, report)
        (launch,) = program.plan.steps(1)
        assert launch.shared <= 227 * 1024
        assert report.registers * launch.block[0] <= 65536


def test_launches_name_the_kernels_parameters(monkeypatch):
    """As many arguments as the .cu file's function has parameters."""
    for program in (*programs(monkeypatch), *hopper(monkeypatch)):
        (launch,) = program.plan.steps(1)
        (parameters,) = re.findall(rf"{launch.entry}\(([^)]*)\) ?{{", program.text)
        assert len(launch.args) == len(parameters.split(",")), launch.entry
