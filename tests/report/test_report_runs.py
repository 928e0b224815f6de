"""ece408-report's runs: which there are, each made once, resumed, and what failed or could not be is kept as such."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ece408_op.errors import DataError, DeviceError
from ece408_op.report import _jobs, _runner
from ece408_op.report.__main__ import main
from ece408_op.report._jobs import COUNTERS, DEVICE, GPU, MACHINE, Asked, Job

ALL = ["baseline", "ece408-high", "ece408-low", "ece408-2018sp", "ece408-2018fa"]


def asked(**changed) -> Asked:
    given = {
        "networks": ALL,
        "sizes": [10_000, 100, 10],
        "milestones": ["m1", "m2", "m3", "m4"],
        "cpu_kernels": ["direct", "loops"],
        "gpu_kernels": ["naive", "register_blocked"],
    }
    return Asked(**{**given, **changed})


def test_every_network_and_size_is_run_alone_and_profiled() -> None:
    names = [job.name for job in _jobs.plan(asked())]
    assert len(names) == len(set(names))
    assert names[0] == MACHINE
    for network in ALL:
        for size in (10_000, 100, 10):
            suffixes = ("m1{}", "m1{}-profile", "m1{}-gpu", "m2{}-auto", "m2{}-direct", "m2{}-loops", "m2{}-profile")
            suffixes += ("m3{}", "m3{}-profile", "m4{}", "m4{}-profile")
            assert {suffix.format(f"-{network}-{size}") for suffix in suffixes} <= set(names)


def test_kernels_and_layers_are_timed_once_for_networks_of_one_form() -> None:
    plan = _jobs.plan(asked())
    kernels = [job.name for job in plan if job.name.startswith("kernels-")]
    assert len(kernels) == 3 * 3
    assert {job.name for job in plan if job.name.startswith("bench-")} == {
        f"bench-{word}-10000"
        for word in ("1x28x28x50x5", "1x64x64x6x5", "6x30x30x16x5", "1x72x72x12x7", "12x33x33x24x7")
    }
    assert len([job for job in plan if job.needs == COUNTERS]) == 5


def test_what_is_left_out_is_not_run() -> None:
    plan = _jobs.plan(asked(networks=["ece408-low"], sizes=[7], milestones=["m2"], gpu_kernels=[]))
    assert [job.name for job in plan] == [
        MACHINE,
        "m2-ece408-low-7-auto",
        "m2-ece408-low-7-direct",
        "m2-ece408-low-7-loops",
        "m2-ece408-low-7-profile",
        "bench-1x28x28x50x5-7",
    ]


def machine(cannot=(), identity=("a CPU",)) -> Job:
    facts = {"identity": list(identity), "cannot": dict.fromkeys(cannot, "no such thing here")}
    return python(MACHINE, f"json.dump({facts!r}, open(path, 'w'))")


def python(name: str, code: str, needs: str = "") -> Job:
    """A run that does so, with the file to write in ``path``."""
    return Job(name, ("-c", f"import json, sys, time; path = sys.argv[-1]; {code}"), needs, f"python {name}")


def counting(name: str, log: Path) -> Job:
    return python(name, f"open({str(log)!r}, 'a').write({name!r}); json.dump(1, open(path, 'w'))")


def status(folder: Path, name: str) -> tuple[str, str]:
    run = _runner.read(folder / f"{name}.json")
    return run["status"], run["reason"]


def test_runs_are_kept_and_made_once(tmp_path) -> None:
    log = tmp_path / "log"
    plan = [machine(), counting("a", log), counting("b", log)]
    _runner.make(plan[:2], tmp_path / "runs", 60)
    _runner.make(plan, tmp_path / "runs", 60)
    assert log.read_text(encoding="utf-8") == "ab"
    assert _runner.read(tmp_path / "runs" / "b.json")["result"] == 1
    assert not list((tmp_path / "runs").glob("*.part"))


def test_another_command_of_the_same_name_is_run_anew(tmp_path) -> None:
    log = tmp_path / "log"
    job = counting("a", log)
    _runner.make([machine(), job], tmp_path, 60)
    _runner.make([machine(), Job(job.name, job.arguments, job.needs, "python a --other")], tmp_path, 60)
    assert log.read_text(encoding="utf-8") == "aa"


def test_what_fails_is_kept_with_its_reason_and_tried_again(tmp_path) -> None:
    plan = [
        machine(cannot=[GPU, DEVICE]),
        python("broken", "sys.exit('the reason')"),
        python("cannot", "print('first', file=sys.stderr); print('no GPU', file=sys.stderr); sys.exit(3)"),
        python("silent", "pass"),
        python("slow", "time.sleep(60)"),
        python("needy", "json.dump(1, open(path, 'w'))", GPU),
        python("free", "json.dump(1, open(path, 'w'))"),
    ]
    _runner.make(plan, tmp_path, 2)
    assert status(tmp_path, "broken") == ("failed", "the reason")
    assert status(tmp_path, "cannot") == ("cannot", "no GPU")
    assert status(tmp_path, "silent") == ("failed", "exit code 0")
    assert status(tmp_path, "slow") == ("failed", "stopped after 2 s")
    assert status(tmp_path, "needy") == ("cannot", "no such thing here")
    assert status(tmp_path, "free") == ("done", "")
    _runner.make([machine(), python("broken", "json.dump(1, open(path, 'w'))"), plan[5]], tmp_path, 60)
    assert status(tmp_path, "broken") == status(tmp_path, "needy") == ("done", "")


def test_runs_of_another_machine_are_not_mixed_in(tmp_path) -> None:
    _runner.make([machine()], tmp_path, 60)
    with pytest.raises(DataError, match="expected runs of this machine .another CPU., got some of a CPU"):
        _runner.make([machine(identity=["another CPU"])], tmp_path, 60)


def test_a_machine_that_cannot_say_what_it_is(tmp_path) -> None:
    with pytest.raises(DeviceError, match="the reason"):
        _runner.make([python(MACHINE, "sys.exit('the reason')")], tmp_path, 60)


@pytest.mark.parametrize(
    "words", ["", "[]", "{", '{"version": 2, "status": "done"}', '{"version": 1, "status": "odd"}']
)
def test_a_broken_run_is_named(tmp_path, words) -> None:
    (tmp_path / "a.json").write_text(words)
    with pytest.raises(DataError, match=r"a\.json.*remove the file"):
        _runner.read(tmp_path / "a.json")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_nothing_is_left_running_and_what_was_done_is_kept(tmp_path, number) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_report_runs import machine, python
from ece408_op.report import _runner
folder = Path({str(tmp_path)!r})
slow = python("slow", f"open({{str(folder / 'pid')!r}}, 'w').write(str(__import__('os').getpid())); time.sleep(60)")
try:
    _runner.make([machine(), python("a", "json.dump(1, open(path, 'w'))"), slow], folder, 60)
except KeyboardInterrupt:
    sys.exit(1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=30) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text(encoding="utf-8")), 0)
    assert status(tmp_path, "a") == ("done", "")
    assert _runner.read(tmp_path / "slow.json") is None


def report(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ece408_op.report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--networks", "resnet"], "ece408-high.*got 'resnet'"),
        (["--sizes", "0"], "1 to 10000 images, got 0"),
        (["--kernels", "fastest"], "fastest"),
        (["--milestones", "m5"], "m5"),
    ],
)
def test_usage_errors(arguments, words, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "x"), *arguments])
    printed, errors = capsys.readouterr()
    assert (ended.value.code, printed) == (2, "")
    assert re.search(words, errors)
    assert not (tmp_path / "x").exists()


def test_an_output_that_is_a_file_is_refused_before_anything_runs(tmp_path) -> None:
    (tmp_path / "taken").write_text("kept")
    command = [sys.executable, "-m", "ece408_op.report", "--out", "taken"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--out: expected a folder, got taken" in done.stderr
    assert os.listdir(tmp_path) == ["taken"]


def test_ctrl_c_ends_the_report_with_one_line(tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_runner, "make", interrupted)
    assert main(["--networks", "ece408-low", "--sizes", "7", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "ece408-report: interrupted; the same command goes on from here\n"


def test_a_small_report_from_end_to_end(tmp_path) -> None:
    pytest.importorskip("mxnet")
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    options = ["--out", tmp_path, "--networks", "ece408-low", "--sizes", 12, "--milestones", "m1"]
    done = report(*options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "index.html"), str(tmp_path / "report.md")]
    assert "runs" not in done.stderr  # no progress bar where stderr is no terminal
    result = json.loads((tmp_path / "runs" / "m1-ece408-low-12.json").read_text(encoding="utf-8"))["result"]
    times = " | ".join(f"{result['time'][key]:.2f}" for key in ("user", "system", "real"))
    words = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert f"| ece408-low | 12 | CPU | {result['accuracy']:.4f} | {times} |" in words
