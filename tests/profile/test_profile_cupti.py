"""CUPTI's records as activities, through a stand-in for cupti-python in sys.modules."""

import ctypes
import enum
import sys
import time
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from process import python

from ece408_op.errors import DeviceError
from ece408_op.profile._cupti import Recorder, demangled
from ece408_op.profile._tables import API_CALL, KERNEL, MEMCPY, MEMSET
from ece408_op.runtime import cuda

#: How far the stand-in's clock is behind the time since 1970, in nanoseconds.
BEHIND = 10**15


ActivityKind = enum.IntEnum("ActivityKind", "MEMCPY MEMSET DRIVER RUNTIME CONCURRENT_KERNEL OVERHEAD MEMCPY2")
NAMES = {(2, 7): "cudaMalloc_v3020", (1, 7): "cuMemcpyAsync_ptsz", (1, 8): "cuMemAlloc_v2"}


def stand_in(*records, dropped=0) -> MagicMock:
    """cupti-python, as far as it is used; a flush passes the records on."""
    cupti = MagicMock(
        ActivityKind=ActivityKind,
        ActivityMemcpyKind=enum.IntEnum("ActivityMemcpyKind", "HTOD DTOH ATOA"),
        ActivityMemoryKind=enum.IntEnum("ActivityMemoryKind", "PINNED DEVICE"),
        CallbackDomain=enum.IntEnum("CallbackDomain", "DRIVER_API RUNTIME_API"),
    )

    def flush(flag) -> None:
        requested, completed = cupti.activity_register_callbacks.call_args[0]
        size, most = requested()
        assert size >= 1 << 20
        assert most == 0
        completed(list(records))

    def count(context, stream, address) -> None:
        ctypes.c_size_t.from_address(address).value = dropped

    cupti.activity_flush_all.side_effect = flush
    cupti.activity_get_num_dropped_records.side_effect = count
    cupti.get_timestamp.side_effect = lambda: time.time_ns() - BEHIND
    cupti.get_callback_name.side_effect = lambda domain, number: NAMES[domain, number]
    return cupti


def broken() -> MagicMock:
    cupti = stand_in()
    cupti.activity_enable.side_effect = RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")
    return cupti


def install(monkeypatch, module) -> None:
    monkeypatch.setitem(sys.modules, "cupti", ModuleType("cupti"))
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)


def record(kind, start=1000, end=3000, **fields) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, start=start, end=end, correlation_id=5, device_id=0, stream_id=7, **fields)


def recorded(monkeypatch, *records, dropped=0):
    cupti = stand_in(*records, dropped=dropped)
    install(monkeypatch, cupti)
    recorder = Recorder()
    found = recorder.stop()
    for switched in (cupti.activity_enable, cupti.activity_disable):
        assert {call.args[0] for call in switched.call_args_list} == set(ActivityKind)
    return recorder, found


def test_a_kernel_keeps_its_launch(monkeypatch):
    sizes = {f"{name}_{axis}": number for name in ("grid", "block") for number, axis in enumerate("xyz", 1)}
    memory = {"static_shared_memory": 8, "dynamic_shared_memory": 16, "local_memory_per_thread": 4}
    made = record(ActivityKind.CONCURRENT_KERNEL, name="_Z3addPfS_i", registers_per_thread=40, **sizes, **memory)
    _, (kernel,) = recorded(monkeypatch, made)
    fields = (kernel.kind, kernel.name, kernel.track, kernel.correlation, kernel.nanoseconds)
    assert fields == (KERNEL, "add(float*, float*, int)", "stream 7", 5, 2000)
    assert abs(kernel.start - BEHIND - 1000) < 10**9
    memory = {"registers": 40, "static_shared": 8, "dynamic_shared": 16, "local": 4}
    assert kernel.details == {"grid": [1, 2, 3], "block": [1, 2, 3], **memory}


def test_copies_and_memsets_are_named_as_nvprof_did(monkeypatch):
    copy = record(ActivityKind.MEMCPY, copy_kind=2, src_kind=2, dst_kind=1, bytes=99)
    array = record(ActivityKind.MEMCPY2, copy_kind=3, src_kind=2, dst_kind=2, bytes=1)
    fill = record(ActivityKind.MEMSET, bytes=3)
    _, (first, second, third) = recorded(monkeypatch, copy, array, fill)
    assert (first.kind, first.name) == (MEMCPY, "[CUDA memcpy DtoH]")
    assert first.details == {"bytes": 99, "from": "device", "to": "pinned"}
    assert second.name == "[CUDA memcpy ATOA]"
    assert (third.kind, third.name, third.details) == (MEMSET, "[CUDA memset]", {"bytes": 3})


def test_calls_have_the_names_of_cudas_documentation(monkeypatch):
    calls = [
        record(ActivityKind.RUNTIME, cbid=7, thread_id=3),
        record(ActivityKind.DRIVER, cbid=7, thread_id=4),
        record(ActivityKind.DRIVER, cbid=8, thread_id=4),
    ]
    _, found = recorded(monkeypatch, *calls)
    assert [(call.kind, call.name, call.track) for call in found] == [
        (API_CALL, "cudaMalloc", "thread 3"),
        (API_CALL, "cuMemcpyAsync", "thread 4"),
        (API_CALL, "cuMemAlloc_v2", "thread 4"),
    ]


def test_cuptis_own_overhead_is_added_up(monkeypatch):
    recorder, found = recorded(monkeypatch, record(ActivityKind.OVERHEAD, 0, 1_500_000_000))
    assert (found, recorder.overhead_seconds, recorder.lost()) == ([], 1.5, 0)


def test_dropped_and_unreadable_records_are_counted(monkeypatch):
    recorder, found = recorded(monkeypatch, record(99), record(ActivityKind.MEMSET), dropped=3)
    assert (found, recorder.lost()) == ([], 5)


@pytest.mark.parametrize(
    ("module", "driver", "message"),
    [
        (None, 12080, "expected cupti-python, got .*; pip install .*profile12"),
        (None, 13000, "expected cupti-python, got .*; pip install .*profile13"),
        (broken(), 13000, "expected CUPTI to start, got CUPTI_ERROR_NOT_INITIALIZED; pip install"),
    ],
)
def test_without_a_cupti_that_starts_one_sentence_says_what_to_install(monkeypatch, module, driver, message):
    install(monkeypatch, module)
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    with pytest.raises(DeviceError, match=message) as error:
        Recorder()
    assert len(str(error.value).splitlines()) == 1


def test_a_driver_without_cupti_is_reported_once_and_the_rest_is_recorded():
    pytest.importorskip("mxnet")
    code = """
import sys
sys.modules["cupti"] = None
from ece408_op.runtime import cuda
from ece408_op.profile import session
cuda.driver_version = lambda: 13000
profile = session.Session(on_gpu=True)
import mxnet as mx
mx.nd.dot(mx.nd.ones((9, 9)), mx.nd.ones((9, 9))).wait_to_read()
profile.finish()
"""
    done = python("-c", code)
    (sentence,) = [line for line in done.stderr.splitlines() if "GPU profile" in line]
    assert "profile13" in sentence
    assert sentence in done.stdout
    assert " dot\n" in done.stdout


@pytest.mark.parametrize(
    ("symbol", "name"), [("_Z3addPfS_i", "add(float*, float*, int)"), ("naive", "naive"), ("_Znonsense", "_Znonsense")]
)
def test_symbols_are_written_as_in_the_source(symbol, name):
    assert demangled(symbol) == name
