"""Runs the commands of a report, one after the other, and keeps the result of each in a file of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ece408_op.bench import results
from ece408_op.commands import CANNOT as EXIT_CANNOT
from ece408_op.commands import FAILED as EXIT_FAILED
from ece408_op.commands import OK, interrupt_on_sigterm
from ece408_op.data.atomic import write_text
from ece408_op.errors import DataError, DeviceError

from ._commands import MACHINE, Command

VERSION = 3
DONE, FAILED, CANNOT = "done", "failed", "cannot"

#: Characters that are kept of what a failed command wrote to stderr.
_LAST = 500

Run = dict[str, Any]


def run_all(commands: Sequence[Command], folder: Path, limit: float) -> None:
    """Run every command that has no result in the folder yet; end a command after ``limit`` seconds.

    Commands that failed, or that the machine could not run, run again. A progress bar goes to stderr where that is a
    terminal. Raises DataError where the folder's results are of another machine, DeviceError where the machine cannot
    be described, OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    interrupt_on_sigterm()  # it ends the running command too
    cannot = _run_machine(next(one for one in commands if one.name == MACHINE), folder, limit)["cannot"]
    with tqdm([one for one in commands if one.name != MACHINE], unit="run", disable=None) as bar:
        for command in bar:
            bar.set_description(command.name)
            kept = read(folder, command.name)
            if kept is not None and kept["status"] == DONE and kept["command"] == command.line:
                continue
            reason = cannot.get(command.needs)
            write(folder, command, _run(command, limit) if reason is None else _record(CANNOT, reason))


def read(folder: Path, name: str) -> Run | None:
    """A kept run; None where there is none. Raises DataError, which names the file, for anything else."""
    path = folder / f"{name}.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["version"] != VERSION or run["status"] not in (DONE, FAILED, CANNOT):
            raise ValueError(f"version {run['version']}, status {run['status']!r}")
        return dict(run)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected a run of ece408-report, got {error!r}; remove the file") from error


def write(folder: Path, command: Command, run: Run) -> None:
    """Keep a run: its status, the reason where it has no result, the result, and what the command printed."""
    data = {"version": VERSION, "command": command.line, **run}
    write_text(folder / f"{command.name}.json", json.dumps(data, indent=1) + "\n")


def _record(status: str, reason: str = "", result: Any = None, printed: str = "") -> Run:
    return {"status": status, "reason": reason, "result": result, "printed": printed}


def _run(command: Command, limit: float) -> Run:
    """Run a command in a process of its own; every failure becomes the status and reason of the run."""
    with tempfile.TemporaryDirectory(prefix="ece408-report-") as scratch:
        path = Path(scratch) / "result.json"
        # In a session of its own, so that the processes that it starts end with it.
        process = subprocess.Popen(
            [sys.executable, *command.arguments, "--json", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return _record(FAILED, f"stopped after {limit:g} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reason = errors.strip()[-_LAST:] or f"exit code {process.returncode}"
        if process.returncode == EXIT_CANNOT:
            return _record(CANNOT, reason.splitlines()[-1])
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"complete": False}
        # ece408-bench exits with 1 where an output was wrong; its results are complete nevertheless.
        if process.returncode not in (OK, EXIT_FAILED) or not result.get("complete", True):
            return _record(FAILED, reason)
        return _record(DONE, "", result, printed)


def _run_machine(command: Command, folder: Path, limit: float) -> dict[str, Any]:
    """Describe the machine, which must be the one of the folder's results."""
    kept, run = read(folder, command.name), _run(command, limit)
    if run["status"] != DONE:
        raise DeviceError(f"the report: expected {command.line} to run, got: {run['reason']}")
    names = [_name(one["result"]) for one in (kept, run) if one is not None]
    if names[0] != names[-1]:
        raise DataError(
            f"{folder}: expected results of this machine ({names[-1]}), got results of {names[0]}; "
            "choose another --out, or write the page with --render"
        )
    write(folder, command, run)
    return dict(run["result"])


def _name(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    gpu = machine["gpu"]["name"] if machine["gpu"] else "no GPU"
    return f"{machine['cpu']}, {machine['cores']} cores, {gpu}"


class Runs:
    """The kept results of commands; a figure that no run gave is None."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self.commands = commands
        self._runs = {command.name: read(folder, command.name) for command in commands}

    def result(self, name: str) -> Any:
        """The result of the command of that name; None where it was not run or failed."""
        run = self._runs.get(name)
        return run["result"] if run and run["status"] == DONE else None

    def printed(self, name: str) -> str:
        """What that command wrote to stdout; empty where it was not run or failed."""
        run = self._runs.get(name)
        return str(run["printed"]).strip() if run and run["status"] == DONE else ""

    def missing(self) -> dict[str, list[str]]:
        """The command lines without a result, by the reason."""
        found: dict[str, list[str]] = {}
        for command in self.commands:
            run = self._runs[command.name]
            if run is None or run["status"] != DONE:
                reason = " ".join(run["reason"].split()) if run else "not run: stopped before, or only rendered"
                found.setdefault(reason, []).append(command.line)
        return found

    def case(self, context: str, layer: str, size: int) -> results.Case | None:
        """What ece408-bench measured of a layer, as CxHxWxMxK."""
        found = self.result(f"layers-{context}-{layer}-{size}")
        return results.from_data(found).cases[0] if found else None
