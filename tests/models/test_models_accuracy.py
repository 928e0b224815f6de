"""The networks classify Fashion-MNIST as well as models/README.md says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from ece408_op import models
from ece408_op.data import load_test, sample
from ece408_op.data.resize import resize
from ece408_op.graph import params_io
from ece408_op.models import accuracy, build

pytest.importorskip("mxnet")

README = Path(models.__file__).with_name("README.md")
NAMES = list(build.NETWORKS)
LEAST = {"baseline": 0.90, "ece408-high": 0.90, "ece408-low": 0.60, "ece408-2018sp": 0.88, "ece408-2018fa": 0.88}
MOST_OF_LOW = 0.66
#: Enough images for a wrong weight to show, few enough for a test.
COUNT = 2000
#: Another processor's rounding may change the answer for a near tie: two images of the 2000.
CHANGED = 2 / COUNT

real_data = pytest.mark.skipif("ECE408_DATA" not in os.environ, reason="needs the real Fashion-MNIST in ECE408_DATA")


@pytest.fixture(autouse=True)
def unfused(monkeypatch):
    """MXNet's default fuses convolution and tanh into an operator that is several times slower."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")


def rows() -> dict[tuple[str, str], list[float]]:
    """The figures of models/README.md, by network and source."""
    lines = re.findall(r"^\| ([\w-]+) \| \d+ x \d+ \| (\w+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    return {(name, source): [float(share) for share in shares.split("|")] for name, source, shares in lines}


def test_readme_has_every_network_and_each_is_as_good_as_promised():
    table = rows()
    assert set(table) == {(name, source) for name in NAMES for source in ("real", "sample")}
    for name, least in LEAST.items():
        assert table[name, "real"][-1] >= least, name
    assert table["ece408-low", "real"][-1] <= MOST_OF_LOW


@pytest.fixture(scope="module")
def sample_set() -> tuple[np.ndarray, np.ndarray]:
    images, labels = sample.generate()
    return images[:COUNT], labels[:COUNT]


@pytest.mark.parametrize("source", [pytest.param("real", marks=real_data), "sample"])
@pytest.mark.parametrize("name", NAMES)
def test_accuracy_is_readmes(name, source, sample_set):
    size = models.info(name).image[1]
    if source == "real":
        images, labels, found = load_test(size, COUNT)
        assert found == "fashion-mnist"
    else:
        images, labels = resize(sample_set[0], size)[:, None], sample_set[1]
    share = (accuracy.predictions(models.find(name), images) == labels).mean()
    assert share == pytest.approx(rows()[name, source][accuracy.COUNTS.index(COUNT)], abs=CHANGED)


def float64_classes(name: str, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each image's class, computed by NumPy in float64, and its lead over the second best."""
    path = models.find(name).params
    weights = params_io.read(path.read_bytes(), str(path))
    weights = {key[4:]: value.astype(np.float64) for key, value in weights.items()}
    x = images.astype(np.float64)
    layer = "convolution" if name == "baseline" else "new"
    for position in range(len(build.NETWORKS[name].convolutions)):
        w = weights[f"{layer}{position}_weight"]
        windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))  # (B, C, OH, OW, K, K)
        x = np.einsum("bcijpq,mcpq->bmij", windows, w, optimize=True)
        if position == 0:
            batch, maps, height, width = x.shape
            x = np.tanh(x).reshape(batch, maps, height // 2, 2, width // 2, 2).max(axis=(3, 5))
    x = x.reshape(len(x), -1) @ weights["fullyconnected0_weight"].T + weights["fullyconnected0_bias"]
    x = np.tanh(x) @ weights["fullyconnected1_weight"].T + weights["fullyconnected1_bias"]
    ranked = np.sort(x, axis=1)
    return x.argmax(axis=1), ranked[:, -1] - ranked[:, -2]


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_the_networks(name):
    images = np.random.RandomState(2).randint(0, 256, (30, 28, 28)).astype(np.uint8)
    images[::2] //= 8
    resized = resize(images, build.NETWORKS[name].size)[:, None]
    expected, lead = float64_classes(name, resized)
    sure = lead > 1e-3
    assert sure.sum() > len(images) // 2
    np.testing.assert_array_equal(accuracy.predictions(models.find(name), resized)[sure], expected[sure])


def test_predictions_in_several_batches_are_those_of_one():
    network = models.find("ece408-high")
    images = np.random.RandomState(4).randint(0, 256, (25, 1, 28, 28)).astype(np.uint8)
    whole = accuracy.predictions(network, images)
    np.testing.assert_array_equal(accuracy.predictions(network, images, batch=10), whole)
    assert len(set(whole)) > 1


def test_weights_are_half_precision_and_small_together():
    paths = [models.find(name).params for name in NAMES]
    assert sum(path.stat().st_size for path in paths) < 32_000_000
    for path in paths:
        for name, value in params_io.read(path.read_bytes(), str(path)).items():
            assert value.dtype == np.float16, name
            assert np.isfinite(value).all(), name


def test_the_table_has_the_shares_of_the_first_images(monkeypatch):
    right = np.isin(np.arange(10000), [*range(50), *range(1500, 2000)]).astype(int)
    truth = np.zeros((10000, 1, 1), np.uint8), np.ones(10000, int)
    monkeypatch.setattr(accuracy, "predictions", lambda network, images: right)
    monkeypatch.setattr(accuracy, "load_test", lambda size: (*truth, "fashion-mnist"))
    monkeypatch.setattr(accuracy.sample, "generate", lambda: truth)
    lines = accuracy.table().splitlines()
    assert len(lines) == 2 + 2 * len(NAMES)
    assert lines[2] == "| baseline | 28 x 28 | real | 1.0000 | 0.5000 | 0.0500 | 0.2750 | 0.0550 |"
