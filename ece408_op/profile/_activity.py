"""An activity of a program, and a profile: everything that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ece408_op.runtime.occupancy import DeviceLimits

#: The kinds of activities: three on a GPU, CUDA calls and MXNet operators on the host.
KERNEL, MEMCPY, MEMSET, API_CALL, OPERATOR = "kernel", "memcpy", "memset", "api_call", "operator"
ON_GPU = (KERNEL, MEMCPY, MEMSET)


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
