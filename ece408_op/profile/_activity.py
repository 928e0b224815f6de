"""One activity of a program, and a profile: everything that was recorded, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ece408_op.errors import DataError

#: The kinds of activity: three on a GPU, a call of CUDA's interface on the host, an operator of MXNet's.
KERNEL, COPY, SET, CALL, OPERATOR = "kernel", "copy", "set", "call", "operator"
ON_GPU = (KERNEL, COPY, SET)

VERSION = 1


@dataclass(frozen=True)
class Activity:
    """Something that took time.

    start, end: nanoseconds since 1970, of one clock for all kinds. place: where it ran, "stream 7" of a GPU or
    "thread 1234" of the host. link: the number that a CUDA call shares with the kernel or copy that it started,
    0 for none. details: of a kernel grid, block, registers (a thread's), static_shared and dynamic_shared (bytes of
    a block) and local (bytes of a thread); of a copy or a set bytes; of operators MXNet's own name where it differs.
    """

    kind: str
    name: str
    start: int
    end: int
    place: str = ""
    device: int = 0
    link: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nanoseconds(self) -> int:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Limits:
    """A GPU: its name, and what one of its multiprocessors can hold; registers are of 32 bits, shared in bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    warps: int
    blocks: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Profile:
    """All that was recorded of one program.

    seconds: the wall time that was watched. recorder_seconds: what the GPU's recorder says that it took itself,
    None where no GPU was recorded. notes: sentences for people, on what is missing, say.
    """

    activities: Sequence[Activity]
    devices: Mapping[int, Limits] = field(default_factory=dict)
    seconds: float = 0.0
    recorder_seconds: float | None = None
    notes: Sequence[str] = ()

    def of(self, *kinds: str) -> list[Activity]:
        """The activities of these kinds, by their start."""
        return sorted((a for a in self.activities if a.kind in kinds), key=lambda a: (a.start, a.end))

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": VERSION,
            "seconds": self.seconds,
            "recorder_seconds": self.recorder_seconds,
            "notes": list(self.notes),
            "devices": {str(number): asdict(limits) for number, limits in self.devices.items()},
            "activities": [asdict(activity) for activity in self.activities],
        }


def from_data(data: Mapping[str, Any]) -> Profile:
    """A profile from what ``as_data`` gave; raises DataError for anything else."""
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        devices = {
            int(number): Limits(**{**limits, "capability": tuple(limits["capability"])})
            for number, limits in data["devices"].items()
        }
        activities = [Activity(**activity) for activity in data["activities"]]
        return Profile(activities, devices, data["seconds"], data["recorder_seconds"], tuple(data["notes"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"expected a profile of version {VERSION} written by this package, got {error!r}") from error
