"""m1.py and m2.py as a user runs them: printed lines, exit codes, checks, and a network dropped into models/."""

import json
import re

import pytest
from milestone_run import passed, run, started

from ece408_op.core import dispatch
from ece408_op.models import files

mx = pytest.importorskip("mxnet")

HEAD = "New Inference\nLoading fashion-mnist data... done\nLoading model... done\n"


@pytest.mark.parametrize("model", ["baseline", "ece408-high", "ece408-low", "ece408-2018sp", "ece408-2018fa"])
def test_m1_and_m2_print_the_courses_lines_and_agree(model, tmp_path):
    done = passed("m1.py", model, 60, "--json", tmp_path / "m1.json")
    accuracy = re.fullmatch(re.escape(HEAD) + r"EvalMetric: \{'accuracy': ([0-9.]+)\}\n", done.stdout)[1]

    done = passed("m2.py", model, 60, "--verify", "--json", tmp_path / "m2.json")
    title = "ece408" if "2018" in model else model
    layers = 2 if "2018" in model else 1
    pattern = (
        re.escape(HEAD)
        + r"Op Time: \d+\.\d{6}\n" * layers
        + re.escape(f"Correctness: {accuracy} Model: {title}\n")
        + r"Largest difference from MXNet's Convolution: \S+\n"
        + r"Largest error against float64: \S+ of the kernel's bound\nAgreeing predictions: 60 of 60\n"
    )
    assert re.fullmatch(pattern, done.stdout), done.stdout

    first, second = (json.loads((tmp_path / name).read_text()) for name in ("m1.json", "m2.json"))
    assert first["accuracy"] == second["accuracy"] == float(accuracy)
    assert first["op_times"] == []
    assert [call["layer"] for call in second["op_times"]] == ["new0", "new1"][:layers]
    assert second["verification"]["agreeing"] == second["size"] == 60
    # One layer of 8-bit pixels and float16 weights may be exact.
    assert all(call["call_seconds"] >= call["seconds"] > 0 for call in second["op_times"])
    assert second["verification"]["right"] and 0 <= second["verification"]["worst"] < 1


def test_fused_layers_give_the_same_predictions():
    done = run("m2.py", "ece408-2018sp", "--fuse", 60, "--verify")  # the size may stand behind an option
    assert done.returncode == 0, done.stderr
    assert "Agreeing predictions: 60 of 60" in done.stdout


def test_one_number_alone_is_the_size_and_times_go_to_stderr():
    done = started("m2.py", 7, "--impl", "loops", "--time")
    assert done.returncode == 0, done.stderr
    assert "Model: ece408-high" in done.stdout
    assert re.search(r"^real \d+\.\d\d\nuser \d+\.\d\d\nsys \d+\.\d\d\nmaxresident \d+ KiB$", done.stderr, re.M)
    assert re.search(r"^new0: whole call \d+\.\d{6}$", done.stderr, re.M)
    assert "real" not in done.stdout


def test_a_folder_without_the_data_is_an_error(tmp_path):
    done = run("m2.py", 10, "--data", tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of models/."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    return tmp_path


def saved(folder, name, symbol, side):
    """Write a network with random weights, for images of 1 x side x side."""
    symbol.save(str(folder / f"{name}-symbol.json"))
    sizes, _, states = symbol.infer_shape(data=(1, 1, side, side))
    shapes = {f"arg:{n}": size for n, size in zip(symbol.list_arguments(), sizes) if n not in ("data", "softmax_label")}
    values = {key: mx.nd.random.normal(scale=0.01, shape=size) for key, size in shapes.items()}
    values.update((f"aux:{n}", mx.nd.ones(size)) for n, size in zip(symbol.list_auxiliary_states(), states))
    mx.nd.save(str(folder / f"{name}-0012.params"), values)
    mx.nd.save(str(folder / f"{name}-0003.params"), {key: value * 0 for key, value in values.items()})


def classifier(x):
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=10, name="fc"), name="softmax")


def test_a_network_of_another_year_runs_by_its_name(folder):
    """Another image size, three layers, another kernel, an attribute spelling of another year; no line of code."""
    x = mx.sym.Variable("data")
    for layer, (filters, kernel) in enumerate([(4, 3), (5, 4), (6, 2)]):
        x = mx.sym.Convolution(x, kernel=(kernel, kernel), num_filter=filters, no_bias=True, name=f"new{layer}")
        x = mx.sym.Activation(x, act_type="relu")
    saved(folder, "mich-2024", classifier(x), 20)
    path = folder / "mich-2024-symbol.json"
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        if node["op"] == "Convolution":
            node["op"] = "New"
            node["attrs"] = {key: node["attrs"][key] for key in ("kernel", "num_filter")}
    path.write_text(json.dumps(graph))
    first = passed("m1.py", "mich-2024", 40)
    accuracy = re.search(r"'accuracy': (\S+)\}", first.stdout)[1]
    second = passed("m2.py", "mich-2024", 40, "--verify")
    assert f"Correctness: {accuracy} Model: mich-2024\n" in second.stdout
    assert second.stdout.count("Op Time: ") == 3


def test_convolutions_that_new_cannot_replace_are_named(folder):
    data = mx.sym.Variable("data")
    # New takes 2-D convolutions only, and gives the reason for others.
    row = mx.sym.Convolution(mx.sym.reshape(data, (0, 1, -1)), kernel=(3,), num_filter=4, name="row")
    saved(folder, "none", classifier(mx.sym.reshape(row, (0, 4, 1, -1))), 20)
    done = run("m2.py", "none", 20, "--verify")
    assert done.returncode == 1
    assert "Correctness" not in done.stdout
    assert "row stays MXNet's Convolution: " in done.stderr
    assert "New takes 2-D convolutions only" in done.stderr
    assert "none: expected a convolution that New can take the place of" in done.stderr

    biased = mx.sym.Convolution(data, kernel=(3, 2), pad=(1, 0), stride=(1, 2), num_filter=5, name="with_a_bias")
    row = mx.sym.Convolution(mx.sym.reshape(biased, (0, 5, -1)), kernel=(3,), num_filter=4, name="row")
    saved(folder, "some", classifier(mx.sym.reshape(row, (0, 4, 1, -1))), 20)
    done = passed("m2.py", "some", 20, "--verify", "--json", folder / "some.json")
    assert done.stdout.count("Op Time: ") == 1
    assert "row stays MXNet's Convolution" in done.stderr
    assert json.loads((folder / "some.json").read_text())["verification"]["right"]


def test_verify_takes_the_states_of_a_batch_normalization(folder):
    x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8, pad=(1, 1), name="first")
    x = mx.sym.BatchNorm(x, name="norm")
    x = x + mx.sym.Convolution(x, kernel=(3, 3), num_filter=8, pad=(1, 1), name="second")
    saved(folder, "residual", classifier(x), 12)
    done = passed("m2.py", "residual", 9, "--verify")
    assert "Agreeing predictions: 9 of 9" in done.stdout
    # MXNet computes these layers faster; the script has no options that a hint could name.
    assert "warn=False" not in done.stderr


@pytest.mark.parametrize("script", ["m1.py", "m2.py"])
def test_a_network_whose_output_has_rows_and_columns_ends_with_one_message(folder, script):
    saved(folder, "map", mx.sym.Convolution(mx.sym.Variable("data"), kernel=(12, 12), num_filter=10, name="conv"), 12)
    done = run(script, "map", 3)
    expected = "expected scores (images, classes) as the network's first output, got (3, 10, 17, 17); add a Flatten"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"{script}: {expected}")


def wrong(problem, x, w, out, threads):
    dispatch.find("im2col").run(problem, x, 2 * w, out, threads)


def failing(problem, x, w, out, threads):
    raise TypeError("planted")


LINE = failing.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong, r"^layer new0: WRONG: worst element \[\d+, \d+, \d+, \d+\]: got \S+, expected \S+,"),
        (failing, rf"TypeError: planted \({re.escape(__file__)}, line {LINE}, in failing\)"),
    ],
    ids=["a wrong result", "an exception"],
)
def test_what_is_wrong_in_a_kernel_is_named(kernel, words, monkeypatch):
    monkeypatch.setitem(vars(dispatch.find("direct")), "run", kernel)  # its fields are frozen
    done = run("m2.py", "ece408-low", 20, "--impl", "direct", "--verify")
    assert done.returncode == 1
    assert re.search(words, done.stderr, re.M)
