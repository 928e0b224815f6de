"""What the GPU's recorder makes of CUPTI's records, with a stand-in for cupti-python."""

from __future__ import annotations

import ctypes
import enum
import time
from types import SimpleNamespace

import pytest

from ece408_op.errors import DeviceError
from ece408_op.profile import _gpu
from ece408_op.profile._activity import CALL, COPY, KERNEL, SET, Limits

#: How far the stand-in's clock is behind the time since 1970, in nanoseconds.
BEHIND = 10**15


class ActivityKind(enum.IntEnum):
    MEMCPY, MEMSET, DRIVER, RUNTIME, DEVICE, CONCURRENT_KERNEL, OVERHEAD, MEMCPY2 = range(8)


class ActivityMemcpyKind(enum.IntEnum):
    HTOD, DTOH, ATOA = range(3)


class ActivityMemoryKind(enum.IntEnum):
    PINNED, DEVICE = range(2)


class CallbackDomain(enum.IntEnum):
    DRIVER_API, RUNTIME_API = range(2)


class Cupti:
    """The part of cupti-python that is used; ``records`` are handed over when it is flushed."""

    ActivityKind, CallbackDomain = ActivityKind, CallbackDomain
    ActivityMemcpyKind, ActivityMemoryKind = ActivityMemcpyKind, ActivityMemoryKind

    def __init__(self, *records, dropped=0) -> None:
        self.records, self.dropped, self.enabled = records, dropped, set()

    def activity_register_callbacks(self, requested, completed) -> None:
        size, most = requested()
        assert size >= 1 << 20
        assert most == 0
        self.completed = completed

    def activity_enable(self, kind) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind) -> None:
        self.enabled.remove(kind)

    def activity_flush_all(self, flag) -> None:
        self.completed(list(self.records))

    def activity_get_num_dropped_records(self, context, stream, address) -> None:
        ctypes.c_size_t.from_address(address).value = self.dropped

    def get_timestamp(self) -> int:
        return time.time_ns() - BEHIND

    def get_callback_name(self, domain, number) -> str:
        return {(1, 7): "cudaMalloc_v3020", (0, 7): "cuMemcpyAsync_ptsz", (0, 8): "cuMemAlloc_v2"}[domain, number]


def record(kind, start=1000, end=3000, **fields) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, start=start, end=end, correlation_id=5, device_id=0, stream_id=7, **fields)


def recorded(monkeypatch, *records, dropped=0):
    cupti = Cupti(*records, dropped=dropped)
    monkeypatch.setattr(_gpu, "import_module", lambda name: cupti)
    recorder = _gpu.Recorder()
    assert cupti.enabled == set(ActivityKind)
    found = recorder.stop()
    assert cupti.enabled == set()
    return recorder, found


def test_a_kernel_keeps_its_launch(monkeypatch) -> None:
    sizes = {f"{name}_{axis}": number for name in ("grid", "block") for number, axis in enumerate("xyz", 1)}
    memory = {"static_shared_memory": 8, "dynamic_shared_memory": 16, "local_memory_per_thread": 4}
    made = record(ActivityKind.CONCURRENT_KERNEL, name="_Z3addPfS_i", registers_per_thread=40, **sizes, **memory)
    _, (kernel,) = recorded(monkeypatch, made)
    assert (kernel.kind, kernel.name, kernel.place, kernel.link) == (KERNEL, "add(float*, float*, int)", "stream 7", 5)
    assert kernel.nanoseconds == 2000
    assert abs(kernel.start - BEHIND - 1000) < 10**9
    assert kernel.details == {
        "grid": [1, 2, 3],
        "block": [1, 2, 3],
        "registers": 40,
        "static_shared": 8,
        "dynamic_shared": 16,
        "local": 4,
    }


def test_copies_and_fills_are_named_as_nvprof_did(monkeypatch) -> None:
    copy = record(ActivityKind.MEMCPY, copy_kind=1, src_kind=1, dst_kind=0, bytes=99)
    array = record(ActivityKind.MEMCPY2, copy_kind=2, src_kind=1, dst_kind=1, bytes=1)
    fill = record(ActivityKind.MEMSET, bytes=3)
    _, (first, second, third) = recorded(monkeypatch, copy, array, fill)
    assert (first.kind, first.name) == (COPY, "[CUDA memcpy DtoH]")
    assert first.details == {"bytes": 99, "from": "device", "to": "pinned"}
    assert second.name == "[CUDA memcpy ATOA]"
    assert (third.kind, third.name, third.details) == (SET, "[CUDA memset]", {"bytes": 3})


def test_calls_have_the_names_of_cudas_documentation(monkeypatch) -> None:
    calls = [
        record(ActivityKind.RUNTIME, cbid=7, thread_id=3),
        record(ActivityKind.DRIVER, cbid=7, thread_id=4),
        record(ActivityKind.DRIVER, cbid=8, thread_id=4),
    ]
    _, found = recorded(monkeypatch, *calls)
    assert [(call.kind, call.name, call.place) for call in found] == [
        (CALL, "cudaMalloc", "thread 3"),
        (CALL, "cuMemcpyAsync", "thread 4"),
        (CALL, "cuMemAlloc_v2", "thread 4"),
    ]


def test_the_gpus_limits_and_cuptis_own_work(monkeypatch) -> None:
    device = SimpleNamespace(
        kind=ActivityKind.DEVICE,
        id=0,
        name="H200",
        compute_capability_major=9,
        compute_capability_minor=0,
        num_multiprocessors=132,
        max_warps_per_multiprocessor=64,
        max_blocks_per_multiprocessor=32,
        max_registers_per_multiprocessor=65536,
        max_shared_memory_per_multiprocessor=233472,
    )
    recorder, found = recorded(monkeypatch, device, record(ActivityKind.OVERHEAD, 0, 1_500_000_000))
    assert found == []
    assert recorder.devices == {0: Limits("H200", (9, 0), 132, 64, 32, 65536, 233472)}
    assert recorder.recorder_seconds == 1.5
    assert recorder.lost() == 0


def test_what_was_dropped_or_cannot_be_read_is_counted(monkeypatch) -> None:
    recorder, found = recorded(monkeypatch, record(99), record(ActivityKind.MEMSET), dropped=3)
    assert found == []
    assert recorder.lost() == 5


def test_a_cupti_that_does_not_start_is_a_device_error(monkeypatch) -> None:
    class Broken(Cupti):
        def activity_enable(self, kind) -> None:
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(_gpu, "import_module", lambda name: Broken())
    with pytest.raises(DeviceError, match=r"expected CUPTI to start, got CUPTI_ERROR_NOT_INITIALIZED; pip install"):
        _gpu.Recorder()
