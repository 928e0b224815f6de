"""m2.py --impl FILE: the whole network with a user's own convolution, which runs in a process of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from milestone_run import passed, run, started
from submissions import HERE as SUBMISSIONS

from ece408_op.lab import __path__ as lab_folders
from ece408_op.models import files
from ece408_op.plugin import bridge
from ece408_op.submission import runner

mx = pytest.importorskip("mxnet")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

TEXTBOOK = SUBMISSIONS / "cpu" / "textbook.h"
NAIVE = SUBMISSIONS / "gpu" / "naive.cuh"
STARTER = Path(lab_folders[0]) / "starters" / "my_kernel.cu"
EINSUM = SUBMISSIONS / "python" / "einsum.py"


@pytest.mark.parametrize("path", [TEXTBOOK, EINSUM], ids=lambda one: one.name)
def test_a_file_computes_all_layers_and_prints_the_courses_lines(path: Path, tmp_path: Path) -> None:
    if path == TEXTBOOK:  # one process computes all layers: files count their calls
        counting = "static int calls = 0; CHECK_EQ(M, calls++ % 2 ? 16 : 6); const int K ="
        path = Path(tmp_path / "counts.h")
        path.write_text(TEXTBOOK.read_text().replace("const int K =", counting))
    done = passed("m2.py", "ece408-2018sp", 8, "--impl", path, "--verify", "--json", tmp_path / "m2.json")
    assert re.search(r"done\n(Op Time: \d+\.\d{6}\n){2}Correctness: \S+ Model: ece408\n", done.stdout)
    assert "Agreeing predictions: 8 of 8" in done.stdout
    results = json.loads((tmp_path / "m2.json").read_text())
    assert [call["implementation"] for call in results["op_times"]] == [path.name] * 2
    assert results["verification"]["right"]


def test_verify_names_the_mistake() -> None:
    wrong = SUBMISSIONS / "cpu" / "transposed_filter.h"
    done = run("m2.py", "ece408-2018sp", 4, "--impl", wrong, "--verify")
    assert done.returncode == 1
    assert done.stderr.count("Your output equals the convolution with p and q exchanged in the filter's index") == 2


def test_verify_and_profile_see_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.h"
    wrong.write_text(TEXTBOOK.read_text().replace("] = 0;", '] = 1; if (b + m + h + w == 0) std::cerr << "called\\n";'))
    done = started("m2.py", 4, "--impl", wrong, "--verify", "--profile")  # MXNet profiles once per process
    assert done.returncode == 1
    assert "verification FAILED: an output that is NaN or errs by more than it may" in done.stderr
    assert "layer new0: WRONG: worst element" in done.stderr
    assert "called" in done.stderr
    assert re.search(r"%.* New$", done.stdout, re.M)  # MXNet's operators


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("] = 0;", "] = 0"), "compile_error: bad.h:27"),
        (("y[b][m][h][w] = 0;", "y[b][m][h][w] = 0; if (b == 3) abort();"), "crashed: it was aborted"),
        (("const int K = ", "while (B) asm(\"\"); const int K = "), "timed_out: a call of forward took longer"),
    ],
    ids=["compiler", "crash", "endless loop"],
)  # fmt: skip
def test_a_file_that_fails_ends_with_one_message(change: tuple[str, str], reason: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.h"
    bad.write_text(TEXTBOOK.read_text().replace(*change))
    done = run("m2.py", 4, "--impl", bad)
    assert done.returncode == 1
    assert reason in done.stderr and "Traceback" not in done.stderr
    assert "Op Time" not in done.stdout


def test_a_file_is_compiled_again_only_if_it_or_what_it_includes_changes(tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text(f'#include "sizes.h"\n{TEXTBOOK.read_text()}')
    (tmp_path / "sizes.h").write_text(f"// {tmp_path}")
    first, again = (runner.compile_file(tmp_path / "own.h").program.what for _ in range(2))
    (tmp_path / "sizes.h").write_text(f"// {tmp_path}, changed")
    assert first == again != runner.compile_file(tmp_path / "own.h").program.what


def test_a_network_of_other_convolutions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    row = mx.sym.Convolution(mx.sym.reshape(mx.sym.Variable("data"), (0, 1, -1)), kernel=(3,), num_filter=4, name="row")
    mx.sym.FullyConnected(row, num_hidden=10, name="fc").save(str(tmp_path / "row-symbol.json"))
    weights = {"row_weight": (4, 1, 3), "row_bias": (4,), "fc_weight": (10, 4 * 98), "fc_bias": (10,)}
    mx.nd.save(str(tmp_path / "row-0000.params"), {f"arg:{name}": mx.nd.ones(size) for name, size in weights.items()})
    done = run("m2.py", "row", 1, "--impl", TEXTBOOK)
    assert done.returncode == 1
    assert done.stderr == "m2.py: row: expected a convolution that a file can compute, without attributes\n"


@pytest.mark.exhaustive
def test_without_a_folder_for_the_cache_a_file_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ece408-op").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("m2.py", 1, "--impl", EINSUM).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("path", [NAIVE, STARTER, SUBMISSIONS / "python" / "on_the_gpu.py"], ids=lambda one: one.name)
@pytest.mark.parametrize("script", ["m3.py", "m4.py"])
def test_a_file_computes_all_layers_on_a_gpu(script: str, path: Path, tmp_path: Path) -> None:
    problem = bridge.gpu_problem("host")
    if problem or shutil.which("nvcc") is None:
        pytest.skip(problem or "needs nvcc")
    done = passed(script, "ece408-2018sp", 600, "--impl", path, "--verify", "--json", tmp_path / "out.json")
    assert "Agreeing predictions: 600 of 600" in done.stdout
    calls = json.loads((tmp_path / "out.json").read_text())["op_times"]
    assert [(call["implementation"], call["device"]) for call in calls] == [(path.name, "gpu")] * 2
    assert all(0 < call["seconds"] < call["call_seconds"] for call in calls)
