"""ece408-report's commands: which there are, run once, continued, and what failed or could not run is kept as such."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
from process import HELPERS, wait_until
from process import python as run_python

from ece408_op.errors import DataError
from ece408_op.report import __main__ as report
from ece408_op.report import _runs
from ece408_op.report.__main__ import main
from ece408_op.report._commands import COUNTERS, GPU, Command, all_commands

ROOT = Path(__file__).parents[2]
ALL = ["baseline", "ece408-high", "ece408-low", "ece408-2018sp", "ece408-2018fa"]


def asked(**changed) -> Namespace:
    given = {"networks": ALL, "sizes": [10_000, 100, 10], "milestones": ["m1", "m2", "m3", "m4"], "data": None}
    return Namespace(**{**given, "impl": ["direct", "loops", "naive", "register_blocked"], **changed})


def test_every_network_and_size_runs_alone_and_profiled_and_every_layer_once():
    commands = all_commands(asked())
    names = [command.name for command in commands]
    assert len(names) == len(set(names))
    suffixes = ["m1{}", "m1{}-profile", "m1{}-gpu", "m1{}-gpu-profile", "m2{}", "m2{}-profile", "m3{}", "m3{}-profile"]
    suffixes += ["m4{}", "m4{}-profile"]
    expected = {s.format(f"-{network}-{size}") for s in suffixes for network in ALL for size in (10_000, 100, 10)}
    words = ("1x28x28x50x5", "1x64x64x6x5", "6x30x30x16x5", "1x72x72x12x7", "12x33x33x24x7")
    expected |= {f"layers-{d}-{word}-{size}" for d in ("cpu", "gpu") for word in words for size in (10_000, 100, 10)}
    expected |= {f"counters-{word}-10000" for word in words}
    assert set(names) == expected
    needs = {command.name.split("-")[0]: command.needs for command in commands}
    assert (needs["m2"], needs["m4"], needs["counters"]) == ("", GPU, COUNTERS)


def test_milestones_and_implementations_that_were_not_asked_for_do_not_run():
    commands = all_commands(asked(networks=["ece408-low"], sizes=[7], milestones=["m2"], data="folder"))
    assert [command.line for command in commands] == [
        "python -m ece408_op m2 ece408-low 7 --data folder",
        "python -m ece408_op m2 ece408-low 7 --profile --data folder",
        "python -m ece408_op bench layers --context cpu --layer 1x28x28x50x5 --images 7 --impl auto direct loops",
    ]


def run_all(commands, folder: Path, limit: float = 300, cannot=(), cpu: str = "a CPU") -> None:
    facts = {"machine": {"cpu": cpu, "cores": 2, "gpu": None}, "cannot": dict.fromkeys(cannot, "no such thing here")}
    _runs.run_all(commands, folder, limit, facts)


def python(name: str, code: str, needs: str = "") -> Command:
    """A command that runs the code, with the file to write in ``path``."""
    return Command(name, ("-c", f"import json, sys, time; path = sys.argv[-1]; {code}"), needs)


DONE = "json.dump({}, open(path, 'w')); print('the lines')"


def counting(name: str, log: Path, more: str = "") -> Command:
    return python(name, f"open({str(log)!r}, 'a').write({name!r}); {DONE}{more}")


def status(folder: Path, name: str) -> tuple[str, str]:
    run = _runs.read(folder, name)
    return run["status"], run["reason"]


def test_commands_run_once_and_another_command_of_the_same_name_runs_again(tmp_path):
    log, runs = tmp_path / "log", tmp_path / "runs"
    commands = [counting("a", log), counting("b", log)]
    run_all(commands[:1], runs)
    run_all(commands, runs)
    assert log.read_text(encoding="utf-8") == "ab"
    kept = _runs.read(runs, "b")
    assert (kept["result"], kept["printed"]) == ({}, "the lines\n")
    run_all([counting("a", log, "; 0")], runs)
    assert log.read_text(encoding="utf-8") == "aba"


def test_a_failure_is_kept_with_its_reason_and_tried_again(tmp_path):
    commands = [
        python("broken", "sys.exit('the reason')"),
        python("cannot", "print('first', file=sys.stderr); print('no GPU', file=sys.stderr); sys.exit(3)"),
        python("silent", "pass"),
        python("needy", DONE, GPU),
        python("wrong", f"{DONE}; sys.exit(1)"),
        python("cut", "json.dump({'complete': False}, open(path, 'w')); sys.exit('the reason')"),
        python("crashed", f"{DONE}; sys.exit(-11)"),
        python("free", DONE),
    ]
    run_all(commands, tmp_path, cannot=[GPU])
    run_all([python("slow", "time.sleep(600)")], tmp_path, 0.5)
    assert status(tmp_path, "broken") == status(tmp_path, "cut") == ("failed", "the reason")
    assert status(tmp_path, "cannot") == ("cannot", "no GPU")
    assert status(tmp_path, "silent") == ("failed", "exit code 0")
    assert status(tmp_path, "crashed") == ("failed", "exit code 245")
    assert status(tmp_path, "slow") == ("failed", "stopped after 0.5 s")
    assert status(tmp_path, "needy") == ("cannot", "no such thing here")
    # ece408-bench exits with 1 where an output is wrong, with all of its results.
    assert status(tmp_path, "wrong") == status(tmp_path, "free") == ("done", "")
    run_all([python("broken", DONE), commands[3]], tmp_path)
    assert status(tmp_path, "broken") == status(tmp_path, "needy") == ("done", "")


def test_results_of_another_machine_are_refused(tmp_path):
    run_all([], tmp_path)
    with pytest.raises(DataError, match="expected results of this machine .another CPU, .*, got results of a CPU, "):
        run_all([], tmp_path, cpu="another CPU")


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        *(("a", words, "") for words in ("", "[]", '{"version": 1, "status": "done"}')),
        *(("a", f'{{"version": 4, "status": "{status}"}}', "") for status in ("odd", "done")),
        ("layers-x", '{"version": 4, "status": "done", "reason": "", "result": {"version": 0}}', "version 0"),
    ],
)
def test_a_broken_result_and_one_of_an_older_benchmark_are_named(tmp_path, name, words, reason):
    (tmp_path / f"{name}.json").write_text(words)
    with pytest.raises(DataError, match=rf"{name}\.json.*{reason}.*remove the file"):
        _runs.read(tmp_path, name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_running_command_and_keeps_what_is_done(tmp_path, number):
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(HELPERS)!r}]
from pathlib import Path
from test_report_runs import DONE, python, run_all
folder = Path({str(tmp_path)!r})
writes = f"open({{str(folder / 'pid')!r}}, 'w').write(str(__import__('os').getpid()))"
slow = python("slow", f"{{writes}}; time.sleep(600)")
try:
    run_all([python("a", DONE), slow], folder)
except KeyboardInterrupt:
    sys.exit(1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(encoding="utf-8"), 300)
    process.send_signal(number)
    assert process.wait(timeout=300) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text(encoding="utf-8")), 0)
    assert status(tmp_path, "a") == ("done", "")
    assert _runs.read(tmp_path, "slow") is None


def test_a_signal_while_a_command_starts_ends_the_command(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def interrupted(*args, **options):
        started.append(popen(*args, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run_all([python("slow", "time.sleep(600)")], tmp_path)
    signal.signal(signal.SIGINT, before)
    running = started[0].poll() is None
    started[0].kill()
    assert not running


def test_a_command_ignores_the_signals_that_its_report_ignores(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        code = "import signal; json.dump({'handler': signal.getsignal(signal.SIGHUP)}, open(path, 'w'))"
        run_all([python("a", code)], tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert _runs.read(tmp_path, "a")["result"] == {"handler": signal.SIG_IGN}


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt(), 130), (KeyboardInterrupt(15), 143)])
def test_an_interrupted_report_says_how_to_continue(tmp_path, monkeypatch, capsys, interrupt, code):
    monkeypatch.setattr(report, "run_all", Mock(side_effect=interrupt))
    assert main(["--out", str(tmp_path)]) == code
    assert capsys.readouterr() == ("", "ece408-report: interrupted; the same command continues\n")
    assert not (tmp_path / "index.html").exists()


@pytest.mark.exhaustive
def test_a_small_report(tmp_path):
    pytest.importorskip("mxnet")
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    words = "--networks", "ece408-low", "--sizes", "12", "--milestones", "m1"
    done = run_python("-m", "ece408_op.report", "--out", tmp_path, *words)
    # No progress bar where stderr is no terminal.
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'index.html'}\n", "")
    result = json.loads((tmp_path / "runs" / "m1-ece408-low-12.json").read_text(encoding="utf-8"))["result"]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    figures = [f"{result['accuracy']:.4f}", *(f"{result['time'][key]:.2f}" for key in ("user", "system", "real"))]
    accuracy, *seconds = (f'<td class="n">{figure}</td>' for figure in figures)
    assert f"{accuracy}<td></td>{''.join(seconds)}" in page  # m1 has no Op Time
