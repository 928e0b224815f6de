"""The tables that nvprof printed, from recorded activities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ece408_op.runtime.occupancy import LaunchShape

from ._activity import API_CALL, KERNEL, ON_GPU, OPERATOR, Activity, Profile

#: The course's reports had to explain more than this share of the time, in percent.
MOST = 90.0


@dataclass(frozen=True)
class Row:
    """All activities of one name. percent: of the table's total time; times in nanoseconds."""

    name: str
    percent: float
    total: int
    calls: int
    average: float
    least: int
    most: int


@dataclass(frozen=True)
class Shape(LaunchShape):
    """A kernel and one shape in which it was launched, ``launches`` times.

    registers: per thread; local: bytes per thread in local memory; occupancy: see DeviceLimits, None if unknown.
    """

    registers: int
    local: int
    launches: int = 0
    occupancy: float | None = None


def rows(activities: Iterable[Activity]) -> list[Row]:
    """One row per name, the longest total first. Overlapping activities each count in full."""
    times: dict[str, list[int]] = {}
    for activity in activities:
        times.setdefault(activity.name, []).append(activity.nanoseconds)
    total = sum(map(sum, times.values()))
    found = [
        Row(name, 100 * sum(t) / total if total else 0.0, sum(t), len(t), sum(t) / len(t), min(t), max(t))
        for name, t in times.items()
    ]
    return sorted(found, key=lambda row: (-row.total, row.name))


def most(table: Sequence[Row]) -> list[Row]:
    """The first rows of a table that together take more than MOST percent of its time."""
    found, share = [], 0.0
    for row in table:
        if share > MOST:
            break
        found.append(row)
        share += row.percent
    return found


def outermost(activities: Iterable[Activity]) -> list[Activity]:
    """The activities that are not inside another one of their track: runtime calls without the driver calls in them."""
    found: list[Activity] = []
    ends: dict[str, int] = {}
    for activity in sorted(activities, key=lambda a: (a.start, -a.end)):
        if activity.end > ends.get(activity.track, -1):
            found.append(activity)
            ends[activity.track] = activity.end
    return found


def tables(profile: Profile) -> dict[str, list[Row]]:
    """nvprof's "GPU activities" ("gpu") and "API calls" ("calls"), and MXNet's operators ("operators")."""
    return {
        "gpu": rows(profile.of(*ON_GPU)),
        "calls": rows(outermost(profile.of(API_CALL))),
        "operators": rows(profile.of(OPERATOR)),
    }


def shapes(profile: Profile) -> list[Shape]:
    """Every kernel in each shape of its launches, in the order of the first launch."""
    counts: Counter[tuple[int, Shape]] = Counter()
    for kernel in profile.of(KERNEL):
        details: dict[str, Any] = {
            name: tuple(size) if isinstance(size, list) else size for name, size in kernel.details.items()
        }
        counts[kernel.device, Shape(kernel.name, **details)] += 1
    found = []
    for (device, shape), count in counts.items():
        limits, shared = profile.devices.get(device), shape.static_shared + shape.dynamic_shared
        share = limits.occupancy(shape.block, shape.registers, shared) if limits else None
        found.append(replace(shape, launches=count, occupancy=share))
    return found


def summary(profile: Profile) -> dict[str, Any]:
    """The tables as data, for the JSON of m1 to m4. most: the names that take over 90 % of a table's time."""
    found = tables(profile)
    return {
        "tables": {name: [asdict(row) for row in table] for name, table in found.items()},
        "most": {name: [row.name for row in most(table)] for name, table in found.items()},
        "shapes": [asdict(shape) for shape in shapes(profile)],
        "seconds": profile.seconds,
        "overhead_seconds": profile.overhead_seconds,
        "notes": list(profile.notes),
    }
