"""Every attribute of MXNet's Convolution: names, spellings and shapes, compared with MXNet's own."""

import numpy as np
import pytest
from general_problems import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_case import assert_right, attributes, operands

import ece408_op
from ece408_op.errors import ProblemError
from ece408_op.problem import ConvProblem

mx = pytest.importorskip("mxnet")


@given(problems(), st.booleans())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_shapes_are_inferred_as_mxnet_infers_them(problem, biased):
    words = attributes(problem, no_bias=not biased, name="conv0")
    own, new = (op(mx.sym.var("data"), **words) for op in (mx.sym.Convolution, ece408_op.Convolution))
    assert new.list_arguments() == own.list_arguments()
    batch, *image = problem.x_shape
    for data in ((batch, *image), (0, *image), (batch, image[0], 0, image[2])):
        assert new.infer_shape_partial(data=data)[:2] == own.infer_shape_partial(data=data)[:2]
    assert new.infer_shape_partial(data=(1, 0, 0, 0), conv0_weight=problem.w_shape)[0][0] == (1, problem.channels, 0, 0)


SPELLINGS = {
    "tuples": {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "dilate": (1, 2)},
    "lists": {"kernel": [3, 2], "stride": [2, 1], "pad": [1, 0], "dilate": [1, 2]},
    "texts": {"kernel": "(3,2)", "stride": "[2, 1]", "pad": " ( 1 , 0 ) ", "dilate": "(1L, 2L)"},
    "NumPy": {"kernel": tuple(np.int64([3, 2])), "stride": tuple(np.int32([2, 1])), "pad": (1, 0), "dilate": (1, 2)},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling):
    problem = ConvProblem(2, 4, 9, 8, 6, 3, 2, (2, 1), (1, 0), (1, 2), 2)
    x, w, bias = operands(problem)
    arrays = [mx.nd.array(a) for a in (x, w, bias)]
    others = {"cudnn_tune": "off", "cudnn_off": True, "workspace": 256, "layout": "NCHW"}
    words = {**SPELLINGS[spelling], "num_filter": "6", "num_group": "2", "no_bias": "False"}
    for more in ({}, others, dict.fromkeys(others, None)):
        assert_right(ece408_op.Convolution(*arrays, **words, **more).asnumpy(), x, w, problem, bias)
    text = {key: str(value) for key, value in {**words, **others}.items() if "int64" not in str(value)}
    if spelling != "NumPy":
        assert_right(mx.nd.Custom(*arrays, op_type="New", **text).asnumpy(), x, w, problem, bias)


def test_empty_tuples_and_none_are_the_defaults():
    x, w, _ = operands(ConvProblem(2, 3, 7, 7, 4, 3))
    arrays = mx.nd.array(x), mx.nd.array(w)
    plain = ece408_op.New(*arrays, kernel=(3, 3), num_filter=4).asnumpy()
    for word in ("no_bias", "num_group"):
        biased = ece408_op.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=4, **{word: None})
        assert len(biased.list_arguments()) == 3
    for empty in ((), [], "()", None, "None"):
        y = ece408_op.New(*arrays, kernel=(3, 3), num_filter=4, stride=empty, pad=empty, dilate=empty)
        np.testing.assert_array_equal(y.asnumpy(), plain)


def test_arguments_by_name_and_position():
    problem = ConvProblem(2, 3, 7, 6, 4, 3, stride=(2, 2), pad=(1, 1))
    x, w, bias = operands(problem)
    data, weight, offsets = (mx.nd.array(a) for a in (x, w, bias))
    by_name = ece408_op.Convolution(data=data, weight=weight, bias=offsets, **attributes(problem))
    by_place = ece408_op.Convolution(data, weight, offsets, (3, 3), (2, 2), (1, 1), (1, 1), 4)
    for y in (by_name, by_place):
        assert_right(y.asnumpy(), x, w, problem, bias)
    with pytest.raises(ProblemError, match="bias: expected an NDArray as data is, got NoneType"):
        ece408_op.Convolution(data, weight, **attributes(problem))
    with pytest.raises(ProblemError, match="bias: expected none with no_bias=True"):
        ece408_op.Convolution(data, weight, offsets, no_bias=True, **attributes(problem))


def test_a_symbol_without_data_gets_a_variable_as_mxnets():
    words = {"kernel": (3, 3), "num_filter": 4, "name": "conv"}
    for more in ({}, {"weight": mx.sym.var("w")}, {"weight": mx.sym.var("w"), "bias": mx.sym.var("b")}):
        own, new = (op(**words, **more) for op in (mx.sym.Convolution, ece408_op.Convolution))
        assert new.list_arguments() == own.list_arguments()
        assert new.infer_shape(conv_data=(2, 3, 7, 6)) == own.infer_shape(conv_data=(2, 3, 7, 6))
    with pytest.raises(ProblemError, match="data: expected an NDArray or a Symbol, got NoneType"):
        ece408_op.Convolution(weight=mx.nd.ones((4, 3, 3, 3)), **words)


def test_a_symbols_names_and_attributes_are_those_of_mxnets():
    words = {"kernel": (3, 3), "num_filter": 4, "pad": (1, 1), "lr_mult": 2, "attr": {"__mood__": "so so"}}
    symbols = [op(mx.sym.var("data"), name="conv", **words) for op in (mx.sym.Convolution, ece408_op.Convolution)]
    own, new = ({node: dict(attrs) for node, attrs in symbol.attr_dict().items()} for symbol in symbols)
    assert symbols[1].list_arguments() == ["data", "conv_weight", "conv_bias"]
    assert own.keys() == new.keys()
    for node, attrs in own.items():
        assert attrs.items() <= new[node].items()
    shapes = symbols[1].infer_shape(data=(2, 3, 5, 5))[0]
    assert shapes == [(2, 3, 5, 5), (4, 3, 3, 3), (4,)]
