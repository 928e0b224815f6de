"""The benchmark: its figures, its refusal to show speed for wrong outputs, and its command line."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from ece408_op.bench import _estimate, _layers, contestants, report
from ece408_op.bench.__main__ import main
from ece408_op.bench._measure import FRESH, REUSED, Calls, Timing, measure
from ece408_op.bench._record import Record
from ece408_op.bench.contestants import BUILT_IN, PYTORCH
from ece408_op.core import reference
from ece408_op.core.check import Comparison
from ece408_op.core.roofline import Ceilings
from ece408_op.kernels.cpu import loops
from ece408_op.problem import ConvProblem

CEILINGS = Ceilings(80e9, 500e9)
RIGHT = Comparison(0.5, 1e-8, (0, 0, 0, 0), 1.0, 1.0, 0, 10, 0)
WRONG = Comparison(5.0, 1e-6, (0, 1, 2, 3), 1.0, 2.0, 4, 10, 0)


def timing(*seconds, check=RIGHT):
    return Timing(list(seconds), check)


def result(name, timings):
    return report.LayerResult(name, ConvProblem(10, 1, 8, 8, 2, 3), timings)


@pytest.fixture
def small():
    random = np.random.RandomState(0)
    return random.randn(4, 2, 8, 9).astype(np.float32), random.randn(3, 2, 3, 3).astype(np.float32)


def calls(x, w, fresh_error=0.0, writes=True):
    right = reference.convolve(x, w).astype(np.float32)

    def reused(output):
        if writes:
            output[...] = right

    return Calls(lambda: right + np.float32(fresh_error), reused, lambda output: output)


def test_right_outputs_are_timed_as_often_as_asked(small):
    found = measure(calls(*small), *small, loops.KERNEL, 3)
    assert [len(found[kind].seconds) for kind in (FRESH, REUSED)] == [3, 3]
    assert found[FRESH].passed
    assert found[REUSED].passed


def test_a_wrong_output_is_found_and_its_speed_not_shown(small):
    found = measure(calls(*small, fresh_error=0.01), *small, loops.KERNEL, 2)
    assert not found[FRESH].passed
    assert "WRONG" in str(found[FRESH])
    assert " ms" not in str(found[FRESH])


def test_an_output_that_is_left_as_it_was_is_found(small):
    found = measure(calls(*small, writes=False), *small, loops.KERNEL, 2)
    assert found[FRESH].passed
    assert not found[REUSED].passed


def test_one_wrong_call_among_right_ones_counts():
    several = Timing()
    for check in (RIGHT, WRONG, RIGHT):
        several.add(1.0, check)
    assert not several.passed


def test_ratios_are_to_the_fastest_peer_and_summed_up_over_layers():
    results = [
        result(
            "a",
            {
                BUILT_IN: {FRESH: timing(8.0), REUSED: timing(2.0)},
                "New x": {FRESH: timing(1.0), REUSED: timing(1.0)},
                PYTORCH[0]: {FRESH: timing(9.0)},
                PYTORCH[1]: {FRESH: timing(3.0)},
            },
        ),
        result(
            "b",
            {
                BUILT_IN: {FRESH: timing(2.0), REUSED: timing(2.0)},
                "New x": {FRESH: timing(1.0), REUSED: timing(4.0)},
                PYTORCH[0]: {FRESH: timing(12.0)},
                PYTORCH[1]: {FRESH: timing(40.0)},
            },
        ),
    ]
    found = report.summary(results)["New x"]
    assert found["x MXNet, fresh"] == pytest.approx({"geometric mean": 4.0, "least": 2.0})
    assert found["x MXNet, reused"] == pytest.approx({"geometric mean": 1.0, "least": 0.5})
    assert found["x PyTorch, fresh"] == pytest.approx({"geometric mean": 6.0, "least": 3.0})


def test_a_wrong_contestant_has_neither_figure_nor_ratio_nor_mean():
    results = [result("a", {BUILT_IN: {FRESH: timing(8.0)}, "New x": {FRESH: timing(0.001, check=WRONG)}})]
    text = report.table(results, CEILINGS)
    assert "| a | New x | WRONG |" in text
    assert "geometric mean | New x" not in text
    data = json.loads(json.dumps(report.as_data(results, CEILINGS)))
    found = data["layers"][0]["results"]["New x"][FRESH]
    assert found["status"] == "FAILED"
    assert "seconds" not in found


def test_what_was_written_gives_the_same_table_again():
    results = [result("a", {BUILT_IN: {FRESH: timing(8.0)}, "New x": {FRESH: timing(0.001, check=WRONG)}})]
    data = json.loads(json.dumps(report.as_data(results, CEILINGS)))
    assert report.table(report.from_data(data), CEILINGS) == report.table(results, CEILINGS)
    assert not report.from_data(data)[0].passed


def test_no_call_is_timed_after_the_budget(small):
    found = measure(calls(*small), *small, loops.KERNEL, 3, budget=0.0)
    assert [len(found[kind].seconds) for kind in (FRESH, REUSED)] == [1, 1]


def test_the_expected_time_grows_with_what_runs():
    def predicted(names, repeats=3):
        return _estimate.seconds(_layers.LAYERS.values(), names, CEILINGS, repeats, 5.0)

    assert 0 < predicted(["New auto"]) < predicted([BUILT_IN]) < predicted([BUILT_IN, "New auto"])
    assert predicted(["New auto"]) < predicted(["New auto"], repeats=6) < predicted(["New loops"], repeats=6)
    assert [_estimate.words(seconds) for seconds in (3, 31, 130)] == [
        "less than 10 seconds",
        "about 40 seconds",
        "about 3 minutes",
    ]


def test_random_layers_are_the_same_for_the_same_seed_and_of_the_five_layers_size():
    drawn = _layers.random_layers(15, 3)
    assert drawn == _layers.random_layers(15, 3)
    assert drawn != _layers.random_layers(15, 4)
    assert len(drawn) == 15
    for name, problem in drawn.items():
        assert _layers.parse(name, problem.batch) == problem
        assert problem.flops <= 100e9
        assert 1 <= problem.batch <= _layers.IMAGES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2016"], "expected 2017, 2018sp-1"),
        (["--layers", "3x4x4x2x5"], "kernel: expected at most"),
        (["--images", "0"], "expected at least 1"),
        (["--json", "/nowhere/bench.json"], "--json: expected a file in a folder that is there, got /nowhere/bench"),
        (["--plots", __file__], f"--plots: expected a folder, got {__file__}"),
        (["--plots", f"{__file__}/plots"], f"--plots: expected a folder, got {__file__}/plots"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--plots", "plots"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "expected matplotlib to import" in err


def test_the_command_measures_checks_and_writes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("mxnet", reason="the built-in is MXNet's")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    file = tmp_path / "bench.json"
    arguments = ["--layers", "2x10x11x3x3", "--images", "20", "--repeats", "2", "--threads", "2", "--json", str(file)]
    assert main([*arguments, "--impl", "direct", "loops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| layer | implementation | fresh, ms | reused, ms |")
    assert [line.split(" | ")[1] for line in lines if "2x10x11x3x3" in line][:3] == [
        BUILT_IN,
        "New direct",
        "New loops",
    ]
    data = json.loads(file.read_text())
    assert data["machine"]["threads"] == 2
    assert data["versions"]["mxnet"] == "1.9.1"
    assert data["ceilings"]["flops_per_second"] > 1e9
    assert data["ceilings"]["bytes_per_second"] > 1e8
    for kinds in data["layers"][0]["results"].values():
        for kind in kinds.values():
            assert kind["status"] == "PASSED"
            assert len(kind["seconds"]) == 2
    assert data["summary"]["New direct"]["x MXNet, fresh"]["least"] > 0


def test_an_unknown_implementation_is_a_usage_error(capsys):
    pytest.importorskip("mxnet", reason="the built-in is MXNet's")
    with pytest.raises(SystemExit) as stop:
        main(["--impl", "fastest", "--images", "1"])
    assert stop.value.code == 2
    assert "expected one of auto, winograd, direct" in capsys.readouterr().err


TWO_LAYERS = ["--layers", "2x10x11x3x3", "1x9x9x2x3", "--images", "20", "--repeats", "1", "--threads", "2"]


def interrupted(arguments, monkeypatch):
    """Run main; Ctrl-C comes when the second layer begins. Returns the problems of the layers that were begun."""
    begun = []
    make_input = contestants.make_input

    def until_the_second(problem, seed):
        begun.append(problem)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return make_input(problem, seed)

    with monkeypatch.context() as patched:
        patched.setattr(contestants, "make_input", until_the_second)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    return begun


def test_by_default_auto_alone_runs_and_the_time_is_said_first(capsys, monkeypatch):
    pytest.importorskip("mxnet", reason="the built-in is MXNet's")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(TWO_LAYERS) == 0
    out, err = capsys.readouterr()
    assert {line.split(" | ")[1] for line in out.splitlines()[2:] if " New " in line} == {"New auto"}
    assert err.splitlines()[0].startswith(f"2 layers x {2 + 2 * (PYTORCH[0] in out)} contestants ({BUILT_IN}, New")
    assert err.splitlines()[0].endswith("): less than 10 seconds")


def test_an_interrupted_run_goes_on_from_its_file(tmp_path, capsys, monkeypatch):
    pytest.importorskip("mxnet", reason="the built-in is MXNet's")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    file = tmp_path / "bench.json"
    arguments = [*TWO_LAYERS, "--json", str(file)]
    first, second = interrupted(arguments, monkeypatch)
    left = json.loads(file.read_text())
    assert left["complete"] is False
    assert [layer["name"] for layer in left["layers"]] == ["2x10x11x3x3"]
    capsys.readouterr()

    with monkeypatch.context() as patched:
        measured = []
        make_input = contestants.make_input
        patched.setattr(contestants, "make_input", lambda *given: measured.append(given[0]) or make_input(*given))
        assert main(arguments) == 0
        assert measured == [second]
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"{file}: 1 of 2 layers taken from the interrupted run"
    assert "| 2x10x11x3x3 | New auto |" in out
    assert "| 1x9x9x2x3 | New auto |" in out
    data = json.loads(file.read_text())
    assert data["complete"] is True
    assert data["layers"][0] == left["layers"][0]
    assert data["ceilings"] == left["ceilings"]
    # A complete file is measured again from the first layer.
    assert interrupted(arguments, monkeypatch) == [first, second]


def test_another_run_does_not_go_on_from_the_file(tmp_path, capsys, monkeypatch):
    pytest.importorskip("mxnet", reason="the built-in is MXNet's")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    file = tmp_path / "bench.json"
    interrupted([*TWO_LAYERS, "--json", str(file)], monkeypatch)
    before = file.read_bytes()
    for change, message in (
        (["--seed", "1"], "other options (seed: 0, this run: 1)"),
        (["--impl", "direct"], "other options (impl: ['auto'], this run: ['direct'])"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*TWO_LAYERS, *change, "--json", str(file)])
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert f"--json: {file} holds an interrupted run with {message}; choose another file, or delete this" in err
    monkeypatch.setattr(report, "versions", lambda: {"mxnet": "1.9.0"})
    with pytest.raises(SystemExit) as stop:
        main([*TWO_LAYERS, "--json", str(file)])
    assert stop.value.code == 2
    assert "an interrupted run with other versions (" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_file_of_something_else_is_replaced(tmp_path):
    for number, content in enumerate((b"\xff not JSON", b"[1]", b'{"layers": []}')):
        file = tmp_path / str(number)
        file.write_bytes(content)
        assert Record(file, {"options": {}, "machine": {}, "versions": {}}).begun == {}
