"""MXNet with its NumPy shims: long after its import, and where NumPy 2 prints or rounds otherwise."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ece408_op  # noqa: F401 (before MXNet)

mx = pytest.importorskip("mxnet", reason="MXNet is not installed")

TWO, FIVE = np.int64(2), np.int64(5)
IMAGE = mx.nd.arange(25).reshape((1, 1, 5, 5))


def test_every_module_of_mxnet_imports() -> None:
    # Programs, a setup script, and what needs packages that MXNet does not ask for.
    programs = ("mxnet.tools", "mxnet.cython", "mxnet.onnx.setup", "mxnet.libmxnet", "mxnet.kvstore.kvstore_server")
    names = [each.name for each in pkgutil.walk_packages(mx.__path__, "mxnet.", onerror=lambda name: None)]
    assert "mxnet.gluon.contrib.estimator.event_handler" in names
    for name in names:
        if not name.startswith(programs):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert not str(error.name).startswith(("numpy", "distutils", "mxnet")), name


def test_bool_arrays_of_mx_np() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        x = mx.np.array([[0, 1], [2, 0]], dtype=bool)
        assert x.dtype == np.bool_
        assert mx.np.zeros(2, dtype="bool").asnumpy().tolist() == [False, False]
        assert mx.np.ones(2).astype(np.bool_).dtype == mx.np.bool_
        assert mx.np.arange(4)[mx.np.arange(4) > 1].asnumpy().tolist() == [2, 3]
        assert isinstance(mx.np.bool, type)


@pytest.mark.filterwarnings("ignore:.*alltrue. is deprecated:DeprecationWarning")
# MXNet hands these names on to NumPy, where 1.25 to 1.26 still have them.
@pytest.mark.filterwarnings("ignore:`(alltrue|product|sometrue)` is deprecated as of NumPy 1.25.0:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:msort is deprecated:DeprecationWarning:mxnet.numpy.multiarray")
def test_functions_that_numpy_renamed_or_dropped() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        x = mx.np.array([[3.0, 1.0], [0.0, 2.0]])
        assert not mx.np.alltrue(x)
        assert mx.np.msort(x).asnumpy().tolist() == [[0, 1], [3, 2]]
        assert float(mx.np.trapz(x[0])) == 2
        assert mx.np.in1d(x, mx.np.array([1.0, 2.0])).asnumpy().tolist() == [False, True, False, True]
        assert mx.np.in1d(x, mx.np.array([1.0]), invert=True).asnumpy().tolist() == [True, False, True, True]
        assert float(mx.np.product(x + 1)) == 24
        assert mx.np.sometrue(x)
        assert mx.np.round_(x + 0.4).asnumpy().tolist() == x.asnumpy().tolist()
        assert (np.isposinf(mx.np.PINF), np.isneginf(mx.np.NINF), np.isnan(mx.np.NAN)) == (True, True, True)
        with pytest.raises((NotImplementedError, RuntimeError), match="numpy.financial"):
            mx.np.npv(0.1, [1.0, 2.0])


def test_numpys_functions_and_scalars_on_arrays_of_mx_np() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        x = mx.np.array([[4.0, 1.0], [1.0, 2.0]])
        assert isinstance(np.sum(x), mx.np.ndarray)
        assert (np.float64(8) / x).asnumpy().tolist() == [[2, 8], [8, 4]]
        q, r = mx.np.linalg.qr(x)
        assert isinstance(q, mx.np.ndarray)
        assert np.allclose((q @ r).asnumpy(), x.asnumpy())


@pytest.mark.parametrize("rand_type", ["uniform", "normal"])
def test_orthogonal_initialiser(rand_type: str) -> None:
    weight = mx.nd.zeros((3, 4, 2))
    mx.init.Orthogonal(scale=1.0, rand_type=rand_type)(mx.init.InitDesc("x_weight"), weight)
    rows = weight.asnumpy().reshape(3, 8).astype(np.float64)
    # Three rows of unit length at right angles; LAPACK's float32 rounds to a few 2**-23.
    assert np.abs(rows @ rows.T - np.eye(3)).max() < 8 * 2.0**-23 * 8


def test_estimators_handlers(tmp_path: Path) -> None:
    from mxnet.gluon.contrib.estimator import Estimator, event_handler

    net = mx.gluon.nn.Dense(2)
    net.initialize(mx.init.One())
    data = mx.gluon.data.ArrayDataset(np.eye(8, dtype=np.float32), np.arange(8) % 2)
    loader = mx.gluon.data.DataLoader(data, 4)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
    estimator = Estimator(
        net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=mx.metric.Accuracy(), trainer=trainer
    )
    best = event_handler.CheckpointHandler(
        str(tmp_path), "net", monitor=estimator.train_metrics[0], save_best=True, mode="max"
    )
    stop = event_handler.EarlyStoppingHandler(monitor=estimator.train_metrics[0], mode="max", patience=1)
    estimator.fit(loader, val_data=loader, epochs=2, event_handlers=[best, stop])
    assert (tmp_path / "net-best.params").is_file()


def test_test_utils() -> None:
    from mxnet import test_utils

    assert test_utils.np.ndarray is np.ndarray
    assert test_utils.np.random is np.random
    test_utils.check_numeric_gradient(mx.sym.tanh(mx.sym.var("x")), [np.array([[0.1, 0.2]])], rtol=0.05, atol=0.01)
    test_utils.assert_almost_equal(mx.nd.ones(3), np.ones(3))
    pytest.importorskip("scipy", reason="chi_square_check needs SciPy")
    draw = np.random.RandomState(0).uniform
    counts = test_utils.chi_square_check(lambda n: draw(0, 1, n), [(0, 0.5), (0.5, 1)], [0.5, 0.5], nsamples=1000)[1]
    assert sum(counts) == 1000


@pytest.mark.parametrize("label", [3.0, [1.0, 2.0, 3.0], np.array([4.0, 5.0])])
def test_records_keep_their_labels(label: Any) -> None:
    header, body = mx.recordio.unpack(mx.recordio.pack(mx.recordio.IRHeader(0, label, 7, 0), b"image"))
    assert body == b"image"
    assert header.id == 7
    assert np.array_equal(header.label, label)


def test_numpys_scalars_as_attributes(tmp_path: Path) -> None:
    """NumPy 2 prints them with their type: (np.int64(2), np.int64(2))."""
    pooled = mx.nd.Pooling(IMAGE, kernel=(TWO, TWO), stride=(TWO, TWO), pool_type="max")
    assert pooled.shape == (1, 1, 2, 2)
    assert mx.nd.zeros((TWO, FIVE)).shape == (2, 5)
    assert mx.nd.reshape(IMAGE, shape=[FIVE, -1]).shape == (5, 5)
    assert mx.nd.random.uniform(np.float64(0), np.float32(1), shape=(TWO, FIVE)).shape == (2, 5)
    symbol = mx.sym.Convolution(mx.sym.var("data"), kernel=(FIVE, FIVE), num_filter=TWO, name="c")
    assert symbol.attr_dict()["c"] == {"kernel": "(5, 5)", "num_filter": "2"}
    variable = mx.sym.var("x", shape=(TWO, FIVE), lr_mult=np.float64(0.5))
    assert (variable.attr("__shape__"), variable.attr("__lr_mult__")) == ("(2, 5)", "0.5")
    (tmp_path / "x.csv").write_text("1,2\n3,4\n")
    batch = next(mx.io.CSVIter(data_csv=str(tmp_path / "x.csv"), data_shape=(TWO,), batch_size=TWO))
    assert batch.data[0].asnumpy().tolist() == [[1, 2], [3, 4]]


def test_a_metric_prints_plain_numbers_and_sums_in_float64() -> None:
    metric = mx.metric.Accuracy()
    metric.update([mx.nd.array([0, 1])], [mx.nd.array([[0.9, 0.1], [0.8, 0.2]])])
    assert str(metric) == "EvalMetric: {'accuracy': 0.5}"
    loss = mx.metric.Loss()
    for _ in range(2):
        loss.update(None, mx.nd.array([2.0**24, 1.0]))  # 2**24 + 1 is no float32; MXNet sums each update in float32
    loss.update(None, mx.nd.array([1.0]))
    assert loss.sum_metric == 2.0**25 + 1
    loss.reset()
    assert loss.sum_metric == 0
