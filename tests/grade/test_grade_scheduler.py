"""A class through Dask: several worker processes, one of them killed; its submissions are graded by others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox import needs_sandbox

from ece408_op.grade import cli

pytest.importorskip("distributed")
pytestmark = needs_sandbox

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parents[1] / "submissions"
SPEC = """
images = [3]
runs = 1
probe = []
network = [{ name = "tiny", layers = [[2, 7, 6, 3, 3]] }]
"""
COUNT = 4


def make_class(folder: Path) -> Path:
    """Right and wrong ones by turns, and one that includes a file beside it."""
    members = folder / "class"
    for number in range(COUNT):
        inner = members / f"student{number:03d}" / "ece408_src"
        inner.mkdir(parents=True)
        name = "transposed_filter.h" if number % 3 == 2 else "textbook.h"
        (inner / "new-forward.h").write_text((HERE / "cpu" / name).read_text() + f"static int number_{number};\n")
    (members / "student000" / "ece408_src" / "own.h").write_text("#define MINE 1\n")
    first = members / "student000" / "ece408_src" / "new-forward.h"
    first.write_text('#include "own.h"\n#if MINE\n' + first.read_text() + "#endif\n")
    (folder / "spec.toml").write_text(SPEC)
    return members


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in reversed(started):
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen], *arguments: str) -> subprocess.Popen:
    code = f"from distributed.cli.{arguments[0]} import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "60s"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments[1:]],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    processes.append(process)
    return process


def address_of(contact: Path) -> str:
    """The scheduler's, from the file that it writes in place: that is there before its text is."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            address: str = json.loads(contact.read_text())["address"]
            return address
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.05)
    pytest.fail(f"no scheduler's address in {contact} within 120 s")


def test_a_killed_worker_gives_its_submissions_back(
    tmp_path: Path, processes: list[subprocess.Popen], capsys: pytest.CaptureFixture[str]
) -> None:
    members = make_class(tmp_path)
    contact = tmp_path / "scheduler.json"
    start(processes, "dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(contact))
    common = ("--nthreads", "1", "--no-dashboard", "--no-nanny", "--scheduler-file", str(contact))
    workers = [start(processes, "dask_worker", *common, "--name", f"w{n}") for n in range(2)]
    address = address_of(contact)
    out = tmp_path / "out.json"
    ended = threading.Event()

    def kill_one() -> None:
        log = tmp_path / "out.json.log"
        while not ended.wait(0.02):
            if log.exists() and log.read_text().count("\n") > 1:
                workers[0].kill()
                return

    killer = threading.Thread(target=kill_one)
    killer.start()
    arguments = ["--context", "cpu", "--scheduler", address, "--spec", str(tmp_path / "spec.toml"), "--json", str(out)]
    try:
        assert cli.main([str(members), *arguments]) == 1
    finally:
        ended.set()
        killer.join()
    assert workers[0].wait(60) == -signal.SIGKILL
    records = json.loads(out.read_text())["records"]
    assert [Path(record["path"]).name for record in records] == [f"student{number:03d}" for number in range(COUNT)]
    assert [record["status"] for record in records] == ["passed", "passed", "wrong", "passed"]
    assert all(record["source"].startswith(str(members)) for record in records)


def test_no_scheduler_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ece408_op.grade._dask._REACH_SECONDS", 0.5)
    assert cli.main([str(HERE / "cpu" / "textbook.h"), "--scheduler", "tcp://127.0.0.1:1"]) == 3
    assert "expected a Dask scheduler" in capsys.readouterr().err
