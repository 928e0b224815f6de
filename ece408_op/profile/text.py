"""A profile as text for people: nvprof's tables."""

from __future__ import annotations

from collections.abc import Sequence

from . import _tables
from ._activity import Profile

#: For each table its title, what its rows are called, and what their times mean.
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
#: The package's own kernel that is no convolution, and what it does.
HOLD = "hold"
HOLD_SENTENCE = (
    "hold is this package's own kernel: where the operator copies to a GPU and back, the stream waits in it until all "
    "work of a launch is queued, so that Op Time does not include waiting for the host. It computes nothing."
)

#: At most this many launch shapes are printed; the JSON has all.
_PRINTED_SHAPES = 20


def as_text(profile: Profile) -> str:
    """The tables that have rows, each with its list of names that take over 90 % and what its times mean."""
    found = _tables.tables(profile)
    parts = [_table(key, table) for key, table in found.items() if table]
    if found["gpu"]:
        parts.insert(1, _launch_table(_tables.shapes(profile)))
    if not parts:
        parts.append("Nothing was recorded: no GPU activity, no CUDA call, no MXNet operator.")
    parts += profile.notes
    recorded = f"Recorded for {profile.seconds:.3f} s"
    if profile.overhead_seconds is not None:
        recorded += f", of which CUPTI itself took {profile.overhead_seconds:.3f} s by its own account"
    parts.append(f"{recorded}; times under a profiler are longer than without.")
    return "\n\n".join(parts)


def time(nanoseconds: float) -> str:
    """A time as nvprof prints it, five digits and a unit: 1.2345ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:#.5g}{unit}"
    return f"{nanoseconds:.0f}ns"


def _table(key: str, table: Sequence[_tables.Row]) -> str:
    title, entries, explanation = EXPLANATIONS[key]
    lines = [f"{title}:", f"{'Time(%)':>8} {'Time':>10} {'Calls':>7} {'Avg':>10} {'Min':>10} {'Max':>10}  Name"]
    for row in table:
        times = " ".join(f"{time(value):>10}" for value in (row.average, row.least, row.most))
        lines.append(f"{row.percent:7.2f}% {time(row.total):>10} {row.calls:7d} {times}  {row.name}")
    names = ", ".join(f"{row.name} ({row.percent:.1f} %)" for row in _tables.most(table))
    lines += [f"Over {_tables.MOST:.0f} % of the time, {entries}: {names}", explanation]
    return "\n".join(lines + [HOLD_SENTENCE] * any(row.name == HOLD for row in table))


def _launch_table(table: Sequence[_tables.Shape]) -> str:
    lines = [
        "Kernel launches:",
        f"{'Launches':>8} {'Grid':>16} {'Block':>13} {'Registers':>9} {'Shared':>8} {'Occupancy':>9}  Name",
    ]
    for shape in table[:_PRINTED_SHAPES]:
        share = "" if shape.occupancy is None else f"{100 * shape.occupancy:.0f} %"
        grid, block = ("x".join(map(str, sizes)) for sizes in (shape.grid, shape.block))
        sizes = f"{grid:>16} {block:>13} {shape.registers:9d} {shape.static_shared + shape.dynamic_shared:8d}"
        lines.append(f"{shape.launches:8d} {sizes} {share:>9}  {shape.name}")
    if len(table) > _PRINTED_SHAPES:
        lines.append(f"and {len(table) - _PRINTED_SHAPES} more")
    lines.append(
        "Registers are per thread, shared memory is in bytes per block, occupancy is the share of a multiprocessor's "
        "warps that can be resident."
    )
    return "\n".join(lines)
