"""A network put into a folder is found by name, and its shapes are read from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ece408_op import models
from ece408_op.errors import GraphError
from ece408_op.graph import params_io
from ece408_op.models import build
from ece408_op.models.shapes import LARGEST
from ece408_op.problem import COURSE_LAYERS

pytest.importorskip("mxnet")

# Unlike any of the five: three channels, a kernel of 3, 41 x 41 images. 41 - 2 = 39, pooled 19, 19 - 2 = 17.
ANOTHER = build.Architecture(41, ((7, 3), (5, 3)), 11)
WEIGHTS = {
    "new0_weight": (7, 3, 3, 3),
    "new1_weight": (5, 7, 3, 3),
    "fullyconnected0_weight": (11, 5 * 17 * 17),
    "fullyconnected0_bias": (11,),
    "fullyconnected1_weight": (10, 11),
    "fullyconnected1_bias": (10,),
}


def put(folder: Path, name: str, epoch: int = 1, data: dict | None = None, **changed: tuple | None) -> None:
    graph = build.graph(ANOTHER)
    graph.nodes[0].attrs.update(data or {})
    (folder / f"{name}-symbol.json").write_text(graph.dump())
    shapes = {key: shape for key, shape in {**WEIGHTS, **changed}.items() if shape is not None}
    arrays = {f"arg:{key}": np.zeros(shape, np.float16) for key, shape in shapes.items()}
    (folder / f"{name}-{epoch:04d}.params").write_bytes(params_io.write(arrays, name))


def test_another_network_is_found_and_its_size_inferred(tmp_path):
    put(tmp_path, "year-2031")
    assert models.list_names(tmp_path) == ["year-2031"]
    found = models.info("year-2031", tmp_path)
    # 40 x 40 images pool to 19 x 19 too: the smallest square that fits.
    assert found.image == (3, 40, 40)
    assert found.network.title == "year-2031"
    assert [layer.name for layer in found.convolutions] == ["new0", "new1"]
    assert found.convolutions[0].x == (1, 3, 40, 40)
    assert found.convolutions[1] == models.ConvLayer("new1", (1, 7, 19, 19), (5, 7, 3, 3), (1, 5, 17, 17))
    assert found.layers[0] == ("New", "new0")
    assert found.layers[-1] == ("SoftmaxOutput", "softmax")


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
def test_the_data_nodes_shape_takes_precedence(tmp_path, stated, rows, columns):
    features = 5 * ((rows - 2) // 2 - 2) * ((columns - 2) // 2 - 2)
    put(tmp_path, "a", data={"__shape__": stated}, fullyconnected0_weight=(11, features))
    assert models.info("a", tmp_path).image == (3, rows, columns)


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


def test_titles():
    titles = {name: models.find(name).title for name in build.NETWORKS}
    assert titles.pop("ece408-2018sp") == titles.pop("ece408-2018fa") == "ece408"
    assert titles == {name: name for name in titles}


def test_the_highest_number_counts(tmp_path):
    for epoch in (2, 9, 10, 10000):
        put(tmp_path, "a", epoch)
    put(tmp_path, "a-b", 20000)
    (tmp_path / "a-99999.params.part").write_bytes(b"")
    found = models.find("a", tmp_path)
    assert (found.epoch, found.params.name) == (10000, "a-10000.params")
    assert found.prefix == str(tmp_path / "a")


def test_a_network_without_weights_is_not_listed(tmp_path):
    put(tmp_path, "a")
    put(tmp_path, "b")
    (tmp_path / "b-0001.params").unlink()
    assert models.list_names(tmp_path) == ["a"]
    with pytest.raises(GraphError, match=r"b-symbol\.json: expected weights in its folder, such as b-0001\.params"):
        models.find("b", tmp_path)


@pytest.mark.parametrize("name", ["", "c", "../a", "a/", "a-symbol.json"])
def test_an_unknown_name_gets_the_known_ones(tmp_path, name):
    put(tmp_path, "a")
    with pytest.raises(GraphError, match=r"found none; models in .*: a$"):
        models.find(name, tmp_path)


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (models.find, lambda file: file.write_bytes(file.read_bytes()[:-20]), "expected a symbol in JSON"),
        (models.find, lambda file: file.write_bytes(b"\xff\xfe"), "expected a symbol file in JSON"),
        (models.find, lambda file: changed(file, '"data"', '"images"'), "expected a variable 'data'"),
        (models.info, lambda file: changed(file, '"Flatten"', '"Flattten"'), ".*Op flatten0 of type Flattten"),
        (
            models.info,
            lambda file: changed(file, '"num_filter": "5"', '"num_filter": "many"'),
            "node 6 'new1': num_filter: ",
        ),
    ],
    ids=["truncated", "not-text", "no-data", "unknown-operator", "wrong-attribute"],
)
def test_a_fault_of_the_symbol_file_is_named(tmp_path, function, change, message):
    put(tmp_path, "a")
    change(tmp_path / "a-symbol.json")
    with pytest.raises(GraphError, match=rf"a-symbol\.json: {message}"):
        function("a", tmp_path)


def test_a_truncated_parameter_file_is_named(tmp_path):
    put(tmp_path, "a")
    path = tmp_path / "a-0001.params"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(GraphError, match=r"a-0001\.params: "):
        models.info("a", tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"new1_weight": None, "fullyconnected1_bias": None},
            r"a-0001\.params: .* lacks new1_weight, fullyconnected1_bias$",
        ),
        (
            {"fullyconnected0_weight": (11, 5 * 17 * 17 + 1)},
            rf"a-0001\.params: .*a-symbol\.json for a square image of up to {LARGEST} rows, got none; nearest: "
            r"expected fullyconnected0_weight of shape \(11, 1445\) for images \(3, 40, 40\), got \(11, 1446\)",
        ),
        (
            {"new1_weight": (5, 7, 2, 2)},
            r"a-0001\.params against .*a-symbol\.json: node 6 'new1': "
            r"expected 'new1_weight' of shape \(5, \?, 3, 3\), got \(5, 7, 2, 2\)",
        ),
        (
            {"new1_weight": (5, 8, 3, 3)},
            r"nearest: expected new1_weight of shape \(5, 7, 3, 3\) .*, got \(5, 8, 3, 3\)",
        ),
        (
            {"data": {"__shape__": "(1, 3, 39, 39)"}},
            r"__shape__ of 'data' in .*a-symbol\.json, expected fullyconnected0_weight of shape \(11, 1280\)",
        ),
    ],
    ids=["missing", "no-image", "kernel", "channels", "stated-image"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, capfd, given, message):
    put(tmp_path, "a", **given)
    with pytest.raises(GraphError, match=message):
        models.info("a", tmp_path)
    assert capfd.readouterr().out == ""
