"""Records a GPU through CUPTI: kernels, copies, fills, and calls of CUDA's runtime and driver interfaces.

cupti-python hands over CUPTI's activity records, of whatever in this process runs on a GPU: MXNet, CuPy, our kernels.
"""

from __future__ import annotations

import ctypes
import re
import time
from importlib import import_module
from typing import Any, Callable

from ece408_op.errors import DeviceError
from ece408_op.runtime import cuda
from ece408_op.runtime.install_hint import command
from ece408_op.runtime.shared_libraries import load_libraries

from ._activity import CALL, COPY, KERNEL, SET, Activity, Limits

#: Bytes of each buffer that CUPTI fills; large ones are asked for seldom.
_BUFFER_BYTES = 8 << 20
_FORCED = 1

#: What a call's name ends in beside what CUDA's documentation calls it: cudaMalloc_v3020, cuMemcpyAsync_ptsz.
_SUFFIX = re.compile(r"(_v\d{4,5}|_ptsz|_ptds)+$")

_DIRECTIONS = {"HTOD": "HtoD", "DTOH": "DtoH", "DTOD": "DtoD", "HTOH": "HtoH", "PTOP": "PtoP"}


def _install() -> str:
    return command("profile12" if (cuda.driver_version() or 0) // 1000 == 12 else "profile13")


class Recorder:
    """Records from its making until ``stop``; raises DeviceError, with what to install, where CUPTI is missing."""

    def __init__(self) -> None:
        load_libraries(("libcupti.so.13", "libcupti.so.12"))
        try:
            self._cupti = import_module("cupti.cupti")
        except ImportError as error:
            raise DeviceError(f"GPU profile: expected cupti-python, got {error}; {_install()}") from None
        self.devices: dict[int, Limits] = {}
        self.recorder_seconds = 0.0
        self._found: list[Activity] = []
        self._names: dict[tuple[int, int], str] = {}
        self._unread = 0
        kinds = self._cupti.ActivityKind
        self._take: dict[int, Callable[[Any], None]] = {
            int(kinds.CONCURRENT_KERNEL): self._kernel,
            int(kinds.MEMCPY): self._copy,
            int(kinds.MEMCPY2): self._copy,
            int(kinds.MEMSET): self._set,
            int(kinds.RUNTIME): self._call,
            int(kinds.DRIVER): self._call,
            int(kinds.OVERHEAD): self._overhead,
            int(kinds.DEVICE): self._device,
        }
        self._runtime = int(kinds.RUNTIME)
        try:
            self._cupti.activity_register_callbacks(self._requested, self._completed)
            for kind in self._take:
                self._cupti.activity_enable(kind)
            self._offset = self._epoch_offset()
        except Exception as error:
            # CUPTI's errors have no class in common.
            raise DeviceError(f"GPU profile: expected CUPTI to start, got {error}; {_install()}") from error

    def stop(self) -> list[Activity]:
        """End the recording; its activities. Work still running on a GPU must have been waited for."""
        self._cupti.activity_flush_all(_FORCED)
        for kind in self._take:
            self._cupti.activity_disable(kind)
        return self._found

    def lost(self) -> int:
        """Activities that CUPTI had no room for, and those that could not be read."""
        dropped = ctypes.c_size_t(0)
        self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(dropped))
        return dropped.value + self._unread

    def _epoch_offset(self) -> int:
        """Nanoseconds from CUPTI's clock to the time since 1970, by the closest of a few readings."""
        readings = []
        for _ in range(20):
            before, cupti, after = time.time_ns(), self._cupti.get_timestamp(), time.time_ns()
            readings.append((after - before, (before + after) // 2 - cupti))
        return min(readings)[1]

    def _requested(self) -> tuple[int, int]:
        return _BUFFER_BYTES, 0

    def _completed(self, activities: list[Any]) -> None:
        # The records' memory is CUPTI's again after this.
        for record in activities:
            try:
                self._take[record.kind](record)
            except Exception:
                # An exception would be lost in CUPTI's thread: what cannot be read is counted and told of.
                self._unread += 1

    def _add(self, kind: str, name: str, record: Any, place: str, device: int, details: dict[str, Any]) -> None:
        start, end = record.start + self._offset, record.end + self._offset
        self._found.append(Activity(kind, name, start, end, place, device, record.correlation_id, details))

    def _kernel(self, record: Any) -> None:
        details = {
            "grid": [record.grid_x, record.grid_y, record.grid_z],
            "block": [record.block_x, record.block_y, record.block_z],
            "registers": record.registers_per_thread,
            "static_shared": record.static_shared_memory,
            "dynamic_shared": record.dynamic_shared_memory,
            "local": record.local_memory_per_thread,
        }
        self._add(KERNEL, demangled(record.name), record, f"stream {record.stream_id}", record.device_id, details)

    def _copy(self, record: Any) -> None:
        kind = self._cupti.ActivityMemcpyKind(record.copy_kind).name
        memory = self._cupti.ActivityMemoryKind
        details = {
            "bytes": record.bytes,
            "from": memory(record.src_kind).name.lower(),
            "to": memory(record.dst_kind).name.lower(),
        }
        name = f"[CUDA memcpy {_DIRECTIONS.get(kind, kind)}]"
        self._add(COPY, name, record, f"stream {record.stream_id}", record.device_id, details)

    def _set(self, record: Any) -> None:
        place = f"stream {record.stream_id}"
        self._add(SET, "[CUDA memset]", record, place, record.device_id, {"bytes": record.bytes})

    def _call(self, record: Any) -> None:
        key = (record.kind, record.cbid)
        if key not in self._names:
            domains = self._cupti.CallbackDomain
            domain = domains.RUNTIME_API if record.kind == self._runtime else domains.DRIVER_API
            self._names[key] = _SUFFIX.sub("", self._cupti.get_callback_name(domain, record.cbid))
        self._add(CALL, self._names[key], record, f"thread {record.thread_id}", 0, {})

    def _overhead(self, record: Any) -> None:
        self.recorder_seconds += (record.end - record.start) / 1e9

    def _device(self, record: Any) -> None:
        self.devices[record.id] = Limits(
            name=record.name,
            capability=(record.compute_capability_major, record.compute_capability_minor),
            multiprocessors=record.num_multiprocessors,
            warps=record.max_warps_per_multiprocessor,
            blocks=record.max_blocks_per_multiprocessor,
            registers=record.max_registers_per_multiprocessor,
            shared=record.max_shared_memory_per_multiprocessor,
        )


def demangled(name: str) -> str:
    """A C++ symbol as it was written; any other name as it is."""
    if not name.startswith("_Z"):
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return name
    demangle, status = library.__cxa_demangle, ctypes.c_int(1)
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or text is None:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(text)
