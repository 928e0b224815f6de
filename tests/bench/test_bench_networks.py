"""The benchmark of whole networks and of one image: it measures what it says, and checks it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mxnet")

from ece408_op.bench import _networks, _one_image
from ece408_op.bench.__main__ import main
from ece408_op.errors import DeviceError
from ece408_op.plugin import bridge


def test_each_network_is_timed_by_each_setting(tmp_path, capsys):
    assert main(["--networks", "--images", "30", "--repeats", "1", "--json", str(tmp_path / "n.json")]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == [name for name in _networks.NETWORKS for _ in _networks.CONTESTANTS]
    assert all(row[-1].strip() == "30 of 30" for row in rows)
    data = json.loads((tmp_path / "n.json").read_text())["networks"]
    assert all(len(result["steady"]) == 1 < result["images"] for result in data)


def test_interrupted_networks_go_on_from_their_file(tmp_path, capsys, monkeypatch):
    measured = []

    def measure(name, images, repeats, device):
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return [_networks.NetworkTiming(name, one, images, 2.0, [1.0], images) for one in _networks.CONTESTANTS]

    monkeypatch.setattr(_networks, "measure", measure)
    file = tmp_path / "n.json"
    arguments = ["--networks", "--images", "30", "--repeats", "1", "--json", str(file)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert json.loads(file.read_text())["complete"] is False
    assert main(arguments) == 0
    assert measured == [_networks.NETWORKS[0], _networks.NETWORKS[1], *_networks.NETWORKS[1:]]
    out, err = capsys.readouterr()
    assert err == f"{file}: 1 of 3 networks taken from the interrupted run\n"
    assert out.count("30 of 30") == len(_networks.NETWORKS) * len(_networks.CONTESTANTS)
    assert json.loads(file.read_text())["complete"] is True


def test_a_wrong_prediction_is_seen():
    assert not _networks.NetworkTiming("x", "y", 30, 1.0, [1.0], 29).passed


def test_one_image_and_a_first_call():
    result = _one_image.measure("cpu", calls=20, processes=1)
    assert result.operator.count == result.nothing.count == 20
    assert len(result.first_calls) == 1
    text = _one_image.table(result, "cpu")
    assert f"| difference | {result.extra:.0f} |" in text


def test_one_image_in_a_context_that_mxnet_lacks_exits_3_with_one_sentence(capsys, monkeypatch):
    def lacks():
        raise DeviceError("mx.gpu(): expected a GPU build of MXNet, got its CPU build")

    monkeypatch.setattr(bridge, "require_mxnet_gpu", lacks)
    assert main(["--one-image", "--context", "gpu"]) == 3
    assert capsys.readouterr().err == "mx.gpu(): expected a GPU build of MXNet, got its CPU build\n"


@pytest.mark.gpu
def test_the_gpu_computes_the_convolutions(tmp_path, capsys):
    reason = bridge.gpu_problem("host")
    if reason:
        pytest.skip(reason)
    arguments = ["--networks", "--context", "gpu", "--images", "30", "--repeats", "1"]
    assert main([*arguments, "--json", str(tmp_path / "n.json")]) == 0
    assert capsys.readouterr().out.count("30 of 30") == len(_networks.NETWORKS) * len(_networks.CONTESTANTS)
    assert json.loads((tmp_path / "n.json").read_text())["machine"]["gpu"]


@pytest.mark.skipif(bridge.gpu_problem("host") is None, reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_and_exit_code_3(capsys):
    assert main(["--networks", "--context", "gpu", "--images", "30"]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
