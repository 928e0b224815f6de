"""Training of Gluon's blocks on a GPU, against MXNet's own operators."""

from __future__ import annotations

import numpy as np
import pytest
from network_case import mx
from training_case import assert_close

import ece408_op
from ece408_op.errors import GraphError, ProblemError

pytestmark = pytest.mark.usefixtures("way")


STATIC = {"static_alloc": True, "static_shape": True}


@pytest.mark.parametrize(
    ("mode", "rule", "words", "options"),
    [({}, "sgd", {}, {}), (STATIC, "sgd", {}, {}), ({}, "adam", {"epsilon": 1e-4}, {"gradients": "gpu"})],
    ids=["hybrid", "static", "gradients on the GPU"],
)
def test_a_gluon_block(mode, rule, words, options):
    """With a frozen parameter. oneDNN's layers behind the network pass gradients back in a blocked layout."""

    def trained(on_gpu):
        mx.random.seed(3)
        net, behind = (mx.gluon.nn.HybridSequential(prefix=prefix) for prefix in ("net_", "behind_"))
        with net.name_scope():
            net.add(mx.gluon.nn.Conv2D(16, 3, padding=1, use_bias=False), mx.gluon.nn.BatchNorm())
            net.add(mx.gluon.nn.Activation("relu"), mx.gluon.nn.Conv2D(16, 3))
        with behind.name_scope():
            behind.add(mx.gluon.nn.Conv2D(16, 3, strides=2), mx.gluon.nn.Dense(10))
        x = mx.nd.array(np.random.RandomState(2).uniform(-1, 1, (8, 3, 12, 12)))
        for one in (net, behind):
            one.initialize(mx.init.Xavier())
        net[3].weight.grad_req = "null"
        first = ece408_op.gluon.on_gpu(net, x, **options) if on_gpu else net
        assert list(first.collect_params()) == list(net.collect_params())
        behind(net(x))
        first.hybridize(**mode)
        behind.hybridize()
        parameters = {**net.collect_params(), **behind.collect_params()}
        name = f"gpu{rule}" if on_gpu and options else rule
        learner = mx.gluon.Trainer(parameters, name, {"learning_rate": 0.05, **words})
        for number in range(5):
            with mx.autograd.record():
                loss = mx.gluon.loss.SoftmaxCELoss()(behind(first(x)), mx.nd.arange(8))
            loss.backward()
            learner.step(8 + number)
        found = {name: parameter.data() for name, parameter in parameters.items()}
        return {**found, "loss": loss, "inference": first(x)}

    assert_close(trained(True), trained(False))


@pytest.mark.parametrize("hybrid", [False, True])
def test_parts_around_a_layer_that_mxnet_computes(hybrid):
    """What the error about unsupported operators advises, forward and gradients."""
    mx.random.seed(5)
    net, parts = mx.gluon.nn.HybridSequential(), mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(8, 3, activation="relu"), mx.gluon.nn.HybridLambda(lambda F, x: F.LRN(x, nsize=3)))
    net.add(mx.gluon.nn.Conv2D(4, 1))
    net.initialize(mx.init.Xavier())
    x = mx.nd.array(np.random.RandomState(2).uniform(-1, 1, (4, 3, 8, 8)))
    middle = net[1](net[0](x))
    with pytest.raises(GraphError, match="LRN.*: unsupported operator.* between separate gpu_network nodes"):
        ece408_op.gluon.on_gpu(net, x)
    parts.add(ece408_op.gluon.on_gpu(net[0], x), net[1], ece408_op.gluon.on_gpu(net[2], middle))
    if hybrid:
        parts.hybridize()
    found = []
    for block in (parts, net):
        with mx.autograd.record():
            loss = (block(x) ** 2).sum()
        loss.backward()
        found.append([loss.asnumpy(), *(p.grad().asnumpy().copy() for p in net.collect_params().values())])
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_in_the_place_of_a_child(tmp_path):
    """Of a block that calls it by its name, whose files stay the same."""

    class Whole(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.features, self.output = mx.gluon.nn.HybridSequential(), mx.gluon.nn.Dense(2)
            self.features.add(mx.gluon.nn.Conv2D(4, 3), mx.gluon.nn.Flatten())

        def forward(self, a, b):
            return self.output(self.features(a) - self.features(b))

    x, file = mx.nd.array(np.random.RandomState(2).uniform(-1, 1, (4, 3, 8, 8))), str(tmp_path / "whole.params")
    whole, loaded = Whole(), Whole()
    whole.initialize(mx.init.Xavier())
    expected = whole(x, 2 * x).asnumpy()
    text = f"on_gpu({whole.features})"
    whole.features = ece408_op.gluon.on_gpu(whole.features, x)
    assert str(whole.features) == text
    whole.save_parameters(file)
    loaded.load_parameters(file)
    for block in (whole, loaded):
        np.testing.assert_allclose(block(x, 2 * x).asnumpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_block_that_cannot_be_on_a_gpu():
    with pytest.raises(ProblemError, match="block: expected a HybridBlock, got Block"):
        ece408_op.gluon.on_gpu(mx.gluon.Block(), mx.nd.ones((1,)))
    with pytest.raises(ProblemError, match="examples: expected an array for each input of the block, got none"):
        ece408_op.gluon.on_gpu(mx.gluon.nn.Dense(3))
    with pytest.raises(ProblemError, match="examples: expected arrays, got tuple"):
        ece408_op.gluon.on_gpu(mx.gluon.nn.Dense(3), (1, 3))
    half = mx.gluon.nn.Dense(3, in_units=2)
    half.initialize()
    half.cast(np.float16)
    with pytest.raises(ProblemError, match="weight: expected float32, got float16; cast the block"):
        ece408_op.gluon.on_gpu(half, mx.nd.ones((1, 2), dtype="float16"))


def test_a_gluon_block_with_several_inputs_and_outputs():
    class Two(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="two_")
            with self.name_scope():
                self.layer = mx.gluon.nn.Dense(4)

        def hybrid_forward(self, F, a, b):
            return self.layer(a), F.tanh(a + b)

    block, found = Two(), []
    block.initialize(mx.init.Xavier())
    stream = np.random.RandomState(0)
    a, b = (mx.nd.array(stream.uniform(-1, 1, (3, 5))) for _ in range(2))
    for one in (ece408_op.gluon.on_gpu(block, a, b), block):
        one.hybridize()
        for array in (a, b):
            array.attach_grad()
        with mx.autograd.record():
            first, second = one(a, b)
            loss = (first**2).sum() + (3 * second).sum()
        loss.backward()
        found.append({"a": a.grad, "b": b.grad, "w": block.layer.weight.grad().copy(), "y": first, "z": second})
    assert_close(*found)


def test_a_gluon_block_with_an_unused_layer_and_nested_outputs(tmp_path, recwarn):
    """Its files of parameters are those of the original block, all of them."""

    class Partly(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__(prefix="partly_")
            with self.name_scope():
                self.layer, self.unused = mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(3, in_units=2)

        def hybrid_forward(self, F, x):
            y = self.layer(x)
            return y, [F.tanh(y), F.relu(y)]

    block, x = Partly(), mx.nd.random.uniform(shape=(3, 5))
    block.initialize(mx.init.Xavier())
    # A second call, as in a notebook's cell that runs twice, starts from the same block.
    one = ece408_op.gluon.on_gpu(ece408_op.gluon.on_gpu(block, x), x, gradients="gpu")
    (first, (second, third)), file = block(x), str(tmp_path / "block.params")
    expected = dict(enumerate([first, second, third]))
    one.hybridize()
    one.save_parameters(file)
    block.initialize(mx.init.One(), force_reinit=True)
    one.load_parameters(file)
    # As from a DataLoader's workers.
    assert_close(dict(enumerate(one(x.copyto(mx.Context("cpu_shared", 0))))), expected)
    assert_close(dict(enumerate([block(x)[0], *block(x)[1]])), expected)
    assert len(mx.nd.load(file)) == 4
    assert not [warning for warning in recwarn if "mxnet" in warning.filename]


def test_a_gluon_block_of_mx_np():
    with mx.util.np_shape(), mx.util.np_array():
        block, x = mx.gluon.nn.Dense(4, activation="tanh"), mx.np.random.uniform(size=(3, 5))
        block.initialize()
        found = ece408_op.gluon.on_gpu(block, x)(x)
        assert type(found) is mx.np.ndarray
        np.testing.assert_allclose(found.asnumpy(), block(x).asnumpy(), rtol=1e-5)
