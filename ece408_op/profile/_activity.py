"""An activity of a program, the GPU that it ran on, and a profile: everything that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ece408_op.runtime.launch import Triple, ceil_div, round_up

#: The kinds of activities: three on a GPU, CUDA calls and MXNet operators on the host.
KERNEL, MEMCPY, MEMSET, API_CALL, OPERATOR = "kernel", "memcpy", "memset", "api_call", "operator"
ON_GPU = (KERNEL, MEMCPY, MEMSET)

_WARP = 32
#: Registers are allocated per warp in units of 256, warps in groups of four (compute capability 3.0 and later).
_REGISTER_UNIT = 256
_WARP_UNIT = 4
#: From 8.0 on the units of shared memory are smaller, and the system reserves 1 KB per block.
_SMALL_UNITS = (8, 0)
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Activity:
    """Something that took time.

    start, end: nanoseconds since 1970, by one clock for all kinds. track: where it ran, "stream 7" of a GPU or
    "thread 1234" of the host. correlation: the number that a CUDA call shares with the kernel or copy that it
    started, 0 for none. details: of a kernel grid, block, registers (per thread), static_shared and dynamic_shared
    (bytes per block) and local (bytes per thread); of a copy or memset bytes; of an operator MXNet's name for it,
    where that differs.
    """

    kind: str
    name: str
    start: int
    end: int
    track: str = ""
    device: int = 0
    correlation: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nanoseconds(self) -> int:
        """The duration."""
        return self.end - self.start


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

    def resident_blocks(self, block: Triple, registers: int, shared: int) -> int:
        """Blocks that fit on one multiprocessor at a time, by the arithmetic of CUDA's occupancy calculator.

        block: threads in x, y, z; registers per thread; shared: bytes per block, static and dynamic.
        """
        warps = ceil_div(prod(block), _WARP)
        limits = [self.blocks, self.warps // warps]
        if registers:
            per_warp = round_up(registers * _WARP, _REGISTER_UNIT)
            limits.append(self.registers // per_warp // _WARP_UNIT * _WARP_UNIT // warps)
        small = self.capability >= _SMALL_UNITS
        per_block = round_up(shared, 128 if small else 256) + (_RESERVED_BYTES if small else 0)
        if per_block:
            limits.append(self.shared // per_block)
        return min(limits)

    def occupancy(self, block: Triple, registers: int, shared: int) -> float:
        """The share of a multiprocessor's warps that can be resident, 0 to 1: an upper bound for a run."""
        return self.resident_blocks(block, registers, shared) * ceil_div(prod(block), _WARP) / self.warps


@dataclass(frozen=True)
class Profile:
    """All that was recorded of one program.

    seconds: the wall time of the recording. overhead_seconds: CUPTI's own account of its overhead, None where no GPU
    was recorded. notes: sentences for people, such as on lost activities.
    """

    activities: Sequence[Activity]
    devices: Mapping[int, DeviceLimits] = field(default_factory=dict)
    seconds: float = 0.0
    overhead_seconds: float | None = None
    notes: Sequence[str] = ()

    def of(self, *kinds: str) -> list[Activity]:
        """The activities of these kinds, by their start."""
        return sorted((a for a in self.activities if a.kind in kinds), key=lambda a: (a.start, a.end))
