"""Counters per line of the source: what a GPU's load and store units would do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LineCounters:
    """What a GPU would do for one line of the source, or in all.

    Attributes:
        line: the line, 0 for the sum of all lines.
        global_loads: warp-level instructions that load from global memory; global_stores and atomics likewise.
        load_sectors: sectors of 32 bytes that they load; store_sectors likewise.
        least_sectors: the fewest sectors that hold all bytes which each instruction uses, loads and stores.
        shared_loads: warp-level instructions that load from shared memory; shared_stores likewise.
        load_wavefronts: cycles of shared memory that the loads take; store_wavefronts likewise.
        least_wavefronts: the same without bank conflicts, loads and stores.
        branches: times that a warp reached a branch of the line, if lanes of it ever went two ways there.
        divergent: times that they did.
        file: the name of the file of that line.
    """

    line: int = 0
    global_loads: int = 0
    global_stores: int = 0
    atomics: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    least_sectors: int = 0
    shared_loads: int = 0
    shared_stores: int = 0
    load_wavefronts: int = 0
    store_wavefronts: int = 0
    least_wavefronts: int = 0
    branches: int = 0
    divergent: int = 0
    file: str = ""

    @property
    def global_requests(self) -> int:
        """Warp-level instructions that load from or store to global memory."""
        return self.global_loads + self.global_stores

    @property
    def sectors(self) -> int:
        """Sectors of 32 bytes, loaded and stored."""
        return self.load_sectors + self.store_sectors

    @property
    def shared_requests(self) -> int:
        """Warp-level instructions on shared memory."""
        return self.shared_loads + self.shared_stores

    @property
    def wavefronts(self) -> int:
        """Cycles of shared memory."""
        return self.load_wavefronts + self.store_wavefronts

    @property
    def bytes(self) -> int:
        """Bytes that the sectors move."""
        return 32 * self.sectors


def add(all_counters: Iterable[LineCounters], line: int = 0, file: str = "") -> LineCounters:
    """Return the sum of counters."""
    rows = list(all_counters)
    names = [one.name for one in fields(LineCounters) if one.name not in ("line", "file")]
    return LineCounters(line=line, file=file, **{name: sum(getattr(row, name) for row in rows) for name in names})
