"""--profile and python -m ece408_op.profile, as a user runs them."""

import json

import pytest
from milestone_run import ROOT, passed
from process import python
from test_milestones import HEAD

pytest.importorskip("mxnet")


def run_profile(*arguments):
    return python("-m", "ece408_op.profile", *arguments, cwd=ROOT)


def test_m2_profiled_names_new_and_writes_the_three_files(tmp_path):
    out = tmp_path / "deep" / "profile"
    done = passed("m2.py", 20, "--profile-out", out, "--json", tmp_path / "r.json")
    assert done.stdout.startswith(HEAD + "Op Time: ")
    printed = done.stdout[done.stdout.index("\nMXNet operators:") + 1 :]
    assert (out / "profile.txt").read_text() == printed
    names = [activity["name"] for activity in json.loads((out / "profile.json").read_text())["activities"]]
    assert names.count("New") == 1
    assert {"Activation", "Pooling", "SoftmaxOutput"} <= set(names)
    result = json.loads((tmp_path / "r.json").read_text())["profile"]
    assert {row["name"] for row in result["tables"]["operators"]} == set(names)
    assert result["tables"]["gpu"] == result["tables"]["calls"] == []
    spans = [event for event in json.loads((out / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(names)


def test_a_script_keeps_its_arguments_and_its_exit_code(tmp_path):
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


@pytest.mark.parametrize("last_line", ["raise ValueError('the reason')", "raise SystemExit('the reason')"])
def test_a_script_that_fails_is_profiled_up_to_there(tmp_path, last_line):
    script = tmp_path / "mine.py"
    script.write_text(f"print('here')\n{last_line}\n")
    done = run_profile(script)
    assert done.returncode == 1
    assert "the reason" in done.stderr
    assert "Nothing was recorded" in done.stdout
