"""The timer: how often it times, and that every timed output is checked."""

import math

import numpy as np
import pytest
from gpu_case import require_gpu

from ece408_op.core import check, reference, timer
from ece408_op.core.kernel import float32_bound
from ece408_op.kernels.cpu import loops
from ece408_op.problem import ConvProblem

RANDOM = np.random.RandomState(0)
X, W = RANDOM.randn(6, 2, 8, 9).astype(np.float32), RANDOM.randn(3, 2, 3, 3).astype(np.float32)
RIGHT = reference.convolve(X, W).astype(np.float32)
BOUND = float32_bound(ConvProblem.from_shapes(X.shape, W.shape))
CHECK = check.Reference(X, W, images=2).compare


def test_each_timed_call_is_checked_and_the_first_one_is_not_timed():
    order = []

    def clock(call):
        return float(len(order)), call()

    timing = timer.measure(
        lambda: order.append("call") or RIGHT,
        clock,
        before=lambda: order.append("before"),
        check=lambda out: order.append("check") or CHECK(out),
        repeats=2,
    )
    assert order == ["before", "call", *["before", "call", "check"] * 2]
    assert timing.seconds == (3.0, 6.0)
    assert timing.median == 4.5
    assert timing.worst.scaled <= BOUND


def test_the_budget_ends_the_calls_after_the_fewest():
    def count(**limits):
        return len(timer.measure(lambda: None, lambda call: (1.0, call()), repeats=9, **limits).seconds)

    assert (count(), count(budget=2.5), count(budget=0.0), count(budget=0.0, fewest=3)) == (9, 3, 1, 3)


def test_one_wrong_call_among_right_ones_counts():
    outputs = iter([RIGHT, RIGHT, RIGHT + np.float32(0.01), RIGHT])
    timing = timer.measure(lambda: next(outputs), timer.cpu_clock, check=CHECK, repeats=3)
    assert timing.worst.scaled > BOUND


@pytest.mark.gpu
def test_the_gpu_clock_times_and_an_output_that_is_left_alone_is_found():
    require_gpu()
    import cupy

    x, w, out = cupy.asarray(X), cupy.asarray(W), cupy.asarray(RIGHT)
    compare, evict = check.Reference(x, w, images=2).compare, timer.eviction(out)
    assert compare(out).scaled <= BOUND
    timing = timer.measure(lambda: out, timer.gpu_clock("nothing"), evict, compare, repeats=2)
    assert timing.worst.scaled == math.inf
    right = cupy.asarray(RIGHT)
    timing = timer.measure(lambda: cupy.copyto(out, right) or out, timer.gpu_clock("copy"), evict, compare, repeats=3)
    assert timing.worst.scaled <= BOUND
    assert len(timing.seconds) == 3
    assert timing.median > 0


def test_a_kernel_is_timed_on_given_arrays():
    out, before = np.full_like(RIGHT, np.nan), []
    problem = ConvProblem.from_shapes(X.shape, W.shape)
    seconds = timer.kernel_seconds(loops.KERNEL, problem, X, W, out, before=lambda: before.append(1), repeats=3)
    assert seconds > 0 and len(before) == 4
    np.testing.assert_allclose(out, RIGHT, rtol=1e-4, atol=1e-5)
