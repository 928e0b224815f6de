"""The pipeline of a whole network on a device that is none: NumPy arrays, and threads that are slow by turns."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.network._pipeline import RING, Pipeline, rounds_of
from ece408_op.runtime.copy_pipeline import Slot

MOST = 7


class Device:
    """Two outputs of two data: (3 a, [sum of a's image, sum of b's image])."""

    def __init__(self, a, b, images, fail=None):
        self.slots = SimpleQueue()
        for _ in range(3):
            self.slots.put(Slot(np.empty(MOST, np.float32)))
        poison = lambda *shape: np.full(shape, np.nan, np.float32)  # noqa: E731
        self.data = [[poison(images, a[0].size), poison(images, b[0].size)] for _ in range(RING)]
        self.outputs = [[poison(images, a[0].size), poison(images, 2)] for _ in range(RING)]
        self.computing = threading.Lock()
        self.order, self.fail, self.turn = [], fail, 0

    def take(self):
        return self.slots.get()

    def give(self, slot):
        self.slots.put(slot)

    def pause(self):
        self.turn += 1
        if self.turn % 5 == 0:
            time.sleep(0.0005)

    def bring(self, slot, number, ring, start, count, after):
        self.pause()
        self.data[ring][number].reshape(-1)[start : start + count] = slot.floats[:count]

    def compute(self, this):
        assert self.computing.acquire(blocking=False), "two rounds are started at once"
        if self.fail == this.first:
            raise ZeroDivisionError("the device fails")
        a, b = self.data[this.ring]
        assert not np.isnan(a).any() and not np.isnan(b).any()
        self.outputs[this.ring][0][...] = 3 * a
        self.outputs[this.ring][1][...] = np.stack([a.sum(axis=1), b.sum(axis=1)], axis=1)
        self.pause()
        for array in self.data[this.ring]:
            array.fill(np.nan)
        self.order.append(this.first)
        self.computing.release()
        return this.first

    def fetch(self, slot, number, ring, start, count, after):
        self.pause()
        assert after in self.order
        part = self.outputs[ring][number].reshape(-1)[start : start + count]
        assert not np.isnan(part).any()
        slot.floats[:count] = part
        part.fill(np.nan)


def arrays(batch, seed=0):
    stream = np.random.RandomState(seed)
    a, b = stream.randint(-9, 9, (batch, 2, 5)).astype("f"), stream.randint(-9, 9, (batch, 3)).astype("f")
    return a, b, [np.full((batch, 10), np.nan, np.float32), np.full((batch, 2), np.nan, np.float32)]


@given(st.integers(1, 23), st.integers(1, 23), st.integers(1, 6), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_output_arrives_whatever_the_rounds_and_threads(batch, images, threads, seed):
    images = min(images, batch)
    a, b, outputs = arrays(batch, seed)
    done = []
    device = Device(a, b, images)
    checks = [lambda n=n: done.append(n) for n in range(5)]
    Pipeline(device, rounds_of(batch, images), [a, b], outputs, MOST, checks).run(threads)
    assert (outputs[0] == 3 * a.reshape(batch, -1)).all()
    assert (outputs[1] == np.stack([a.sum(axis=(1, 2)), b.sum(axis=1)], axis=1)).all()
    assert sorted(done) == list(range(5))
    assert device.order == sorted(device.order)


@given(st.integers(1, 99), st.integers(1, 99))
def test_rounds_are_equal_and_cover_the_batch_once(batch, images):
    rounds = rounds_of(batch, min(images, batch))
    assert {this.images for this in rounds} == {min(images, batch)}
    assert [n for this in rounds for n in range(this.first + this.known, this.first + this.images)] == list(
        range(batch)
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_ends_the_call_and_is_raised(threads):
    a, b, outputs = arrays(20)
    with pytest.raises(ZeroDivisionError, match="the device fails"):
        Pipeline(Device(a, b, 4, fail=8), rounds_of(20, 4), [a, b], outputs, MOST).run(threads)
