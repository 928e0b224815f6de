"""Code shared by all commands: exit codes, handling of Ctrl-C, and the table for ``python -m ece408_op COMMAND``."""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

OK, FAILED, USAGE, CANNOT, INTERRUPTED = 0, 1, 2, 3, 128 + signal.SIGINT

#: The module of each command's function ``main``, which for milestones takes the milestone's name.
COMMANDS = {
    **dict.fromkeys(("m1", "m2", "m3", "m4"), "milestones.cli"),
    "bench": "bench.__main__",
    "grade": "grade.__main__",
    "lab": "lab.__main__",
    "profile": "profile.__main__",
    "report": "report.__main__",
}

#: These commands handle Ctrl-C themselves, because ending their child processes may take longer than _GRACE.
_HANDLE_INTERRUPTS = {"grade", "report"}

_MOST_DIGITS = 20

#: Seconds from Ctrl-C until the process is ended by force.
_GRACE = 0.7


def run(name: str) -> int:
    """Import and run one of COMMANDS with this process's arguments; return its exit code."""
    _tolerate_closed_streams()
    milestone = COMMANDS[name] == "milestones.cli"
    program = f"{name}.py" if milestone else f"ece408-{name}"

    def work() -> int:
        with _exit_on_interrupt(program):
            main: Callable[..., int] = import_module(f"ece408_op.{COMMANDS[name]}").main
        return main(name) if milestone else main()

    return work() if name in _HANDLE_INTERRUPTS else guard(program, work)


#: The entry points of ece408-bench, ece408-grade, ece408-lab and ece408-report.
bench, grade, lab, report = (partial(run, name) for name in ("bench", "grade", "lab", "report"))


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a function for argparse's ``type`` that parses a whole number from ``least`` to ``most``."""

    def parsed(word: str) -> int:
        # Python refuses to parse a number with thousands of digits.
        if not word.isdecimal() or len(word) > _MOST_DIGITS or not least <= int(word) <= most:
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {word!r}")
        return int(word)

    return parsed


def interrupt_on_sigterm() -> None:
    """Make SIGTERM and SIGHUP, which comes when the terminal is closed, end a command like Ctrl-C.

    The main thread raises KeyboardInterrupt with the signal's number.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in (signal.SIGTERM, signal.SIGHUP):  # a second signal would interrupt the clean-up
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    with suppress(ValueError):  # only the main thread can set a handler; in others, the caller has to react
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, interrupt)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code of a command that a signal ended: 128 plus its number, which Ctrl-C's interrupt lacks."""
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, with escapes for characters that stdout's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        print(line)


def guard(program: str, work: Callable[[], int]) -> int:
    """Run a command as the only work of this process; return its exit code.

    Ctrl-C prints one line with the program's name, and the exit code is 130. Python cannot interrupt a computation of
    MXNet or of a kernel, nor MXNet's wait at exit. So a thread ends the process after _GRACE seconds.
    """
    _tolerate_closed_streams()
    with _exit_on_interrupt(program):
        print_once = _watch_interrupts(program)
    try:
        # If the caller ignores SIGINT, as a shell does for background jobs, the command ignores it too.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        return work()
    except KeyboardInterrupt as interrupt:
        print_once()
        return exit_code(interrupt)
    finally:
        # From here on only the watching thread reacts: Python would print an exception raised at exit, and go on.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: None)


class _Stream(io.FileIO):
    """The file of stdout or stderr. A reader that has ended, as head, or a closed terminal is no error.

    The rest goes to /dev/null.
    """

    #: Whether stdout's reader has ended.
    unread = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and (error.errno != errno.EIO or not _is_device(self)):
                raise
            _Stream.unread |= self.fileno() == 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return super().write(data)


def _is_device(file: io.FileIO) -> bool:
    return stat.S_ISCHR(os.fstat(file.fileno()).st_mode)


def is_read() -> bool:
    """Return whether somebody can still read stdout: not if the program that reads the pipe has ended."""
    polled = select.poll()
    polled.register(1, 0)
    return not (_Stream.unread or polled.poll(0))


def _tolerate_closed_streams() -> None:
    """Send what is written to a stdout or stderr without a reader to /dev/null, so that the command does its work."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the shell closed it, as by >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif stream is getattr(sys, f"__{name}__"):
            file = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


@contextmanager
def _exit_on_interrupt(program: str) -> Iterator[None]:
    """Inside the context, Ctrl-C ends the process without cleaning up.

    This is for imports before a command's work: NumPy turns a KeyboardInterrupt during its import into an ImportError
    with a message of many lines.
    """
    before = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        _print_interrupted(program)
        os._exit(INTERRUPTED)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_interrupted(program: str) -> None:
    # The current line of a terminal may hold a progress bar and the ^C that the user typed.
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}{program}: interrupted", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not inside MXNet: an exception in a callback crashes MXNet's library."""
    while frame is not None:
        if "mxnet" in Path(frame.f_code.co_filename).parts:
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _watch_interrupts(program: str) -> Callable[[], None]:
    """Start the thread that ends the process after Ctrl-C; return a function that prints the line, but only once.

    Python runs a signal's handler between two bytecodes of the main thread, so not while that thread waits in MXNet.
    But the C handler writes to the wakeup descriptor at once (docs.python.org/3/library/signal.html), which the thread
    reads.
    """
    printed = threading.Lock()

    def print_once() -> None:
        if printed.acquire(blocking=False):
            _print_interrupted(program)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) != bytes([signal.SIGINT]):
            pass
        time.sleep(_GRACE)
        print_once()
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    return print_once
