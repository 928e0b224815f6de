"""ece408-bench on the CPU: its tables, its subcommands, and what it does with wrong and unsupported outputs."""

import json
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from ece408_op.bench import _calls, _cpu_roofline, _layer_names, _sweep, layers, results, tables
from ece408_op.bench.__main__ import main
from ece408_op.bench.results import FAILED, FRESH, KERNEL, REUSED, SKIPPED, Case, Results, Row
from ece408_op.core import timer, tuning
from ece408_op.core.check import Reference
from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

BUILT_IN = "MXNet Convolution"
SMALL = ["--images", "20", "--repeats", "2", "--threads", "2"]
#: winograd, one of the CPU's kernels, does not support the second.
TWO_LAYERS = ["--layer", "2x10x11x3x3", "1x9x9x2x1", *SMALL]


#: The CPU's rates, measured once for all tests.
measured = cache(_cpu_roofline.measure)


@pytest.fixture
def mxnet(monkeypatch):
    """Skip where MXNet is missing; main sets the variable."""
    pytest.importorskip("mxnet", reason="MXNet is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(_cpu_roofline, "measure", measured)


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_layers_are_timed_checked_and_written(mxnet, tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["layers", *TWO_LAYERS, "--impl", "direct", "loops", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "| case | images | contestant | fresh, ms | quartiles | reused, ms | quartiles | x MXNet, fresh |"
    )
    assert [row[2] for row in rows_of(out)][:3] == [BUILT_IN, "New direct", "New loops"]
    run = results.read(file)
    assert (run.command, run.complete, run.machine.threads) == ("layers", True, 2)
    assert run.command_line.startswith("ece408-bench layers --layer 2x10x11x3x3")
    assert run.machine.versions["mxnet"] == "1.9.1"
    assert run.ceilings["flops_per_second"] > 1e9
    assert run.ceilings["bytes_per_second"] > 1e8
    assert [case.name for case in run.cases] == ["2x10x11x3x3", "1x9x9x2x1"]
    for case in run.cases:
        assert len(case.rows) >= 6
        for row in case.rows:
            assert len(row.seconds) == 2
            assert row.error <= row.bound
        assert case.ratio(case.row("New direct", REUSED), "MXNet") > 0
        assert case.row("New direct", FRESH).kernel == "direct"


@pytest.mark.parametrize("gradient", ["data", "weight"])
def test_gradients_are_timed_and_checked(gradient, mxnet, tmp_path):
    file = tmp_path / "bench.json"
    given = ["--layer", "2x10x11x3x3", "4x9x8x6x3s2p1", *SMALL]
    assert main(["layers", "--gradient", gradient, *given, "--impl", "auto", "loops", "--json", str(file)]) == 0
    for case in results.read(file).cases:
        row = case.row("New auto", REUSED)
        assert row.error <= row.bound
        assert case.ratio(row, "MXNet") > 0
        assert f"it does not support {gradient} gradient" in case.row("New loops", REUSED).reason


def test_an_implementation_that_does_not_support_a_layer_is_a_row_that_says_why(mxnet, tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main([*TWO_LAYERS, "--impl", "all", "--json", str(file)]) == 0
    case = results.read(file).cases[1]
    row = case.row("New winograd", FRESH)
    assert (row.status, row.seconds) == (SKIPPED, ())
    assert "winograd: " in row.reason
    assert case.row("New direct", FRESH).median > 0
    out = capsys.readouterr().out
    assert "| 1x9x9x2x1 | 20 | New winograd | skipped |" in out
    assert f"1x9x9x2x1, New winograd: skipped: {row.reason}" in out


def interrupted(arguments, monkeypatch):
    """Run main; Ctrl-C comes when the first layer has been written."""
    write = results.write

    def interrupt(*given):
        write(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(results, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)


def test_an_interrupted_run_continues_from_its_file(mxnet, tmp_path, capsys, monkeypatch):
    file = tmp_path / "bench.json"
    arguments = [*TWO_LAYERS, "--json", str(file)]
    interrupted(arguments, monkeypatch)
    begun = results.read(file)
    assert not begun.complete
    assert [case.name for case in begun.cases] == ["2x10x11x3x3"]
    for change, message in (
        (["--seed", "1"], "another seed (0, this run: 1)"),
        (["--impl", "direct"], "this run: ['direct']"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, *change])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    run = results.read(file)
    assert err.splitlines()[0] == f"{file}: 1 of 2 cases taken from the interrupted run"
    assert ("2x10x11x3x3", "New auto (direct)") in {(row[0], row[2]) for row in rows_of(out)}
    assert {row[0] for row in rows_of(out)} >= {"2x10x11x3x3", "1x9x9x2x1"}
    assert run.complete
    assert (run.cases[0], run.ceilings) == (begun.cases[0], begun.ceilings)


@pytest.mark.parametrize("failing", [("results", "write"), ("tables", "table"), ("layers", "cpu_case")])
def test_a_failure_of_this_machine_is_one_line(failing, mxnet, tmp_path, capsys, monkeypatch):
    module, name = failing
    monkeypatch.setattr(globals()[module], name, Mock(side_effect=OSError("No space left on device")))
    assert main([*TWO_LAYERS, "--json", str(tmp_path / "bench.json")]) == 1
    assert capsys.readouterr().err == "ece408-bench: No space left on device\n"


def test_damaged_images_are_no_fault_of_the_command_line(mxnet, tmp_path, capsys, monkeypatch):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"cut")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"cut")
    monkeypatch.setenv("ECE408_DATA", str(tmp_path))
    assert main(["networks", "--network", "ece408-high", *SMALL]) == 1
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1) and "t10k-images-idx3-ubyte: not the published" in errors


def test_a_wrong_output_is_shown_without_a_time_and_has_no_ratio():
    peer = Row(BUILT_IN, FRESH, (8.0,))
    wrong = Row("New x", FRESH, status=FAILED, reason="worst element [0, 1, 2, 3]: got 1, expected 2", impl="x")
    right = Row("New x", FRESH, (4.0,), impl="x")
    problem = ConvProblem(10, 1, 8, 8, 2, 3)
    cases = tuple(Case(name, 10, (peer, row), problem) for name, row in (("a", wrong), ("b", right)))
    text = tables.table(Results("layers", results.this_machine(), cases=cases))
    assert "| a | 10 | New x | failed |  |  |" in text
    assert "| b | 10 | New x | 4000 | 4000 to 4000 | 2.00 |" in text
    assert "a, New x: failed: worst element [0, 1, 2, 3]: got 1, expected 2" in text
    assert "geometric mean" not in text


def test_the_wrong_elements_of_a_peer_are_those_outside_its_own_bound():
    problem = ConvProblem(4, 2, 6, 7, 3, 3)
    x, w = (np.ones(shape, np.float32) for shape in problem.shapes[:2])
    out = np.full(problem.shapes[2], 18, np.float32)
    out *= 1 + 0.5 * 0.01  # right for cuDNN in fp16
    out[1, 2, 3, 4] = 27
    peer = layers.Contestant("cuDNN fp16 NCHW", {KERNEL: (lambda: out, None)}, 0.01)
    settings = layers.Settings([], 2)
    (row,) = layers.timed_rows([peer], lambda name: timer.cpu_clock, Reference(x, w), settings)
    assert row.status == FAILED
    assert row.reason.endswith("50 of the error bound; 1 of 240 wrong (0.417 %); error 0.5, allowed 0.01")


def test_the_table_sums_ratios_up():
    cases = tuple(
        Case(name, 1, (Row("New", "forward", (own,), impl="auto"), Row("MXNet, NONE", "forward", (4.0,))))
        for name, own in (("a", 2.0), ("b", 0.5))
    )
    rows = rows_of(tables.table(Results("networks", results.this_machine(), cases=cases)))
    assert [row for row in rows if row[0] == "geometric mean"] == [["geometric mean", "", "New", "", "", "4.00"]]
    assert [row for row in rows if row[0] == "least"] == [["least", "", "New", "", "", "2.00"]]


def test_random_layers_keep_to_their_ranges_limits_and_seed():
    drawn = _layer_names.random_layers(15, 3)
    assert drawn == _layer_names.random_layers(15, 3)
    assert drawn != _layer_names.random_layers(15, 4)
    for name, problem in drawn.items():
        assert _layer_names.parse(name, problem.batch) == problem
        assert problem.flops <= 100e9
        assert 1 <= problem.batch <= _layer_names.IMAGES
    drawn = _layer_names.random_layers(40, 5)
    assert all(2 <= p.channels <= 32 and 8 <= p.filters <= 64 for p in drawn.values())
    assert {p.kernel for p in drawn.values()} == set(range(3, 10))
    drawn = _layer_names.random_layers(4, 5, [((1, 1), (1, 9), (1, 1)), ((7, 7), (1, 9), (2, 2))])
    assert [(p.channels, p.kernel) for p in drawn.values()] == [(1, 1), (7, 2)] * 2


@pytest.mark.parametrize("word", [*_layer_names.SETS["resnet"], "2x9x9x4x3-2s2-1p1d2-1g2"])
def test_a_layers_name_has_its_attributes(word):
    assert _layer_names.name_of(_layer_names.parse(word, 2)) == word


def test_the_sweep_has_the_courses_layers_with_three_numbers_of_images_and_random_ones():
    found = _sweep.layers(10_000, 30, 408)
    assert len(found) == 45
    assert {p.with_batch(n) for p in COURSE_LAYERS.values() for n in (10, 100, 10_000)} <= set(found.values())
    drawn = list(found.values())[15:]
    assert max(p.channels for p in drawn[::3]) <= 4
    assert min(p.channels for p in drawn[2::3]) >= 16


def test_the_tuning_tables_own_layers_can_be_timed_again(monkeypatch):
    (table,) = (table for table in tuning.read(tuning.TABLE) if table.chip == "NVIDIA H200")
    monkeypatch.setattr(cuda, "chip", lambda: Chip(table.chip, table.capability, 132))
    assert list(_sweep.recorded().values()) == [row.problem for row in table.layers]
    monkeypatch.setattr(cuda, "chip", lambda: Chip("another GPU", table.capability, 132))
    with pytest.raises(ValueError, match="--again: expected layers of this GPU, another GPU, in .*tuning.json"):
        _sweep.recorded()


def test_a_tuning_table_that_cannot_be_written_is_refused_before_the_sweep(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "missing" / "tuning.json")
    assert main(["sweep", "--record"]) == 1
    assert capsys.readouterr().err.startswith("ece408-bench: --record: the tuning table: expected a file in a folder")


def test_one_image_and_a_first_call(mxnet, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_calls, "PROCESSES", 1)
    file = tmp_path / "one.json"
    assert main(["one-image", "--repeats", "20", "--json", str(file)]) == 0
    (case,) = results.read(file).cases
    assert [(row.call, len(row.seconds)) for row in case.rows] == [(FRESH, 20), (FRESH, 20), ("first", 1)]
    assert [row[2] for row in rows_of(capsys.readouterr().out)] == ["New", "empty Custom operator"]


def test_plots_are_drawn_the_same_each_time(mxnet, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from ece408_op.bench import plots

    file = tmp_path / "bench.json"
    folders = [tmp_path / name for name in ("first", "second", "third")]
    assert main([*TWO_LAYERS, "--json", str(file), "--plots", str(folders[0])]) == 0
    names = ["bars-2x10x11x3x3.svg", "bars-1x9x9x2x1.svg", "roofline.svg"]
    assert capsys.readouterr().err.splitlines()[-3:] == [str(folders[0] / name) for name in names]
    for folder in folders[1:]:
        plots.draw(results.read(file), folder)
    for name in names:
        assert b"<svg" in (folders[1] / name).read_bytes() == (folders[2] / name).read_bytes()


def test_every_file_of_results_that_is_kept_is_read():
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    others = ("emulator-counters-h200.json", "lab-times.json")
    files = [path for path in folder.glob("*.json") if path.name not in others]
    assert len(files) >= 10
    for path in files:
        run = results.read(path)
        assert run.complete, path.name
        assert run.passed, path.name
        assert json.loads(path.read_text())["cases"] == json.loads(results.as_text(run))["cases"], path.name
