"""--profile and python -m ece408_op.profile, as a user runs them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
from test_milestones import HEAD, ROOT, run

from ece408_op.profile import _gpu, session
from ece408_op.profile._activity import OPERATOR, from_data
from ece408_op.runtime import cuda

pytest.importorskip("mxnet")


def run_profile(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ece408_op.profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_m2_profiled_names_new_and_writes_the_three_files(tmp_path) -> None:
    out = tmp_path / "deep" / "profile"
    done = run("m2.py", 20, "--profile-out", out, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(HEAD + "Op Time: ")
    printed = done.stdout[done.stdout.index("\nMXNet operators:") + 1 :]
    assert (out / "profile.txt").read_text() == printed
    profile = from_data(json.loads((out / "profile.json").read_text()))
    names = [activity.name for activity in profile.of(OPERATOR)]
    assert names.count("New") == 1
    assert {"Activation", "Pooling", "SoftmaxOutput"} <= set(names)
    result = json.loads((tmp_path / "r.json").read_text())["profile"]
    assert {row["name"] for row in result["tables"]["operators"]} == set(names)
    assert result["tables"]["gpu"] == result["tables"]["calls"] == []
    spans = [event for event in json.loads((out / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(names)


def test_without_profile_nothing_is_started(capsys) -> None:
    parser = argparse.ArgumentParser()
    session.add_options(parser)
    assert session.start(parser.parse_args([]), on_gpu=True) is None
    assert session.finish(None) is None
    assert capsys.readouterr() == ("", "")


def test_a_script_keeps_its_arguments_and_its_exit_code(tmp_path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\n"
        "import neighbour\n"
        "import mxnet as mx\n"
        "mx.nd.dot(mx.nd.ones((9, 9)), mx.nd.ones((9, 9)))\n"
        "print(sys.argv[1:], __name__)\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    done = run_profile(script, "--out", "x")
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("['--out', 'x'] __main__\n")
    assert " dot\n" in done.stdout
    assert not (ROOT / "x").exists()


def test_a_script_that_fails_is_profiled_up_to_there(tmp_path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("print('here')\nraise ValueError('the reason')\n")
    done = run_profile(script)
    assert done.returncode == 1
    assert "the reason" in done.stderr
    assert "Nothing was recorded" in done.stdout


def test_no_such_script_is_a_usage_error() -> None:
    done = run_profile("nowhere.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere.py" in done.stderr


def test_without_cupti_one_sentence_says_what_to_install(monkeypatch) -> None:
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_gpu, "import_module", absent)
    monkeypatch.setattr(cuda, "driver_version", lambda: 12080)
    with pytest.raises(_gpu.DeviceError, match=r"expected cupti-python.*profile12") as error:
        _gpu.Recorder()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z3addPfS_i", "add(float*, float*, int)"),
        ("register_blocked", "register_blocked"),
        ("_Znonsense", "_Znonsense"),
    ],
)
def test_symbols_are_written_as_in_the_source(symbol, name) -> None:
    assert _gpu.demangled(symbol) == name


def test_a_driver_without_cupti_is_told_of_once_and_the_rest_is_recorded() -> None:
    code = """
from ece408_op.runtime import cuda
from ece408_op.profile import _gpu, session
cuda.driver_version = lambda: 13000
def absent(name):
    raise ImportError(name)
_gpu.import_module = absent
watched = session.Session(on_gpu=True)
import mxnet as mx
mx.nd.dot(mx.nd.ones((9, 9)), mx.nd.ones((9, 9))).wait_to_read()
watched.finish()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    (sentence,) = [line for line in done.stderr.splitlines() if "GPU profile" in line]
    assert "profile13" in sentence
    assert sentence in done.stdout
    assert " dot\n" in done.stdout
