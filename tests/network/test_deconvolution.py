"""What Deconvolution has besides Convolution's attributes; random ones are in the tests of operators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from network_case import mx, mxnets, ours, values
from numpy_operators import NumpyArrays

import ece408_op
from ece408_op.core.kernel import EPS32
from ece408_op.network._layers import BatchNorm
from ece408_op.network._operators import operator_of

S = mx.sym
data = S.Variable("data")


def test_the_target_shape_of_a_deconvolution_decides_pad_and_adj():
    """As MXNet documents and computes without oneDNN."""
    outputs = []
    for words in ({"target_shape": (8, 10), "adj": (0, 1), "pad": (2, 0)}, {"pad": (1, 2), "adj": (1, 1)}):
        symbol = S.Deconvolution(data, kernel=(3, 4), stride=(2, 3), num_filter=2, **words)
        args, _ = values(symbol, {"data": (2, 3, 4, 4)})
        outputs += ours(symbol, args, {})
    assert outputs[0].shape == (2, 2, 8, 10)
    assert np.array_equal(*outputs)


@pytest.mark.parametrize("words", [{"target_shape": (0, 3), "stride": (2, 2)}, {"pad": (2, 3)}])
def test_an_output_without_pixels_is_refused(words):
    symbol = S.Deconvolution(data, kernel=(3, 3), num_filter=2, name="up", **words)
    node, *_ = ece408_op.gpu_network(symbol, {"up_weight": mx.nd.zeros((3, 2, 3, 3))})
    with pytest.raises(mx.MXNetError, match="pad, target_shape: expected an output of some pixels"):
        node.infer_shape(data=(2, 3, 3, 4))


@pytest.mark.parametrize("groups", [1, 3])
def test_a_deconvolution_with_the_factors_of_a_batch_norm(groups):
    symbol = S.Deconvolution(data, kernel=(2, 3), num_filter=6, num_group=groups, no_bias=False, name="up")
    args, aux = values(S.BatchNorm(symbol, fix_gamma=False, name="norm"), {"data": (2, 3 * groups, 3, 4)})
    operator, norm = operator_of("Deconvolution", symbol.attr_dict()["up"]), BatchNorm("BatchNorm", fix_gamma=False)
    (y,) = mxnets(symbol, {name: args[name] for name in symbol.list_arguments()}, {})
    parameters = args["norm_gamma"], args["norm_beta"], *aux.values()
    norm.compute(NumpyArrays(), (y, *parameters), y)
    inputs = args["data"], args["up_weight"], args["up_bias"], *parameters
    w, bias = replace(operator, norm=norm).folded(inputs)
    (folded,) = mxnets(symbol, {"data": args["data"], "up_weight": w, "up_bias": bias}, {})
    assert np.abs(folded - y).max() <= 2 * (3 * 6 + 4) * EPS32 * np.abs(y).max()
