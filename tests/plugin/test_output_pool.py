"""The output pool: large outputs of imperative calls get the memory of freed ones."""

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process import python

import ece408_op  # noqa: F401 (joins itself to MXNet)
from ece408_op.core.check import compare
from ece408_op.errors import DeviceError
from ece408_op.kernels.cpu import direct

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import bridge, output_pool  # noqa: E402 (they need MXNet)

#: 4.6 MB of output.
SHAPES = (100, 3, 34, 34), (12, 3, 3, 3)
ATTRIBUTES = {"op_type": "New", "kernel": (3, 3), "num_filter": 12}


def values(seed=408):
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, SHAPES[0]).astype(np.float32), rng.standard_normal(SHAPES[1]).astype(np.float32)


def call(x, w, **more):
    return mx.nd.Custom(mx.nd.array(x), mx.nd.array(w), **{**ATTRIBUTES, **more})


def place(array):
    array.wait_to_read()
    return bridge.cpu_view(array).ctypes.data


def assert_right(output, x, w):
    found = compare(output.asnumpy(), x, w, direct.KERNEL)
    assert found.passed, str(found)


#: They are as long-lived as their arrays.
POOLS = []


def pool(limit):
    POOLS.append(output_pool.OutputPool(limit))
    return POOLS[-1]


def allocated(pool, count):
    """An array of the pool; None if there is no room for it after all that frees others has ended."""
    mx.nd.waitall()
    for _ in range(100):  # the engine may use an array a moment longer
        array = pool.array((count,))
        if array is not None:
            return array
        time.sleep(0.002)
    return None


def test_the_next_output_lies_where_the_last_one_lay(monkeypatch):
    alone = pool(4 * 100 * 12 * 32 * 32)  # of one output
    monkeypatch.setattr(output_pool, "pool", lambda: alone)
    output = call(*values(1))
    where = place(output)
    assert alone.array(output.shape) is None
    for _ in range(100):  # the engine may use the last one a moment longer
        del output
        mx.nd.waitall()
        output = call(*values(2))
        if place(output) == where:
            break
    assert place(output) == where and alone.array(output.shape) is None
    assert_right(output, *values(2))
    assert output.context == mx.cpu() and output.dtype == np.float32


HOLDS = {
    "the array": lambda y: y,
    "a reshape": lambda y: y.reshape((-1, 32)),
    "a slice": lambda y: y[3:5],
    "a detached one": lambda y: y.detach(),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_what_is_still_held_stays(hold):
    held = hold(call(*values(1)))
    before = held.asnumpy().copy()
    others = [call(*values(seed)) for seed in range(2, 4)]
    for seed, other in enumerate(others, 2):
        assert_right(other, *values(seed))
    assert np.array_equal(held.asnumpy(), before)


def test_an_operator_that_has_not_read_it_yet_keeps_it():
    x, w = values(1)
    exact = call(x, w).asnumpy()
    for _ in range(20):
        doubled = call(x, w) * 2  # the output is gone before it is computed
        call(*values(2))
        assert np.array_equal(doubled.asnumpy(), 2 * exact)


def test_the_interpreter_ends_with_outputs_alive_and_pending():
    text = f"""
import ece408_op, mxnet as mx
def call(): return mx.nd.Custom(x, w, **{ATTRIBUTES!r})
class Holder:
    def __init__(self): self.me, self.output = self, call()
x, w = mx.nd.ones({SHAPES[0]}), mx.nd.ones({SHAPES[1]})
holder, kept, pending = Holder(), [call() for _ in range(3)], call() * 2
"""
    done = python("-W", "ignore", "-c", text)
    assert (done.returncode, done.stderr) == (0, "")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5_000_000)), max_size=20))
def test_blocks_in_use_never_overlap(steps):
    one, used = pool(1 << 30), []
    for free, count in steps:
        if free and used:
            used.pop(count % len(used))
            continue
        array = one.array((count,))
        view = bridge.cpu_view(array)
        start = view.ctypes.data
        assert start % 64 == 0
        assert all(start + 4 * count <= other or other + size <= start for _, other, size in used)
        view[...] = np.nan
        used.append((array, start, 4 * count))


def mapped_bytes():
    """The address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def test_blocks_in_use_and_waiting_ones_are_within_the_limit():
    one = pool(64 << 20)
    before = mapped_bytes()
    for number in range(32):
        assert allocated(one, (60 << 18) + number) is not None
    assert mapped_bytes() < before + (600 << 20)
    assert one.array((65 << 18,)) is None
    arrays = [allocated(one, 20 << 18) for _ in range(3)]
    assert all(array is not None for array in arrays) and allocated(one, 20 << 18) is None
    arrays.pop()
    assert allocated(one, 24 << 18) is not None


@pytest.mark.parametrize(("limit", "serves"), [("0", False), ("4000000", False), ("5000000", True), (" ", True)])
def test_an_environment_variable_limits_it_and_turns_it_off(limit, serves, monkeypatch):
    monkeypatch.setenv(output_pool.VARIABLE, limit)
    POOLS.append(output_pool.pool.__wrapped__())
    monkeypatch.setattr(output_pool, "pool", lambda: POOLS[-1])
    x, w = values()
    assert_right(call(x, w), x, w)
    assert (allocated(POOLS[-1], 100 * 12 * 32 * 32) is not None) == serves


def test_a_limit_that_is_no_number_is_an_error(monkeypatch):
    monkeypatch.setenv(output_pool.VARIABLE, "4 GiB")
    with pytest.raises(DeviceError, match="expected a number of bytes, or 0 to turn the output pool off, got '4 GiB'"):
        output_pool.pool.__wrapped__()
