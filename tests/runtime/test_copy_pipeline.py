"""Calls cut into rounds and pieces: the arithmetic, and right answers on a device that does things when it likes."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.core import reference
from ece408_op.problem import ITEM_BYTES, ConvProblem
from ece408_op.runtime.copy_pipeline import RING, ROUND_BYTES, Call, Slot, elements, pieces_in_order, rounds_of

SECONDS = 60

problems = st.builds(
    lambda b, c, h, w, m, k: ConvProblem(b, c, h + k - 1, w + k - 1, m, k),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
)


def image_bytes(problem):
    """Input and output of one image."""
    one = problem.with_batch(1)
    return ITEM_BYTES * (elements(one.x_shape) + elements(one.y_shape))


class Mark:
    """Work of the device that is done when it is asked for, after the work before it."""

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
    """A device of NumPy arrays that computes at once or as late as it may, by chance."""

    def __init__(self, problem, images, w, most, slots, seed, fail_at=None):
        part = problem.with_batch(images)
        self.problem = problem
        self.memory = {("w", 0): np.full(w.size, np.nan, np.float32)}
        for ring in range(RING):
            for array, shape in (("x", part.x_shape), ("y", part.y_shape)):
                self.memory[array, ring] = np.full(elements(shape), np.nan, np.float32)
        self.slots = SimpleQueue()
        for _ in range(slots):
            self.slots.put(Slot(np.full(most, np.nan, np.float32)))
        self.random = random.Random(seed)
        self.last = None
        self.work = 0
        self.fail_at = fail_at
        self.lock = threading.Lock()

    def take(self):
        return self.slots.get_nowait()

    def give(self, slot):
        self.slots.put(slot)

    def begin(self):
        with self.lock:
            self.work += 1
            if self.work == self.fail_at:
                raise RuntimeError("the device failed")
        time.sleep(self.random.choice([0, 0, 1e-4]))

    def bring(self, slot, piece, ring):
        self.begin()
        place = self.memory[piece.array, 0 if piece.array == "w" else ring][piece.start : piece.stop]
        np.copyto(place, slot.floats[: place.size])

    def fetch(self, slot, piece, ring, after):
        self.begin()
        if after is not None:
            after.finish()
        place = self.memory[piece.array, ring][piece.start : piece.stop]
        np.copyto(slot.floats[: place.size], place)

    def compute(self, this):
        self.begin()
        part = self.problem.with_batch(this.images)

        def work():
            x = self.memory["x", this.ring][: elements(part.x_shape)].reshape(part.x_shape)
            y = reference.convolve(x, self.memory["w", 0].reshape(part.w_shape))
            self.memory["y", this.ring][: y.size] = y.ravel()

        self.last = Mark(work, self.last)
        if self.random.random() < 0.5:
            self.last.finish()
        return self.last


def arrays(problem, seed):
    """Input, filters, and an output full of NaN."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, problem.x_shape).astype(np.float32)
    w = rng.integers(-9, 9, problem.w_shape).astype(np.float32)
    return x, w, np.full(problem.y_shape, np.nan, np.float32)


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


@given(problems, st.integers(1, 5), st.integers(1, 70), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_every_image_arrives_whatever_the_device_does_first(problem, images, most, threads, add, seed):
    x, w, y = arrays(problem, seed)
    if add:
        y[...] = 1
    rounds = rounds_of(problem, images * image_bytes(problem))
    device = Unsteady(problem, rounds[0].images, w, most, threads, seed)
    assert finishes(lambda: Call(device, problem, rounds, most, add).run(x, w, y, threads)) == []
    # Small integers: every sum is exact.
    np.testing.assert_array_equal(y, reference.convolve(x, w) + add)


@given(problems, st.integers(1, 3), st.integers(1, 30), st.integers(1, 5), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_an_error_ends_the_call_and_is_raised(problem, images, most, threads, fail_at, seed):
    x, w, y = arrays(problem, seed)
    rounds = rounds_of(problem, images * image_bytes(problem))
    device = Unsteady(problem, rounds[0].images, w, most, threads, seed, fail_at)
    errors = finishes(lambda: Call(device, problem, rounds, most).run(x, w, y, threads))
    work = len(pieces_in_order(problem, rounds, most)) + len(rounds)
    assert [str(error) for error in errors] == ["the device failed"] * (fail_at <= work)
    assert device.slots.qsize() == threads


@given(problems, st.integers(1, 10_000))
def test_rounds_cover_the_batch_in_order_and_fit(problem, round_bytes):
    rounds = rounds_of(problem, round_bytes)
    assert [this.first for this in rounds] == [0, *np.cumsum([this.images for this in rounds])[:-1]]
    assert sum(this.images for this in rounds) == problem.batch
    assert all(0 < this.images <= rounds[0].images for this in rounds)
    assert rounds[0].images == 1 or rounds[0].images * image_bytes(problem) <= round_bytes
    assert [this.ring for this in rounds] == [number % RING for number in range(len(rounds))]


@given(problems, st.integers(1, 1000), st.integers(1, 50))
def test_pieces_cover_every_array_once(problem, round_bytes, most):
    rounds = rounds_of(problem, round_bytes)
    pieces = pieces_in_order(problem, rounds, most)
    assert all(0 < piece.stop - piece.start <= most for piece in pieces)
    for array, shape in (("x", problem.x_shape), ("w", problem.w_shape), ("y", problem.y_shape)):
        own = [piece for piece in pieces if piece.array == array]
        image = elements(shape[1:]) if array != "w" else 0
        starts = [rounds[piece.round].first * image + piece.start for piece in own]
        ends = [rounds[piece.round].first * image + piece.stop for piece in own]
        assert (starts[0], ends[-1]) == (0, elements(shape))
        assert starts[1:] == ends[:-1]


def test_the_course_layer_takes_little_of_the_device():
    problem = ConvProblem(10_000, 1, 28, 28, 50, 5)
    rounds = rounds_of(problem)
    assert len(rounds) == 9
    assert RING * rounds[0].images * image_bytes(problem) <= RING * ROUND_BYTES


def test_images_larger_than_a_round_go_one_by_one():
    assert [this.images for this in rounds_of(ConvProblem(3, 3, 5000, 5000, 8, 3))] == [1, 1, 1]


def test_an_empty_batch_has_no_rounds():
    assert rounds_of(ConvProblem(0, 1, 5, 5, 1, 3)) == []
