"""MXNet's callbacks and checkpoints with networks on a GPU: training goes on from a file, bit for bit."""

import logging
import re

import numpy as np
import pytest
from network_case import mx, ndarrays
from training_case import images, small

import ece408_op

pytestmark = pytest.mark.usefixtures("way")

RULES = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.003, "wd": 0.01},
}
each_rule = pytest.mark.parametrize("rule", [*RULES, *(f"gpu{name}" for name in RULES)])
BATCHES, BATCH = 4, 6


def options(rule):
    return {"gradients": "gpu"} if rule.startswith("gpu") else {}


def same_bits(first, second):
    assert first.keys() == second.keys()
    return all(first[name].asnumpy().tobytes() == second[name].asnumpy().tobytes() for name in first)


def given():
    stream = np.random.RandomState(1)
    count = BATCHES * BATCH
    return stream.uniform(-1, 1, (count, 3, 8, 8)).astype("f"), stream.randint(0, 10, count).astype("f")


def fitted(rule, first, last, prefix=None, **words):
    """Return a Module after epochs of ``fit``, from the beginning or from the checkpoint of its first epoch."""
    symbol = small()
    args, aux = images(symbol, BATCH)
    args, aux = ndarrays({n: a for n, a in args.items() if n not in ("data", "softmax_label")}), ndarrays(aux)
    node, *_ = ece408_op.gpu_network(symbol, args, aux, for_training=True, **options(rule))
    module = mx.mod.Module(node, context=mx.cpu())
    if first:
        module = mx.mod.Module.load(prefix, first, load_optimizer_states=True, context=mx.cpu())
        args, aux = module._arg_params, module._aux_params
    if prefix and not first:
        words["epoch_end_callback"] = mx.callback.module_checkpoint(module, prefix, save_optimizer_states=True)
    # The states of MXNet's own rules have no count of the updates.
    count = {} if rule.startswith("gpu") else {"begin_num_update": first * BATCHES}
    settings = {**RULES[rule.replace("gpu", "")], **count}
    words |= {"optimizer": rule, "optimizer_params": settings, "arg_params": args, "aux_params": aux}
    iterator = mx.io.NDArrayIter(*given(), BATCH, label_name="softmax_label")
    module.fit(iterator, begin_epoch=first, num_epoch=last, **words)
    mx.nd.waitall()
    return module


@each_rule
def test_a_module_goes_on_from_a_checkpoint(rule, tmp_path):
    prefix = str(tmp_path / "network")
    whole = fitted(rule, 0, 2).get_params()
    begun = fitted(rule, 0, 1, prefix).get_params()
    resumed = fitted(rule, 1, 2, prefix).get_params()
    for got, expected, before in zip(resumed, whole, begun):
        assert same_bits(got, expected)
        assert not same_bits(before, expected)


@each_rule
def test_a_gluon_trainer_goes_on_from_files(rule, tmp_path):
    def started():
        mx.random.seed(5)
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mx.gluon.nn.Conv2D(4, 3), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Activation("relu"))
            net.add(mx.gluon.nn.Dense(10))
        net.initialize(mx.init.Xavier())
        block = ece408_op.gluon.on_gpu(net, mx.nd.zeros((BATCH, 3, 8, 8)), **options(rule))
        return net, block, mx.gluon.Trainer(net.collect_params(), rule, RULES[rule.replace("gpu", "")])

    def trained(net, block, trainer, numbers):
        images_, labels = given()
        for number in numbers:
            mine = slice(number * BATCH, (number + 1) * BATCH)
            with mx.autograd.record():
                loss = mx.gluon.loss.SoftmaxCELoss()(block(mx.nd.array(images_[mine])), mx.nd.array(labels[mine]))
            loss.backward()
            trainer.step(BATCH)
        return {name: parameter.data().copy() for name, parameter in net.collect_params().items()}

    files = str(tmp_path / "net.params"), str(tmp_path / "net.states")
    whole = trained(*started(), range(BATCHES))
    net, block, trainer = started()
    half = trained(net, block, trainer, range(2))
    net.save_parameters(files[0])
    trainer.save_states(files[1])
    net, block, trainer = started()
    net.load_parameters(files[0])
    trainer.load_states(files[1])
    assert same_bits(trained(net, block, trainer, range(2, BATCHES)), whole)
    assert not same_bits(half, whole)


def test_the_callbacks_of_fit_work_unchanged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    prefix = str(tmp_path / "network")
    speed = mx.callback.Speedometer(BATCH, frequent=2, auto_reset=False)
    module = fitted("sgd", 0, 2, batch_end_callback=speed, epoch_end_callback=mx.callback.do_checkpoint(prefix))
    pattern = r"Epoch\[(\d)\] Batch \[0-2\]\s+Speed: [\d.]+ samples/sec\s+accuracy=[\d.]+"
    assert re.findall(pattern, caplog.text) == ["0", "1"]
    symbol, *saved = mx.model.load_checkpoint(prefix, 2)
    assert all(map(same_bits, saved, module.get_params()))
    # The file has the node; it computes without the network that it was made from.
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(2, 3, 8, 8))
    executor.copy_params_from(*saved)
    assert np.isfinite(executor.forward(is_train=False, data=mx.nd.ones((2, 3, 8, 8)))[0].asnumpy()).all()
