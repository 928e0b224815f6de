"""The frame of every command: its exit codes, and what Ctrl-C does.

``python -m ece408_op m2 100`` runs a command of an installed package; a checkout has m1.py to m4.py for it too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

OK, FAILED, USAGE, CANNOT, INTERRUPTED = 0, 1, 2, 3, 128 + signal.SIGINT

#: Seconds that an interrupted command has to clean up and exit, before it is ended where it stands.
_GRACE = 0.7

#: Where each command's main function is; a milestone's takes the name as its first argument.
COMMANDS = {
    **dict.fromkeys(("m1", "m2", "m3", "m4"), "milestones.cli"),
    "bench": "bench.__main__",
    "grade": "grade.cli",
    "report": "report.__main__",
}

#: These end their own child processes on Ctrl-C, however long that takes, and never compute themselves.
_THAT_CLEAN_UP = {"grade", "report"}


def guard(name: str, work: Callable[[], int]) -> int:
    """Run a command's work in a process of its own; returns its exit code.

    Ctrl-C prints one line under the command's name and gives exit code 130. A computation of MXNet or of a kernel
    cannot be interrupted from Python, nor can the wait for it at exit: the process then ends without it.
    """
    tell = _end_when_interrupted(name)
    try:
        return work()
    except KeyboardInterrupt:
        tell()
        return INTERRUPTED
    finally:
        # What runs at exit is left to the watching thread: an exception there would be printed and lost.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: None)


def run(name: str) -> int:
    """Import and run one of COMMANDS with this process's arguments; returns its exit code."""
    milestone = COMMANDS[name] == "milestones.cli"
    shown = f"{name}.py" if milestone else f"ece408-{name}"

    def work() -> int:
        # NumPy turns an exception inside its import into an ImportError of many lines.
        with _ended_at_once(shown):
            main: Callable[..., int] = import_module(f"ece408_op.{COMMANDS[name]}").main
        return main(name) if milestone else main()

    if name not in _THAT_CLEAN_UP:
        return guard(shown, work)
    return work()


def bench() -> int:
    """Run ece408-bench."""
    return run("bench")


def grade() -> int:
    """Run ece408-grade."""
    return run("grade")


def report() -> int:
    """Run ece408-report."""
    return run("report")


@contextmanager
def _ended_at_once(name: str) -> Iterator[None]:
    """Inside it, SIGINT prints its line and ends the process where it stands: nothing has begun that needs an end."""
    before = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        _tell(name)
        os._exit(INTERRUPTED)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(name: str) -> None:
    # A terminal's current line may hold a progress bar and the ^C that was typed.
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}{name}: interrupted", file=sys.stderr, flush=True)


def _end_when_interrupted(name: str) -> Callable[[], None]:
    """Watch for SIGINT on a thread of its own; returns what prints the line about it, once.

    Python runs a signal's handler between two of the main thread's bytecodes, so not while that thread waits in
    MXNet. The wakeup descriptor is written by the C handler itself (docs.python.org/3/library/signal.html).
    """
    lock = threading.Lock()
    told: list[bool] = []

    def tell() -> None:
        with lock:
            if not told:
                told.append(True)
                _tell(name)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, but not inside MXNet: an exception in a callback of its library ends in a crash."""
        while frame is not None:
            if "mxnet" in Path(frame.f_code.co_filename).parts:
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    # Where the caller ignores SIGINT, as a shell does for its background jobs, so does the command.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)

    def watch() -> None:
        while True:
            number: Any = os.read(reader, 1)
            if number and number[0] == signal.SIGINT:
                break
        time.sleep(_GRACE)
        tell()
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    return tell
