"""The copy pipeline: chunks and transfers, and right results on a device that computes as early or late as it may."""

import random
import threading
import time
from collections import Counter
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.plugin.host_context import CHUNK_BYTES, STAGING_BYTES, Gpu
from ece408_op.runtime.copy_pipeline import INPUT, OUTPUT, Chunk, Pipeline, StagingBuffer, chunks_of, images_per_chunk

SECONDS = 60


class Mark:
    """Work of the device that runs when somebody waits for it, after the work queued before it."""

    def __init__(self, work, before):
        self.work, self.before, self.done = work, before, False
        self.lock = threading.RLock()

    def finish(self):
        with self.lock:
            if not self.done:
                if self.before is not None:
                    self.before.finish()
                self.work()
                self.done = True


class Unsteady:
    """A device of NumPy arrays: from inputs a and b and the constant c, outputs a c and (sum of a, sum of b).

    It computes at random times; what it has not yet received, and what has been copied out, is NaN.
    """

    def __init__(self, call, staging, seed, fail_at=None):
        images, stage = call.chunks[0].images, 1 + max(this.stage for this in call.chunks)
        poison = lambda like: np.full((images, *like.shape[1:]), np.nan, np.float32)  # noqa: E731
        self.memory = {("constant", 0, 0): np.full(call.c.size, np.nan, np.float32)}
        for number in range(stage):
            for role, arrays in ((INPUT, call.inputs), (OUTPUT, call.outputs)):
                self.memory.update({(role, i, number): poison(array) for i, array in enumerate(arrays)})
        self.staging = SimpleQueue()
        for _ in range(staging):
            self.staging.put(StagingBuffer(np.full(call.most, np.nan, np.float32)))
        self.random, self.lock, self.last = random.Random(seed), threading.Lock(), None
        self.work, self.fail_at, self.copied = 0, fail_at, Counter()

    def begin(self):
        with self.lock:
            self.work += 1
            if self.work == self.fail_at:
                raise RuntimeError("the device failed")
        time.sleep(self.random.choice([0, 0, 1e-4]))

    def copy(self, buffer, transfer, after):
        self.begin()
        if after is not None:
            after.finish()
        with self.lock:
            self.copied[transfer.role] += transfer.host.size
        memory = self.memory[transfer.role, transfer.array, transfer.stage].reshape(-1)
        there = memory[transfer.start : transfer.start + transfer.host.size]
        here = buffer.floats[: there.size]
        if transfer.role == OUTPUT:
            here[...] = there
            there.fill(np.nan)
        else:
            there[...] = here

    def compute(self, chunk):
        self.begin()

        def work():
            a, b = (self.memory[INPUT, i, chunk.stage] for i in (0, 1))
            product, sums = (self.memory[OUTPUT, i, chunk.stage] for i in (0, 1))
            product[...] = a * self.memory["constant", 0, 0]
            sums[...] = np.stack([a.sum(axis=(1, 2)), b.sum(axis=1)], axis=1)
            a.fill(np.nan)
            b.fill(np.nan)

        self.last = Mark(work, self.last)
        if self.random.random() < 0.5:
            self.last.finish()
        return self.last


class Call:
    """Arrays of small integers, so that sums are exact, and chunks; ``whole``: one chunk of one image, the batch."""

    def __init__(self, batch, images, stage, most, seed=0):
        rng = np.random.default_rng(seed)
        self.inputs = [rng.integers(-9, 9, shape).astype("f") for shape in ((batch, 2, 5), (batch, 3))]
        self.c = rng.integers(-9, 9, 5).astype("f")
        self.outputs = [np.full(shape, np.nan, np.float32) for shape in ((batch, 2, 5), (batch, 2))]
        self.chunks, self.most, self.checked = chunks_of(batch, min(images, batch), stage), most, []

    def run(self, device, threads):
        checks = [lambda n=n: self.checked.append(n) for n in range(5)]
        pipeline = Pipeline(device, self.chunks, self.inputs, self.outputs, self.most, [self.c], checks)
        return finishes(lambda: pipeline.run(threads))


def finishes(work):
    """Run work in a thread; fails where it does not come to an end, and returns the error that it raised."""
    errors = []

    def guarded():
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the call waits for something that never comes"
    return errors


batches, sizes, stages, threads_ = st.integers(1, 23), st.integers(1, 23), st.integers(2, 4), st.integers(1, 6)


@given(batches, sizes, stages, st.integers(1, 40), threads_, st.integers(0, 10**6))
@settings(max_examples=250)
def test_every_image_arrives_once_whatever_the_device_does_first(batch, images, stage, most, threads, seed):
    call = Call(batch, images, stage, most, seed)
    device = Unsteady(call, threads, seed)
    assert call.run(device, threads) == []
    a, b = call.inputs
    np.testing.assert_array_equal(call.outputs[0], a * call.c)
    np.testing.assert_array_equal(call.outputs[1], np.stack([a.sum(axis=(1, 2)), b.sum(axis=1)], axis=1))
    assert sorted(call.checked) == list(range(5))
    computed = len(call.chunks) * call.chunks[0].images
    assert device.copied == {"constant": 5, INPUT: 13 * computed, OUTPUT: 12 * batch}


@pytest.mark.parametrize("threads", [1, 3])
def test_without_inputs_the_caller_computes(threads):
    callers = []
    device = SimpleNamespace(compute=lambda this: callers.append(threading.get_ident()))
    checks = [lambda: callers.append(None)] * 2
    Pipeline(device, [Chunk(0, 1)], [np.empty((1, 0), np.float32)], [], 4, checks=checks).run(threads)
    assert callers == [threading.get_ident(), None, None]


@given(batches, sizes, stages, st.integers(1, 40), threads_, st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=150)
def test_an_error_ends_the_call_and_is_raised(batch, images, stage, most, threads, fail_at, seed):
    call = Call(batch, images, stage, most, seed)
    device = Unsteady(call, threads, seed, fail_at)
    errors = call.run(device, threads)
    assert [str(error) for error in errors] == ["the device failed"] * (device.work >= fail_at)
    assert device.staging.qsize() == threads


@given(batches, sizes, stages)
def test_chunks_are_equal_and_cover_the_batch_once_in_order(batch, images, stage):
    chunks = chunks_of(batch, min(images, batch), stage)
    assert {this.images for this in chunks} == {min(images, batch)}
    copied_out = [n for this in chunks for n in range(this.first + this.overlap, this.first + this.images)]
    assert copied_out == list(range(batch))
    assert [this.stage for this in chunks] == [number % stage for number in range(len(chunks))]


@given(st.integers(1, 500), st.integers(1, 1000), st.integers(1, 10_000))
def test_chunks_fit_their_bytes_and_are_as_few_as_possible(batch, image_bytes, chunk_bytes):
    images = images_per_chunk(batch, image_bytes, chunk_bytes)
    assert images == 1 or images * image_bytes <= chunk_bytes
    assert len(chunks_of(batch, images)) == -(-batch // min(batch, max(1, chunk_bytes // image_bytes)))


def test_an_empty_batch_has_no_rounds():
    assert chunks_of(0, images_per_chunk(0, 4, CHUNK_BYTES)) == []


def test_a_failed_copy_gives_all_staging_buffers_back():
    """The next call waits for them."""
    fails = Mock(side_effect=KeyboardInterrupt)
    gpu = object.__new__(Gpu)  # without a device
    gpu.threads, gpu.staging, gpu.copy = 2, SimpleQueue(), fails
    gpu.stream = gpu.pinned_stream = SimpleNamespace(synchronize=lambda: None)
    for _ in range(gpu.threads):
        buffer = StagingBuffer(np.zeros(STAGING_BYTES // 4, np.float32), SimpleNamespace(synchronize=fails))
        gpu.staging.put(buffer)
    with pytest.raises(KeyboardInterrupt):
        gpu.copy_out(0, np.zeros(2 * STAGING_BYTES // 4, np.float32))
    assert gpu.staging.qsize() == gpu.threads
    with pytest.raises(KeyboardInterrupt):
        gpu.wait()
    assert gpu.staging.qsize() == gpu.threads
