"""Training is seeded, learns, and exports weights for raw pixels."""

import math

import numpy as np
import pytest
from gpu_case import require_gpu
from small_networks import variant

import ece408_op
from ece408_op import models
from ece408_op.data import TrainingSet
from ece408_op.graph import params_io
from ece408_op.models import train
from ece408_op.problem import ConvProblem, WeightGradient

pytest.importorskip("mxnet")

RECIPE = train.Recipe(seed=5, images=24, epochs=3, batch=8)
SMALL = variant("ece408-high", new0={"num_filter": "3"}, fullyconnected0={"num_hidden": "6"})
PIXELS = np.random.RandomState(0).randint(0, 256, (40, 1, 14, 14)).astype(np.uint8)
DATA = TrainingSet(PIXELS, np.arange(40, dtype=np.uint8) % 10)


def test_equal_recipes_give_equal_weights():
    first, *_, expected = train.train(SMALL, RECIPE, DATA)
    *_, got = train.train(SMALL, RECIPE, DATA)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
        # Otherwise the comparison would not show that anything was trained.
        assert not np.allclose(first[name], array, rtol=1e-5, atol=1e-6), name


def test_the_operator_computes_the_convolution_and_its_gradient():
    ece408_op.clear_op_times()
    list(train.train(SMALL, train.Recipe(seed=5, images=8, epochs=1, batch=8), DATA))
    assert [type(call.problem) for call in ece408_op.op_times()] == [ConvProblem, WeightGradient]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_it_learns(device, capsys):
    if device == "gpu":
        require_gpu()
    recipe = train.Recipe(seed=5, images=24, epochs=60, batch=8, rate=0.01, augment=False)
    assert sum(1 for _ in train.train(SMALL, recipe, DATA, device=device)) == 61
    shares = [float(line.split()[3]) for line in capsys.readouterr().err.splitlines() if "right while" in line]
    assert len(shares) == 60
    assert shares[-1] > 0.9 > shares[0]


def test_exported_weights_are_for_raw_pixels(tmp_path):
    weights = next(train.train(SMALL, RECIPE, DATA))
    path = tmp_path / "small-0000.params"
    train.export(weights, path)
    written = params_io.read(path.read_bytes(), str(path))
    assert list(written) == [
        *("arg:new0_weight", "arg:fullyconnected0_weight", "arg:fullyconnected0_bias"),
        *("arg:fullyconnected1_weight", "arg:fullyconnected1_bias"),
    ]
    for name, trained in weights.items():
        got = written[f"arg:{name}"]
        expected = trained / 255 if name == "new0_weight" else trained
        assert got.dtype == np.float16
        # Half a unit in float16's last place, or of its smallest number.
        np.testing.assert_allclose(got.astype(np.float64), expected, rtol=2**-11, atol=2**-25, err_msg=name)


def test_the_command_makes_its_folder_and_refuses_a_wrong_one_before_it_trains(tmp_path, monkeypatch, capsys):
    loaded = []

    def load(size):
        loaded.append(size)
        pixels = np.random.RandomState(1).randint(0, 256, (32, 1, size, size)).astype(np.uint8)
        return TrainingSet(pixels, np.arange(32, dtype=np.uint8) % 10)

    monkeypatch.setattr(train, "RECIPES", {"ece408-low": RECIPE})
    monkeypatch.setattr(train, "load_training", load)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        train.main(["ece408-low", "--out", str(tmp_path / "file")])
    assert loaded == []
    folder = tmp_path / "new" / "folder"
    assert train.main(["ece408-low", "--out", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'ece408-low-0003.params'}\n"
    assert params_io.read((folder / "ece408-low-0003.params").read_bytes(), "written")


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


def test_every_network_has_a_recipe():
    assert set(train.RECIPES) == set(models.list_names())
    assert all(recipe.images % recipe.batch == 0 for recipe in train.RECIPES.values())
