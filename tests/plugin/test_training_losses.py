"""Losses of networks of Gluon's model zoo in training, step by step, compared with those of MXNet's own Convolution.

Both runs have the same weights, images, order and optimizer. Rounding errors grow from step to step, by as much as the
network amplifies them, so the tolerance is measured: further runs of MXNet's own begin with weights that a relative
noise of float32's precision has changed. A loss may be as far from MXNet's as four times the furthest of these runs at
any step so far, or 16 roundings of the loss.
"""

from __future__ import annotations

import numpy as np
import pytest
from gpu_case import require_gpu

import ece408_op

mx = pytest.importorskip("mxnet")

#: The networks and their learning rates. With larger ones, rounding errors grow a hundredfold at each step.
NETWORKS = {"resnet18_v1": 1e-4, "mobilenetv2_1.0": 1e-5}
STEPS, BATCH, SIZE, CLASSES = 20, 32, 64, 10
NOISE, NOISY_RUNS = 2.0**-23, 6
FACTOR, LEAST = 4, 2.0**-20


def losses(name: str, where: str = "MXNet", noise: int = 0) -> np.ndarray:
    """The loss at each step; ``noise`` seeds the weights' noise."""
    mx.random.seed(408)
    random = np.random.RandomState(408)
    images = random.standard_normal((STEPS * BATCH, 3, SIZE, SIZE)).astype(np.float32)
    labels = random.randint(0, CLASSES, STEPS * BATCH).astype(np.float32)
    net = mx.gluon.model_zoo.vision.get_model(name, classes=CLASSES, prefix="net_")
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(images[:BATCH]))
    for parameter in net.collect_params(".*weight").values():
        value = random.standard_normal(parameter.shape) * np.sqrt(2 / np.prod(parameter.shape[1:]))
        if noise:
            value *= 1 + NOISE * np.random.RandomState(noise).uniform(-1, 1, parameter.shape)
        parameter.set_data(mx.nd.array(value))
    if where == "operator":
        assert not ece408_op.gluon.replace(net).left
    if where == "GPU":
        net = ece408_op.gluon.on_gpu(net, mx.nd.array(images[:BATCH]), gradients="gpu")
    else:
        net.hybridize()
    rule = "gpusgd" if where == "GPU" else "sgd"
    trainer = mx.gluon.Trainer(net.collect_params(), rule, {"learning_rate": NETWORKS[name]})
    measure, found = mx.gluon.loss.SoftmaxCrossEntropyLoss(), []
    for data, label in zip(np.split(images, STEPS), np.split(labels, STEPS)):
        with mx.autograd.record():
            loss = measure(net(mx.nd.array(data)), mx.nd.array(label)).mean()
        loss.backward()
        trainer.step(1)
        found.append(float(loss.asscalar()))
    return np.array(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("where", ["operator", pytest.param("GPU", marks=pytest.mark.gpu)])
def test_losses_are_mxnets(where, name):
    if where == "GPU":
        require_gpu()
    mine, own = losses(name, where), losses(name)
    noisy = [losses(name, noise=seed) for seed in range(1, NOISY_RUNS + 1)]
    spread = np.maximum.accumulate(np.abs(np.subtract(noisy, own)).max(axis=0))
    assert (np.abs(mine - own) <= np.maximum(FACTOR * spread, LEAST * np.abs(own))).all()
