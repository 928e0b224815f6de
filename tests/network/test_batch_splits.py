"""Which networks may compute a batch's images in parts or on several GPUs; no GPU needed."""

import pytest
from network_case import S, data, fused, mx, text_of

import ece408_op
from ece408_op.network._network import parse, splits


@pytest.mark.parametrize(
    ("symbol", "shape", "expected"),
    [
        (S.tanh(data), (4, 3), True),
        (S.reshape(data, shape=(-1, 3)), (4, 3), True),
        (S.reshape(data, shape=(0, -1)), (4, 3, 2), True),
        (S.reshape(data, shape=(-1, 6)), (4, 3), False),
        (S.transpose(data), (4, 3), False),
        (S.transpose(data, axes=(0, 2, 1)), (4, 3, 4), True),
        (S.transpose(data, axes=(1, 0, 2)), (4, 4, 2), False),
        (S.mean(data, axis=1), (4, 3), True),
        (S.mean(data, axis=0), (4, 3), False),
        (S.mean(data, axis=0, keepdims=True), (1, 3), False),
        (S.sum(data, axis=0, keepdims=True), (1, 3), False),
        (S.squeeze(data, axis=1), (4, 1, 3), True),
        (S.squeeze(data), (4, 1, 3), False),
        (S.swapaxes(data, 0, 1), (4, 4, 3), False),
        (S.slice(data, begin=(None,), end=(None,), step=(-1,)), (4, 3), False),
        (S.slice(data, begin=(0, 2), end=(None, None), step=(1, -1)), (4, 3), True),
        (S.slice_axis(data, axis=0, begin=0, end=4), (4, 3), False),
        (S.split(data, num_outputs=3)[1], (4, 3), True),
        (S.softmax(data, axis=0), (4, 3), False),
        (S.softmax(data), (4, 3), True),
        (S.concat(data, data, dim=0), (4, 3), False),
        (S.concat(data, data, dim=1), (4, 3), True),
        (S.SoftmaxOutput(data, preserve_shape=True, name="softmax"), (4, 3, 2), True),
        (S.SoftmaxOutput(data, preserve_shape=True, name="softmax"), (4,), False),
        (S.broadcast_add(data, S.mean(data, axis=0, keepdims=True)), (4, 3), False),
        (S.slice_like(S.Variable("table", shape=(9, 3)), data), (4, 3), False),
        (S.slice_like(data * 2, data, axes=(1,)), (4, 3), True),
    ],
)
def test_a_batch_is_split_only_if_images_are_independent(symbol, shape, expected):
    assert splits(fused(symbol, {"data": shape}), (shape,)) is expected


def test_a_parameter_with_the_batch_size_keeps_it_whole():
    symbol = S.elemwise_add(data, S.Variable("table"))
    node, *_ = ece408_op.gpu_network(symbol, {"table": mx.nd.ones((4, 3))})
    assert not splits(parse(text_of(node)), ((4, 3),))
