"""The compiler's report on a kernel, and how many of its blocks fit on a multiprocessor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from . import cuda
from .launch import Triple, ceil_div, round_up

WARP = 32
#: Registers are allocated per warp in units of 256, warps in groups of four (compute capability 3.0 and later).
_REGISTER_UNIT = 256
_WARP_UNIT = 4
#: From 8.0 on the units of shared memory are smaller, and the system reserves 1 KB per block.
_SMALL_UNITS = (8, 0)
_RESERVED_BYTES = 1024
#: cudaDevAttrMaxBlocksPerMultiprocessor
_MOST_BLOCKS = 106


@dataclass(frozen=True)
class KernelNotes:
    """One kernel as ptxas reports it: registers per thread, bytes that spill, static shared and constant bytes."""

    name: str
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    registers: int = 0
    shared_bytes: int = 0
    constant_bytes: int = 0


@dataclass(frozen=True)
class LaunchShape:
    """A kernel as it was launched: its name, blocks and threads in x, y and z, and bytes of shared memory per block."""

    name: str
    grid: Triple
    block: Triple
    static_shared: int
    dynamic_shared: int


@dataclass(frozen=True)
class DeviceLimits:
    """A GPU's name, and the limits of one multiprocessor; registers have 32 bits, shared memory is in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    warps: int
    blocks: int
    registers: int
    shared: int

    def resident_blocks(self, block: Triple, registers: int, shared: int) -> dict[str, int]:
        """Return how many blocks each resource has room for on one multiprocessor, the scarcest first.

        block: threads in x, y, z; registers per thread; shared: bytes per block, static and dynamic.
        """
        warps = ceil_div(prod(block), WARP)
        limits = {"warps": self.warps // warps, "blocks": self.blocks}
        if registers:
            per_warp = round_up(registers * WARP, _REGISTER_UNIT)
            limits["registers"] = self.registers // per_warp // _WARP_UNIT * _WARP_UNIT // warps
        small = self.capability >= _SMALL_UNITS
        per_block = round_up(shared, 128 if small else 256) + (_RESERVED_BYTES if small else 0)
        if per_block:
            limits["shared memory"] = self.shared // per_block
        return dict(sorted(limits.items(), key=lambda limit: limit[1]))

    def occupancy(self, block: Triple, registers: int, shared: int) -> float:
        """The share of a multiprocessor's warps that can be resident, 0 to 1: an upper bound for a run."""
        blocks = next(iter(self.resident_blocks(block, registers, shared).values()))
        return blocks * ceil_div(prod(block), WARP) / self.warps


def device_limits(device: int = 0) -> DeviceLimits:
    """Return the limits of the GPU of that number; raises DeviceError where there is none."""
    chip, runtime = cuda.chip(device), cuda.cupy().cuda.runtime
    figures = runtime.getDeviceProperties(device)
    return DeviceLimits(
        chip.name,
        chip.capability,
        chip.multiprocessors,
        figures["maxThreadsPerMultiProcessor"] // WARP,
        runtime.deviceGetAttribute(_MOST_BLOCKS, device),
        figures["regsPerMultiprocessor"],
        figures["sharedMemPerMultiprocessor"],
    )
