"""The reports of ptxas -v on kernels, and what they mean for the kernels' author."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .launch import REGISTERS
from .occupancy import DeviceLimits, KernelNotes, LaunchShape

#: The most threads of a multiprocessor; 7.5, 8.6, 8.9 and 12.0 hold fewer (CUDA C++ Programming Guide).
_THREADS = 2048

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?(?:.*?(\d+) bytes cmem\[3\])?")


def kernels(text: str) -> list[KernelNotes]:
    """Return the kernels in what ptxas printed with -v."""
    found: list[KernelNotes] = []
    one = None
    for line in text.splitlines():
        entry, spills, used = _ENTRY.search(line), _STACK.search(line), _USED.search(line)
        if entry:
            one = KernelNotes(_readable(entry[1]))
        elif spills and one:
            one = KernelNotes(one.name, *map(int, spills.groups()))
        elif used and one:
            registers, shared, constant = (int(group or 0) for group in used.groups())
            found.append(replace(one, registers=registers, shared_bytes=shared, constant_bytes=constant))
            one = None
    return found


def _readable(mangled: str) -> str:
    """The name in the source without scope and parameters, from the length and name pairs of the Itanium C++ ABI."""
    name, rest = mangled, re.sub(r"^_ZN?K?", "", mangled)
    while (length := re.match(r"\d{1,4}", rest)) and rest != mangled:
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name


def lines(
    notes: Sequence[KernelNotes], launches: Sequence[LaunchShape] = (), limits: DeviceLimits | None = None
) -> list[str]:
    """Return what ptxas reports, for people: registers, spills, shared memory, and what limits a kernel's occupancy.

    The occupancy itself needs the kernel's launches and the GPU.
    """
    told = []
    for one in notes:
        threads = min(_THREADS, REGISTERS // max(1, one.registers) // 32 * 32)
        shared = f"{one.shared_bytes} bytes of static shared memory"
        told.append(f"{one.name}: {one.registers} registers per thread, {shared}")
        if one.spill_store_bytes or one.spill_load_bytes:
            told.append(
                f"  {one.spill_store_bytes} bytes are spilled to memory and {one.spill_load_bytes} read back: "
                "fewer variables at a time, or arrays indexed by constants alone, would keep them in registers"
            )
        elif one.stack_bytes:
            told.append(
                f"  {one.stack_bytes} bytes of a thread lie in memory: an array indexed by what is known only when "
                "it runs cannot be in registers"
            )
        mine = [launch for launch in launches if launch.name == one.name]
        if limits and mine:
            told += [f"  {_occupancy(one, launch, limits)}" for launch in mine]
        elif threads < _THREADS:
            told.append(f"  its registers limit a multiprocessor to {threads} of {_THREADS} threads")
    return told


def _occupancy(one: KernelNotes, launch: LaunchShape, limits: DeviceLimits) -> str:
    resources = launch.block, one.registers, one.shared_bytes + launch.dynamic_shared
    share = limits.occupancy(*resources)
    block = " x ".join(str(size) for size in launch.block if size > 1) or "1"
    dynamic = f" and {launch.dynamic_shared} bytes of dynamic shared memory" if launch.dynamic_shared else ""
    told = f"blocks of {block} threads{dynamic}: occupancy {100 * share:.0f} %"
    if share == 1:
        return told
    limit, blocks = next(iter(limits.resident_blocks(*resources).items()))
    what = {"warps": "its warps limit", "registers": "its registers limit", "shared memory": "its shared memory limits"}
    number = f"{blocks} block{'' if blocks == 1 else 's'}"
    return f"{told}: {what.get(limit, 'their most number limits')} a multiprocessor to {number}"
