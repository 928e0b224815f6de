"""Records a GPU through CUPTI: kernels, copies, memsets, and calls of CUDA's runtime and driver APIs.

cupti-python provides CUPTI's activity records of the whole process, whether MXNet, CuPy or this package did the work.
"""

from __future__ import annotations

import ctypes
import re
import time
from functools import cache
from importlib import import_module
from typing import Any

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command
from ece408_op.runtime.shared_libraries import load_libraries

from ._tables import API_CALL, KERNEL, MEMCPY, MEMSET, Activity

#: Bytes of each buffer that CUPTI fills: large, so that CUPTI seldom asks for another one.
_BUFFER_BYTES = 8 << 20
_FORCED = 1

#: Suffixes that CUPTI appends to the name in CUDA's documentation: cudaMalloc_v3020, cuMemcpyAsync_ptsz.
_SUFFIX = re.compile(r"(_v\d{4,5}|_ptsz|_ptds)+$")


class Recorder:
    """Records from its creation until ``stop``; raises DeviceError, which says what to install, if CUPTI is missing."""

    def __init__(self) -> None:
        install = command("profile12" if (cuda.driver_version() or 0) // 1000 == 12 else "profile13")
        load_libraries(("libcupti.so.13", "libcupti.so.12"))
        try:
            self._cupti = import_module("cupti.cupti")
        except ImportError as error:
            raise DeviceError(f"GPU profile: expected cupti-python, got {error}; {install}") from None
        self.overhead_seconds = 0.0
        self._found: list[Activity] = []
        self._names: dict[tuple[int, int], str] = {}
        self._unread = 0
        kinds = self._cupti.ActivityKind
        self._read = {
            kinds.CONCURRENT_KERNEL: self._kernel,
            kinds.MEMCPY: self._memcpy,
            kinds.MEMCPY2: self._memcpy,
            kinds.MEMSET: self._memset,
            kinds.RUNTIME: self._api_call,
            kinds.DRIVER: self._api_call,
            kinds.OVERHEAD: self._overhead,
        }
        try:
            self._cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._completed)
            for kind in self._read:
                self._cupti.activity_enable(kind)
            self._epoch = self._epoch_offset()
        except Exception as error:
            # CUPTI's errors have no common base class.
            raise DeviceError(f"GPU profile: expected CUPTI to start, got {error}; {install}") from error

    def stop(self) -> list[Activity]:
        """End the recording; returns its activities. The caller must have waited for all work on the GPU."""
        self._cupti.activity_flush_all(_FORCED)
        for kind in self._read:
            self._cupti.activity_disable(kind)
        return self._found

    def lost(self) -> int:
        """The number of lost activities: those that CUPTI had no room for, and those that could not be read."""
        dropped = ctypes.c_size_t(0)
        self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(dropped))
        return dropped.value + self._unread

    def _epoch_offset(self) -> int:
        """Return the nanoseconds from CUPTI's clock to the time since 1970, by the most precise of some readings."""
        readings = []
        for _ in range(20):
            before, timestamp, after = time.time_ns(), self._cupti.get_timestamp(), time.time_ns()
            readings.append((after - before, (before + after) // 2 - timestamp))
        return min(readings)[1]

    def _completed(self, records: list[Any]) -> None:
        # CUPTI reuses the records' memory after this call.
        for record in records:
            try:
                self._read[record.kind](record)
            except Exception:
                # CUPTI's thread would lose an exception: unreadable records are counted and reported.
                self._unread += 1

    def _add(self, kind: str, name: str, record: Any, details: dict[str, Any]) -> None:
        on_host = kind == API_CALL
        track = f"thread {record.thread_id}" if on_host else f"stream {record.stream_id}"
        start, end = record.start + self._epoch, record.end + self._epoch
        device = 0 if on_host else record.device_id
        self._found.append(Activity(kind, name, start, end, track, device, record.correlation_id, details))

    def _kernel(self, record: Any) -> None:
        details = {
            "grid": [record.grid_x, record.grid_y, record.grid_z],
            "block": [record.block_x, record.block_y, record.block_z],
            "registers": record.registers_per_thread,
            "static_shared": record.static_shared_memory,
            "dynamic_shared": record.dynamic_shared_memory,
            "local": record.local_memory_per_thread,
        }
        self._add(KERNEL, demangled(record.name), record, details)

    def _memcpy(self, record: Any) -> None:
        direction = self._cupti.ActivityMemcpyKind(record.copy_kind).name
        memory = self._cupti.ActivityMemoryKind
        details = {
            "bytes": record.bytes,
            "from": memory(record.src_kind).name.lower(),
            "to": memory(record.dst_kind).name.lower(),
        }
        name = re.sub("^([HDP])TO([HDP])$", r"\1to\2", direction)  # nvprof writes HtoD for CUPTI's HTOD
        self._add(MEMCPY, f"[CUDA memcpy {name}]", record, details)

    def _memset(self, record: Any) -> None:
        self._add(MEMSET, "[CUDA memset]", record, {"bytes": record.bytes})

    def _api_call(self, record: Any) -> None:
        key = (record.kind, record.cbid)
        if key not in self._names:
            domains = self._cupti.CallbackDomain
            runtime = record.kind == self._cupti.ActivityKind.RUNTIME
            name = self._cupti.get_callback_name(domains.RUNTIME_API if runtime else domains.DRIVER_API, record.cbid)
            self._names[key] = _SUFFIX.sub("", name)
        self._add(API_CALL, self._names[key], record, {})

    def _overhead(self, record: Any) -> None:
        self.overhead_seconds += (record.end - record.start) / 1e9


@cache
def demangled(name: str) -> str:
    """Return a C++ symbol in the form of its source; return any other name unchanged."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return name
    demangle.restype, demangle.argtypes = ctypes.c_char_p, [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    # The result is copied and its memory, some bytes per name, is never freed.
    text = demangle(name.encode(), None, None, None)
    return name if text is None else text.decode(errors="replace")
