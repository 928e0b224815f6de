"""Run Python in a process of its own, which finds this checkout and the tests' helpers; wait for what others do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]


def python(
    *arguments: object, first: Sequence[object] = (), cwd: Path | None = None, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments; it searches the folders ``first`` before all others, and has the variables."""
    folders = [*map(str, (*first, ROOT, HELPERS)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **variables}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(*arguments: object, **words: object) -> str:
    """Return what it prints; fail the test where it fails."""
    done = python(*arguments, **words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command_lines() -> Iterator[str]:
    """Yield the command line of every process."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            yield file.read_text(errors="replace").replace("\0", " ")


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until the condition holds; fail the test where it does not within that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def has_ended(word: str, seconds: float = 60) -> bool:
    """Wait until no process has the word in its command line; False where one still has."""
    end = time.monotonic() + seconds
    while any(word in command for command in command_lines()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> None:
    """Put a program of that name, which runs Python code that may use sys, in front of PATH."""
    program = folder / "bin" / name
    program.parent.mkdir()
    script = program.with_suffix(".py")
    script.write_text(f"import sys\n{code}\n")
    # The path in a shebang ends at its first space.
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(script)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
