"""The trained networks without their convolutions, computed without MXNet and compared with MXNet's labels."""

from unittest.mock import Mock

import numpy as np
import pytest

from ece408_op.core import reference
from ece408_op.errors import DataError
from ece408_op.grade import _real_images
from ece408_op.problem import NETS, Net

IMAGES = 40


def exact_labels(net: _real_images.CourseNet, x: np.ndarray) -> np.ndarray:
    for layer, w in enumerate(net.filters):
        x = net.after(layer, reference.convolve(x, w).astype(np.float32))
    return net.labels(x)


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_the_labels_are_mxnets(net):
    mx = pytest.importorskip("mxnet")
    from ece408_op.models import files, inference

    for one in _real_images.trained(net, IMAGES):
        expected = inference.predict(inference.built_in(files.find(one.name)), one.test.images, mx.cpu())
        np.testing.assert_array_equal(exact_labels(one, one.test.images), expected)


def test_the_largest_of_four_may_be_found_before_the_tanh():
    y = np.random.default_rng(1).standard_normal((3, 2, 5, 7)).astype(np.float32)
    got = _real_images.CourseNet.after(0, y)
    for i in range(2):
        for j in range(3):
            expected = np.tanh(y[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]).max(axis=(2, 3))
            np.testing.assert_allclose(got[:, :, i, j], expected, rtol=1e-6)
    assert got.shape == (3, 2, 2, 3) and got.dtype == np.float32


def test_agreement_and_accuracy_are_counted():
    (net, _) = _real_images.trained(NETS[0], 10)
    truth = net.test.labels.astype(int)
    wrong = truth.copy()
    wrong[:3] = (truth[:3] + 1) % 10
    found = net.compare(wrong, np.where(np.arange(10) < 2, wrong, truth))
    assert (found["accuracy"], found["agreement"]) == (0.7, 0.9)


def test_layers_of_the_graders_own_have_no_trained_network(monkeypatch):
    assert _real_images.trained(Net("own", ((1, 28, 28, 5, 5),)), 10) == ()
    assert _real_images.trained(NETS[0], _real_images.MOST + 1) == ()

    monkeypatch.setattr(_real_images, "load_test", Mock(side_effect=DataError("t10k: expected the published file")))
    assert _real_images.trained(NETS[0], 9) == ()  # images that no other test has loaded
