"""Nsight Compute's counters, summed for each kernel; a stand-in for ncu runs the command that it is given."""

import json
import os
from functools import partial

import pytest
from process import on_path

from ece408_op.profile import counters

METRICS = [*(name for (name,) in counters.SUMS.values()), *counters.SHARES.values(), "gpu__time_duration.sum"]
LINES = [
    "==PROF== Connected to process 1",
    ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *METRICS]),
    '"","","byte","byte","byte","%","ns"',
    '"0","next_is_im2col_gemm","1","1","1","1","1"',
    '"1","unroll(float const*)","1,000","20","300","50.0","3,000"',
    '"2","multiply","1","2","3","100","1000"',
    '"3","next_is_streams()","1","1","1","1","1"',
    '"4","next_is_naive","1","1","1","1","1"',
    '"5","naive","7","8","9","25","9"',
    "==PROF== Disconnected",
]


COUNTERS = {
    "im2col_gemm": {"read": 1001, "written": 22, "l2": 303, "occupancy": 0.625},
    "naive": {"read": 7, "written": 8, "l2": 9, "occupancy": 0.25},
}
LOG = "open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write"


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A function that puts a program of that name on PATH, which runs Python code."""
    return partial(on_path, monkeypatch, tmp_path, "ncu")


def test_the_command_leaves_the_clocks_alone_and_sums_up_the_launches_of_each_kernel(ncu, tmp_path):
    ncu(f"{LOG}({os.linesep.join(LINES)!r}); open({str(tmp_path / 'words')!r}, 'w').write(' '.join(sys.argv))")
    arguments = ["1x28x28x50x5", "--images", "100", "--impl", "naive", "--json", str(tmp_path / "out.json")]
    assert counters.main(arguments) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == COUNTERS
    words = (tmp_path / "words").read_text()
    assert " --clock-control none " in words
    assert words.endswith(" -m ece408_op.profile.counters 1x28x28x50x5 --images 100 --impl naive --launch")


def test_counters_that_may_not_be_read_are_an_error(ncu, capsys):
    lines = [*LINES[:6], '"3","multiply","n/a","8","9","25","1"']
    ncu(f"{LOG}({os.linesep.join(lines)!r})")
    assert counters.main(["1x28x28x50x5"]) == 1
    assert "expected a number, got 'n/a'" in capsys.readouterr().err


def test_a_profiler_that_fails_is_an_error_in_its_own_words(ncu, capsys):
    ncu("sys.exit('ERR_NVGPUCTRPERM')")
    assert counters.main(["1x28x28x50x5"]) == 1
    assert capsys.readouterr() == ("", "ncu: ERR_NVGPUCTRPERM\n")


def test_without_the_profiler_the_machine_cannot(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert counters.main(["1x28x28x50x5"]) == 3
    assert capsys.readouterr() == ("", f"{counters.MISSING}\n")
