"""Time and memory of the whole process so far, as GNU time reports them at a program's end."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

#: Where Linux keeps a process's start, in clock ticks since boot: field 22, counted behind the program's name.
_START_FIELD = 22 - 3


@dataclass(frozen=True)
class Usage:
    """real, user and system time in seconds since the process started; peak resident memory in KiB."""

    real: float
    user: float
    system: float
    peak_kib: int

    def as_text(self) -> str:
        """Four lines: real, user and sys in seconds, peak memory in KiB."""
        return f"real {self.real:.2f}\nuser {self.user:.2f}\nsys {self.system:.2f}\nmaxresident {self.peak_kib} KiB"


def measure() -> Usage:
    """Return the time and memory that this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(_elapsed(), used.ru_utime, used.ru_stime, used.ru_maxrss)


def _elapsed() -> float:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started
