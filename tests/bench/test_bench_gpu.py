"""The benchmark on the GPU: its arithmetic on given timings, its refusals, and a run where there is a GPU."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from gpu_case import require_gpu

from ece408_op.bench import _gpu, _gpu_report, _plots
from ece408_op.bench.__main__ import main
from ece408_op.bench._gpu import GpuTiming
from ece408_op.bench._gpu_report import GpuResult
from ece408_op.bench._layers import parse_ranges, random_layers
from ece408_op.core import roofline
from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda


def timing(*milliseconds, error=1e-7, bound=1e-6, kernel=""):
    return GpuTiming(milliseconds, error, bound, kernel)


def result(name, floor=1.0, **timings):
    return GpuResult(
        name, ConvProblem(10, 1, 8, 8, 2, 3), {key.replace("_", " "): t for key, t in timings.items()}, floor
    )


RESULTS = [
    result("a", auto=timing(2.0, 2.0, 5.0, kernel="register_blocked"), cuDNN_NCHW=timing(9.0), cuDNN_NHWC=timing(4.0)),
    result("b", auto=timing(1.0, kernel="sliding_window"), cuDNN_NCHW=timing(8.0), cuDNN_NHWC=timing(16.0)),
]


def test_ratios_are_to_the_faster_layout_of_the_peer():
    assert _gpu_report.summary(RESULTS) == {"auto": {"geometric mean": pytest.approx(4.0), "least": pytest.approx(2.0)}}


def test_the_table_shows_medians_quartiles_and_what_auto_stands_for():
    lines = _gpu_report.table(RESULTS).splitlines()
    assert lines[2].startswith("| a | 10 | auto (register_blocked) | 2 | 2 to 3.5 | 2.00 | 2.00 |")
    assert "| geometric mean |  | auto |  |  | 4.00 |" in lines[-2]


@pytest.mark.parametrize("error", [1e-5, math.inf, math.nan])
def test_a_wrong_output_has_no_speed_anywhere(error):
    results = [*RESULTS, result("c", auto=timing(0.001, error=error), cuDNN_NCHW=timing(1.0))]
    assert "| c | 10 | auto | WRONG |" in _gpu_report.table(results)
    assert _gpu_report.summary(results) == {}
    assert not results[-1].passed
    assert [point.contestant for point in _gpu_report.points(results[-1:])] == ["cuDNN NCHW"]


def test_what_was_written_gives_the_same_table_again():
    results = [*RESULTS, result("c", auto=timing(0.001, error=math.inf), cuDNN_NCHW=timing(1.0))]
    data = json.loads(json.dumps(_gpu_report.as_data(results, Ceilings(4e12, 60e12), "float32")))
    assert _gpu_report.table(_gpu_report.from_data(data)) == _gpu_report.table(results)


def test_without_a_peer_there_is_no_ratio():
    assert _gpu_report.summary([result("a", auto=timing(1.0))]) == {}


def test_ranges_bound_what_is_drawn():
    word = "C=2-32,M=8-64,K=3-9"
    drawn = random_layers(40, 5, word)
    assert all(2 <= p.channels <= 32 and 8 <= p.filters <= 64 and 3 <= p.kernel <= 9 for p in drawn.values())
    assert {p.kernel for p in drawn.values()} == set(range(3, 10))


@pytest.mark.parametrize("word", ["", "C=1-2", "C=3-2,M=1-2,K=1-2", "C=1-2,M=1-2,K=1-17", "C=0-2,M=1-2,K=1-2"])
def test_words_that_are_no_ranges_are_refused(word):
    with pytest.raises(ValueError, match="expected a word like"):
        parse_ranges(word)


def test_what_only_the_gpu_has_is_a_usage_error_on_the_cpu(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--precision", "fp16"])
    assert stop.value.code == 2
    assert "--context gpu" in capsys.readouterr().err


@pytest.mark.parametrize(("context", "impl"), [("gpu", "direct"), ("cpu", "naive")])
def test_an_implementation_of_the_other_device_is_a_usage_error(context, impl, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--context", context, "--impl", impl])
    assert stop.value.code == 2
    assert f"expected one for the {context} (auto," in capsys.readouterr().err


@pytest.mark.skipif(not find_spec("matplotlib"), reason="the plots are matplotlib's, which is not installed")
def test_both_plots_are_drawn_the_same_each_time(tmp_path):
    ceilings = Ceilings(4e12, 60e12)
    first, again = (
        _plots.draw(_gpu_report.points(RESULTS), ceilings, tmp_path / folder, "a chip") for folder in ("one", "two")
    )
    assert [path.name for path in first] == ["roofline.svg", "peers.svg"]
    for one, two in zip(first, again):
        assert one.read_bytes() == two.read_bytes()
        assert b"<svg" in one.read_bytes()


def test_an_interrupted_run_goes_on_from_its_file(tmp_path, capsys, monkeypatch):
    """Without a GPU: what asks for one is replaced."""
    begun = []

    def contest(problem, impls, precision, repeats, seed):
        begun.append(problem.channels)
        if len(begun) == 2:
            raise KeyboardInterrupt
        yield from {impl: timing(1.0, 2.0) for impl in impls}.items()

    monkeypatch.setattr(_gpu, "contest", contest)
    monkeypatch.setattr(cuda, "chip", lambda: SimpleNamespace(name="a chip"))
    monkeypatch.setattr(cuda, "cupy", MagicMock())
    monkeypatch.setattr(roofline, "measure", lambda: Ceilings(4e12, 60e12))
    monkeypatch.setattr(_gpu_report, "facts", lambda chip: {"machine": {"name": chip.name}, "versions": {}})
    file = tmp_path / "bench.json"
    arguments = ["--context", "gpu", "--layers", "3x9x9x5x3", "4x9x9x5x3", "--images", "5", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert json.loads(file.read_text())["complete"] is False
    assert main(arguments) == 0
    assert begun == [3, 4, 4]
    out, err = capsys.readouterr()
    assert f"{file}: 1 of 2 layers taken from the interrupted run\n" in err
    assert "| 3x9x9x5x3 | 5 | auto |" in out
    assert "| 4x9x9x5x3 | 5 | auto |" in out
    assert json.loads(file.read_text())["complete"] is True


@pytest.mark.gpu
def test_a_run_is_checked_and_written(tmp_path, capsys):
    require_gpu()
    file = tmp_path / "bench.json"
    arguments = ["--context", "gpu", "--layers", "3x20x21x5x3", "--images", "50", "--repeats", "3"]
    assert main([*arguments, "--impl", "auto", "naive", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    found = data["layers"][0]["results"]
    assert found["auto"]["kernel"]
    assert all(one["status"] == "PASSED" and one["median"] > 0 for one in found.values())
    assert "| 3x20x21x5x3 | 50 | naive |" in capsys.readouterr().out
