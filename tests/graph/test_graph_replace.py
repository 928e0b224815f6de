"""replace_convolution: which nodes it replaces, their names, and that the outputs stay the same."""

import json
from itertools import product

import numpy as np
import pytest
from graph_files import nodes_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ece408_op
from ece408_op.errors import GraphError, ProblemError

mx = pytest.importorskip("mxnet")
amp = pytest.importorskip("mxnet.contrib.amp")

PLAIN = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}


def conv(data, name="conv", **changes):
    return mx.sym.Convolution(data, name=name, **{**PLAIN, **changes})


def whole_numbers(symbol, seed=0, **inputs):
    """Return small integers for every argument: float32 sums are exact in any order."""
    stream = np.random.RandomState(seed)
    shapes, _, _ = symbol.infer_shape(**inputs)
    return {n: mx.nd.array(stream.randint(-3, 4, shape)) for n, shape in zip(symbol.list_arguments(), shapes)}


def outputs(symbol, arguments):
    return [output.asnumpy() for output in symbol.bind(mx.cpu(), arguments).forward(is_train=False)]


def assert_same_outputs(symbol, result, arguments):
    """Compare the outputs of both networks, bit by bit, for integers by their old names."""
    assert set(result.arg_params) == set(result.symbol.list_arguments())
    for got, want in zip(outputs(result.symbol, result.arg_params), outputs(symbol, arguments)):
        np.testing.assert_array_equal(got, want)


LEFT = [
    ({"kernel": (3,)}, "2-D"),
    ({"kernel": (3,), "layout": "NCW"}, "2-D"),
    ({"kernel": (3, 3, 3)}, "2-D"),
    ({"layout": "NHWC"}, "layout: expected NCHW, got 'NHWC'"),
]
ATTRIBUTES = [
    {"no_bias": False},
    {"stride": (2, 2)},
    {"stride": (1, 2), "pad": (1, 0)},
    {"dilate": (2, 1), "no_bias": False},
    {"num_group": 2},
    {"kernel": (3, 5)},
]


@pytest.mark.parametrize("changes", ATTRIBUTES)
def test_every_attribute_goes_into_the_new_node_and_through_a_file(changes, tmp_path):
    symbol = conv(conv(mx.sym.var("data"), name="odd", **changes), name="good")
    params = whole_numbers(symbol, data=(2, 4, 15, 13))
    result = ece408_op.replace_convolution(symbol, params)
    assert (result.replaced, result.left) == ({"odd": "new0", "good": "new1"}, {})
    assert_same_outputs(symbol, result, params)
    weights = {name: array for name, array in result.arg_params.items() if name != "data"}
    ece408_op.save_checkpoint(tmp_path / "net", 1, result.symbol, weights, {})
    opened, arrays, _ = ece408_op.load_checkpoint(tmp_path / "net", 1)
    assert opened.list_arguments() == result.symbol.list_arguments()
    (got,) = outputs(opened, {**arrays, "data": params["data"]})
    np.testing.assert_array_equal(got, outputs(symbol, params)[0])


@pytest.mark.parametrize(("changes", "reason"), LEFT)
def test_a_convolution_that_new_cannot_do_is_left_with_the_reason(changes, reason):
    symbol = conv(conv(mx.sym.var("data"), name="odd", **changes), name="good")
    result = ece408_op.replace_convolution(symbol)
    assert result.replaced == {"good": "new0"}
    assert list(result.left) == ["odd"]
    assert reason in result.left["odd"]
    assert result.arg_params is None
    old, new = nodes_of(symbol), nodes_of(result.symbol)
    assert new["odd"] == old["odd"]


def test_every_reason_is_given():
    data = mx.sym.var("data", dtype="float64")
    symbol = mx.sym.Group([conv(data, kernel=(3,), name="twin"), conv(data, name="twin")])
    reasons = ece408_op.replace_convolution(symbol).left["twin"]
    assert "type float64" in reasons
    assert "2 nodes are called 'twin'" in reasons


SPELLED_OUT = {"stride": (1, 1), "pad": (0, 0), "dilate": (1, 1), "num_group": 1}


@pytest.mark.parametrize("plain", [SPELLED_OUT, {"layout": "NCHW"}])
def test_defaults_spelled_out_are_replaced(plain):
    hints = {"workspace": 256, "cudnn_tune": "off", "cudnn_off": True}
    symbol = conv(mx.sym.var("data"), **plain, **hints)
    result = ece408_op.replace_convolution(symbol)
    assert result.replaced == {"conv": "new0"}
    assert nodes_of(result.symbol)["new0_weight"]["attrs"] == {"kernel": "(3, 3)", "num_filter": "4"}


#: Of each architecture the smallest, since others differ in depth and width alone, and the deepest of all.
ZOO = ["alexnet", "densenet121", "inceptionv3", "mobilenet0.25", "mobilenetv2_0.25", "resnet18_v1", "resnet50_v1"]
ZOO += ["resnet18_v2", "resnet50_v2", "squeezenet1.0", "squeezenet1.1", "vgg11", "vgg11_bn"]


@pytest.mark.parametrize("name", [*ZOO, pytest.param("densenet201", marks=pytest.mark.exhaustive)])
def test_every_convolution_of_gluons_model_zoo_is_replaced(name):
    symbol = mx.gluon.model_zoo.vision.get_model(name)(mx.sym.var("data"))
    found = sum(node["op"] == "Convolution" for node in nodes_of(symbol).values())
    result = ece408_op.replace_convolution(symbol, warn=False)
    assert result.left == {}
    assert len(result.replaced) == found > 0


def test_another_type_is_left_where_it_is_known():
    cast = conv(mx.sym.Cast(mx.sym.var("data"), dtype="float16"), name="after_cast")
    declared = conv(mx.sym.var("other", dtype="float16"), name="declared")
    mixed = amp.convert_symbol(conv(mx.sym.var("fourth"), name="mixed"), "bfloat16")
    result = ece408_op.replace_convolution(mx.sym.Group([cast, declared, mixed, conv(mx.sym.var("third"))]))
    assert result.replaced == {"conv": "new0"}
    types = {"after_cast": "float16", "declared": "float16", "mixed": "bfloat16"}
    assert result.left == {name: f"type {dtype}: New takes float32 only" for name, dtype in types.items()}


def test_the_first_state_of_a_recurrent_cell_gets_its_batch_from_its_layer():
    cell, inputs = mx.rnn.ConvLSTMCell((2, 1, 8, 8), 4), [mx.sym.var("first"), mx.sym.var("second")]
    symbol = mx.sym.Group(cell.unroll(2, inputs)[0])
    arguments = whole_numbers(symbol, first=(2, 1, 8, 8), second=(2, 1, 8, 8))
    result = ece408_op.replace_convolution(symbol, arguments)
    assert len(result.replaced) == 3
    assert result.left == {"ConvLSTM_t0_h2h": "the shape of its data depends on that of its output"}
    for got, want in zip(outputs(result.symbol, result.arg_params), outputs(symbol, arguments)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def test_new_names_avoid_every_name_that_is_there():
    data = mx.sym.var("data")
    first = conv(data, weight=mx.sym.var("new0_weight"), name="a")
    second = conv(mx.sym.Activation(first, act_type="relu", name="new1"), name="b")
    third = conv(mx.sym.broadcast_add(second, mx.sym.var("new2_output")), name="c")
    symbol = conv(third, name="new3")
    params = {**whole_numbers(symbol, data=(1, 2, 12, 12), new2_output=(1,)), "new5_weight": mx.nd.ones((1,))}
    result = ece408_op.replace_convolution(symbol, params)
    assert result.replaced == {"a": "new4", "b": "new6", "c": "new7", "new3": "new8"}
    assert len(set(nodes_of(result.symbol))) == len(json.loads(result.symbol.tojson())["nodes"])
    assert result.arg_params.pop("new5_weight") is params.pop("new5_weight")
    assert_same_outputs(symbol, result, params)


def test_a_weight_of_two_replaced_layers_stays_one():
    weight = mx.sym.var("shared", lr_mult=3)
    data = mx.sym.var("data")
    symbol = conv(conv(data, weight=weight, name="a"), weight=weight, name="b")
    params = whole_numbers(symbol, data=(2, 4, 9, 8))
    result = ece408_op.replace_convolution(symbol, params)
    assert result.replaced == {"a": "new0", "b": "new1"}
    assert result.symbol.list_arguments() == ["data", "new0_weight"]
    assert result.symbol.attr_dict()["new0_weight"]["__lr_mult__"] == "3"
    assert_same_outputs(symbol, result, params)


@pytest.mark.parametrize("use", ["regulariser", "left convolution", "output", "computed", "data too"])
def test_a_weight_that_is_more_than_a_weight_keeps_its_name(use):
    weight, data = mx.sym.var("shared", shape=(4, 4, 3, 3)), mx.sym.var("data", shape=(2, 4, 9, 8))
    if use == "computed":
        symbol = conv(data, weight=weight * 2)
    elif use == "data too":
        symbol = conv(weight, weight=weight)
    else:
        other = {
            "regulariser": mx.sym.sum(weight),
            "left convolution": conv(conv(data, weight=weight, pad=(1, 1), name="left"), weight=weight, name="left"),
            "output": weight,
        }[use]
        symbol = mx.sym.Group([conv(data, weight=weight), other])
    params = whole_numbers(symbol)
    result = ece408_op.replace_convolution(symbol, params)
    assert result.replaced == {"conv": "new0"}
    assert set(result.left) == ({"left"} if use == "left convolution" else set())
    assert result.symbol.list_arguments() == symbol.list_arguments()
    assert [name.replace("new0", "conv") for name in result.symbol.list_outputs()] == symbol.list_outputs()
    assert nodes_of(result.symbol)["shared"] == nodes_of(symbol)["shared"]
    assert_same_outputs(symbol, result, params)


def test_a_convolution_inside_control_flow_is_left():
    def body(element, state):
        return conv(element, weight=mx.sym.var("w"), name="inner"), state

    inside, states = mx.sym.contrib.foreach(body, mx.sym.var("seq"), [mx.sym.var("state")])
    outside = conv(mx.sym.var("data"), weight=mx.sym.var("w"), name="outer")
    result = ece408_op.replace_convolution(mx.sym.Group([inside, *states, outside]))
    assert result.replaced == {"outer": "new0"}
    assert list(result.left) == ["inner"]
    assert "control flow" in result.left["inner"]
    assert "w" in result.symbol.list_arguments()


def test_attributes_outputs_and_kind_of_symbol_stay():
    with mx.AttrScope(__ctx_group__="dev1"):
        data = mx.sym.var("data", shape=(2, 3, 8, 8), lr_mult=2)
        first = conv(data, name="a")
    parts = mx.sym.SliceChannel(first, num_outputs=2, name="parts")
    casted = mx.sym.amp_cast(parts[1], dtype="float32", name="cast")
    symbol = mx.sym.Group([casted, parts[0], first])
    params = whole_numbers(symbol)
    result = ece408_op.replace_convolution(symbol, params)
    assert result.symbol.list_outputs() == ["cast_output", "parts_output0", "new0_output"]
    new, old = nodes_of(result.symbol), nodes_of(symbol)
    assert new["new0"]["attrs"]["__ctx_group__"] == "dev1"
    assert (new["data"], new["parts"], new["cast"]) == (old["data"], old["parts"], old["cast"])
    assert_same_outputs(symbol, result, params)
    numpy_symbol = mx.sym.npx.convolution(mx.sym.var("d").as_np_ndarray(), mx.sym.var("w").as_np_ndarray(), **PLAIN)
    assert type(ece408_op.replace_convolution(numpy_symbol).symbol) is type(numpy_symbol)


def test_bad_arguments_are_refused():
    symbol = conv(mx.sym.var("data"))
    with pytest.raises(GraphError, match=r"'conv': expected 'conv_weight' .*\(4, \?, 3, 3\), got \(4, 2, 3, 5\)"):
        ece408_op.replace_convolution(symbol, {"conv_weight": mx.nd.ones((4, 2, 3, 5))})
    with pytest.raises(ProblemError, match="fastest"):
        ece408_op.replace_convolution(symbol, impl="fastest")
    with pytest.raises(ProblemError, match="where: expected one of all, faster; got 'here'"):
        ece408_op.replace_convolution(symbol, where="here")
    with pytest.raises(GraphError, match="expected an mxnet Symbol, got str"):
        ece408_op.replace_convolution("net")
    with pytest.raises(GraphError, match="arg_params: expected a dictionary of arrays by name, got list"):
        ece408_op.replace_convolution(symbol, [("conv_weight", mx.nd.ones((4, 2, 3, 3)))])
    with pytest.raises(GraphError, match="arg_params: expected arrays by name, got NoneType for 'conv_weight'"):
        ece408_op.replace_convolution(symbol, {"conv_weight": None})


@st.composite
def networks(draw):
    """A chain of one to four convolutions, with other nodes between them, and the names of its parameters."""
    symbol, expected = mx.sym.var("data"), {}
    for number in range(draw(st.integers(1, 4))):
        changes = draw(st.sampled_from([{}, {"pad": (1, 1)}, {"stride": (2, 2)}, {"no_bias": False}]))
        kernel, filters = draw(st.tuples(st.integers(1, 3), st.integers(1, 3))), draw(st.integers(1, 5))
        name = f"layer{number}"
        symbol = conv(symbol, name=name, kernel=kernel, num_filter=filters, **changes)
        expected[name] = ("weight", "bias") if changes.get("no_bias") is False else ("weight",)
        between = draw(st.sampled_from(["nothing", "relu", "branch"]))
        if between == "relu":
            symbol = mx.sym.relu(symbol, name=f"relu{number}")
        elif between == "branch":
            symbol = mx.sym.Concat(symbol, symbol * 2, name=f"concat{number}")
    return symbol, expected


@given(networks(), st.integers(0, 1000))
@settings(max_examples=30)
def test_any_network_gives_the_same_before_and_after(network, seed):
    """The arrays given are those of the result, and nothing that was given changes."""
    symbol, expected = network
    params = whole_numbers(symbol, seed, data=(2, 2, 33, 31))  # four layers of 3 x 3 by steps of 2 leave something
    before, given_params = symbol.tojson(), dict(params)
    result = ece408_op.replace_convolution(symbol, params, impl="im2col")  # it compiles nothing
    assert (symbol.tojson(), list(params)) == (before, list(given_params))
    assert set(result.replaced) == set(expected)
    assert result.left == {}
    renamed = {f"{was}_{role}": f"{now}_{role}" for was, now in result.replaced.items() for role in expected[was]}
    assert {name: id(array) for name, array in result.arg_params.items()} == {
        renamed.get(name, name): id(array) for name, array in given_params.items()
    }
    old, new = nodes_of(symbol), nodes_of(result.symbol)
    assert [{**renamed, **result.replaced}.get(name, name) for name in old] == list(new)
    assert all(new[name] == old[name] for name in set(old) - {*result.replaced, *renamed})
    assert {new[name]["attrs"]["impl"] for name in result.replaced.values()} == {"im2col"}
    assert_same_outputs(symbol, result, params)


@pytest.mark.parametrize(
    ("channels", "filters", "kernel", "attributes", "slower"),
    [
        *((c, m, 1, {}, slower) for c, m, slower in ((32, 64, 1), (6, 16, 0), (32, 50, 0))),
        *((c, 64, 3, {}, slower) for c, slower in ((64, 0), (32, 1))),
        (64, 64, 3, {"pad": (1, 1)}, 0),
        *((64, 64, 3, {name: size}, 1) for name, size in (("stride", (2, 2)), ("dilate", (1, 2)))),
    ],
)
def test_layers_that_mxnet_computes_faster_are_counted_once(channels, filters, kernel, attributes, slower, capsys):
    named_data, other = mx.sym.relu(mx.sym.Variable("data")), mx.sym.Variable("image")
    weights = {"a_weight": (channels, 5, 3, 3), "b_weight": (filters, channels, kernel, kernel)}
    params = {name: mx.nd.zeros(shape) for name, shape in weights.items()}
    for image, known, of_numpy in ((named_data, params, False), *product((named_data, other), (None,), (False, True))):
        first = conv(image, num_filter=channels, name="a")
        symbol = conv(first, kernel=(kernel, kernel), num_filter=filters, name="b", **attributes)
        with mx.util.np_shape(of_numpy):
            ece408_op.replace_convolution(symbol, known)
            printed, errors = capsys.readouterr()
            assert printed == ""
            assert errors.count("expect 1 of 2 replaced layers to be slower") == slower
            assert len(errors.splitlines()) == slower
            faster = ece408_op.replace_convolution(symbol, known, where="faster")
            assert len(faster.replaced) == 2 - slower
            assert list(faster.left.values()) == ["MXNet's own Convolution is expected to be faster"] * slower
            ece408_op.replace_convolution(symbol, known, warn=False)
            assert capsys.readouterr() == ("", "")


def test_layers_of_one_input_are_known_beside_inputs_of_other_dimensions():
    """A text with a 1-D convolution, and a matrix named as the image is by default; a classifier follows the layers."""
    text = mx.sym.Convolution(mx.sym.Variable("text"), kernel=(3,), num_filter=4, no_bias=True, name="text0")
    matrix = mx.sym.transpose(mx.sym.Variable("data"), axes=(1, 0))
    for image, other in (("data", text), ("image", text), ("image", matrix)):
        first = conv(mx.sym.Variable(image), num_filter=32, name="a")
        slower = conv(first, kernel=(1, 1), num_filter=64, name="b")
        classes = mx.sym.FullyConnected(slower, num_hidden=3)
        result = ece408_op.replace_convolution(mx.sym.Group([classes, other]), where="faster")
        assert list(result.replaced) == ["a"]
        assert result.left["b"] == "MXNet's own Convolution is expected to be faster"
