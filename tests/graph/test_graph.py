"""Original files: opened in each spelling, run, written again, and read by MXNet's own reader of parameters."""

import json
import resource

import graph_files as files
import numpy as np
import pytest
from graph_files import nodes_of

import ece408_op
from ece408_op.errors import GraphError, ProblemError

mx = pytest.importorskip("mxnet")

CUSTOM = {"kernel": "(3, 3)", "num_filter": "6", "op_type": "New", "__layer__": "new0"}


@pytest.fixture(autouse=True)
def unfused(monkeypatch):
    """MXNet fuses Convolution and tanh into another tanh; without that the rest of both networks is the same."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")


@pytest.mark.parametrize("spelling", files.SPELLINGS)
def test_an_original_file_gives_what_mxnets_own_convolution_gives(tmp_path, spelling):
    prefix = files.write(tmp_path, files.original(spelling), files.weights())
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(prefix, 1)
    assert aux_params == {}
    ece408_op.clear_op_times()
    (got,) = files.run(symbol, arg_params, files.images())
    (want,) = files.run(files.built_in(), files.ndarrays(files.weights("convolution0")), files.images())
    assert np.ptp(want) > 0.1, "the outputs should depend on the image"
    np.testing.assert_array_equal(got, want)
    assert [call.layer for call in ece408_op.op_times()] == ["new0"]


@pytest.mark.parametrize("spelling", files.SPELLINGS)
def test_only_new_nodes_change_in_loading(tmp_path, spelling):
    prefix = files.write(tmp_path, files.original(spelling), files.weights())
    symbol, _, _ = ece408_op.load_checkpoint(prefix, 1)
    assert symbol.list_outputs() == ["softmax_output"]
    nodes = nodes_of(symbol)
    assert list(nodes) == [name for name, *_ in files.LAYERS]
    for name, op, attributes, inputs in files.LAYERS:
        assert [list(nodes)[source] for source, *_ in nodes[name]["inputs"]] == list(inputs)
        if name == "new0":
            assert (nodes[name]["op"], nodes[name]["attrs"]) == ("Custom", CUSTOM)
        elif spelling == "param" and op == "null":
            # Before 0.9 variables had none but the user's own, which MXNet 1.9.1 spells its way.
            assert nodes[name].get("attrs", {}) == ({"__lr_mult__": "2"} if name == "new0_weight" else {})
        else:
            assert (nodes[name]["op"], nodes[name].get("attrs", {})) == (op, attributes)


@pytest.mark.parametrize("kernel", ["(3, 3)", "(3,3)", "[3, 3]", "(3L, 3L)", " (3, 3,)"])
def test_attributes_of_several_spellings_in_one_node_are_read(tmp_path, kernel):
    graph = files.original("attrs")
    graph["nodes"][2].update(attrs={"num_filter": "6"}, param={"kernel": kernel}, attr={"__ctx_group__": "a"})
    symbol, _, _ = ece408_op.load_checkpoint(files.write(tmp_path, graph, files.weights()), 1)
    assert nodes_of(symbol)["new0"]["attrs"] == {**CUSTOM, "__ctx_group__": "a"}


def test_the_users_own_attributes_of_the_oldest_files_become_todays(tmp_path):
    graph = files.original("param")
    graph["nodes"][2]["attr"] = {"ctx_group": "a", "weight_wd_mult": "0.5"}
    symbol, _, _ = ece408_op.load_checkpoint(files.write(tmp_path, graph, files.weights()), 1)
    nodes = nodes_of(symbol)
    assert nodes["new0"]["attrs"] == {**CUSTOM, "__ctx_group__": "a"}
    assert nodes["new0_weight"]["attrs"] == {"__lr_mult__": "2", "__wd_mult__": "0.5"}


def test_options_reach_the_operator_where_they_are_not_the_default(tmp_path):
    prefix = files.write(tmp_path, files.original(), files.weights())
    options = {"impl": "im2col", "device": "cpu", "precision": "tf32"}
    symbol, arg_params, _ = ece408_op.load_checkpoint(prefix, 1, **options)
    assert nodes_of(symbol)["new0"]["attrs"] == {**CUSTOM, **options}
    ece408_op.clear_op_times()
    files.run(symbol, arg_params, files.images())
    assert [call.implementation for call in ece408_op.op_times()] == ["im2col"]
    for option in ({"impl": "fastest"}, {"device": "tpu"}, {"precision": "float8"}):
        with pytest.raises(ProblemError, match=next(iter(option.values()))):
            ece408_op.load_checkpoint(prefix, 1, **option)


def test_a_built_in_network_loads_as_mxnet_loads_it(tmp_path):
    prefix = str(tmp_path / "base")
    arrays = files.ndarrays(files.weights("convolution0"))
    aux = {"moving": mx.nd.arange(3)}
    mx.model.save_checkpoint(prefix, 12, files.built_in(), arrays, aux)
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(prefix, 12)
    own_symbol, own_args, own_aux = mx.model.load_checkpoint(prefix, 12)
    assert symbol.tojson() == own_symbol.tojson()
    for got, want in ((arg_params, own_args), (aux_params, own_aux)):
        assert list(got) == list(want)
        for name, array in want.items():
            assert got[name].context == array.context
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name].asnumpy(), array.asnumpy())


def test_saving_writes_what_the_original_wrote(tmp_path):
    prefix = files.write(tmp_path, files.original(), files.weights())
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(prefix, 1, impl="im2col", device="cpu")
    again = tmp_path / "again"
    ece408_op.save_checkpoint(again, 7, symbol, arg_params, aux_params)
    with pytest.raises(GraphError, match="MXNet cannot load New .* use ece408_op.load_checkpoint"):
        mx.model.load_checkpoint(str(again), 7)
    saved = json.loads((tmp_path / "again-symbol.json").read_text())
    want = files.original("attr")
    assert saved["nodes"] == want["nodes"]
    assert (saved["arg_nodes"], saved["heads"]) == (want["arg_nodes"], want["heads"])
    names = ["again-0007.params", "again-symbol.json", "net-0001.params", "net-symbol.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    arrays = mx.nd.load(str(tmp_path / "again-0007.params"))
    assert list(arrays) == [f"arg:{name}" for name in files.weights()]
    for name, array in files.weights().items():
        np.testing.assert_array_equal(arrays[f"arg:{name}"].asnumpy(), array)
    for got, want in zip(ece408_op.load_checkpoint(again, 7)[1:], (arg_params, aux_params)):
        assert list(got) == list(want)


def test_a_network_of_the_builder_is_saved_as_the_originals(tmp_path):
    layer = ece408_op.New(mx.sym.var("data"), kernel=(3, 3), num_filter=6, impl="im2col", name="new0")
    array = mx.nd.array(files.weights()["new0_weight"])
    ece408_op.save_checkpoint(tmp_path / "built", 1, layer, {"new0_weight": array}, {})
    saved = json.loads((tmp_path / "built-symbol.json").read_text())
    assert saved["nodes"] == files.original("attr")["nodes"][:3]


def test_a_save_that_fails_leaves_the_old_files(tmp_path):
    prefix = files.write(tmp_path, files.original(), files.weights())
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(prefix, 1)
    before = (tmp_path / "net-symbol.json").read_bytes()
    (tmp_path / "net-0002.params").mkdir()
    with pytest.raises(OSError, match="net-0002.params"):
        ece408_op.save_checkpoint(prefix, 2, symbol, arg_params, aux_params)
    assert (tmp_path / "net-symbol.json").read_bytes() == before
    names = ["net-0001.params", "net-0002.params", "net-symbol.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names


@pytest.mark.parametrize(("layers", "room"), [(20, 2000), (200, 20000), (1, 2000)])
def test_a_full_disk_names_the_file_and_leaves_the_old_ones(tmp_path, layers, room):
    """The symbol's file has no room, at its end or already in between; or the parameters' file."""
    symbol, full = mx.sym.var("data"), "symbol.json" if layers > 1 else "0001.params"
    for number in range(layers):
        symbol = mx.sym.relu(symbol, name=f"relu{number}")
    params = {} if layers > 1 else {"w": mx.nd.zeros(room)}
    old = [tmp_path / "net-symbol.json", tmp_path / "net-0001.params"]
    for path in old:
        path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match=f"net-{full}'$"):
            ece408_op.save_checkpoint(tmp_path / "net", 1, symbol, params, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.read_text() for path in old] == ["old", "old"]
    assert sorted(tmp_path.iterdir()) == sorted(old)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"])
def test_parameters_of_every_type_go_both_ways(tmp_path, dtype):
    array = mx.nd.array(np.arange(24).reshape(2, 3, 4), dtype=dtype)
    symbol = mx.sym.var("data") * 2
    ece408_op.save_checkpoint(tmp_path / "own", 0, symbol, {"w": array}, {"v": array + 1})
    mx.model.save_checkpoint(str(tmp_path / "mx"), 0, symbol, {"w": array}, {"v": array + 1})
    for prefix in (tmp_path / "own", tmp_path / "mx"):
        for load in (ece408_op.load_checkpoint, mx.model.load_checkpoint):
            _, arg_params, aux_params = load(str(prefix), 0)
            assert arg_params["w"].dtype == np.dtype(dtype)
            np.testing.assert_array_equal(arg_params["w"].asnumpy(), array.asnumpy())
            np.testing.assert_array_equal(aux_params["v"].asnumpy(), array.asnumpy() + 1)


def test_files_are_read_and_written_under_np_shape_too(tmp_path):
    with mx.util.np_shape(True):
        prefix = files.write(tmp_path, files.original(), files.weights())
        symbol, arg_params, aux_params = ece408_op.load_checkpoint(prefix, 1)
        ece408_op.save_checkpoint(tmp_path / "again", 1, symbol, arg_params, aux_params)
    assert list(mx.nd.load(str(tmp_path / "again-0001.params"))) == [f"arg:{name}" for name in files.weights()]


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    symbol = mx.sym.var("data") * 2
    sparse = mx.nd.ones((2, 2)).tostype("row_sparse")
    with pytest.raises(GraphError, match="w: expected a dense array, got a row_sparse one"):
        ece408_op.save_checkpoint(tmp_path / "net", 1, symbol, {"w": sparse}, {})
    with pytest.raises(GraphError, match="expected an mxnet Symbol, got int"):
        ece408_op.save_checkpoint(tmp_path / "net", 1, 3, {}, {})
    with pytest.raises(GraphError, match="w: expected an NDArray, got ndarray"):
        ece408_op.save_checkpoint(tmp_path / "net", 1, symbol, {"w": np.ones(3)}, {})
    with pytest.raises(GraphError, match="aux_params: expected a dictionary of arrays by name, got list"):
        ece408_op.save_checkpoint(tmp_path / "net", 1, symbol, {}, [sparse])
    with pytest.raises(GraphError, match="arg_params: expected names without 'arg:' and 'aux:', got 'arg:w'"):
        ece408_op.save_checkpoint(tmp_path / "net", 1, symbol, {"arg:w": mx.nd.ones(3)}, {})
    with pytest.raises(FileNotFoundError, match="missing/net-symbol.json"):
        ece408_op.save_checkpoint(tmp_path / "missing" / "net", 1, symbol, {}, {})
    assert list(tmp_path.iterdir()) == []
