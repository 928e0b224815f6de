"""Files that are missing, broken, damaged or hostile: one clear error that names file and node."""

import copy
import json
import re
import struct

import graph_files as files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ece408_op
from ece408_op.errors import GraphError, ProblemError
from ece408_op.graph import node_conversion, params_io
from ece408_op.graph.symbol_graph import Graph

mx = pytest.importorskip("mxnet")

NEW0 = 2  # the node's number in files.LAYERS


def error_of(folder, graph=None, arrays=None, epoch=1):
    """Return the error of load_checkpoint for the files."""
    prefix = files.write(folder, files.original() if graph is None else graph, arrays or files.weights())
    with pytest.raises(GraphError) as caught:
        ece408_op.load_checkpoint(prefix, epoch)
    return str(caught.value)


def edited(edit):
    graph = files.original("attr")
    edit(graph, graph["nodes"])
    return graph


def set_new(**attributes):
    return lambda graph, nodes: nodes[NEW0].update(attr=attributes)


BROKEN = {
    "input beyond the file": (lambda g, n: n[NEW0].update(inputs=[[0, 0, 0], [17, 0, 0]]), "'new0'.*11 nodes.*node 17"),
    "input before the file": (lambda g, n: n[NEW0].update(inputs=[[0, 0, 0], [-1, 0, 0]]), r"'new0'.*\[-1, 0, 0\]"),
    "input of another form": (lambda g, n: n[NEW0].update(inputs=[[0], 1]), r"'new0'.*\[node, output\].*got \[0\]"),
    "one input": (lambda g, n: n[NEW0].update(inputs=[[0, 0, 0]]), "'new0'.*expected 2, data and weight, got 1"),
    "an output that is not there": (lambda g, n: n[NEW0]["inputs"][1].__setitem__(1, 3), "'new0_weight', got output 3"),
    "a head that is not there": (lambda g, n: g.update(heads=[[10, 5, 0]]), "heads.*'softmax', got output 5"),
    "head beyond the file": (lambda g, n: g.update(heads=[[11, 0, 0]]), "heads.*got node 11"),
    "no head": (lambda g, n: g.update(heads=[]), "heads.*at least one"),
    "heads missing": (lambda g, n: g.pop("heads"), "heads.*got nothing"),
    "cycle": (lambda g, n: n[NEW0].update(inputs=[[3, 0, 0], [1, 0, 0]]), "'new0'.*cycle"),
    "variable with inputs": (lambda g, n: n[1].update(inputs=[[0, 0, 0]]), "'new0_weight'.*variable"),
    "no name": (lambda g, n: n[NEW0].pop("name"), "node 2: expected an object with a name"),
    "no op": (lambda g, n: n[NEW0].pop("op"), "'new0'.*op.*got nothing"),
    "no inputs": (lambda g, n: n[NEW0].pop("inputs"), "'new0'.*inputs.*got nothing"),
    "unknown operator": (lambda g, n: n[3].update(op="Activatoin"), "Activatoin"),
    "unknown spelling": (lambda g, n: n[NEW0].update(attributes=n[NEW0].pop("attr")), "'new0'.*got attributes"),
    "attribute that is a number": (set_new(kernel="(3, 3)", num_filter=6), "'new0'.*num_filter.*text, got 6"),
    "attributes in a list": (lambda g, n: n[NEW0].update(attr=["kernel"]), "'new0'.*attr.*got \\['kernel'\\]"),
    "kernel missing": (set_new(num_filter="6"), "'new0'.*kernel.*got none"),
    "kernel of one": (set_new(kernel="(3,)", num_filter="6"), "'new0'.*kernel.*2-D"),
    "bias missing": (set_new(kernel="(3, 3)", num_filter="6", no_bias="False"), "'new0': inputs: expected 3.* got 2"),
    "kernel that is code": (set_new(kernel="(__import__('os'),)*2", num_filter="6"), "'new0'.*kernel"),
    "unknown attribute": (set_new(kernel="(3, 3)", num_filter="6", adj="(0, 0)"), "'new0'.*unknown attribute adj"),
    "other num_filter": (set_new(kernel="(3, 3)", num_filter="7"), r"'new0'.*\(7, \?, 3, 3\).*\(6, 2, 3, 3\)"),
    "other kernel": (set_new(kernel="(4, 4)", num_filter="6"), r"'new0'.*\(6, \?, 4, 4\).*\(6, 2, 3, 3\)"),
    "other num_hidden": (lambda g, n: n[8].update(attr={"num_hidden": "9"}), r"'fully.*\(9, \?\).*\(7, 150\)"),
    "other operator's attribute": (lambda g, n: n[3].update(attr={"act_type": "sine"}), "act_type"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_symbol_is_named(tmp_path, case):
    edit, expected = BROKEN[case]
    message = error_of(tmp_path, edited(edit))
    assert "net-symbol.json" in message
    assert re.search(expected, message), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(files.original())[:500], "broken JSON"),
        ("", "broken JSON"),
        ("[1, 2]", "an object with a list of nodes, got [1, 2]"),
        ('{"nodes": 3}', "an object with a list of nodes"),
        ("[" * 100_000, "nested too deeply"),
        ('{"nodes": [], "arg_nodes": [], "heads": [], "weights": []}', "got weights"),
    ],
)
def test_a_file_that_is_no_symbol_is_named(tmp_path, text, expected):
    message = error_of(tmp_path, text)
    assert message.startswith(f"{tmp_path}/net-symbol.json: ")
    assert expected in message


def test_subgraphs_are_bounded_and_new_is_not_loaded_inside_them(tmp_path):
    inside = {"nodes": [{"op": "null", "name": "x", "inputs": []}], "arg_nodes": [0], "heads": [[0, 0, 0]]}
    for _ in range(40):
        node = {"op": "_foreach", "name": "loop", "inputs": [], "subgraphs": [inside]}
        inside = {"nodes": [node], "arg_nodes": [], "heads": [[0, 0, 0]]}
    assert "at most 16 levels of nested subgraphs" in error_of(tmp_path, inside)
    graph = files.original("attrs")
    graph["nodes"][3]["subgraphs"] = [copy.deepcopy(graph)]
    message = error_of(tmp_path, graph)
    assert "node 3 'activation0': node 2 'new0': expected New outside of control flow" in message


def test_missing_files_are_named(tmp_path):
    prefix = files.write(tmp_path, files.original(), files.weights())
    with pytest.raises(GraphError, match="net-0002.params: expected a file, found none"):
        ece408_op.load_checkpoint(prefix, 2)
    (tmp_path / "net-symbol.json").unlink()
    with pytest.raises(GraphError, match="net-symbol.json: expected a file, found none"):
        ece408_op.load_checkpoint(prefix, 1)
    (tmp_path / "net-symbol.json").mkdir()
    with pytest.raises(GraphError, match="net-symbol.json: expected a file to read"):
        ece408_op.load_checkpoint(prefix, 1)
    (tmp_path / "net-symbol.json").rmdir()
    (tmp_path / "net-symbol.json").write_bytes(b"\xff\xfe")
    with pytest.raises(GraphError, match="net-symbol.json: expected a symbol in UTF-8"):
        ece408_op.load_checkpoint(prefix, 1)


@pytest.mark.parametrize("shape", [(6, 2, 3), (5, 2, 3, 3), (6, 2, 3, 4), (6, 18), None])
def test_a_weight_of_the_wrong_shape_or_none_is_named(tmp_path, shape):
    arrays = files.weights()
    del arrays["new0_weight"]
    if shape:
        arrays["new0_weight"] = np.ones(shape, np.float32)
    message = error_of(tmp_path, None, arrays)
    assert "net-0001.params" in message
    assert "node 2 'new0'" in message
    assert "'new0_weight' of shape (6, ?, 3, 3), got" in message


def params_content(folder):
    files.write(folder, files.original(), files.weights())
    return (folder / "net-0001.params").read_bytes()


def test_a_truncated_parameter_file_is_named_wherever_it_ends(tmp_path):
    content = params_content(tmp_path)
    for length in [*range(0, 120), *range(120, len(content), 97), len(content) - 1]:
        (tmp_path / "net-0001.params").write_bytes(content[:length])
        with pytest.raises(GraphError, match=r"net-0001.params: .* truncated or damaged"):
            ece408_op.load_checkpoint(tmp_path / "net", 1)
    (tmp_path / "net-0001.params").write_bytes(content + b"\0")
    with pytest.raises(GraphError, match="net-0001.params: .*1 bytes more"):
        ece408_op.load_checkpoint(tmp_path / "net", 1)


def test_a_parameter_file_that_is_something_else_is_named(tmp_path):
    files.write(tmp_path, files.original(), files.weights())
    for content, expected in (
        (b"PK\3\4" + b"\0" * 40, "expected an MXNet parameter file"),
        (params_io.write({"weight": np.ones(3)}, ""), "expected names that begin with arg: or aux:, got 'weight'"),
        (params_io.write({"arg:": np.ones(3)}, ""), "got 'arg:'"),
    ):
        (tmp_path / "net-0001.params").write_bytes(content)
        with pytest.raises(GraphError, match=f"net-0001.params: .*{expected}"):
            ece408_op.load_checkpoint(tmp_path / "net", 1)
    mx.nd.save(str(tmp_path / "net-0001.params"), {"arg:w": mx.nd.ones((2, 2)).tostype("csr")})
    with pytest.raises(GraphError, match="array 0 of 1: expected a dense array"):
        ece408_op.load_checkpoint(tmp_path / "net", 1)
    mx.nd.save(str(tmp_path / "net-0001.params"), [mx.nd.ones((2, 2))])
    with pytest.raises(GraphError, match="expected a name for each of the 1 arrays, got 0"):
        ece408_op.load_checkpoint(tmp_path / "net", 1)


def test_the_oldest_arrays_are_read_as_mxnet_reads_them(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = struct.pack("<III", 2, 2, 3) + struct.pack("<iii", 1, 0, 0) + values.tobytes()
    content = struct.pack("<QQQ", 0x112, 0, 1) + array + struct.pack("<QQ", 1, 5) + b"arg:w"
    (tmp_path / "old").write_bytes(content)
    np.testing.assert_array_equal(params_io.read(content, "old")["arg:w"], values)
    np.testing.assert_array_equal(mx.nd.load(str(tmp_path / "old"))["arg:w"].asnumpy(), values)


@given(st.data())
@settings(max_examples=300)
def test_damaged_parameters_are_read_or_refused(data):
    content = bytearray(params_io.write({f"arg:{name}": array for name, array in files.weights().items()}, ""))
    head = st.integers(0, 60) | st.integers(0, len(content) - 1)
    for position in data.draw(st.lists(head, min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    try:
        arrays = params_io.read(bytes(content), "damaged")
    except GraphError as error:
        assert str(error).startswith("damaged: ")
    else:
        assert sum(array.nbytes for array in arrays.values()) <= len(content)


def positions(value, path=()):
    """Iterate over every position in a JSON value, as a path of keys and indices."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from positions(child, (*path, key))


@given(st.sampled_from(files.SPELLINGS), st.data())
@settings(max_examples=300)
def test_a_symbol_with_anything_in_any_place_is_read_or_refused(spelling, data):
    graph = files.original(spelling)
    *path, last = data.draw(st.sampled_from([place for place in positions(graph) if place]))
    target = graph
    for key in path:
        target = target[key]
    texts = st.sampled_from(['""', '"New"', '"null"', '"(3, 3)"', "[]", "{}", "[[]]", "null", "true", "NaN", "1e99"])
    target[last] = json.loads(data.draw(texts | st.integers(-2, 20).map(str)))
    try:
        read = Graph.parse(json.dumps(graph), "odd")
        node_conversion.to_custom(read, "odd", {})
        read.for_mxnet()
        node_conversion.check_weights(read, {k: v.shape for k, v in files.weights().items()}, "odd", required=True)
    except GraphError as error:
        assert str(error).startswith("odd: ")


@pytest.mark.parametrize("epoch", ["1", 1.0, -1, None, True])
def test_an_epoch_is_a_whole_number(tmp_path, epoch):
    prefix = files.write(tmp_path, files.original(), files.weights())
    with pytest.raises(ProblemError, match="epoch: expected a whole number from 0 on, got"):
        ece408_op.load_checkpoint(prefix, epoch)
