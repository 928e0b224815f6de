"""ece408-bench on a GPU; and what a kernel launches, which needs none."""

import pytest
from gpu_case import require_gpu

from ece408_op.bench import launches, results
from ece408_op.bench.__main__ import main
from ece408_op.bench.results import KERNEL, PASSED, SKIPPED
from ece408_op.core import dispatch, tuning
from ece408_op.plugin import bridge
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import CopyToConstant, Launch, Plan

PROBLEM = ConvProblem(50, 3, 20, 21, 5, 3)


def test_launches_are_counted_over_all_ranges_of_images():
    first, second = Launch("a", (1, 1, 1), (32, 1, 1), ()), Launch("b", (2, 1, 1), (32, 1, 1), (), shared=64)
    plan = Plan({}, 4, lambda images: (first, second) if images == 4 else (first,), setup=(second,))
    counted = launches.count(plan, 10)
    assert counted == {("a", (1, 1, 1), (32, 1, 1), 0): 3, ("b", (2, 1, 1), (32, 1, 1), 64): 3}
    assert launches.count(Plan({}, 4, lambda images: (), setup=(CopyToConstant("w", "w", 4),)), 4) == {}


@pytest.mark.gpu
def test_layers_are_checked_and_written_with_what_is_launched(tmp_path, capsys):
    require_gpu()
    file = tmp_path / "bench.json"
    arguments = ["layers", "--context", "gpu", "--layer", "3x20x21x5x3", "--images", "50", "--repeats", "3"]
    assert main([*arguments, "--impl", "auto", "all", "--json", str(file)]) == 0
    run = results.read(file)
    (case,) = run.cases
    assert case.problem == PROBLEM
    assert {row.impl for row in case.rows if not row.peer} == {"auto", *dispatch.names("gpu")}
    assert case.row("auto", KERNEL).kernel in dispatch.names("gpu")
    assert case.row("fp16x3_one_channel", KERNEL).status == SKIPPED
    for row in case.rows:
        if row.status == PASSED:
            assert len(row.seconds) == 3
            assert row.error <= row.bound
            if not row.peer and row.impl != "cudnn":  # whose launches are cuDNN's own
                assert row.details["launches"][0]["registers"] > 0
    assert "| 3x20x21x5x3 | 50 | naive |" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", ["data", "weight"])
def test_gradients_are_checked(gradient, tmp_path):
    require_gpu()
    file = tmp_path / "bench.json"
    layers = ["--layer", "3x20x21x5x3", "36x13x17x40x3s2p1", "--images", "50", "--repeats", "2"]
    arguments = ["layers", "--context", "gpu", "--gradient", gradient, "--impl", "auto", "blocked_gemm"]
    assert main([*arguments, *layers, "--json", str(file)]) == 0
    for case in results.read(file).cases:
        assert all(row.status == PASSED and row.error <= row.bound for row in case.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_layer_on_split_activations_is_checked(precision, tmp_path):
    require_gpu()
    file = tmp_path / "bench.json"
    layers = ["--layer", "30x13x17x40x3p1", "24x99x99x36x3s9", "--images", "5", "--repeats", "2"]
    arguments = ["layers", "--context", "gpu", "--split-form", "--precision", precision, "--json", str(file)]
    assert main([*arguments, *layers]) == 0
    computed, refused = (case.row("auto, split NHWC", KERNEL) for case in results.read(file).cases)
    if cuda.chip().capability != (9, 0):
        assert (computed.status, refused.status) == (SKIPPED, SKIPPED)
        return
    assert computed.status == PASSED
    assert computed.median > 0
    assert computed.error <= computed.bound
    assert refused.status == SKIPPED
    assert "stride: at most 8" in refused.reason


@pytest.mark.gpu
def test_the_sweep_records_its_times_in_the_tuning_table(tmp_path, monkeypatch):
    require_gpu()
    table = tmp_path / "tuning.json"
    monkeypatch.setattr(tuning, "TABLE", table)
    arguments = ["sweep", "--impl", "naive", "fp16x3_mma_sync", "--images", "1000", "--random", "1", "--record"]
    assert main(arguments) == 0
    (chip,) = tuning.read(table)
    assert len(chip.layers) == 16
    assert all(row.milliseconds["naive"] > 0 for row in chip.layers)
    assert any("fp16x3_mma_sync" in row.milliseconds and row.tiles["fp16x3_mma_sync"] for row in chip.layers)
    assert main(["sweep", "--again", "--impl", "naive", "--repeats", "1", "--record"]) == 0
    (again,) = tuning.read(table)
    assert [row.problem for row in again.layers] == [row.problem for row in chip.layers]
    assert any(new.milliseconds["naive"] != old.milliseconds["naive"] for new, old in zip(again.layers, chip.layers))
    assert all(new.milliseconds.keys() == old.milliseconds.keys() for new, old in zip(again.layers, chip.layers))


@pytest.mark.gpu
def test_transfers_are_compared_with_a_bare_copy(tmp_path):
    reason = bridge.gpu_problem("host")
    if reason:
        pytest.skip(reason)
    file = tmp_path / "transfers.json"
    assert main(["transfers", "--images", "500", "--repeats", "1", "--json", str(file)]) == 0
    (case,) = results.read(file).cases
    assert [(row.contestant, row.call) for row in case.rows] == [
        (name, call) for call in ("fresh", "reused") for name in ("New", "bare copy of the output")
    ]
    assert case.rows[0].details["op_time_ms"] > 0
