"""Threads that share the parts of calls."""

from __future__ import annotations

import threading

from ece408_op.runtime import thread_pool


def test_calls_at_the_same_time_do_not_wait_for_each_others_helpers():
    parts = 3
    everybody = threading.Barrier(2 * parts)
    broken = []

    def work(part: int) -> None:
        try:
            everybody.wait(timeout=20)
        except threading.BrokenBarrierError:
            broken.append(part)

    callers = [threading.Thread(target=thread_pool.share, args=(work, parts, parts)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not broken
