"""The symbol files: the course's architectures in the course's format."""

from __future__ import annotations

import json

import pytest

from ece408_op import models
from ece408_op.graph.symbol_graph import Graph
from ece408_op.models import build
from ece408_op.models.files import FOLDER

TANH = ("Activation", {"act_type": "tanh"})
POOL = ("Pooling", {"kernel": "(2, 2)", "pool_type": "max", "stride": "(2, 2)"})


def convolution(filters: int, kernel: int) -> tuple:
    return ("New", {"kernel": f"({kernel}, {kernel})", "num_filter": str(filters)})


def fully_connected(hidden: int) -> tuple:
    return ("FullyConnected", {"num_hidden": str(hidden)})


FLATTEN, SOFTMAX = ("Flatten", {}), ("SoftmaxOutput", {})
OF_2017 = [convolution(50, 5), TANH, POOL, FLATTEN, fully_connected(500), TANH, fully_connected(10), SOFTMAX]
LAYERS = {
    "baseline": [("Convolution", {**OF_2017[0][1], "no_bias": "True"}), *OF_2017[1:]],
    "ece408-high": OF_2017,
    "ece408-low": OF_2017,
    "ece408-2018sp": [
        *(convolution(6, 5), TANH, POOL, convolution(16, 5)),
        *(FLATTEN, fully_connected(140), TANH, fully_connected(10), SOFTMAX),
    ],
    "ece408-2018fa": [
        *(convolution(12, 7), TANH, POOL, convolution(24, 7)),
        *(FLATTEN, fully_connected(160), TANH, fully_connected(10), SOFTMAX),
    ],
}
IMAGES = {"baseline": 28, "ece408-high": 28, "ece408-low": 28, "ece408-2018sp": 64, "ece408-2018fa": 72}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    raw = json.loads((FOLDER / f"{name}-symbol.json").read_text())
    got = [(node["op"], node.get("attr", {})) for node in raw["nodes"] if node["op"] != "null"]
    assert got == LAYERS[name]
    assert all("attrs" not in node and "param" not in node for node in raw["nodes"])


@pytest.mark.parametrize("name", LAYERS)
def test_variables_carry_their_layers_attributes(name):
    nodes = {node["name"]: node for node in json.loads((FOLDER / f"{name}-symbol.json").read_text())["nodes"]}
    first = "convolution0" if name == "baseline" else "new0"
    assert nodes[f"{first}_weight"]["attr"] == nodes[first]["attr"]
    assert nodes["fullyconnected1_bias"]["attr"] == {"num_hidden": "10"}


def test_building_gives_the_files_in_the_folder(tmp_path):
    paths = build.write(tmp_path)
    assert sorted(path.name for path in paths) == sorted(f"{name}-symbol.json" for name in LAYERS)
    for path in paths:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes()


def test_mxnet_refuses_a_new_node_and_takes_its_own():
    mx = pytest.importorskip("mxnet")
    with pytest.raises(mx.MXNetError, match="Operator New is not registered"):
        mx.sym.load(str(FOLDER / "ece408-high-symbol.json"))
    assert mx.sym.load(str(FOLDER / "baseline-symbol.json")).list_outputs() == ["softmax_output"]


@pytest.mark.parametrize("name", LAYERS)
def test_with_convolutions_changes_new_nodes_alone(name):
    graph = models.read_graph(FOLDER / f"{name}-symbol.json")
    plain = models.with_convolutions(graph)
    assert [node.name for node in plain.nodes] == [node.name for node in graph.nodes]
    for before, after in zip(graph.nodes, plain.nodes):
        if before.op == "New":
            assert after.op == "Convolution"
            assert after.attrs == {**before.attrs, "no_bias": "True"}
        else:
            assert after == before


def test_with_convolutions_takes_custom_nodes_and_drops_the_operators_own_attributes():
    graph = build.graph(build.NETWORKS["ece408-high"])
    node = next(node for node in graph.nodes if node.op == "New")
    plain = dict(node.attrs)
    node.op = "Custom"
    node.attrs = {**plain, "op_type": "New", "impl": "direct", "precision": "float32", "__lr_mult__": "2"}
    after = next(n for n in models.with_convolutions(graph).nodes if n.name == node.name)
    assert (after.op, after.attrs) == ("Convolution", {**plain, "__lr_mult__": "2", "no_bias": "True"})
    assert node.op == "Custom"
    Graph.parse(graph.dump(), "a graph that was left as it was")
