"""A profile as text for people: the tables in nvprof's form."""

from __future__ import annotations

from collections.abc import Sequence

from ._activity import Profile
from ._tables import MOST, Row, Shape, call_rows, gpu_rows, operator_rows, over, shapes

GPU_SENTENCE = (
    "A kernel, copy or fill is work on the GPU: its time runs from its start to its end there, by the GPU's clock."
)
CALLS_SENTENCE = (
    "A CUDA API call is work on the host: its time is the calling thread's, waiting for the GPU included, so a call "
    "that only starts a kernel is short and one that waits for it is long."
)
#: What this package launches beside the convolution, by its kernel's name.
GATE = "gate"
GATE_SENTENCE = (
    "gate is this package's own kernel: where the operator copies to a GPU and back, it holds the stream until all of "
    "a round's work is queued, so that Op Time has no waiting for the host in it. It computes nothing."
)
OPERATORS_SENTENCE = (
    "An operator is a piece of MXNet's graph or engine on a thread of the host; New is the whole forward, copies to "
    "a GPU and, at a layer's first call, compiling included, where Op Time is the computation alone."
)

#: Launch shapes that are printed at most; the JSON has all.
_MOST_SHAPES = 20


def as_text(profile: Profile) -> str:
    """The tables that have rows, each with its list of what takes over 90 % and a sentence on what its entries are."""
    parts = []
    gpu, calls, operators = gpu_rows(profile), call_rows(profile), operator_rows(profile)
    if gpu:
        gate = any(row.name == GATE for row in gpu)
        sentence = f"{GPU_SENTENCE}\n{GATE_SENTENCE}" if gate else GPU_SENTENCE
        parts.append(_section("GPU activities", gpu, "kernels and copies", sentence))
    if calls:
        parts.append(_section("CUDA API calls", calls, "CUDA API calls", CALLS_SENTENCE))
    if gpu:
        parts.append(_shape_table(shapes(profile)))
    if operators:
        parts.append(_section("MXNet operators", operators, "operators", OPERATORS_SENTENCE))
    if not parts:
        parts.append("Nothing was recorded: no GPU activity, no CUDA call, no MXNet operator.")
    parts += profile.notes
    watched = f"Watched for {profile.seconds:.3f} s"
    if profile.recorder_seconds is not None:
        watched += f", {profile.recorder_seconds:.3f} s of it CUPTI's own work by its own account"
    parts.append(f"{watched}; times under a profiler are longer than without.")
    return "\n\n".join(parts)


def time(nanoseconds: float) -> str:
    """A time as nvprof prints it, five digits and the unit that suits it: 1.2345ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:#.5g}{unit}"
    return f"{nanoseconds:.0f}ns"


def _section(title: str, table: Sequence[Row], kind: str, sentence: str) -> str:
    names = ", ".join(f"{row.name} ({row.percent:.1f} %)" for row in over(list(table)))
    lines = [f"{title}:", f"{'Time(%)':>8} {'Time':>10} {'Calls':>7} {'Avg':>10} {'Min':>10} {'Max':>10}  Name"]
    for row in table:
        times = " ".join(f"{time(value):>10}" for value in (row.average, row.least, row.most))
        lines.append(f"{row.percent:7.2f}% {time(row.total):>10} {row.calls:7d} {times}  {row.name}")
    return "\n".join([*lines, f"Over {MOST:.0f} % of the time, {kind}: {names}", sentence])


def _shape_table(table: Sequence[Shape]) -> str:
    lines = [
        "Kernel launches:",
        f"{'Launches':>8} {'Grid':>16} {'Block':>13} {'Registers':>9} {'Shared':>8} {'Occupancy':>9}  Name",
    ]
    for shape in table[:_MOST_SHAPES]:
        share = "" if shape.occupancy is None else f"{100 * shape.occupancy:.0f} %"
        shared = shape.static_shared + shape.dynamic_shared
        grid, block = ("x".join(map(str, sizes)) for sizes in (shape.grid, shape.block))
        sizes = f"{grid:>16} {block:>13} {shape.registers:9d} {shared:8d}"
        lines.append(f"{shape.launches:8d} {sizes} {share:>9}  {shape.name}")
    if len(table) > _MOST_SHAPES:
        lines.append(f"and {len(table) - _MOST_SHAPES} more")
    lines.append(
        "Registers are a thread's, shared memory is a block's in bytes, occupancy is the share of a multiprocessor's "
        "warps that fit."
    )
    return "\n".join(lines)
