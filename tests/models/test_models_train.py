"""Training: seeded, resumable, and its weights are for raw pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ece408_op.data import TrainingSet
from ece408_op.errors import GraphError
from ece408_op.graph import params_io
from ece408_op.models import build, train

pytest.importorskip("mxnet")

RECIPE = train.Recipe(seed=5, images=24, epochs=3, batch=8)
SMALL = build.Architecture(14, ((3, 5),), 6)


@pytest.fixture
def data(monkeypatch) -> TrainingSet:
    monkeypatch.setattr(train, "NETWORKS", {"small": SMALL})
    random = np.random.RandomState(0)
    return TrainingSet(random.randint(0, 256, (40, 1, 14, 14)).astype(np.uint8), np.arange(40, dtype=np.uint8) % 10)


def weights(trainer: train.Trainer) -> dict[str, np.ndarray]:
    return {name: value.asnumpy() for name, value in trainer.state["weight"].items()}


def test_a_resumed_training_ends_as_one_never_stopped(data, tmp_path, monkeypatch):
    whole = train.Trainer("small", RECIPE, data, tmp_path / "whole")
    first = weights(whole)
    whole.run()

    stopped = train.Trainer("small", RECIPE, data, tmp_path / "stopped")
    one_epoch = stopped._one_epoch

    def interrupted() -> float:
        if stopped.epoch == 1:
            raise KeyboardInterrupt
        return one_epoch()

    monkeypatch.setattr(stopped, "_one_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()

    resumed = train.Trainer("small", RECIPE, data, tmp_path / "stopped")
    assert resumed.epoch == 1
    resumed.run()
    for name, expected in weights(whole).items():
        np.testing.assert_allclose(weights(resumed)[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        # Or the comparison would say nothing.
        assert not np.allclose(first[name], expected, rtol=1e-5, atol=1e-6), name


def test_it_learns(data, tmp_path):
    recipe = train.Recipe(seed=5, images=24, epochs=60, batch=8, rate=0.01, augment=False)
    trainer = train.Trainer("small", recipe, data, tmp_path / "state")
    trainer.run()
    assert trainer._one_epoch() > 0.9


def test_a_checkpoint_of_another_recipe_is_refused(data, tmp_path):
    train.Trainer("small", RECIPE, data, tmp_path / "state").run()
    other = train.Recipe(seed=6, images=24, epochs=3, batch=8)
    with pytest.raises(GraphError, match=r"state: expected a checkpoint of Recipe\(seed=6"):
        train.Trainer("small", other, data, tmp_path / "state")


def test_a_cut_checkpoint_is_refused(data, tmp_path):
    train.Trainer("small", RECIPE, data, tmp_path / "state").run()
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:-9])
    with pytest.raises(GraphError, match=r"state: "):
        train.Trainer("small", RECIPE, data, tmp_path / "state")


def test_the_weights_written_are_for_raw_pixels(data, tmp_path):
    trainer = train.Trainer("small", RECIPE, data, tmp_path / "state")
    path = trainer.export(tmp_path)
    assert path.name == "small-0000.params"
    written = params_io.read(path.read_bytes(), str(path))
    assert list(written) == [
        *("arg:new0_weight", "arg:fullyconnected0_weight", "arg:fullyconnected0_bias"),
        *("arg:fullyconnected1_weight", "arg:fullyconnected1_bias"),
    ]
    for name, trained in weights(trainer).items():
        got = written[f"arg:{name}"]
        expected = trained / 255 if name == "new0_weight" else trained
        assert got.dtype == np.float16
        # Half a unit in float16's last place, or of its smallest number.
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2**-11, atol=2**-25, err_msg=name)


@pytest.mark.parametrize("size", [28, 64])
def test_augmented_images_are_mirrored_and_shifted(size):
    reach = size // 28
    images = np.zeros((400, size, size), np.uint8)
    row, column = size // 2, size // 3
    images[:, row, column] = 255
    rows, columns = np.nonzero(train.augmented(images, np.random.RandomState(1)))[1:]
    assert len(rows) == len(images)
    assert set(rows - row) == set(range(-reach, reach + 1))
    upright = set(range(column - reach, column + reach + 1))
    assert set(columns) == upright | {size - 1 - place for place in upright}
    assert 0.4 < np.isin(columns, list(upright)).mean() < 0.6


def test_first_weights_are_glorots():
    shapes = {"new0_weight": (50, 6, 5, 5), "fullyconnected0_bias": (9,)}
    got = train.first_weights(shapes, np.random.RandomState(3))
    bound = math.sqrt(6 / (50 * 25 + 6 * 25))
    assert 0.99 * bound < np.abs(got["new0_weight"]).max() <= bound
    assert abs(got["new0_weight"].mean()) < 0.05 * bound
    assert not got["fullyconnected0_bias"].any()
    again = train.first_weights(shapes, np.random.RandomState(3))
    assert all(np.array_equal(got[name], again[name]) for name in shapes)


def test_every_network_has_a_recipe():
    assert set(train.RECIPES) == set(build.NETWORKS)
    assert all(recipe.images % recipe.batch == 0 for recipe in train.RECIPES.values())


def test_an_unknown_name_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["nobody"])
    assert stopped.value.code == 2
    assert "expected names among baseline, ece408-high" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--help"])
    assert stopped.value.code == 0
    assert "example: ECE408_DATA=" in capsys.readouterr().out
