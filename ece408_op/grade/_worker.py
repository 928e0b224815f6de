"""The parent's side of one worker: its clock, its commands, and what it makes of the worker's end."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ece408_op.problem import ConvProblem

from . import _sandbox
from ._buffers import GUARD
from ._errors import HarnessError

#: A GPU's first context in a process may take so long, in seconds, beside the limit for loading.
_BEGIN_SECONDS = 60.0
#: Empty calls that wake the processes on the way, and tell what such a call takes; and on the CPU, where each of a few
#: in a row may wait its turn behind other work, milliseconds long, how many tell it.
_PINGS, _CPU_PINGS = 5, 40
#: A line of the runner's is shorter than so many bytes.
_LONGEST = 1 << 14
#: How long the parent waits for a GPU's reply without going to sleep.
_SPIN_SECONDS = 0.1
#: A printed text is kept up to so many bytes from its beginning.
KEPT_BYTES = 1 << 16


class EndedError(Exception):
    """The worker is no more, or may not go on: the status that this means, and the reason in words."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Call:
    """Seconds of one call of forward: by the parent's clock, and as the worker has it; CUDA's error left unread.

    ``late``: seconds for which a GPU was at the worker's work after the answer, where that is beyond doubt.
    """

    seconds: float
    claimed: float
    note: str = ""
    late: float = 0.0


@dataclass(frozen=True)
class Program:
    """What a worker is: a command, the folders that it sees, and whether Python's packages are hidden from it."""

    command: tuple[str, ...]
    seen: tuple[Path, ...]
    hidden: bool = True
    #: A folder of the harness's own that means nothing to the author of a submission.
    folder: str = ""

    def shown(self, text: str) -> str:
        """A message without that folder."""
        return text.replace(self.folder, "") if self.folder else text


class Worker:
    """A process that holds one submission and the buffers of its layers. It is stopped except during a call."""

    def __init__(
        self,
        tools: _sandbox.Tools,
        program: Program,
        problems: Sequence[ConvProblem],
        handles: Sequence[Sequence[str]],
        folder: Path,
        limits: _sandbox.Limits,
        *,
        descriptors: Sequence[int] = (),
        guard: int = GUARD,
        slot: int = 0,
        device: int | None = None,
    ) -> None:
        root = folder / "root"
        root.mkdir(exist_ok=True)
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        self._text, self._fault = b"", ""
        self._on_gpu = device is not None
        #: Seconds of an empty call, measured before the submission is loaded and could make it slow.
        self.overhead = 0.0
        self._spin = 0.0 if device is None else _SPIN_SECONDS
        self._most = limits.memory
        self._size = self._growth = 0
        self.printed = folder / "printed.txt"
        command = [*program.command, str(commands), str(replies), str(guard)]
        for p, places in zip(problems, handles):
            command += map(str, (p.batch, p.channels, p.height, p.width, p.filters, p.kernel, *places))
        try:
            with open(self.printed, "ab") as printed:
                self.inside = _sandbox.start(
                    tools,
                    command,
                    root=root,
                    limits=limits,
                    stdout=printed,
                    stderr=printed,
                    seen=program.seen,
                    descriptors=(commands, replies, *descriptors),
                    slot=slot,
                    device=device,
                    hidden=program.hidden,
                )
        finally:
            os.close(commands)
            os.close(replies)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside.end()
        os.close(self._commands)
        os.close(self._replies)

    def begin(self) -> None:
        """Wait until the buffers are mapped, and see what an empty call takes, before anything of the submission runs.

        Raises HarnessError where the runner cannot begin.
        """
        with self._sound():
            line = self._line(time.monotonic() + _BEGIN_SECONDS, "beginning")
            if line != "open":
                raise HarnessError(f"expected the worker to begin, got {line}")
            self.overhead = self.ping(_PINGS if self._on_gpu else _CPU_PINGS)

    def touch(self, layer: int) -> None:
        """Have the runner fill a GPU's output with zeros, which it has done when it answers; before load alone."""
        with self._sound():
            self.call(layer, _BEGIN_SECONDS, "touch")

    def load(self, seconds: float) -> None:
        """Wait until the submission is loaded, its static constructors run, and stop the worker.

        Raises EndedError where that fails or takes longer than so many seconds.
        """
        with self._sound():
            self.inside.go()
            os.write(self._commands, b"load\n")
        line = self._line(time.monotonic() + seconds, "loading it")
        if line.startswith("unloadable"):
            raise EndedError("compile_error", f"it cannot be loaded: {line.partition(' ')[2]}")
        if line != "ready":
            raise EndedError("tampered", f"a message came that the runner does not send while loading: {line!r}")
        self._stop()

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """What goes wrong here is the harness's fault: nothing of the submission has run."""
        try:
            yield
        except (EndedError, BrokenPipeError) as ended:
            raise HarnessError(f"expected the worker to begin, but {ended}: {kept(self.printed)}") from None

    def call(self, layer: int, seconds: float, word: str = "run") -> Call:
        """Let the worker run for one call on that layer, and stop it; the word "empty" has it do nothing.

        Raises EndedError where it does not come back in time.
        """
        self._nothing_waits()
        nonce = secrets.token_hex(8)
        start = time.perf_counter()
        self.inside.go()
        try:
            os.write(self._commands, f"{word} {nonce} {layer}\n".encode())
        except BrokenPipeError:
            raise self._reason_of_end("between two calls") from None
        line = self._line(time.monotonic() + seconds, "a call of forward")
        end = time.perf_counter()
        if not self._on_gpu:
            # Threads that go on behind the answer are timed until they stand still.
            self._stop()
            end = time.perf_counter()
        word, _, rest = line.partition(" ")
        if word == "failed":
            raise EndedError("crashed", f"forward threw: {rest}")
        if word == "refused":
            raise EndedError("unsupported", f"it says that it does not take this layer: {rest}")
        if word == "cuda":
            raise _cuda_ended(rest)
        match = re.fullmatch(rf"done {nonce} (\d+)(?: (-|[A-Za-z]{{4,80}}))?", line)
        if match is None:
            raise EndedError("tampered", f"a message came that the runner does not send: {line[:80]!r}")
        if self._on_gpu:
            self._stop()
        self._nothing_waits()
        note = (match.group(2) or "-").replace("-", "")
        return Call(end - start, int(match.group(1)) / 1e9, note)

    def ping(self, count: int = _PINGS) -> float:
        """Seconds of a call that does nothing, when every process on the way has just run.

        On the CPU, which others use too, the least: what is taken off must not be more than there was.
        """
        seconds = [self.call(0, 10.0, "empty").seconds for _ in range(count)]
        return statistics.median(seconds) if self._on_gpu else min(seconds)

    def idle(self, pause: float, seconds: float) -> None:
        """Let the worker run with nothing to do, so that work left behind comes to light; seconds bounds its answer."""
        self.inside.go()
        time.sleep(pause)
        self.call(0, seconds, "empty")

    def note_size(self) -> None:
        """Note how large it is, at its beginning and after each of its rounds; on a GPU others look after memory."""
        size = 0 if self._on_gpu else self.inside.data_bytes()
        self._growth, self._size = (size - self._size if self._size else 0), size

    @property
    def outgrown(self) -> bool:
        """Would it, growing on as in its last round, have come to the end of its memory by now?"""
        return self._growth > 0 and self._size + 2 * self._growth > self._most

    def _stop(self) -> None:
        if not self.inside.stop():
            raise self._reason_of_end("after a call")

    def _nothing_waits(self) -> None:
        if self._text or select.select([self._replies], [], [], 0)[0]:
            data = self._text or os.read(self._replies, 200)
            if data:
                if data.startswith(b"fault"):
                    self._fault = data.decode(errors="replace").strip()
                    raise self._reason_of_end("outside of a call")
                raise EndedError("tampered", f"a message came that nobody had asked for: {data[:80]!r}")
            raise self._reason_of_end("outside of a call")

    def _line(self, deadline: float, doing: str) -> str:
        while True:
            while b"\n" not in self._text:
                left = deadline - time.monotonic()
                if left <= 0 or not (self._here_soon() or select.select([self._replies], [], [], left)[0]):
                    raise EndedError("timed_out", f"{doing} took longer than its limit, and was ended")
                data = os.read(self._replies, 4096)
                if not data:
                    raise self._reason_of_end(doing)
                self._text += data
                if len(self._text) > _LONGEST:
                    raise EndedError("tampered", f"a message came that the runner does not send: {data[:80]!r}")
            raw, _, self._text = self._text.partition(b"\n")
            line = raw.decode(errors="replace")
            if not line.startswith("fault"):
                return line
            self._fault = line

    def _here_soon(self) -> bool:
        """Look for a reply without going to sleep, for as long as a call on a GPU may take."""
        end = time.monotonic() + self._spin
        while time.monotonic() < end:
            if select.select([self._replies], [], [], 0)[0]:
                return True
        return False

    def _reason_of_end(self, doing: str) -> EndedError:
        if not self.inside.wait_for("ended", 5.0):
            self.inside.end()
            return EndedError("tampered", f"the runner's pipe was closed during {doing}, though the process lived on")
        if self.inside.woke:
            return EndedError("tampered", "its process ran on by itself while the harness had stopped it")
        kind, _, number = (self.inside.ended or "lost").partition(" ")
        if kind == "signal" and re.fullmatch(rf"fault {number} stack 0 0", self._fault):
            return EndedError("crashed", f"{_STACK}, during {doing}")
        place = re.fullmatch(r"fault (\d+) ([xyw]) (-?\d+) (\d+)", self._fault)
        if place is not None:
            return _fault(place.group(2), int(place.group(3)), int(place.group(4)), doing)
        if kind == "exit":
            return EndedError("crashed", f"it ended its process itself (exit code {number}) during {doing}")
        if kind == "signal":
            return _signal(int(number), doing)
        return EndedError("crashed", f"its process was lost during {doing}")


def kept(path: Path) -> str:
    """The beginning of what a submission printed."""
    try:
        with open(path, "rb") as file:
            return file.read(KEPT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _fault(name: str, offset: int, elements: int, doing: str) -> EndedError:
    full = {"x": "its input x", "w": "the filters w", "y": "the output y"}[name]
    if 0 <= offset < elements:
        return EndedError("tampered", f"it wrote into {full}, which is const, at element {offset} of {elements}")
    where = f"{-offset} before the first" if offset < 0 else f"{offset - elements + 1} past the last"
    hint = "" if name == "w" or offset < 0 else "; y has H - K + 1 rows and W - K + 1 columns: do the loops end there?"
    return EndedError(
        "out_of_bounds", f"it touched memory outside {full}, {where} of its {elements} elements, in {doing}{hint}"
    )


_STACK = "its stack was too small: an array within a function is too large, or a function calls itself without end"
_SIGNALS = {
    signal.SIGSEGV: "it touched memory that it does not own (segmentation fault)",
    signal.SIGBUS: "it touched memory that is not there (bus error)",
    signal.SIGFPE: "it divided an integer by zero (SIGFPE)",
    signal.SIGABRT: "it was aborted (a failed assert, an uncaught exception, or a broken heap)",
    signal.SIGILL: "it ran an instruction that this processor lacks, or fell off a function's end (SIGILL)",
    signal.SIGSYS: "it asked the system for what no submission may do, such as starting another process",
    signal.SIGKILL: "it was killed, most likely for using more memory than its limit",
    signal.SIGXCPU: "it used more processor time than its limit",
    signal.SIGXFSZ: "it wrote a file larger than its limit",
}


def _signal(number: int, doing: str) -> EndedError:
    known = {int(key): text for key, text in _SIGNALS.items()}
    status = "timed_out" if number == signal.SIGXCPU else "crashed"
    return EndedError(status, f"{known.get(number, f'it was ended by signal {number}')}, during {doing}")


def _cuda_ended(text: str) -> EndedError:
    return EndedError("crashed", f"the GPU reported {text} after forward")
