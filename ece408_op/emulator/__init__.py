"""CUDA without a GPU: compile an unmodified CUDA source with g++ and run it on the CPU, with checks and counters.

A block's threads are fibers. g++ -fsanitize=thread calls a function before each access, and here that function is the
emulator's: it checks bounds and races, and joins the accesses of a warp's lanes into a GPU's requests. Values, indices
and barriers are a GPU's; times are not.

compile, run_layers   a course submission; the Report has y, findings, counters per line, launches and hints
can_emulate      whether there is a g++ that can compile for the emulator
"""

from __future__ import annotations

from ._api import can_emulate, compile, run_layers
from ._build import Program
from ._counters import Hint, LineCounters
from ._errors import CompileError, UnsupportedCodeError
from ._report import Finding, Report

__all__ = [
    "CompileError",
    "Finding",
    "Hint",
    "LineCounters",
    "Program",
    "Report",
    "UnsupportedCodeError",
    "can_emulate",
    "compile",
    "run_layers",
]
