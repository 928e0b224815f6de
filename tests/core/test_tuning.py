"""The table that auto chooses GPU kernels by, and the command that makes it."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cuda_layers import H200
from process import python

from ece408_op.core import dispatch, tuning
from ece408_op.core.kernel import roofline_milliseconds
from ece408_op.core.tuning import ChipTable, LayerTimes
from ece408_op.errors import DataError, DeviceError
from ece408_op.kernels import KERNELS
from ece408_op.problem import COURSE_LAYERS, ConvProblem
from ece408_op.runtime.launch import Chip

NAMES = ("a", "b", "c", "new", "fast", "slow")
SMALL, LARGE = ConvProblem(10_000, 1, 28, 28, 6, 5), ConvProblem(10_000, 64, 28, 28, 256, 11)
HOPPER, ADA = Chip("hopper", (9, 0), 132), Chip("ada", (8, 9), 128)
TABLES = (
    ChipTable("hopper", (9, 0), (LayerTimes(SMALL, {"b": 2.0, "a": 1.0}), LayerTimes(LARGE, {"a": 9.0, "b": 3.0}))),
    ChipTable("ada", (8, 9), (LayerTimes(SMALL, {"c": 1.0}),)),
)


def preference(problem, chip, path, estimate=None):
    return tuning.ranked_by_time(
        problem, chip, NAMES, estimate or (lambda name: roofline_milliseconds(problem, chip)), path
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(tuning.merged(TABLES[1:], TABLES[0]))
    return path


def table_of(folder, *rows):
    """Write a table of these layers on one chip; its path."""
    path = folder / "tuning.json"
    path.write_text(tuning.merged((), ChipTable("hopper", (9, 0), rows)))
    return path


def test_what_is_written_is_read_back(table):
    assert tuning.read(table) == TABLES
    again = tuning.merged(tuning.read(table), TABLES[1])
    assert [chip["name"] for chip in json.loads(again)["chips"]] == ["ada", "hopper"]


def test_times_of_other_kernels_on_the_same_layer_are_kept(tmp_path):
    again = ChipTable("hopper", (9, 0), (LayerTimes(SMALL, {"b": 0.5, "new": 3.0}),))
    path = tmp_path / "again.json"
    path.write_text(tuning.merged(TABLES, again))
    hopper = next(each for each in tuning.read(path) if each.chip == "hopper")
    times = {row.problem: row.milliseconds for row in hopper.layers}
    assert times == {SMALL: {"a": 1.0, "b": 0.5, "new": 3.0}, LARGE: {"a": 9.0, "b": 3.0}}


def test_the_nearest_measured_layer_decides(table):
    assert preference(SMALL, HOPPER, table) == ["a", "b"]
    assert preference(LARGE.with_batch(100), HOPPER, table) == ["b", "a"]
    assert preference(ConvProblem(5000, 2, 30, 33, 8, 5), HOPPER, table) == ["a", "b"]
    assert preference(ConvProblem(5000, 40, 30, 33, 128, 9), HOPPER, table) == ["b", "a"]


def test_a_layers_tile_serves_every_batch_until_another_is_used(tmp_path):
    recorded, other = {"lines": 2}, {"lines": 7}
    rows = (LayerTimes(SMALL, {"a": 1.0}, tiles={"a": recorded}), LayerTimes(LARGE, {"a": 9.0}, tiles={"a": other}))
    path = table_of(tmp_path, *rows)
    chip = replace(HOPPER, name=str(tmp_path))  # whose tiles no other test uses
    assert tuning.recorded_tile("a", SMALL.with_batch(3), chip, path) == recorded
    assert tuning.recorded_tile("a", LARGE, ADA, path) == other
    assert tuning.recorded_tile("a", ConvProblem(50, 40, 30, 33, 128, 9), chip, path) == {}
    assert tuning.recorded_tile("b", SMALL, chip, path) == {}
    tuning.use_tile("a", SMALL, chip, other)
    assert tuning.recorded_tile("a", SMALL.with_batch(3), chip, path) == other


def test_a_tile_that_fails_does_not_stay(monkeypatch):
    def run(problem, x, w, out):
        if tuning.recorded_tile("failing", problem, HOPPER) == {"lines": 2}:
            raise DeviceError("no room")

    kernel = SimpleNamespace(name="failing", run=run, tiles=lambda *of: [{"lines": 1}, {"lines": 2}])
    monkeypatch.setattr(tuning, "cuda", SimpleNamespace(chip=lambda number: HOPPER, alignment=lambda *at: 16))
    monkeypatch.setattr(tuning, "gpu_clock", lambda name: lambda call: (1e-3, call()))
    array = SimpleNamespace(device=SimpleNamespace(id=0), data=SimpleNamespace(ptr=0))
    with pytest.raises(DeviceError, match="no room"):
        tuning.tune(kernel, SMALL, array, array, array)
    assert tuning.recorded_tile("failing", SMALL, HOPPER) == {"lines": 1}


def test_what_was_measured_on_the_very_layer_is_weighed_against_what_others_are_expected_to_take(tmp_path):
    # On another layer, ten times as much work, "fast" took a tenth of what "measured" did.
    more = LayerTimes(ConvProblem(10_000, 1, 84, 84, 6, 5), {"a": 9.0, "fast": 0.9, "slow": 90.0})
    path = table_of(tmp_path, LayerTimes(SMALL, {"a": 1.0, "b": 0.2}), more)
    assert preference(SMALL, HOPPER, path) == ["fast", "b", "a", "slow"]


def test_a_kernels_own_estimate_carries_its_times_over(tmp_path):
    # Both took as long on a layer that is a little different, where "a" expected to take 1 ms and "b" 4.
    path = table_of(tmp_path, LayerTimes(SMALL, {"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 4.0}))
    near = ConvProblem(10_000, 1, 30, 30, 8, 5)
    assert preference(near, HOPPER, path, {"a": 3.0, "b": 4.0}.get) == ["b", "a"]
    assert preference(near, HOPPER, path, {"a": 0.5, "b": 4.0}.get) == ["a", "b"]


def test_estimates_in_the_table_are_those_of_the_kernels():
    # A stale one would scale times wrongly: ece408-bench sweep --record updates them.
    known, recorded = {kernel.name: kernel for kernel in KERNELS}, defaultdict(list)
    for table in tuning.read(tuning.TABLE):
        assert table.chip == H200.name, "another chip: give its figures here"
        for row in table.layers:
            own = [name for name in row.milliseconds if known[name].predicted_milliseconds is not roofline_milliseconds]
            assert sorted(row.estimates) == sorted(own)
            for name in own:
                recorded[name].append(row)
    assert {"fp16x3_mma_sync", "fp16x3_warpgroup", "fp16x1_mma_sync", "fp16x1_warpgroup"} <= set(recorded)
    # All of them take a minute: of every kernel ten, the same ones each time.
    for name, rows in recorded.items():
        for row in random.Random(408).sample(rows, min(10, len(rows))):
            expected = known[name].predicted_milliseconds(row.problem, H200)
            assert row.estimates[name] == pytest.approx(expected, abs=1e-4)


def test_a_chip_that_was_not_measured_is_like_the_nearest_that_was(table):
    assert preference(SMALL, ADA, table) == ["c"]
    assert preference(SMALL, Chip("another", (8, 9), 60), table) == ["c"]
    assert preference(SMALL, Chip("older", (8, 0), 108), table) == ["c"]
    assert preference(SMALL, Chip("oldest", (5, 0), 5), table) == ["a", "b"]


def test_that_another_chips_table_decides_is_said_once_and_on_stderr_alone():
    code = """
from ece408_op.core import dispatch
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Chip
for images in (1, 2):
    dispatch.select(ConvProblem(images, 1, 28, 28, 6, 5), "gpu", chip=Chip("RTX of mine", (8, 9), 128))
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("there is no tuning table of the RTX of mine; the kernel is chosen by times of the") == 1
    assert "Run ece408-bench sweep --random 24 --record" in done.stderr


def test_without_a_table_there_is_no_preference(tmp_path):
    assert preference(SMALL, HOPPER, tmp_path / "nothing.json") == []


ROW = '{"chips": [{"name": "a", "capability": [9, 0], "layers": [{"layer": [9, 1, 28, 28, 6, 5], %s}]}]}'
DAMAGED = (
    "",
    "{}",
    '{"chips": [{"name": 1}]}',
    '{"chips": [[]]}',
    "[1]",
    ROW % '"milliseconds": {"a": 0}',
    ROW % '"milliseconds": {"a": NaN}',
    ROW % '"milliseconds": {"a": 1}, "estimates": {"a": Infinity}',
    ROW % '"milliseconds": {"a": 1}, "estimates": {"a": -1}',
)


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_table_is_named(tmp_path, text):
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(DataError, match="tuning.json: expected a table"):
        tuning.read(path)


@pytest.mark.parametrize("images", [10, 100, 10_000])
@pytest.mark.parametrize("layer", COURSE_LAYERS)
def test_auto_takes_what_was_fastest_for_that_many_images_of_a_course_layer(layer, images):
    (table,) = (table for table in tuning.read(tuning.TABLE) if table.chip == H200.name)
    problem = COURSE_LAYERS[layer].with_batch(images)
    (row,) = (row for row in table.layers if row.problem == problem)
    exact = {kernel.name for kernel in KERNELS if kernel.precision == "float32"}
    fastest = min((name for name in row.milliseconds if name in exact), key=lambda name: row.milliseconds[name])
    assert dispatch.select(problem, "gpu", chip=H200).name == fastest


def test_a_smaller_chip_of_the_same_kind_chooses_alike():
    layers = [ConvProblem(9_000, c, h, h, m, k) for c, h, m, k in ((12, 40, 24, 7), (24, 24, 48, 5), (3, 60, 16, 4))]
    chosen = [
        [dispatch.select(layer, "gpu", chip=Chip(f"{size} of them", (9, 0), size, 227 * 1024)).name for layer in layers]
        for size in (132, 33)
    ]
    assert chosen[0] == chosen[1]
    assert set(chosen[0]) & {"fp16x3_mma_sync", "fp16x3_warpgroup"}
