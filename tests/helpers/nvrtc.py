"""NVRTC through ctypes: compile CUDA C++ to machine code without a GPU, and read ptxas's report."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ece408_op.runtime import ptxas

#: The library of each release of the test extra, below site-packages.
LIBRARIES = {
    "11.8": "nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2",
    "12.9": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "13.0": "nvidia/cu13/lib/libnvrtc.so.13",
}
#: The release that compiles for each architecture; every release is used.
RELEASE_OF = {50: "11.8", 60: "11.8", 70: "12.9", 80: "11.8", 90: "13.0", 100: "12.9", 120: "13.0"}


@dataclass(frozen=True)
class Report:
    """ptxas's report of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    serialized: bool  # each wgmma waits for the one before


_SITE = Path(sysconfig.get_path("purelib"))
#: The releases that are not installed.
_MISSING = ", ".join(release for release, path in LIBRARIES.items() if not (_SITE / path).is_file())

needs_nvrtc = pytest.mark.skipif(bool(_MISSING), reason=f"NVRTC {_MISSING} not installed: pip install ece408-op[test]")


def compile_text(
    text: str, architecture: int, options: tuple[str, ...] = (), release: str | None = None
) -> dict[str, Report]:
    """Return each kernel's report; raise ValueError with the log on an error or a warning."""
    nvrtc = _library(release or RELEASE_OF[architecture])
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"text.cu", 0, None, None))
    try:
        # sm_90a and the like have instructions that sm_90 lacks; kernels that need them pass the option themselves.
        names = [o for o in options if o.startswith("--gpu-architecture")] or [f"--gpu-architecture=sm_{architecture}"]
        rest = [o for o in options if not o.startswith("--gpu-architecture")]
        flags = [*names, "--std=c++17", "--ptxas-options=-v", *rest]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        with _own_locale():
            status = nvrtc.nvrtcCompileProgram(program, len(flags), array)
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        if status or re.search(r"\): warning|ptxas warning", log.value.decode()):
            raise ValueError(f"sm_{architecture}: {log.value.decode()}")
        return _reports(log.value.decode())
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@contextmanager
def _own_locale():
    """Releases before 12.6.2 leave their thread with the C locale, in which Python reads files as ASCII."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


def _reports(log: str) -> dict[str, Report]:
    # These lines precede the reports of the single kernels.
    waiting = set(re.findall(r"wgmma\.mma_async instructions are serialized .* in the function '(\w+)'", log))
    return {
        one.name: Report(
            one.registers, one.stack_bytes, one.spill_store_bytes + one.spill_load_bytes, one.name in waiting
        )
        for one in ptxas.kernels(log)
    }


@cache
def _library(release: str) -> ctypes.CDLL:
    path = _SITE / LIBRARIES[release]
    # Release 13.0 searches this library on the system's paths only, but finds it if it is loaded already.
    ctypes.CDLL(str(next(path.parent.glob(f"libnvrtc-builtins.so.{release}"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")
