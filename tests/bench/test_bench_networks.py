"""The benchmark of whole networks: what it times, its check of predictions, and PyTorch's version of a network."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("mxnet")

import network_fake
from network_case import mx

from ece408_op.bench import _networks, _training, results
from ece408_op.bench.__main__ import main
from ece408_op.models import inference
from ece408_op.network import engine
from ece408_op.plugin import bridge
from ece408_op.runtime import cuda

CONTESTANTS = ["MXNet, default", "MXNet, NONE", "New", "New fused"]


def test_each_network_is_timed_by_each_contestant(tmp_path, capsys):
    file = tmp_path / "n.json"
    assert main(["networks", "--images", "30", "--repeats", "1", "--json", str(file)]) == 0
    run = results.read(file)
    assert [case.name for case in run.cases] == list(_networks.SETS["course"])
    for case in run.cases:
        assert [(row.contestant, row.call) for row in case.rows] == [
            (name, call) for name in CONTESTANTS for call in ("first", "forward")
        ]
        assert {row.details["agreeing"] for row in case.rows[1::2]} == {case.images} == {30}
        assert case.ratio(case.row("New", "forward")) > 0
    assert "| ece408-high | 30 | New fused |" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "reason"), [(-1, "of 3 predictions are MXNet's"), (1.001, "3 of 3 predictions")])
def test_a_network_of_new_that_is_wrong_fails(monkeypatch, capsys, factor, reason):
    with_operator = inference.with_operator

    def wrong(*given, **options):
        network = with_operator(*given, **options)
        parameters = {name: array * (factor if array.ndim == 2 else 1) for name, array in network.arg_params.items()}
        return replace(network, arg_params=parameters)

    monkeypatch.setattr(inference, "with_operator", wrong)
    assert main(["networks", "--network", "ece408-low", "--images", "3", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert "| ece408-low | 3 | New |  |  | failed |" in out
    assert "ece408-low, New: failed: " in out
    assert reason in out


@pytest.mark.parametrize("name", ["resnet18_v1", "inceptionv3", "mobilenetv2_1.0"])
def test_pytorchs_module_computes_what_mxnet_does(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import mxnet as mx

    network, image = _networks.gluons(name, seed=1)
    pixels = np.random.RandomState(0).uniform(-1, 1, (2, *image)).astype(np.float32)
    expected = inference.bound(network, pixels.shape, mx.cpu())(data=mx.nd.array(pixels)).asnumpy()
    scores = _networks.torch_module(network, "cpu").eval()(torch.from_numpy(pixels)).numpy()
    assert np.abs(scores - expected).max() <= 1e-4 * np.abs(expected).max()


def test_pytorchs_module_lacks_functions_that_no_network_here_has(monkeypatch):
    torch = SimpleNamespace(nn=SimpleNamespace(Module=object, functional=Mock()))
    monkeypatch.setitem(sys.modules, "torch", torch)
    symbol = mx.sym.LeakyReLU(mx.sym.var("data"), act_type="gelu")
    module = _networks.torch_module(SimpleNamespace(symbol=symbol, arg_params={}, aux_params={}), "cpu")
    with pytest.raises(KeyError, match="gelu"):
        module.forward(None)


@pytest.mark.gpu
def test_the_gpus_contestants_agree(tmp_path):
    reason = bridge.gpu_problem("host")
    if reason:
        pytest.skip(reason)
    file = tmp_path / "n.json"
    names = ["ece408-2018sp", "resnet18_v1"]
    arguments = ["networks", "--context", "gpu", "--network", *names, "--images", "30", "--repeats", "1"]
    assert main([*arguments, "--json", str(file)]) == 0
    run = results.read(file)
    assert run.machine.gpu.name
    for case in run.cases:
        agreeing = {
            (row.contestant, row.call): row.details["agreeing"] for row in case.rows if "agreeing" in row.details
        }
        assert ("gpu_network auto", "gpu") in agreeing
        assert set(agreeing.values()) == {30}


def test_the_contestants_before_pytorch_leave_their_memory_to_it(monkeypatch):
    left, before = [], {*engine.engines()}

    def free_gpu():
        end = time.monotonic() + 20
        while {*engine.engines()} - before and time.monotonic() < end:  # MXNet's threads free the operators
            free()
            time.sleep(0.01)
        left.extend({*engine.engines()} - before)

    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    weights = {"fc_weight": mx.nd.ones((3, 5)), "fc_bias": mx.nd.ones((3,))}
    network, pixels, free = inference.Loaded(symbol, weights, {}), np.ones((4, 5), np.float32), _networks.free_gpu
    monkeypatch.setattr(_networks, "given", lambda *_: (network, pixels, None))
    monkeypatch.setattr(_networks, "free_gpu", free_gpu)
    with network_fake.installed():
        monkeypatch.setattr(cuda.cupy().cuda.runtime, "getDeviceCount", lambda: 2, raising=False)
        case = _networks.case("a network", 4, "gpu", 1, 0)
    assert {row.contestant for row in case.rows} == {"gpu_network auto", "gpu_network auto, 2 GPUs"}
    assert {row.status for row in case.rows} == {"passed"}
    assert left == []


def test_a_training_step_returns_its_loss():
    with network_fake.installed():
        case = _training.case("ece408-high", 4, 1, 2, 0)
    assert len(case.rows) >= 3
    for row, contestant in zip(case.rows, ("gpu_network gpusgd", "gpu_network sgd", "gpu_network gpusgd, 2 GPUs")):
        assert (row.contestant, row.call, row.status) == (contestant, "step", "passed")
        assert 0 < row.details["loss"] < 10
