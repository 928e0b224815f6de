"""The tables that nvprof printed, from recorded activities; arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ece408_op.runtime.launch import Triple

from ._activity import CALL, KERNEL, ON_GPU, OPERATOR, Activity, Profile
from ._occupancy import occupancy

#: The share of the time that the course's reports asked to be explained, in percent.
MOST = 90.0


@dataclass(frozen=True)
class Row:
    """All activities of one name. percent: of the table's whole time; times in nanoseconds."""

    name: str
    percent: float
    total: int
    calls: int
    average: float
    least: int
    most: int


@dataclass(frozen=True)
class Shape:
    """One way in which a kernel was launched.

    registers: of a thread; static_shared, dynamic_shared: bytes of a block; local: bytes of a thread that
    went to memory; occupancy: the share of a multiprocessor's warps that fit, None where the GPU is not known.
    """

    name: str
    launches: int
    grid: Triple
    block: Triple
    registers: int
    static_shared: int
    dynamic_shared: int
    local: int
    occupancy: float | None


def rows(activities: Iterable[Activity]) -> list[Row]:
    """One row for each name, the one that took longest first. Overlapping activities each count in full."""
    times: dict[str, list[int]] = {}
    for activity in activities:
        times.setdefault(activity.name, []).append(activity.nanoseconds)
    whole = sum(map(sum, times.values()))
    found = [
        Row(name, 100 * sum(t) / whole if whole else 0.0, sum(t), len(t), sum(t) / len(t), min(t), max(t))
        for name, t in times.items()
    ]
    return sorted(found, key=lambda row: (-row.total, row.name))


def over(table: list[Row], percent: float = MOST) -> list[Row]:
    """The first rows of a table that together take more than that share of its time."""
    found, share = [], 0.0
    for row in table:
        if share > percent:
            break
        found.append(row)
        share += row.percent
    return found


def outermost(activities: Iterable[Activity]) -> list[Activity]:
    """The activities that lie in no other of their place: the runtime's calls without the driver's that they make."""
    found: list[Activity] = []
    last: dict[str, int] = {}
    for activity in sorted(activities, key=lambda a: (a.start, -a.end)):
        if activity.end > last.get(activity.place, -1):
            found.append(activity)
            last[activity.place] = activity.end
    return found


def gpu_rows(profile: Profile) -> list[Row]:
    """Kernels, copies and fills: nvprof's "GPU activities"."""
    return rows(profile.of(*ON_GPU))


def call_rows(profile: Profile) -> list[Row]:
    """CUDA calls: nvprof's "API calls"; a call that another one made counts as part of that one."""
    return rows(outermost(profile.of(CALL)))


def operator_rows(profile: Profile) -> list[Row]:
    """MXNet's operators."""
    return rows(profile.of(OPERATOR))


def shapes(profile: Profile) -> list[Shape]:
    """Every kernel with each shape that it was launched in, in the order of the first launch."""
    counts: dict[tuple, int] = {}
    for activity in profile.of(KERNEL):
        d = activity.details
        key = (
            activity.name,
            activity.device,
            _triple(d["grid"]),
            _triple(d["block"]),
            d["registers"],
            d["static_shared"],
            d["dynamic_shared"],
            d["local"],
        )
        counts[key] = counts.get(key, 0) + 1
    found = []
    for (name, device, grid, block, registers, static, dynamic, local), launches in counts.items():
        limits = profile.devices.get(device)
        share = occupancy(limits, block, registers, static + dynamic) if limits else None
        found.append(Shape(name, launches, grid, block, registers, static, dynamic, local, share))
    return found


def summary(profile: Profile) -> dict[str, Any]:
    """The tables as data: what a run keeps of its profile."""
    tables = {"gpu": gpu_rows(profile), "calls": call_rows(profile), "operators": operator_rows(profile)}
    return {
        "tables": {name: [asdict(row) for row in table] for name, table in tables.items()},
        "over": {name: [row.name for row in over(table)] for name, table in tables.items()},
        "shapes": [asdict(shape) for shape in shapes(profile)],
        "seconds": profile.seconds,
        "recorder_seconds": profile.recorder_seconds,
        "notes": list(profile.notes),
    }


def _triple(sizes: Any) -> Triple:
    x, y, z = sizes
    return (int(x), int(y), int(z))
