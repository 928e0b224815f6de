"""Recorded activities, and tables of them in the form of nvprof's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

#: The kinds of activities: three on a GPU, CUDA calls and MXNet operators on the host.
KERNEL, MEMCPY, MEMSET, API_CALL, OPERATOR = "kernel", "memcpy", "memset", "api_call", "operator"
ON_GPU = (KERNEL, MEMCPY, MEMSET)

#: The course's reports had to explain more than this share of the time, in percent.
MOST = 90.0

#: For each table: its title, the name of its rows, the meaning of their times.
EXPLANATIONS = {
    "gpu": (
        "GPU activities",
        "kernels and copies",
        "A kernel, copy or memset is work on the GPU: its time is from its start to its end, by the GPU's clock.",
    ),
    "calls": (
        "CUDA API calls",
        "CUDA API calls",
        "A CUDA API call is work on the host: its time is that of the calling thread, including its waits for the GPU. "
        "A call that only starts a kernel is short, one that waits for the kernel is long.",
    ),
    "operators": (
        "MXNet operators",
        "operators",
        "An operator is a node of MXNet's graph or a task of its engine, on a thread of the host. New is the whole "
        "forward, with copies to a GPU and, in a layer's first call, compiling; Op Time is the computation alone.",
    ),
}


@dataclass(frozen=True)
class Activity:
    """One recorded interval: a kernel, copy, memset, CUDA call or MXNet operator.

    start, end: nanoseconds since 1970, by one clock for all kinds. track: where it ran, "stream 7" of a GPU or
    "thread 1234" of the host. correlation: the number that a CUDA call shares with the kernel or copy that it
    started, 0 for none. details: for a kernel, grid, block, registers (per thread), static_shared and dynamic_shared
    (bytes per block) and local (bytes per thread); for a copy or memset, bytes; for an operator, MXNet's name for it,
    if that differs.
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
        """The duration in nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Profile:
    """The recording of one program.

    seconds: the wall time of the recording. overhead_seconds: CUPTI's overhead, as CUPTI reports it; None if no GPU was
    recorded. notes: sentences for people, such as about lost activities.
    """

    activities: Sequence[Activity]
    seconds: float = 0.0
    overhead_seconds: float | None = None
    notes: Sequence[str] = ()

    def of(self, *kinds: str) -> list[Activity]:
        """Return the activities of these kinds, in order of their start."""
        return sorted((a for a in self.activities if a.kind in kinds), key=lambda a: (a.start, a.end))


@dataclass(frozen=True)
class Row:
    """All activities of one name. percent: the share of the table's total time; times are in nanoseconds."""

    name: str
    percent: float
    total: int
    calls: int
    average: float
    least: int
    most: int


def rows(activities: Iterable[Activity]) -> list[Row]:
    """Return one row per name, the longest total first. Overlapping activities each count in full."""
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
    """Return the fewest first rows of a table that together take more than MOST percent of its time."""
    shares_before = accumulate((row.percent for row in table), initial=0.0)
    return [row for row, share in zip(table, shares_before) if share <= MOST]


def outermost(activities: Iterable[Activity]) -> list[Activity]:
    """Return activities that are not inside another of their track: runtime calls without the driver calls in them."""
    found: list[Activity] = []
    ends: dict[str, int] = {}
    for activity in sorted(activities, key=lambda a: (a.start, -a.end)):
        if activity.end > ends.get(activity.track, -1):
            found.append(activity)
            ends[activity.track] = activity.end
    return found


def tables(profile: Profile) -> dict[str, list[Row]]:
    """Return nvprof's tables "GPU activities" ("gpu") and "API calls" ("calls"), MXNet's operators ("operators")."""
    return {
        "gpu": rows(profile.of(*ON_GPU)),
        "calls": rows(outermost(profile.of(API_CALL))),
        "operators": rows(profile.of(OPERATOR)),
    }


def summary(profile: Profile) -> dict[str, Any]:
    """Return the tables as data, for the JSON of m1 to m4. most: the names that take over 90 % of a table's time."""
    found = tables(profile)
    return {
        "tables": {name: [asdict(row) for row in table] for name, table in found.items()},
        "most": {name: [row.name for row in most(table)] for name, table in found.items()},
        "seconds": profile.seconds,
        "overhead_seconds": profile.overhead_seconds,
        "notes": list(profile.notes),
    }


def as_text(profile: Profile) -> str:
    """Return the tables that have rows, each with the names that take over 90 % and the meaning of its times."""
    parts = [_table(key, table) for key, table in tables(profile).items() if table]
    parts = parts or ["Nothing was recorded: no GPU activity, no CUDA call, no MXNet operator."]
    recorded = f"Recorded for {profile.seconds:.3f} s"
    if profile.overhead_seconds is not None:
        recorded += f", of which CUPTI itself took {profile.overhead_seconds:.3f} s by its own account"
    return "\n\n".join([*parts, *profile.notes, f"{recorded}; times under a profiler are longer than without."])


def _table(key: str, table: Sequence[Row]) -> str:
    title, entries, explanation = EXPLANATIONS[key]
    lines = [f"{title}:", f"{'Time(%)':>8} {'Time':>10} {'Calls':>7} {'Avg':>10} {'Min':>10} {'Max':>10}  Name"]
    for row in table:
        times = " ".join(f"{_time(value):>10}" for value in (row.average, row.least, row.most))
        lines.append(f"{row.percent:7.2f}% {_time(row.total):>10} {row.calls:7d} {times}  {row.name}")
    names = ", ".join(f"{row.name} ({row.percent:.1f} %)" for row in most(table))
    return "\n".join([*lines, f"Over {MOST:.0f} % of the time, {entries}: {names}", explanation])


def _time(nanoseconds: float) -> str:
    """Return a time as nvprof prints it, with five digits and a unit: 1.2345ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:#.5g}{unit}"
    return f"{nanoseconds:.0f}ns"
