"""m3.py and m4.py as a user runs them, with a GPU and without one."""

import json
import re

import pytest
from milestone_run import passed
from test_milestones import HEAD

from ece408_op.core import dispatch
from ece408_op.kernels import KERNELS
from ece408_op.plugin import bridge

mx = pytest.importorskip("mxnet")

HOST = bridge.gpu_problem("host")
DEVICE = bridge.gpu_problem("device")
gpu = pytest.mark.gpu


@pytest.fixture
def host():
    """Skip where the operator cannot compute on a GPU."""
    if HOST is not None:
        pytest.skip(HOST)


VERIFIED = (
    r"Largest difference from MXNet's Convolution: \S+\n"
    r"Largest error against float64: \S+ of the kernel's bound\nAgreeing predictions: 100 of 100\n"
)


unknown_to_mxnet = pytest.mark.skipif(DEVICE is None, reason="MXNet's own kernels run on this machine's GPU")
MODELS = ["ece408-high", "ece408-low", "ece408-2018sp", "ece408-2018fa"]


@gpu
@pytest.mark.parametrize(
    ("script", "kernel", "context", "model"),
    [
        *(pytest.param(*one, "cpu", model) for one in [("m3.py", "naive"), ("m4.py", None)] for model in MODELS),
        *(
            pytest.param(*one, "gpu", model, marks=unknown_to_mxnet)  # the whole network as one node
            for one in [("m1.py", "cudnn"), ("m3.py", "naive"), ("m4.py", None)]
            for model in ("baseline", "ece408-2018sp")
        ),
    ],
)
def test_the_courses_lines_from_the_gpu(host, script, kernel, context, model, tmp_path):
    if kernel == "cudnn":
        pytest.importorskip("cudnn")
    verify = [] if script == "m1.py" else ["--verify"]
    done = passed(script, model, 100, "--context", context, *verify, "--json", tmp_path / "r.json")
    assert ("ece408_op.gpu_network runs on it" in done.stderr) == (context == "gpu")
    layers = 2 if "2018" in model else 1
    lines = (
        r"EvalMetric: {'accuracy': [0-9.]+}\n"
        if script == "m1.py"
        else r"Op Time: \d+\.\d{6}\n" * layers + r"Correctness: [0-9.]+ Model: \S+\n" + VERIFIED
    )
    assert re.fullmatch(re.escape(HEAD) + lines, done.stdout), done.stdout
    results = json.loads((tmp_path / "r.json").read_text())
    assert context == "cpu" or results["context"] == "gpu_network"
    assert len(results["op_times"]) == layers
    assert all(call["device"] == "gpu" and call["seconds"] > 0 for call in results["op_times"])
    if kernel is not None:
        assert {call["implementation"] for call in results["op_times"]} == {kernel}


@gpu
@pytest.mark.parametrize(("script", "kernels"), [("m3.py", {"naive"}), ("m4.py", {"sliding_window", "register_tiled"})])
@pytest.mark.parametrize("model", MODELS)
def test_fused_layers_give_the_same_predictions(host, script, kernels, model, tmp_path):
    done = passed(script, model, 1000, "--fuse", "--context", "cpu", "--verify", "--json", tmp_path / "r.json")
    assert "Agreeing predictions: 1000 of 1000" in done.stdout
    first = json.loads((tmp_path / "r.json").read_text())["op_times"][0]
    assert first["implementation"] in kernels
    assert first["y"][2] == (first["x"][2] - first["w"][2] + 1) // 2


@gpu
@unknown_to_mxnet
def test_a_whole_network_as_one_node_sees_itself_to_what_it_fuses(host):
    done = passed("m4.py", 100, "--fuse", "--context", "gpu", "--verify")
    assert "Agreeing predictions: 100 of 100" in done.stdout


@gpu
def test_reduced_precision_is_reported_and_fails_nothing(host):
    name = next(kernel.name for kernel in KERNELS if kernel.device == "gpu" and kernel.precision != "float32")
    done = passed("m4.py", 200, "--impl", name, "--verify", "--context", "cpu")
    assert re.search(r"^Agreeing predictions: \d+ of 200$", done.stdout, re.M)


@gpu
def test_all_kernels_in_one_table(host, tmp_path):
    done = passed("m4.py", "ece408-2018sp", 200, "--impl", "all", "--context", "cpu", "--json", tmp_path / "r.json")
    cases = json.loads((tmp_path / "r.json").read_text())["layers"]
    assert [case["name"] for case in cases] == ["new0", "new1"]
    for case in cases:
        assert {row["impl"] for row in case["rows"]} == set(dispatch.names("gpu"))
        for row in case["rows"]:
            assert row["status"] == "skipped" and row["reason"] or row["seconds"]
            assert row["impl"] in done.stdout
