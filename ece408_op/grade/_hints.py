"""What the compiler says of a submission's kernels, and what an author can make of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

#: A multiprocessor's registers, and the threads that it holds at most, on every NVIDIA GPU since 2014 but a few.
_REGISTERS, _THREADS = 65536, 2048
#: Kernels that are told of.
_MOST = 20

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?(?:.*?(\d+) bytes cmem\[3\])?")


@dataclass(frozen=True)
class KernelNotes:
    """One kernel as ptxas reports it: registers of a thread, bytes that spill, static shared and constant bytes."""

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    constant_bytes: int


def kernels(text: str, readable: Callable[[Sequence[str]], Mapping[str, str]] = lambda names: {}) -> list[KernelNotes]:
    """The kernels in what ptxas printed with -v; ``readable`` maps names of the object file to those of the source."""
    found: list[tuple[str, KernelNotes]] = []
    name, stack = "", (0, 0, 0)
    for line in text.splitlines():
        entry, spills, used = _ENTRY.search(line), _STACK.search(line), _USED.search(line)
        if entry:
            name, stack = entry.group(1), (0, 0, 0)
        elif spills:
            stack = (int(spills.group(1)), int(spills.group(2)), int(spills.group(3)))
        elif used and name:
            registers, shared, constant = (int(group or 0) for group in used.groups())
            found.append((name, KernelNotes(name, registers, stack[1], stack[2], stack[0], shared, constant)))
            name = ""
    found = found[:_MOST]
    names = readable([name for name, _ in found])
    return [KernelNotes(**{**vars(notes), "name": names.get(name, name)}) for name, notes in found]


def lines(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people: each kernel's figures, and what stands in their way."""
    told = []
    for one in notes:
        threads = min(_THREADS, _REGISTERS // max(1, one["registers"]) // 32 * 32)
        told.append(
            f"{one['name']}: {one['registers']} registers a thread, {one['shared_bytes']} bytes of static shared memory"
        )
        if one["spill_store_bytes"] or one["spill_load_bytes"]:
            told.append(
                f"  {one['spill_store_bytes']} bytes are spilled to memory and {one['spill_load_bytes']} read back: "
                "fewer variables at a time, or arrays indexed by constants alone, would keep them in registers"
            )
        elif one["stack_bytes"]:
            told.append(
                f"  {one['stack_bytes']} bytes of a thread lie in memory: an array indexed by what is known only when "
                "it runs cannot be in registers"
            )
        if threads < _THREADS:
            told.append(f"  its registers limit a multiprocessor to {threads} of {_THREADS} threads")
    return told
