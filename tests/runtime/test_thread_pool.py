"""Threads that share the parts of calls."""

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from process import printed, wait_until

from ece408_op.runtime.thread_pool import parallel_for, run_in_other_thread


def test_calls_at_the_same_time_do_not_wait_for_each_others_helpers():
    everybody = threading.Barrier(2 * 3, timeout=60)
    with ThreadPoolExecutor(2) as callers:
        list(callers.map(lambda _: parallel_for(lambda part: everybody.wait(), 3, 3), range(2)))


def test_calls_one_after_another_share_their_helpers():
    """Also those that a thread makes faster than helpers wake up."""
    program = """
import sys, threading
from ece408_op.runtime.thread_pool import parallel_for
sys.setswitchinterval(100)
for _ in range(200):
    parallel_for(lambda part: None, 3, 3)
print(sum(thread.name == "ece408-op" for thread in threading.enumerate()))
"""
    assert printed("-c", program) == "2\n"


def test_a_call_after_an_interrupted_one_does_not_wait_for_its_helper():
    program = """
import signal, threading
from ece408_op.runtime.thread_pool import parallel_for
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background
main, begun, end = threading.main_thread(), threading.Event(), threading.Event()

def work(part):
    if threading.current_thread() is main:
        begun.wait(60)
        threading.Timer(0.2, lambda: signal.pthread_kill(main.ident, signal.SIGINT)).start()
    else:
        begun.set()
        end.wait(60)

try:
    parallel_for(work, 2, 2)
except KeyboardInterrupt:
    both = threading.Barrier(2, timeout=30)
    parallel_for(lambda part: both.wait(), 2, 2)
    print("done")
end.set()
"""
    assert printed("-c", program) == "done\n"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_part_is_done_once_and_by_no_more_threads_than_asked_for(threads):
    everybody, seen, done = threading.Barrier(threads, timeout=60), set(), []

    def work(part):
        everybody.wait()
        time.sleep(0.001)
        seen.add(threading.get_ident())
        done.append(part)

    parallel_for(work, 12, threads)
    assert (len(seen), sorted(done)) == (threads, list(range(12)))


def test_an_error_in_a_part_is_raised_and_the_next_call_works():
    def work(part):
        if part == 3:
            raise ValueError("part 3")

    with pytest.raises(ValueError, match="part 3"):
        parallel_for(work, 8, 2)
    done: list[int] = []
    parallel_for(done.append, 8, 2)
    assert sorted(done) == list(range(8))


def test_a_call_within_a_part_ends():
    done: list[int] = []
    parallel_for(lambda part: parallel_for(done.append, 5, 2), 4, 2)
    assert sorted(done) == sorted(4 * list(range(5)))


class Memory:
    """What a call uses."""


@pytest.fixture
def freed():
    """A function: wait until these weak references are dead, without a garbage collection."""

    def wait(*kept):
        # A helper may still leave the work, or the handler of its error.
        wait_until(lambda: not any(one() for one in kept))

    gc.collect()
    gc.disable()
    yield wait
    gc.enable()


def test_an_error_keeps_nothing_without_a_garbage_collection(freed):
    def work(part):
        memory = Memory()
        kept.append(weakref.ref(memory))
        raise ValueError(part)

    kept = []
    with contextlib.suppress(ValueError):
        parallel_for(work, 2, 2)
    assert len(kept) == 2
    freed(*kept)


@pytest.mark.parametrize(
    "call", [lambda work: parallel_for(work, 3, 3), lambda work: run_in_other_thread(lambda: work(0))]
)
def test_helpers_keep_nothing_of_a_call_that_has_ended(call, freed):
    memory = Memory()
    kept = weakref.ref(memory)

    def work(part, used=memory):
        time.sleep(0.01)  # so that helpers wake up

    call(work)
    del memory, work
    freed(kept)


def test_work_elsewhere_raises_its_error():
    with pytest.raises(ZeroDivisionError):
        run_in_other_thread(lambda: 1 // 0)
    assert run_in_other_thread(lambda: 1 // 1) == 1


ELSEWHERE = """
import atexit, threading
from ece408_op.runtime.thread_pool import is_only_thread, run_in_other_thread

thread = run_in_other_thread(threading.get_ident)
assert thread != threading.get_ident()
assert is_only_thread()

def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

threading.Thread.start = refuse  # as in Python 3.12 and later while the interpreter exits
atexit.register(lambda: print(run_in_other_thread(threading.get_ident) == thread))
"""


def test_the_thread_elsewhere_is_no_disturbance_and_also_works_at_exit():
    assert printed("-c", ELSEWHERE) == "True\n"
