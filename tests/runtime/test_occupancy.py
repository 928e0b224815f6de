"""Resident blocks per multiprocessor, against CUDA's occupancy calculator and the driver's own figures."""

import json
from pathlib import Path

import pytest

from ece408_op.runtime.occupancy import DeviceLimits

HOPPER = DeviceLimits("H200", (9, 0), 132, 64, 32, 65536, 228 * 1024)
PASCAL = DeviceLimits("P100", (6, 0), 56, 64, 32, 65536, 64 * 1024)


@pytest.mark.parametrize(
    ("limits", "threads", "registers", "shared", "blocks"),
    [
        (HOPPER, 1024, 32, 0, 2),
        (HOPPER, 32, 16, 0, 32),  # the limit on blocks
        (HOPPER, 256, 255, 0, 1),  # 256 registers per thread, 8192 per warp, 8 warps
        (HOPPER, 256, 33, 0, 6),  # 40 registers per thread, 1280 per warp, 51 warps, 48 in groups of four
        (HOPPER, 128, 32, 48 * 1024, 4),  # 49 KB with the reserved one, of 228
        (HOPPER, 128, 32, 227 * 1024, 1),
        (HOPPER, 128, 32, 228 * 1024, 0),
        (PASCAL, 128, 32, 48 * 1024, 1),
        (PASCAL, 128, 32, 32 * 1024, 2),  # nothing is reserved before 8.0
    ],
)
def test_resident_blocks_as_cudas_calculator_has_them(limits, threads, registers, shared, blocks):
    assert min(limits.resident_blocks((threads, 1, 1), registers, shared).values()) == blocks
    assert limits.occupancy((threads, 1, 1), registers, shared) == blocks * -(-threads // 32) / 64


def test_occupancy_is_what_the_driver_reported():
    """Of each kernel's launches on the course's layers, by cuOccupancyMaxActiveBlocksPerMultiprocessor on an H200."""
    launches = json.loads((Path(__file__).parent / "recorded" / "occupancy-h200.json").read_text())
    assert len(launches) > 40
    for block, registers, shared, share in launches:
        assert HOPPER.occupancy(tuple(block), registers, shared) == pytest.approx(share)
