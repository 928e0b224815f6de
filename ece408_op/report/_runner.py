"""Makes the runs, one after the other, and keeps each one's result in a file that appears whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ece408_op.data.atomic import replacing
from ece408_op.errors import DataError, DeviceError

from ._jobs import MACHINE, Job

VERSION = 1
DONE, FAILED, CANNOT = "done", "failed", "cannot"

_EXIT_CANNOT = 3
#: Of what a failed run wrote to stderr, so much is kept.
_LAST = 500

Run = dict[str, Any]


def make(jobs: Sequence[Job], folder: Path, limit: float) -> None:
    """Make every run that the folder does not have yet; a run is stopped after ``limit`` seconds.

    Runs that failed before, or that the machine could not do, are tried again. A progress bar goes to stderr where
    that is a terminal. Raises DataError where the folder's runs are of another machine, DeviceError where even what
    the machine is cannot be found out, OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Ended by a signal, the run that is under way is ended with it.
    signal.signal(signal.SIGTERM, _stop)
    machine = _machine(next(job for job in jobs if job.name == MACHINE), folder, limit)
    rest = [job for job in jobs if job.name != MACHINE]
    with tqdm(rest, unit="run", disable=None) as bar:
        for job in bar:
            bar.set_description(job.name)
            kept = read(folder / f"{job.name}.json")
            if kept is not None and kept["status"] == DONE and kept["command"] == job.shown:
                continue
            reason = machine["cannot"].get(job.needs)
            run = start(job, limit) if reason is None else record(job, CANNOT, reason)
            write(folder / f"{job.name}.json", run)


def start(job: Job, limit: float) -> Run:
    """Make one run in a process of its own; whatever happens there becomes the run's status and reason."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ece408-report-") as scratch:
        result = Path(scratch) / "result.json"
        # A session of its own: what the run starts is ended with it.
        process = subprocess.Popen(
            [*job.command, "--json", str(result)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, words = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return record(job, FAILED, f"stopped after {limit:g} s", time.perf_counter() - began)
        except BaseException:
            _end(process)
            raise
        seconds = time.perf_counter() - began
        last = words.strip()[-_LAST:] or f"exit code {process.returncode}"
        if process.returncode == _EXIT_CANNOT:
            return record(job, CANNOT, last.splitlines()[-1], seconds)
        if process.returncode or not result.is_file():
            return record(job, FAILED, last, seconds)
        return record(job, DONE, "", seconds, json.loads(result.read_text(encoding="utf-8")))


def read(path: Path) -> Run | None:
    """A kept run; None where there is none. Raises DataError, which names the file, for anything else."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["version"] != VERSION or run["status"] not in (DONE, FAILED, CANNOT):
            raise ValueError(f"version {run['version']}, status {run['status']!r}")
        return dict(run)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: expected a run of ece408-report, got {error!r}; remove the file") from error


def write(path: Path, run: Run) -> None:
    """Keep a run."""
    with replacing(path) as file:
        file.write((json.dumps(run, indent=1) + "\n").encode())


def _machine(job: Job, folder: Path, limit: float) -> dict[str, Any]:
    """What the machine is, found out anew; it must be the one that the folder's runs were made on."""
    path = folder / f"{job.name}.json"
    kept, run = read(path), start(job, limit)
    if run["status"] != DONE:
        raise DeviceError(f"the report: expected {job.shown} to run, got: {run['reason']}")
    found: dict[str, Any] = run["result"]
    if kept is not None and kept["result"]["identity"] != found["identity"]:
        raise DataError(
            f"{folder}: expected runs of this machine ({', '.join(found['identity'])}), got some of "
            f"{', '.join(kept['result']['identity'])}; take another --out, or write the page with --render"
        )
    write(path, run)
    return found


def record(job: Job, status: str, reason: str = "", seconds: float = 0.0, result: Any = None) -> Run:
    """A run as it is kept; seconds: what it took, the start of Python included."""
    return {
        "version": VERSION,
        "name": job.name,
        "command": job.shown,
        "status": status,
        "reason": reason,
        "seconds": seconds,
        "result": result,
    }


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
