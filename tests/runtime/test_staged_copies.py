"""Copies through a staging buffer, on a stand-in for CUDA whose copies run as late as they may."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from ece408_op.runtime import cuda
from ece408_op.runtime.memory import address
from ece408_op.runtime.staged_copies import BLOCK_BYTES, Driver, Staging, copy_to_device, copy_to_host

STREAM, EVENTS, CONTEXT, OTHER_CONTEXT = 7, (11, 12), 21, 22


class Device:
    """Functions of CUDA's driver in Python; the call number ``failing`` returns the status ``failing``."""

    def __init__(self, failing=None):
        self.queued, self.recorded, self.done, self.calls, self.failing = [], {}, 0, 0, failing
        self.context = OTHER_CONTEXT
        copy = self.function(self.copy, 4)
        others = ((self.record, 2), (self.wait, 1), (self.get_context, 1), (self.set_context, 1))
        self.functions = copy, copy, *(self.function(*each) for each in others), ctypes.CDLL(None).memcpy
        self.driver = Driver(*(ctypes.cast(each, ctypes.c_void_p).value for each in self.functions))
        self.memory = np.full(2 * BLOCK_BYTES // 4 + 32, np.nan, np.float32)
        first = -address(self.memory) % 64 // 4
        self.buffer = self.memory[first : first + 2 * BLOCK_BYTES // 4]
        self.staging = Staging(address(self.buffer), STREAM, EVENTS, CONTEXT)

    def function(self, work, arguments):
        def call(*arguments):
            self.calls += 1
            work(*arguments)
            return self.calls if self.calls == self.failing else 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * arguments)(call)

    def get_context(self, target):
        ctypes.c_int64.from_address(target).value = self.context

    def set_context(self, context):
        self.context = context

    def copy(self, target, source, count, stream):
        assert (stream, self.context) == (STREAM, CONTEXT)
        self.queued.append((target, source, count))

    def record(self, event, stream):
        assert (stream, self.context) == (STREAM, CONTEXT)
        self.recorded[event] = len(self.queued)

    def wait(self, event):
        self.finish(self.recorded.get(event, 0))

    def finish(self, end=None):
        """Run the copies in front of that one."""
        for target, source, count in self.queued[self.done : end]:
            ctypes.memmove(target, source, count)
        self.done = max(self.done, len(self.queued) if end is None else end)


COUNTS = [1, 5, 63, 1001, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, BLOCK_BYTES // 2, BLOCK_BYTES + 77]


@pytest.mark.parametrize("simd", ["", "sse"])
@pytest.mark.parametrize("count", COUNTS)
def test_all_elements_arrive(count, simd, monkeypatch):
    monkeypatch.setenv("ECE408_SIMD", simd)
    device, given = Device(), np.random.default_rng(count).random(count + 1, np.float32)[1:]  # not aligned to a vector
    there = np.full(count + 2, np.nan, np.float32)
    copy_to_device(given, address(there) + 4, device.staging, device.driver)
    np.testing.assert_array_equal(there[1:-1], given)
    assert np.isnan(there[[0, -1]]).all()
    back = np.full(count + 2, np.nan, np.float32)
    copy_to_host(back[1:-1], address(there) + 4, device.staging, device.driver)
    np.testing.assert_array_equal(back[1:-1], given)
    assert np.isnan(back[[0, -1]]).all()
    assert device.context == OTHER_CONTEXT


@pytest.mark.parametrize("out", [False, True])
def test_a_block_is_copied_while_the_next_one_is_staged(out):
    device, waits = Device(), []
    source, target = np.arange(5 * BLOCK_BYTES // 8, dtype=np.float32), np.empty(5 * BLOCK_BYTES // 8, np.float32)
    finish = device.finish
    device.finish = lambda end: (waits.append(len(device.queued) - end), finish(end))
    if out:
        copy_to_host(target, address(source), device.staging, device.driver)
    else:
        copy_to_device(source, address(target), device.staging, device.driver)
    np.testing.assert_array_equal(target, source)
    assert waits == ([1, 1, 0] if out else [1, 0])


def test_nothing_is_copied_of_an_empty_array():
    device = Device()
    for copy in (copy_to_device, copy_to_host):
        copy(np.empty(0, np.float32), 0, device.staging, device.driver)
    assert device.calls == 0


@pytest.mark.parametrize("failing", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("out", [False, True])
def test_the_first_status_that_is_an_error_is_raised(failing, out, monkeypatch):
    class Error(Exception):
        pass

    driver = SimpleNamespace(CUDADriverError=Error)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=driver)))
    device, host = Device(failing), np.zeros(3 * BLOCK_BYTES // 4, np.float32)
    there = np.zeros_like(host)
    with pytest.raises(Error, match=f"^{failing}$"):
        (copy_to_host if out else copy_to_device)(host, address(there), device.staging, device.driver)
