"""The CPU that LLVM compiles for: this machine's.

The environment variable ECE408_SIMD (avx512, avx2 or sse) limits the instructions used.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

from ece408_op.errors import DeviceError

#: Building IR and compiling share global state in llvmlite: one thread at a time.
LOCK = threading.RLock()

_LEVELS = {"sse": 4, "avx2": 8, "avx512": 16}
#: Names to tune for where the CPU's own would bring its instructions back. For "x86-64", and for "generic", LLVM orders
#: them as for older CPUs, and spills sums of ``winograd`` from AVX2's 16 registers.
_LIMITED = {"sse": "x86-64", "avx2": "x86-64-v3"}


@dataclass(frozen=True)
class Cpu:
    """The CPU that code is compiled for.

    ``lanes`` float32 values fit one of ``registers`` vector registers; ``fma``: whether there are fused multiply-adds;
    ``name`` and ``features`` are LLVM's.
    """

    level: str
    lanes: int
    registers: int
    fma: bool
    name: str
    features: str

    @property
    def by_amd(self) -> bool:
        """Whether AMD makes it: only AMD has SSE4a, also on chips that LLVM has no name for yet."""
        return "+sse4a" in self.features.split(",")


def cpu() -> Cpu:
    """Return this machine's CPU, limited to the instructions that ECE408_SIMD allows.

    Raises DeviceError if ECE408_SIMD is unknown, or beyond the CPU.
    """
    return _cpu(os.environ.get("ECE408_SIMD", ""))


@cache
def _cpu(asked: str) -> Cpu:
    with LOCK:
        _start_llvm()
        name = llvm.get_host_cpu_name()
        features = dict(llvm.get_host_cpu_features())
    has_avx512 = features.get("avx512f") and features.get("avx512vl")
    best = "avx512" if has_avx512 else "avx2" if features.get("avx2") else "sse"
    level = asked or best
    if level not in _LEVELS or _LEVELS[level] > _LEVELS[best]:
        usable = ", ".join(word for word, lanes in _LEVELS.items() if lanes <= _LEVELS[best])
        raise DeviceError(f"ECE408_SIMD: expected one of {usable} on this CPU, got {asked!r}")
    if level != best:
        beyond = {"avx2": ("avx512", "evex", "avx10"), "sse": ("avx", "evex", "fma", "f16c", "vaes", "vpclmul", "xop")}
        for word in features:
            if word.startswith(beyond[level]):
                features[word] = False
        name = _LIMITED[level]
    flat = ",".join(("+" if on else "-") + word for word, on in sorted(features.items()))
    registers = 32 if level == "avx512" else 16
    return Cpu(level, _LEVELS[level], registers, bool(features.get("fma")), name, flat)


def _start_llvm() -> None:
    with suppress(RuntimeError):  # llvmlite 0.45 and later start LLVM themselves and refuse to be asked
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
