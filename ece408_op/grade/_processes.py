"""Programs that run under the supervisor (native/supervisor.cpp): its commands and its reports."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ._errors import StoppedError


@dataclass
class Process:
    """A started program. ``had`` and ``lacks`` name the means of containment that this system gave, and did not."""

    process: subprocess.Popen
    control: socket.socket
    cgroup: Path | None
    user: socket.socket | None
    had: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    #: "exit 0", "signal 11" and the like, once the program has ended.
    ended: str | None = None
    #: Did it run while it was stopped?
    woke: bool = False
    failed: str = ""
    #: The processes that it is one of until it has ended.
    running: Processes | None = None
    _rest: str = ""

    def wait_for(self, word: str, seconds: float) -> bool:
        """Read the supervisor's reports until that word or the end; False where neither came in time."""
        deadline = time.monotonic() + seconds
        while self.ended is None:
            while "\n" in self._rest:
                line, _, self._rest = self._rest.partition("\n")
                self._take(line)
                if line == word:
                    return True
                if self.ended is not None:
                    return word == "ended"
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.control], [], [], left)[0]:
                return False
            data = self.control.recv(4096)
            if not data:
                self.ended = self.ended or "lost"
            self._rest += data.decode(errors="replace")
        return word == "ended"

    def begin(self) -> None:
        """Let the supervisor start the program, in the cgroup if there is one."""
        if self.wait_for("ready", 30.0) and self.cgroup is not None:
            for pid in self._pids():
                (self.cgroup / "cgroup.procs").write_text(str(pid))
        self._send(b"b")

    def stop(self, seconds: float = 5.0) -> bool:
        """Stop every process inside; False where the program has ended."""
        self._send(b"s")
        return self.wait_for("stopped", seconds)

    def go(self) -> None:
        """Let them run again."""
        self._send(b"g")

    def kill(self) -> None:
        """Kill everything inside without waiting; any thread may call this."""
        self._send(b"k")

    def end(self, seconds: float = 10.0) -> str:
        """Kill everything inside and return how the program had ended: "exit N", "signal N" or "lost"."""
        self.kill()
        self.wait_for("ended", seconds)
        if self.running is not None:
            self.running.remove(self)
        self.control.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.cgroup is not None:
            _remove(self.cgroup)
        if self.user is not None:
            self.user.close()
        return self.ended or "lost"

    def data_bytes(self) -> int:
        """Bytes that the program may write to and shares with no other; 0 where the system does not say."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._pids()[-1]}/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def _pids(self) -> list[int]:
        """bubblewrap, the supervisor and the program, as far as they run."""
        pids = [self.process.pid]
        with suppress(OSError):
            while children := Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children").read_text().split():
                pids.append(int(children[0]))
        return pids

    def _send(self, command: bytes) -> None:
        try:
            self.control.send(command)
        except OSError:
            self.ended = self.ended or "lost"

    def _take(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind in ("exit", "signal"):
            self.ended = line
        elif kind == "failed":
            self.failed = rest
        elif kind == "woke":
            self.woke = True


class Processes:
    """The programs that run, so that an interrupted harness can end them all; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Process] = []
        self._closed = False

    def add(self, process: Process) -> None:
        """Add one; it is killed at once where all have been ended."""
        with self._lock:
            process.running = self
            self._all.append(process)
            if self._closed:
                process.kill()

    def remove(self, process: Process) -> None:
        """Remove one that has ended, before its control socket is closed."""
        with self._lock:
            self._all = [one for one in self._all if one is not process]

    def require_open(self) -> None:
        """Raise StoppedError where all have been ended; long computations of the harness call this too."""
        if self._closed:
            raise StoppedError("the grading was interrupted")

    def close(self) -> None:
        """End all of them, and let no other start."""
        with self._lock:
            self._closed = True
            for one in self._all:
                one.kill()


def _remove(cgroup: Path) -> None:
    """A dying process is counted for a moment; a folder that stays is empty and harmless."""
    for _ in range(20):
        with suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.01)
