"""Describe the machine, run the commands of a report one after another, and keep the result of each in a file."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ece408_op.bench import results
from ece408_op.commands import CANNOT as EXIT_CANNOT
from ece408_op.commands import FAILED as EXIT_FAILED
from ece408_op.commands import OK, interrupt_on_sigterm
from ece408_op.data.atomic import write_text
from ece408_op.errors import DataError
from ece408_op.plugin import bridge, mxnet_import
from ece408_op.profile import counters

from ._commands import COUNTERS, GPU, Command

VERSION = 4
DONE, FAILED, CANNOT = "done", "failed", "cannot"
MACHINE = "machine"

#: The number of last characters of a failed command's stderr that are kept.
_LAST = 500

Run = dict[str, Any]


def machine_facts() -> dict[str, Any]:
    """Return the machine as data; ``cannot`` maps each requirement to the reason why the machine lacks it, or None.

    Raises MXNetImportError if MXNet cannot be imported.
    """
    mxnet = mxnet_import.load()
    problem = bridge.gpu_problem("host")
    machine = results.this_machine(gpu=problem is None)
    machine.versions.setdefault("mxnet", mxnet.__version__)
    profiler = None if shutil.which(counters.PROFILER) else counters.MISSING
    return {
        "machine": asdict(machine),
        "cannot": {GPU: problem, COUNTERS: problem or profiler},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def run_all(commands: Sequence[Command], folder: Path, limit: float, facts: Mapping[str, Any]) -> None:
    """Run every command that has no result in the folder yet; end a command after ``limit`` seconds.

    Commands that failed, or that the machine of ``facts`` could not run, run again. If stderr is a terminal, it shows a
    progress bar. Raises DataError if the folder has another machine's results, OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    interrupt_on_sigterm()  # it ends the running command too
    before = read(folder, MACHINE)
    names = [_name(one["machine"]) for one in ((before or {}).get("result"), facts) if one]
    if names[0] != names[-1]:
        raise DataError(
            f"{folder}: expected results of this machine ({names[-1]}), got results of {names[0]}; "
            "choose another --out, or write the page with --render"
        )
    write(folder, Command(MACHINE, ()), _record(DONE, result=dict(facts)))
    with tqdm(commands, unit="run", disable=None) as bar:
        for command in bar:
            bar.set_description(command.name)
            kept = read(folder, command.name)
            if kept is not None and kept["status"] == DONE and kept["command"] == command.line:
                continue
            reason = facts["cannot"].get(command.needs)
            write(folder, command, _run(command, limit) if reason is None else _record(CANNOT, reason))


def _name(machine: Mapping[str, Any]) -> str:
    gpu = machine["gpu"]["name"] if machine["gpu"] else "no GPU"
    return f"{machine['cpu']}, {machine['cores']} cores, {gpu}"


def read(folder: Path, name: str) -> Run | None:
    """Return a kept run; None if there is none. Raises DataError, which names the file, for any other content."""
    path = folder / f"{name}.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["version"] != VERSION or run["status"] not in (DONE, FAILED, CANNOT):
            raise ValueError(f"version {run['version']}, status {run['status']!r}")
        if run["status"] == DONE and name.startswith("layers-"):
            results.from_data(run["result"])  # the benchmark's format has a separate version
        return {key: run[key] for key in ("command", "status", "reason", "result", "printed")}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: expected a run of ece408-report, got {error!r}; remove the file") from error


def write(folder: Path, command: Command, run: Run) -> None:
    """Write a run to its file: its status, the reason if it has no result, the result, and the command's output."""
    data = {"version": VERSION, "command": command.line, **run}
    write_text(folder / f"{command.name}.json", json.dumps(data, indent=1) + "\n")


def _record(status: str, reason: str = "", result: Any = None, printed: str = "") -> Run:
    return {"status": status, "reason": reason, "result": result, "printed": printed}


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Inside the context, defer the signals that end a report: subprocess forgets a process that it is starting."""
    arrived: list[int] = []
    before = {}
    ends = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(one))]
    with suppress(ValueError):  # other threads than the main one get no signals
        for one in ends:
            before[one] = signal.signal(one, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in arrived:
            signal.raise_signal(number)


def _run(command: Command, limit: float) -> Run:
    """Run a command in a separate process; every failure becomes the status and reason of the run."""
    with tempfile.TemporaryDirectory(prefix="ece408-report-") as scratch:
        path = Path(scratch) / "result.json"
        words = [sys.executable, *command.arguments, "--json", str(path)]
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process: Any = None
        try:
            with _signals_deferred():
                # In a new session, so that the processes that the command starts end with it.
                process = subprocess.Popen(words, text=True, errors="replace", start_new_session=True, **streams)
            printed, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return _record(FAILED, f"stopped after {limit:g} s")
        finally:
            if process and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reason = errors.strip()[-_LAST:] or f"exit code {process.returncode}"
        if process.returncode == EXIT_CANNOT:
            return _record(CANNOT, reason.splitlines()[-1])
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"complete": False}
        # ece408-bench exits with 1 if an output was wrong; its results are complete nevertheless.
        if process.returncode not in (OK, EXIT_FAILED) or not result.get("complete", True):
            return _record(FAILED, reason)
        return _record(DONE, "", result, printed)


class Runs:
    """The kept results of commands; a figure without a run is None."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self._runs = {command: read(folder, command.name) for command in commands}
        machine = read(folder, MACHINE)
        self.facts: Any = machine and machine["result"]

    def done(self, prefix: str) -> list[tuple[Command, Any, str]]:
        """Return each command with a result whose name begins with ``prefix``: the command, the result, the output."""
        found = ((command, run) for command, run in self._runs.items() if run and command.name.startswith(prefix))
        return [(command, run["result"], run["printed"].strip()) for command, run in found if run["status"] == DONE]

    def missing(self) -> dict[str, list[str]]:
        """Return the command lines without a result, by reason."""
        found: dict[str, list[str]] = {}
        for command, run in self._runs.items():
            if run is None or run["status"] != DONE:
                reason = " ".join(run["reason"].split()) if run else "not run: stopped before, or only rendered"
                found.setdefault(reason, []).append(command.line)
        return found
