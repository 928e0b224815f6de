"""The harness's side of one worker: its clock, its commands, and what the worker's end means."""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import signal
import site
import socket
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ece408_op.runtime.occupancy import KernelNotes

from . import EndedError, HarnessError, sandbox
from .arrays import GUARD, Arrays
from .sandbox import LimitsSpec, Tools

_PARTS = ("ece408_op", "kernels", "models", "data")  # what of a checkout belongs to the package


def python_program(file: Path) -> Program:
    """The worker's program for the file: it sees Python, this package and the file's folder."""
    root = Path(__file__).resolve().parents[2]
    # Of sys.path only Python's own folders: the caller's may hold a class and the grader's file.
    own = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    own |= set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) - {"", str(root)}
    paths = [str(root), *(path for path in sys.path if path in own or path.endswith("lib-dynload"))]
    seen = {Path(sys.prefix), Path(sys.base_prefix), *map(Path, paths[1:]), *(root / part for part in _PARTS)}
    # The sandbox has a /tmp of its own; where PYTHONPATH names /tmp, the caller's stays out.
    there = {path for path in seen if path.exists() and not Path("/tmp").is_relative_to(path.resolve())}
    outermost = sorted(path for path in there if there.isdisjoint(path.parents))
    return Program(str(file), (*outermost, file.parent), tuple(paths))


#: A worker may take this long, in seconds, to begin, with a GPU's first context in its process, and to fill an output.
BEGIN_SECONDS = 60.0
#: Empty calls that wake the processes on the way and measure the overhead. On the CPU each of a few in a row may wait
#: milliseconds for other work, so there are more.
_PINGS, _CPU_PINGS = 5, 40
#: A message from the worker has fewer bytes. For some seconds the harness polls for a GPU's reply instead of sleeping.
_LONGEST, _SPIN_SECONDS = 1 << 14, 0.1
_SEND_SECONDS = 5.0  # a command may wait for those before it, which a submission can answer and leave in the socket
#: How often a worker's memory in RAM is read. CUDA needs too much address space for a limit of that, and pinned memory
#: is in no cgroup.
_LOOK_SECONDS = 0.05
_KEPT_BYTES = 1 << 16  # this many bytes of the printed text are kept
#: The work after a command, in words; after other commands, a worker does nothing.
_DOING, _NOTHING = {"load": "loading it", "run": "a call of forward"}, "the time between two calls"
#: Answers that end the submission.
_FAILURES = {
    "unloadable": ("compile_error", "it cannot be loaded: {}"),
    "failed": ("crashed", "forward threw: {}"),
    "refused": ("unsupported", "it says that it does not take this layer: {}"),
    "cuda": ("crashed", "the GPU reported {} after forward"),
}


@dataclass(frozen=True)
class Call:
    """Seconds of one call of forward by the harness's clock and by the worker's; CUDA's error left unread."""

    seconds: float
    worker_seconds: float
    note: str = ""


@dataclass(frozen=True)
class Program:
    """What a worker runs: a compiled library, or a kernel in Python with its sys.path; and the paths that it sees.

    ``source`` is the submission's text. Its workers have run the seconds ``used`` to load it and in its calls, and may
    run ``most``. ``arithmetic`` names the units that it computes with, a key of ``core.roofline.PRODUCTS``; ``notes``
    are what ptxas reports on its kernels.
    """

    what: str
    seen: tuple[Path, ...] = ()
    paths: tuple[str, ...] = ()
    source: str = ""
    used: list[float] = field(default_factory=list)
    most: float = math.inf
    arithmetic: str = "fp32"
    notes: tuple[KernelNotes, ...] = ()


class Worker(AbstractContextManager["Worker"]):
    """A process that holds one submission and the buffers of its layers. Between commands it is stopped."""

    def __init__(
        self, tools: Tools, program: Program, buffers: Sequence[Arrays], folder: Path, spec: LimitsSpec
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_SECONDS)
        self._fault, self._stopped, self._loads = "", False, False
        self._program, self._on_gpu = program, buffers[0].gpu
        #: Seconds of an empty call, measured before the submission is loaded and could make it slow.
        self.overhead = 0.0
        arrays = [array for one in buffers for array in one.arrays]
        limits = replace(spec, memory_bytes=spec.memory_bytes + sum(one.problem.bytes for one in buffers))
        seconds = int(spec.run_seconds * 64 * len(buffers)) + 60  # of a processor
        self._most = limits.memory_bytes - limits.disk_bytes
        self._size = self._growth = 0
        self._output = folder / "printed.txt"
        python, command = bool(program.paths), [str(tools.folder / "worker")]
        if python:
            quiet = ("-W", "ignore:MXNet is not installed:UserWarning")
            command = [sys.executable, "-I", "-B", "-u", *quiet, str(Path(__file__).with_name("python_worker.py"))]
            command += [str(tools.folder / "worker.so"), os.pathsep.join(program.paths)]
        command += [program.what, str(theirs.fileno()), "gpu" if self._on_gpu else "cpu", str(buffers[0].guard)]
        for one in buffers:
            command += [*map(str, one.problem.sizes.values()), *(array.handle for array in one.arrays)]
        shared = [theirs.fileno(), *(array.descriptor for array in arrays)]
        guards, number = 2 * GUARD * len(arrays), buffers[0].number
        with suppress(FileNotFoundError):  # a program of the harness's own user may have changed its mode
            self._output.chmod(0o600)
        with theirs, open(self._output, "ab") as printed:
            self.process = sandbox.start(
                tools, command, limits, seconds, printed, program.seen, shared, number, guards, python=python
            )

    def __exit__(self, *error: object) -> None:
        self.process.end()
        self._socket.close()

    def begin(self) -> None:
        """Wait until the buffers are mapped, and measure an empty call, before anything of the submission runs."""
        self.call(0, BEGIN_SECONDS, "empty")
        self.overhead = self.ping(_PINGS if self._on_gpu else _CPU_PINGS)

    def call(self, layer: int, seconds: float, word: str = "run") -> Call:
        """Let the worker run for one command on that layer, see native/worker.cpp, and stop it.

        Raises EndedError where it does not come back in time; HarnessError where nothing of the submission has run.
        """
        try:
            self._nothing_waits()
            self._loads = self._loads or word == "load"
            return self._timed(layer, seconds, word)
        except (EndedError, ConnectionError) as error:
            if self._loads:
                raise
            raise HarnessError(f"expected the worker to begin, but {error}: {self.printed}") from None

    def _timed(self, layer: int, seconds: float, word: str) -> Call:
        if self._loads:
            left = self._program.most - sum(self._program.used)
            if left <= 0:
                raise EndedError("timed_out", f"all its calls took longer than their limit of {self._program.most:g} s")
            seconds = min(seconds, left)
        nonce = secrets.token_hex(8)
        start = time.perf_counter()
        self._go()
        try:
            self._socket.send(f"{word} {nonce} {layer}".encode())
        except OSError:  # it has ended, or reads no commands
            raise self._reason_of_end(_NOTHING) from None
        try:
            answer = self._answer(time.monotonic() + seconds, _DOING.get(word, _NOTHING))
        finally:
            end = time.perf_counter()
            if self._loads:
                self._program.used.append(end - start)
        self._stopped = self.process.stop()
        if not self._stopped:
            raise self._reason_of_end("the time after a call")
        if not self._on_gpu:
            # Threads that go on after the answer are timed until they are stopped.
            end = time.perf_counter()
        kind, _, rest = answer.partition(" ")
        if kind in _FAILURES:
            status, text = _FAILURES[kind]
            raise EndedError(status, text.format(" ".join(rest.split())))
        match = _DONE.fullmatch(answer)
        if match is None or match["nonce"] != nonce:
            raise _forged(answer)
        self._nothing_waits()
        return Call(end - start, int(match["nanoseconds"]) / 1e9, match["note"] or "")

    def ping(self, count: int = _PINGS) -> float:
        """Seconds of a call that does nothing, when every process on the way has just run.

        On the CPU, which others use too, the least: more than the overhead must not be subtracted.
        """
        seconds = [self.call(0, 10.0, "empty").seconds for _ in range(count)]
        return statistics.median(seconds) if self._on_gpu else min(seconds)

    def idle(self, pause: float, seconds: float) -> None:
        """Let the worker run with nothing to do, so that work left behind shows; ``seconds`` bounds its answer."""
        self._go()
        time.sleep(pause)
        self.call(0, seconds, "empty")

    def note_size(self) -> None:
        """Note how large it is, at its beginning and after each round; a GPU's memory is watched elsewhere."""
        size = 0 if self._on_gpu else self.process.pages()[1]
        self._growth, self._size = (size - self._size if self._size else 0), size

    @property
    def printed(self) -> str:
        """The beginning of what the submission printed."""
        return sandbox.beginning(self._output, _KEPT_BYTES)

    @property
    def outgrown(self) -> bool:
        """Would it have reached its memory limit by now, had it grown as in its last round?"""
        return self._growth > 0 and self._size + 2 * self._growth > self._most

    def _go(self) -> None:
        self._stopped = False
        self.process.send(signal.SIGCONT)

    def _nothing_waits(self) -> None:
        if self._stopped and self.process.runs():
            raise EndedError("tampered", "its process ran on by itself while the harness had stopped it")
        if select.select([self._socket], [], [], 0)[0]:
            self._fault = self._received()
            if self._fault and not _FAULT.fullmatch(self._fault):
                raise _forged(self._fault)
            raise self._reason_of_end(_NOTHING)

    def _answer(self, deadline: float, doing: str) -> str:
        awake = time.monotonic() + _SPIN_SECONDS if self._on_gpu else 0.0
        while True:
            now = time.monotonic()
            pause = 0 if now < awake else min(_LOOK_SECONDS, max(0.0, deadline - now))
            if select.select([self._socket], [], [], pause)[0]:
                message = self._received()
                if not message:
                    raise self._reason_of_end(doing)
                if not _FAULT.fullmatch(message):
                    return message
                self._fault = message
            elif now >= awake and self._on_gpu and self.process.pages()[0] > self._most:
                raise EndedError("crashed", f"{_SIGNALS[signal.SIGKILL]}, during {doing}")
            if now >= max(awake, deadline):  # also where reports of faults come without end
                raise EndedError("timed_out", f"{doing} took longer than its limit, and was ended")

    def _received(self) -> str:
        with suppress(ConnectionResetError):  # it ended with a command unread: what it had sent comes next
            return self._socket.recv(_LONGEST).decode(errors="replace")
        return self._socket.recv(_LONGEST).decode(errors="replace")

    def _reason_of_end(self, doing: str) -> EndedError:
        if not self.process.wait(5.0):
            return EndedError("tampered", f"the worker's socket was closed during {doing}, though the process lived on")
        kind, _, number = (self.process.ended or "lost").partition(" ")
        fault = _FAULT.fullmatch(self._fault)
        if fault and fault[2] in _ARRAYS:
            return _outside(_ARRAYS[fault[2]], int(fault[3]), int(fault[4]), doing)
        said = f"its process was lost{f' ({number})' if number else ''}"
        if kind == "exit":
            said = f"it ended its process itself (exit code {number})"
        elif fault and fault[1] == number and fault[2] == "stack":
            said = _STACK
        elif kind == "signal":
            said = _SIGNALS.get(int(number), f"it was ended by signal {number}")
        used_up = (kind, number) == ("signal", str(int(signal.SIGXCPU)))
        return EndedError("timed_out" if used_up else "crashed", f"{said}, during {doing}")


def _forged(line: str) -> EndedError:
    return EndedError("tampered", f"a message came that the worker does not send: {line[:80]!r}")


def _outside(full: str, offset: int, elements: int, doing: str) -> EndedError:
    if 0 <= offset < elements:
        did = f"unmapped {full}" if full == _ARRAYS["y"] else f"wrote into {full}, which is const"
        return EndedError("tampered", f"it {did}, at element {offset} of {elements}")
    where = f"{-offset} before the first" if offset < 0 else f"{offset - elements + 1} past the last"
    text = f"it touched memory outside {full}, {where} of its {elements} elements, in {doing}"
    if full != _ARRAYS["w"] and offset >= 0:
        text += "; y has H - K + 1 rows and W - K + 1 columns: do the loops end there?"
    return EndedError("out_of_bounds", text)


#: Its answer to a call that came back.
_DONE = re.compile(r"done (?P<nonce>[0-9a-f]{16}) (?P<nanoseconds>\d{1,18}) (?:-|(?P<note>[A-Za-z]{4,80}))")
#: The worker's report of a fault: the signal, the array that is near, the element, and the array's elements.
_FAULT = re.compile(r"fault (\d{1,2}) (stack|elsewhere|[xyw]) (-?\d{1,18}) (\d{1,18})")
_ARRAYS = {"x": "its input x", "w": "the filters w", "y": "the output y"}
#: What ended a process, in words.
_STACK = "its stack was too small: an array within a function is too large, or a function calls itself without end"
_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "it touched memory that it does not own (segmentation fault)",
    signal.SIGBUS: "it touched memory that is not there (bus error)",
    signal.SIGFPE: "it divided an integer by zero (SIGFPE)",
    signal.SIGABRT: "it was aborted (a failed assert, an uncaught exception, or a broken heap)",
    signal.SIGILL: "it ran an instruction that this processor lacks, or fell off a function's end (SIGILL)",
    signal.SIGSYS: "it made a forbidden system call, such as starting another process",
    signal.SIGKILL: "it was killed, most likely for using more memory than its limit",
    signal.SIGXCPU: "it used more processor time than its limit",
    signal.SIGXFSZ: "it wrote a file larger than its limit",
}
