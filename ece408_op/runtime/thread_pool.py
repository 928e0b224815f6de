"""A pool of threads that share the parts of one call, and one for work that the calling thread must not do.

Several threads may call at the same time. A caller of ``parallel_for`` works on parts too, and waits only for parts
that a helper has begun; so a call also ends where no helper is left: while the interpreter exits, or in a forked child.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import Callable, TypeVar

#: Operations for which waking a thread pays off: about 20 microseconds of the fastest kernel, as long as waking takes.
THREAD_FLOPS = 4_000_000

_Result = TypeVar("_Result")


class _Call:
    """One call: the parts that no thread has begun, and a result for each part that is done: an error or None."""

    def __init__(self, work: Callable[[int], None], parts: int) -> None:
        self.work = work
        self.left = deque(range(parts))
        #: Helpers that were asked for, and have not ended their work.
        self.helpers = 0
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()

    def help(self) -> None:
        while True:
            try:
                part = self.left.popleft()
            except IndexError:
                return
            try:
                self.work(part)
            except BaseException as error:
                self.results.put(error)
            else:
                self.results.put(None)


class _Helpers:
    """Threads that wait for calls. They are daemons: the interpreter's exit does not wait for them."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        self.lock = threading.Lock()
        #: Helpers that exist, and those that calls in progress have asked for and that have not ended their work.
        self.threads = self.asked = 0

    def ask(self, call: _Call, helpers: int) -> None:
        with self.lock:
            # Calls at the same time must not wait for each other's helpers.
            self.asked += helpers
            call.helpers = helpers
            for _ in range(helpers):
                self.calls.put(call)
            while self.threads < self.asked:
                try:
                    threading.Thread(target=self._serve, name="ece408-op", daemon=True).start()
                except RuntimeError:  # no thread can be started, as while the interpreter exits: the caller does it all
                    return
                self.threads += 1

    def wait(self, call: _Call, parts: int) -> None:
        """Wait until that many parts are done; raises the error of one."""
        errors = [error for error in (call.results.get() for _ in range(parts)) if error is not None]
        # A helper that waits, or that has not woken up yet, would keep all that the work refers to.
        del call.work
        with self.lock:
            # Helpers that have not woken up yet are free for the next call. Not after an interrupt: they may be busy.
            self.asked -= call.helpers
            call.helpers = 0
        try:
            if errors:
                raise errors[0]
        finally:
            # The error refers to this frame: a cycle would keep all that its traceback has.
            errors.clear()

    def _serve(self) -> None:
        while True:
            call = self.calls.get()
            call.help()
            with self.lock:
                if call.helpers:
                    self.asked -= 1
                    call.helpers -= 1
            del call


#: Helpers of ``parallel_for``, and of ``run_in_other_thread``, where callers do nothing.
_helpers, _others = _Helpers(), _Helpers()


def parallel_for(work: Callable[[int], None], parts: int, threads: int) -> None:
    """Run work(0), ..., work(parts - 1), in any order, on at most ``threads`` threads, the caller's among them.

    Returns when all are done; an error raised by one of them is raised here.
    """
    if threads == 1 or parts == 1:
        for part in range(parts):
            work(part)
        return
    call = _Call(work, parts)
    _helpers.ask(call, min(threads, parts) - 1)
    call.help()
    _helpers.wait(call, parts)


def run_in_other_thread(work: Callable[[], _Result]) -> _Result:
    """Return work(), or raise its error, from another thread; ``work`` must not call this function.

    The thread remains for later calls, also while the interpreter exits, when Python 3.12 starts none: RuntimeError
    then, if there was no call before.
    """
    found: list[_Result] = []
    call = _Call(lambda _: found.append(work()), 1)
    _others.ask(call, 1)
    if not _others.threads:
        raise RuntimeError("expected another thread, got none: none can be started, as while the interpreter exits")
    _others.wait(call, 1)
    return found[0]


def thread_count(flops: int) -> int:
    """Return the threads for that many operations, at least one.

    It is the least of OMP_NUM_THREADS, the cores of this process, and the threads that are worth waking.
    """
    cores = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    limit = int(asked) if asked.isdecimal() and int(asked) > 0 else cores
    return max(1, min(limit, cores, flops // THREAD_FLOPS))


def is_only_thread() -> bool:
    """Return whether the caller is the program's only thread, besides helpers, so that no other thread can interfere.

    Threads that Python did not start, such as those of MXNet's Custom operators, are never alone.
    """
    others = threading.active_count() - _helpers.threads - _others.threads
    return threading.get_ident() == threading.main_thread().ident and others <= 1


def _forget() -> None:
    global _helpers, _others  # a forked child has none of its parent's threads
    _helpers, _others = _Helpers(), _Helpers()


os.register_at_fork(after_in_child=_forget)
