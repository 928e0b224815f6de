"""The rates of a GPU's units follow from its figures; CuPy is a stand-in."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from ece408_op.core import roofline
from ece408_op.runtime.launch import Chip


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "megahertz", "tensor", "float32"),
    [
        ((6, 0), 56, 1480, 0, 10.6),
        ((7, 0), 80, 1530, 125, 15.7),
        ((7, 5), 40, 1590, 65, 8.1),
        ((8, 0), 108, 1410, 312, 19.5),
        ((8, 6), 84, 1740, 149.7, 37.4),
        ((8, 7), 16, 1300, 42.5, 5.3),
        ((8, 9), 142, 2505, 364, 91.1),
        ((9, 0), 132, 1830, 989, 61.8),
    ],
)
def test_the_rates_are_those_of_nvidias_data_sheets(
    capability, multiprocessors, megahertz, tensor, float32, monkeypatch
):
    """P100, V100, T4, A100, A40, Jetson AGX Orin (170 sparse int8 TOPS), RTX 6000 Ada, H100: dense fp16 TFLOPS."""
    cupy = MagicMock()
    cupy.cuda.runtime.deviceGetAttribute.return_value = 1000 * megahertz
    monkeypatch.setattr(roofline.cuda, "cupy", lambda: cupy)
    monkeypatch.setattr(roofline.cuda, "chip", lambda device: Chip("any", capability, multiprocessors))
    monkeypatch.setattr(roofline.timer, "measure", lambda *_: SimpleNamespace(median=0.5))
    found = roofline.measure.__wrapped__(0)
    assert found.tensor_flops_per_second == pytest.approx(tensor * 1e12, rel=0.02)
    assert found.flops_per_second == pytest.approx(float32 * 1e12, rel=0.02)
    assert found.bytes_per_second == 1 << 31
