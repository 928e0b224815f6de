"""A class of submissions: killed at any moment and resumed, no record is lost and none is doubled."""

import csv
import html
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sandbox import needs_sandbox
from submissions import logged

from ece408_op.grade import __main__ as cli
from ece408_op.grade import _grading
from ece408_op.grade._buffers import Device
from ece408_op.grade._grading import Grader, Log
from ece408_op.grade._rounds import Trial
from ece408_op.grade._spec import Spec
from ece408_op.grade._submission import Submission
from ece408_op.submission import EndedError
from ece408_op.submission.sandbox import Tools

ROOT = Path(__file__).parents[2]
TEXTBOOK = ROOT / "tests" / "submissions" / "cpu" / "textbook.h"
WRONG = ROOT / "tests" / "submissions" / "cpu" / "transposed_filter.h"
SPEC = """
images = [3]
runs = 1
network = [{ name = "tiny", layers = [[2, 7, 6, 3, 3]] }]
"""


def make_class(folder: Path, count: int) -> Path:
    members = folder / "class"
    for number in range(count):
        inner = members / f"student{number:03d}" / "ece408_src"
        inner.mkdir(parents=True)
        # Every third is wrong; each is another text, so that none is a copy of another.
        source = WRONG if number % 3 == 2 else TEXTBOOK
        (inner / "new-forward.h").write_text(source.read_text(encoding="utf-8") + f"static int number_{number};\n")
    (folder / "spec.toml").write_text(SPEC)
    return members


def command(folder: Path, members: Path) -> list[str]:
    where = ["--context", "cpu", "--spec", str(folder / "spec.toml"), "--json", str(folder / "out.json")]
    return [sys.executable, "-m", "ece408_op.grade", str(members), "--jobs", "2", "--time-in-parallel", *where]


@needs_sandbox
def test_the_callers_umask_keeps_no_program_from_its_files(tmp_path):
    make_class(tmp_path, 2)  # at the same time: the compiler's user and the worker's may differ
    inner = tmp_path / "class" / "student000" / "ece408_src"
    (inner / "impl").mkdir()
    (inner / "new-forward.h").rename(inner / "impl" / "own.h")
    (inner / "new-forward.h").write_text('#include <mxnet/base.h>\n#include "impl/own.h"\n')
    words, environment = command(tmp_path, tmp_path / "class"), {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    limited = ["sh", "-c", 'umask 077; exec "$@"', "sh", *words]
    graded = subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (graded.returncode, graded.stdout.partition(" ")[0]) == (0, "passed"), graded


@needs_sandbox
def test_killed_and_resumed(tmp_path):
    members = make_class(tmp_path, 6)
    first = subprocess.Popen(command(tmp_path, members), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    out = tmp_path / "out.json"
    while len(logged(out)) < 2 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = logged(out)
    assert 2 <= len(before) < 6

    second = subprocess.run(command(tmp_path, members), cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 1, second.stderr
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    assert [Path(record["path"]).name for record in records] == [f"student{number:03d}" for number in range(6)]
    assert [record["status"] for record in records] == ["passed", "passed", "wrong"] * 2
    for record in records:
        if record["path"] in before:
            assert before[record["path"]]["started"] == record["started"]
    assert not (tmp_path / "out.json.log").exists()


@needs_sandbox
def test_reports(tmp_path, capsys):
    members = make_class(tmp_path, 2)
    broken = members / "zzz<broken>" / "ece408_src"
    broken.mkdir(parents=True)
    (broken / "new-forward.h").write_text("#error not & finished\n")
    reports = tmp_path / "reports"
    assert cli.main([*command(tmp_path, members)[3:], "--reports", str(reports)]) == 1
    assert "compile_error" in capsys.readouterr().out

    records = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["records"]
    rows = list(csv.DictReader(io.StringIO((reports / "leaderboard.csv").read_text(encoding="utf-8"))))
    assert {row["path"] for row in rows} == {record["path"] for record in records if record["status"] == "passed"}
    page = (reports / "leaderboard.html").read_text(encoding="utf-8")
    assert "<broken>" not in page and page.count("<tr>") == (1 + 2) + (1 + 3)  # places and everyone, each with a head
    results = {path.parent.name: json.loads(path.read_text()) for path in reports.glob("students/*/results.json")}
    texts = {path.stem: html.unescape(path.read_text(encoding="utf-8")) for path in reports.glob("students/*.html")}
    named = [next(name for name in texts if record["path"] + ": " in texts[name]) for record in records]
    assert [results[name]["score"] for name in named] == [100.0, 100.0, 0.0]
    assert [bool(results[name]["leaderboard"]) for name in named] == [True, True, False]
    assert "not & finished" in texts[named[2]]


def test_one_submission_at_a_time_has_the_gpu(monkeypatch, tmp_path):
    checked, busy = [], threading.Lock()

    class Checked(Device):
        def check(self) -> None:
            checked.append(self.number)

    def run(*arguments: object) -> None:
        assert busy.acquire(blocking=False)
        time.sleep(0.02)
        busy.release()
        raise EndedError("crashed", "nothing was run")

    monkeypatch.setattr(Trial, "run", run)
    kernel = TEXTBOOK.parents[1] / "python" / "on_the_gpu.py"
    found = [Submission(Path(f"{number}.py"), kernel, "gpu") for number in range(9)]
    grader = Grader(Tools(tmp_path), Spec(), Checked(0), images=1, alone=threading.Lock())
    records = _grading.grade_all(found, {"gpu": grader}, 5, Log(None, ""))
    assert [record["status"] for record in records] == ["crashed"] * 9
    assert checked == [0] * 9


MAIN = "import sys; from ece408_op.grade.__main__ import main; sys.exit(main())"
#: The package's own kernel is a library's call that takes a minute.
BUSY = f"import time; from ece408_op.core import dispatch; dispatch.select = lambda *_, **__: time.sleep(60); {MAIN}"


@needs_sandbox
@pytest.mark.parametrize(
    ("name", "pause", "code"),
    [
        pytest.param("hangs.h", 0.0, MAIN, id="in a call"),
        pytest.param("openmp.h", 3.0, MAIN, id="in a comparison", marks=pytest.mark.exhaustive),
        pytest.param("avx.h", 3.0, BUSY, id="in a library", marks=pytest.mark.exhaustive),
    ],
)
def test_ended_by_a_signal_it_leaves_nothing_behind(tmp_path, name, pause, code):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    net, images = ("2017", 20) if code == BUSY else ("2018fa", 2000)
    (tmp_path / "spec.toml").write_text(f"images = [{images}]\nnetworks = ['{net}']\naccuracy = false\n")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(TEXTBOOK.with_name(name)), "--spec", str(tmp_path / "spec.toml")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not list(scratch.glob("ece408-grade-*-case-*/printed.txt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(pause)
    process.terminate()
    errors = process.communicate(timeout=20)[1]  # of several minutes that were left
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "ece408-grade: interrupted\n")
    assert list(scratch.iterdir()) == []


@needs_sandbox
@pytest.mark.exhaustive
def test_no_more_submissions_at_a_time_than_descriptors_suffice_for(tmp_path):
    words = command(tmp_path, make_class(tmp_path, 3))
    layers = [[1, 5, 5, 8, 3]] * 20
    (tmp_path / "spec.toml").write_text(f"images = [2]\nruns = 1\nnetwork = [{{ name = 'n', layers = {layers} }}]\n")
    limited = ["sh", "-c", 'ulimit -n 230; exec "$@"', "sh", *words, "--jobs", "3"]
    graded = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert graded.stderr.splitlines()[-1] == "ece408-grade: 3 submissions: 2 passed, 1 wrong"
