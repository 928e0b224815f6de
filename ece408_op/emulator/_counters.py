"""Counters per line of the source: what a GPU's load and store units would do; and hints on what costs most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

_MOST = 3
#: With fewer global loads and shared requests per atomic operation, products are added one by one.
_LOADS_PER_ATOMIC = 8
#: The section of the docs that explains each hint.
COALESCING = "docs/lab.md#coalescing"
CONFLICTS = "docs/lab.md#bank-conflicts"
DIVERGENCE = "docs/lab.md#divergence"
REUSE = "docs/lab.md#reuse"


@dataclass(frozen=True)
class LineCounters:
    """What a GPU would do for one line of the source, or in all.

    Attributes:
        line: the line, 0 for the sum of all lines.
        global_loads: warp-level instructions that load from global memory; global_stores and atomics likewise.
        sectors: sectors of 32 bytes that they load and store.
        least_sectors: the fewest sectors that hold all bytes which each instruction uses.
        shared_requests: warp-level instructions that load from or store to shared memory.
        wavefronts: cycles of shared memory that they take.
        least_wavefronts: the same without bank conflicts.
        branches: times that a warp reached a branch of the line, if lanes of it ever went two ways there.
        divergent: times that they did.
        file: the name of the file of that line.
    """

    line: int = 0
    global_loads: int = 0
    global_stores: int = 0
    atomics: int = 0
    sectors: int = 0
    least_sectors: int = 0
    shared_requests: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0
    branches: int = 0
    divergent: int = 0
    file: str = ""

    @property
    def global_requests(self) -> int:
        """Warp-level instructions that load from or store to global memory."""
        return self.global_loads + self.global_stores


#: The counters, in the order in which a program writes them.
COUNTED = tuple(one.name for one in fields(LineCounters) if one.name not in ("line", "file"))


def add(rows: Sequence[LineCounters], line: int = 0, file: str = "") -> LineCounters:
    """Return the sum of counters."""
    return LineCounters(line=line, file=file, **{name: sum(getattr(row, name) for row in rows) for name in COUNTED})


@dataclass(frozen=True)
class Hint:
    """A change that would help.

    Attributes:
        line: the line of the source.
        text: one or two sentences, without the line.
        section: the page and section of the docs that explains it.
    """

    line: int
    text: str
    section: str


def hints(lines: Sequence[LineCounters], totals: LineCounters) -> tuple[Hint, ...]:
    """Return up to three hints, the costliest first. Costs are cycles of the load and store units."""
    costs: list[tuple[float, Hint]] = []
    for line in lines:
        costs += [*_coalescing(line), *_conflicts(line), *_divergence(line)]
        costs += _atomics(line, totals)
    costs += _reuse(lines, totals)
    costs.sort(key=lambda pair: -pair[0])
    least = 0.02 * (totals.sectors / 4 + totals.wavefronts + totals.global_requests)
    return tuple(hint for cost, hint in costs if cost > least)[:_MOST]


def _coalescing(line: LineCounters) -> list[tuple[float, Hint]]:
    if not line.global_requests or line.sectors <= 1.3 * line.least_sectors:
        return []
    factor, per_request = line.sectors / line.least_sectors, line.sectors / line.global_requests
    verb = "read" if line.global_loads >= line.global_stores else "write"
    text = f"the 32 lanes of a warp {verb} {per_request:.1f} different sectors, {factor:.1f} times as many as needed: "
    text += "let neighbouring lanes (threadIdx.x) use neighbouring elements"
    return [((line.sectors - line.least_sectors) / 4, Hint(line.line, text, COALESCING))]


def _conflicts(line: LineCounters) -> list[tuple[float, Hint]]:
    if not line.shared_requests or line.wavefronts <= 1.2 * line.least_wavefronts:
        return []
    factor = line.wavefronts / line.least_wavefronts
    text = f"lanes of a warp use different words of one bank of shared memory, {factor:.1f} times as many cycles; "
    # In a column, the rows' length matters; in two rows, which a narrow block's warp covers, no padding helps.
    text += "pad the rows by one element (four for float4), or " if factor > 2 else "a block 32 threads wide may help: "
    text += "let neighbouring lanes use neighbouring elements"
    return [(line.wavefronts - line.least_wavefronts, Hint(line.line, text, CONFLICTS))]


def _divergence(line: LineCounters) -> list[tuple[float, Hint]]:
    if not line.divergent or line.divergent < 0.2 * line.branches:
        return []
    share = line.divergent / line.branches
    text = f"in {100 * share:.0f} % of cases the lanes of a warp go two ways here, one after the other: "
    text += "let whole warps take the same branch, or choose a block that fits the row"
    return [(float(line.divergent), Hint(line.line, text, DIVERGENCE))]


def _atomics(line: LineCounters, totals: LineCounters) -> list[tuple[float, Hint]]:
    loads = totals.global_loads + totals.shared_requests
    if not line.atomics or loads > _LOADS_PER_ATOMIC * line.atomics:
        return []
    text = f"this line has {line.atomics} atomic operations, and the kernel {loads} "
    text += "loads from global memory and accesses to shared memory: "
    text += "add products in a register, and the sum by one atomic operation"
    return [(4.0 * line.atomics, Hint(line.line, text, REUSE))]


def _reuse(lines: Sequence[LineCounters], totals: LineCounters) -> list[tuple[float, Hint]]:
    """A kernel that loads from global memory far more often than it stores could keep values."""
    loads, stores = [line for line in lines if line.global_loads], max(1, totals.global_stores + totals.atomics)
    # Where one lane stores for its warp, only the sectors show how much is loaded for it.
    loaded = sum(line.sectors for line in loads)
    often = totals.global_loads >= 20 * stores or loaded > 50 * max(1, totals.sectors - loaded + totals.atomics)
    if not loads or not often or totals.shared_requests > 4 * totals.global_loads:
        return []
    most = max(loads, key=lambda line: line.global_loads)
    text = f"this line loads from global memory {most.global_loads} times per {stores} stores: "
    text += "load a tile into shared memory or registers once, and use it for many outputs"
    return [(float(most.global_loads), Hint(most.line, text, REUSE))]
