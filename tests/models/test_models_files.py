"""The course's networks, and networks put into a folder: found by name, with the shapes of their files."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from small_networks import variant

from ece408_op import models
from ece408_op.data import load_test, sample
from ece408_op.data.resize import resize
from ece408_op.errors import Ece408Error, GraphError
from ece408_op.graph import params_io
from ece408_op.graph.symbol_graph import Graph
from ece408_op.models import files
from ece408_op.models.shapes import LARGEST
from ece408_op.problem import COURSE_LAYERS

mx = pytest.importorskip("mxnet")

LEAST = {"baseline": 0.90, "ece408-high": 0.90, "ece408-low": 0.60, "ece408-2018sp": 0.88, "ece408-2018fa": 0.88}
#: Images that are classified: enough for a wrong weight to show. The column of models/README.md is the fourth.
COUNT, COLUMN = 2000, 3


@pytest.mark.parametrize("name", LEAST)
def test_symbol_files_are_in_the_courses_format(name):
    nodes = json.loads((files.FOLDER / f"{name}-symbol.json").read_text())["nodes"]
    assert all("attrs" not in node and "param" not in node for node in nodes)
    # A variable carries the attributes of its layer.
    by_name = {node["name"]: node for node in nodes}
    first = "convolution0" if name == "baseline" else "new0"
    assert by_name[f"{first}_weight"]["attr"] == by_name[first]["attr"]
    assert by_name["fullyconnected1_bias"]["attr"] == {"num_hidden": "10"}
    if name != "baseline":
        with pytest.raises(mx.MXNetError, match="New from a file of the course; use ece408_op.load_checkpoint"):
            mx.sym.load(str(files.FOLDER / f"{name}-symbol.json"))


def test_with_convolutions_takes_custom_nodes_and_drops_the_operators_own_attributes():
    graph = variant("ece408-high")
    node = next(node for node in graph.nodes if node.op == "New")
    plain = dict(node.attrs)
    node.op = "Custom"
    node.attrs = {**plain, "op_type": "New", "impl": "direct", "precision": "float32", "__lr_mult__": "2"}
    after = next(n for n in models.with_convolutions(graph).nodes if n.name == node.name)
    assert (after.op, after.attrs) == ("Convolution", {**plain, "__lr_mult__": "2", "no_bias": "True"})
    assert node.op == "Custom"
    Graph.parse(graph.dump(), "a graph that was left as it was")


@pytest.fixture(scope="module")
def readme() -> dict[tuple[str, str], list[float]]:
    """The accuracies in models/README.md, by network and source of the images."""
    text = (files.FOLDER / "README.md").read_text()
    lines = re.findall(r"^\| ([\w-]+) \| \d+ x \d+ \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    return {(name, source): [float(share) for share in shares.split("|")] for name, source, shares in lines}


def test_each_network_is_as_good_as_promised(readme):
    assert set(readme) == {(name, source) for name in LEAST for source in ("real", "sample")}
    assert all(readme[name, "real"][-1] >= least for name, least in LEAST.items())
    assert readme["ece408-low", "real"][-1] <= 0.66


#: By default one network of each number of layers classifies the sample set.
SOON = [("ece408-high", "sample"), ("ece408-2018sp", "sample")]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(name, source, marks=() if (name, source) in SOON else pytest.mark.exhaustive)
        for name in LEAST
        for source in ("real", "sample")
    ],
)
def test_accuracy_is_readmes(name, source, readme, monkeypatch):
    from ece408_op.models import inference

    if source == "real" and "ECE408_DATA" not in os.environ:
        pytest.skip("needs the real Fashion-MNIST in ECE408_DATA")
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")  # the default's fused operator is several times slower
    size = models.info(name).image[1]
    images, labels = sample.generate() if source == "sample" else load_test(size, COUNT)[:2]
    if source == "sample":
        images = resize(images[:COUNT], size)[:, None].astype(np.float32)
    predictions = inference.predict(inference.built_in(models.find(name)), images, mx.cpu())
    # Another processor's rounding may change the answer for a near tie: two images of the 2000.
    assert (predictions == labels[:COUNT]).mean() == pytest.approx(readme[name, source][COLUMN], abs=2 / COUNT)


def test_weights_are_half_precision_and_small_together():
    paths = [models.find(name).params for name in LEAST]
    assert sum(path.stat().st_size for path in paths) < 32_000_000
    for path in paths:
        for name, value in params_io.read(path.read_bytes(), str(path)).items():
            assert value.dtype == np.float16, name
            assert np.isfinite(value).all(), name


# Unlike any of the five: three channels, a kernel of 3, 41 x 41 images. 41 - 2 = 39, pooled 19, 19 - 2 = 17.
ANOTHER = variant(
    "ece408-2018sp",
    new0={"kernel": "(3, 3)", "num_filter": "7"},
    new1={"kernel": "(3, 3)", "num_filter": "5"},
    fullyconnected0={"num_hidden": "11"},
)
WEIGHTS = {
    "new0_weight": (7, 3, 3, 3),
    "new1_weight": (5, 7, 3, 3),
    "fullyconnected0_weight": (11, 5 * 17 * 17),
    "fullyconnected0_bias": (11,),
    "fullyconnected1_weight": (10, 11),
    "fullyconnected1_bias": (10,),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in place of models/."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    return tmp_path


def put(folder: Path, name: str, epoch: int = 1, data: dict | None = None, **changed: tuple | None) -> None:
    graph = copy.deepcopy(ANOTHER)
    graph.nodes[0].attrs.update(data or {})
    (folder / f"{name}-symbol.json").write_text(graph.dump())
    shapes = {key: shape for key, shape in {**WEIGHTS, **changed}.items() if shape is not None}
    arrays = {f"arg:{key}": np.zeros(shape, np.float16) for key, shape in shapes.items()}
    (folder / f"{name}-{epoch:04d}.params").write_bytes(params_io.write(arrays, name))


def test_another_network_is_found_and_its_size_inferred(folder):
    put(folder, "year-2031")
    assert models.list_names() == ["year-2031"]
    found = models.info("year-2031")
    # 40 x 40 images pool to 19 x 19 too: the smallest square that fits.
    assert found.image == (3, 40, 40)
    assert found.network.title == "year-2031"
    assert [layer.name for layer in found.convolutions] == ["new0", "new1"]
    assert found.convolutions[0].x == (1, 3, 40, 40)
    assert found.convolutions[1] == models.ConvLayer("new1", (1, 7, 19, 19), (5, 7, 3, 3), (1, 5, 17, 17))


def test_a_network_for_images_of_every_size_gets_the_data_sets(folder):
    x = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=2, no_bias=True, name="conv")
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1))
    x = mx.sym.FullyConnected(x, num_hidden=10, no_bias=True, name="fc")
    x.save(str(folder / "any-symbol.json"))
    arrays = {"arg:conv_weight": np.zeros((2, 1, 3, 3), np.float32), "arg:fc_weight": np.zeros((10, 2), np.float32)}
    (folder / "any-0000.params").write_bytes(params_io.write(arrays, "any"))
    assert models.info("any").image == (1, 28, 28)


@pytest.mark.parametrize(
    ("stated", "rows", "columns"),
    [
        ("(0, 3, 41, 41)", 41, 41),
        ("[1,3,41,41]", 41, 41),
        ("(1L, 3L, 41L, 41L)", 41, 41),
        ("(0, 3, 30, 54)", 30, 54),
        ("(0, 3, 0, 0)", 40, 40),  # unknown sizes: inferred
    ],
)
def test_the_data_nodes_shape_takes_precedence(folder, stated, rows, columns):
    features = 5 * ((rows - 2) // 2 - 2) * ((columns - 2) // 2 - 2)
    put(folder, "a", data={"__shape__": stated}, fullyconnected0_weight=(11, features))
    assert models.info("a").image == (3, rows, columns)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("baseline", ["2017"]), ("ece408-2018sp", ["2018sp-1", "2018sp-2"]), ("ece408-2018fa", ["2018fa-1", "2018fa-2"])],
)
def test_the_courses_networks(name, layers):
    found = models.info(name)
    problems = [COURSE_LAYERS[layer].with_batch(1) for layer in layers]
    assert (1, *found.image) == problems[0].x_shape
    expected = [(problem.x_shape, problem.w_shape, problem.y_shape) for problem in problems]
    assert [(layer.x, layer.w, layer.y) for layer in found.convolutions] == expected


def test_an_array_that_a_network_does_not_use_is_no_fault(folder):
    from ece408_op.models import inference

    put(folder, "year-2031", spare=(3,))
    network, images = models.find("year-2031"), np.ones((2, 3, 40, 40), np.float32)
    for loaded in (inference.built_in(network), inference.with_operator(network, "auto", "cpu")):
        assert inference.predict(loaded, images, mx.cpu()).shape == (2,)


def test_parameters_that_a_loaded_network_lacks_are_named(folder):
    from ece408_op.models import inference

    put(folder, "a")
    loaded, images = inference.built_in(models.find("a")), np.ones((2, 3, 40, 40), np.float32)
    del loaded.arg_params["new1_weight"], loaded.arg_params["fullyconnected1_bias"]
    with pytest.raises(Ece408Error, match="lacks new1_weight, fullyconnected1_bias$"):
        inference.predict(loaded, images, mx.cpu())
    with pytest.raises(Ece408Error, match="lacks loss_label, mean, deviation$"):
        states = (mx.sym.var(name) for name in ("mean", "deviation"))
        normalised = mx.sym.BatchNorm(mx.sym.var("data"), mx.sym.var("new0_weight"), mx.sym.var("loss_label"), *states)
        inference.run(normalised, loaded, images)


def test_the_highest_number_counts(folder):
    for epoch in (2, 9, 10, 10000):
        put(folder, "a", epoch)
    put(folder, "a-b", 20000)
    (folder / "a-99999.params.part").write_bytes(b"")
    found = models.find("a")
    assert (found.epoch, found.params.name) == (10000, "a-10000.params")
    assert found.prefix == str(folder / "a")


def test_a_network_without_weights_is_not_listed(folder):
    put(folder, "a")
    put(folder, "b")
    (folder / "b-0001.params").unlink()
    assert models.list_names() == ["a"]
    with pytest.raises(GraphError, match=r"b-symbol\.json: expected weights in its folder, such as b-0001\.params"):
        models.find("b")


@pytest.mark.parametrize("name", ["", "c", "../a", "a/", "a-symbol.json"])
def test_an_unknown_name_gets_the_known_ones(folder, name):
    put(folder, "a")
    with pytest.raises(GraphError, match=r"found none; models in .*: a$"):
        models.find(name)


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (models.find, lambda file: file.write_bytes(file.read_bytes()[:-20]), "expected a symbol in JSON"),
        (models.find, lambda file: file.write_bytes(b"\xff\xfe"), "expected a symbol file in JSON"),
        (models.find, lambda file: replaced(file, '"data"', '"images"'), "expected a variable 'data'"),
        (models.info, lambda file: replaced(file, '"Flatten"', '"Flattten"'), ".*Op flatten0 of type Flattten"),
        (models.info, lambda file: replaced(file, '"5"', '"many"'), "node 6 'new1': num_filter: "),
    ],
    ids=["truncated", "not-text", "no-data", "unknown-operator", "wrong-attribute"],
)
def test_a_fault_of_the_symbol_file_is_named(folder, function, change, message):
    put(folder, "a")
    change(folder / "a-symbol.json")
    with pytest.raises(GraphError, match=rf"a-symbol\.json: {message}"):
        function("a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"new1_weight": None, "fullyconnected1_bias": None}, "lacks new1_weight, fullyconnected1_bias$"),
        ({"new1_weight": (5, 7, 2, 2)}, r"node 6 'new1': expected .* of shape \(5, \?, 3, 3\), got \(5, 7, 2, 2\)"),
        ({"new1_weight": (5, 8, 3, 3)}, r"nearest: expected new1_weight of shape \(5, 7, 3, 3\) .*got \(5, 8, 3, 3\)"),
        (
            {"fullyconnected0_weight": (11, 5 * 17 * 17 + 1)},
            rf"for a square image of up to {LARGEST} rows, got none; nearest: expected fullyconnected0_weight of shape "
            r"\(11, 1445\) for images \(3, 40, 40\), got \(11, 1446\)",
        ),
        (
            {"data": {"__shape__": "(1, 3, 39, 39)"}},
            r"__shape__ of 'data' in .*a-symbol\.json, expected fullyconnected0_weight of shape \(11, 1280\)",
        ),
    ],
    ids=["missing", "kernel", "channels", "no-image", "stated-image"],
)
def test_weights_that_do_not_fit_are_named(folder, capfd, given, message):
    put(folder, "a", **given)
    with pytest.raises(GraphError, match=rf"a-0001\.params.* {message}"):
        models.info("a")
    assert capfd.readouterr().out == ""
