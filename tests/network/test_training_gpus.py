"""Training on several GPUs, against one and against MXNet's own data parallel training on several CPUs."""

from unittest.mock import MagicMock

import numpy as np
import pytest
from network_case import S, data, mx, ndarrays, on_numpy, require_gpus
from network_fake import Communicator
from training_case import assert_close, bound, fitted, images, normalized, odd, on_gpus, plain, results, small, step

import ece408_op
from ece408_op.errors import GraphError, ProblemError
from ece408_op.network import _data_parallel
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda, nccl

pytestmark = pytest.mark.usefixtures("two_gpus")


def test_several_outputs_and_labels_in_any_shape():
    x = S.Convolution(data, kernel=(3, 3), num_filter=4, name="layer")
    symbol = S.Group([S.SoftmaxOutput(x, multi_output=True, name="softmax"), S.tanh(x)])
    args, aux = images(symbol, 1)
    args = {**args, "data": np.random.RandomState(3).uniform(-1, 1, (5, 3, 8, 8)).astype("f")}
    args["softmax_label"] = (np.arange(5 * 36) % 4).astype("f").reshape(5, 36)
    head = mx.nd.array(np.random.RandomState(4).uniform(-1, 1, (5, 4, 6, 6)))
    found = []
    for one, labels in ((symbol, (5, 36)), (on_gpus(symbol, args, aux, [0, 1]), (180,))):
        found.append(bound(one, {**args, "softmax_label": args["softmax_label"].reshape(labels)}, aux))
        step(found[-1], [mx.nd.ones(head.shape), head])
    assert_close(*map(results, reversed(found)))


WORDS = {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-3}


#: Networks, their arrays, and requests of gradients.
CASES = {
    "plain": (plain, images, ["write", "add", {"data": "null", "w": "null"}]),
    "normalized": (normalized, odd, ["write", {"data": "null"}, {"of_data_gamma": "null", "shared_beta": "add"}]),
}


@pytest.mark.parametrize(("case", "which"), [(case, which) for case in CASES for which in range(3)])
@pytest.mark.parametrize(
    ("numbers", "batch"), [([0, 1], 7), ([1, 0], 6), ([0, 1], 3), ([0, 1], 1), ([2, 0, 1], 7), ([0, 1, 2], 2)]
)
def test_steps_are_those_of_one_gpu(case, which, numbers, batch, way, monkeypatch):
    """Outputs, gradients and running statistics, against MXNet's and one GPU's; each pass is captured once per GPU."""
    require_gpus(way, len(numbers))
    captured, original = [], cuda.captured
    monkeypatch.setattr(cuda, "captured", lambda *given: captured.append(given) or original(*given))
    network, arrays, requests = CASES[case]
    symbol = network()
    args, aux = arrays(symbol, batch)
    nodes = [on_gpus(symbol, args, aux, each) for each in (numbers, numbers[:1])]
    ours, one, theirs = executors = [bound(each, args, aux, requests[which]) for each in (*nodes, symbol)]
    for seed in range(4):
        args, _ = arrays(symbol, batch, seed)
        for executor in executors:
            executor.copy_params_from(ndarrays(args))
            step(executor)
        assert_close(results(ours), results(one))
        assert_close(results(ours, False), results(theirs, False))
    assert len(captured) == 2 * (min(batch, len(numbers)) + 1)


@pytest.mark.parametrize("options", [{}, {"gradients": "gpu"}], ids=["cpu", "gpu"])
@pytest.mark.parametrize("network", [plain, small])
def test_batch_sizes_that_change(network, options):
    """Against MXNet's without BatchNorm, else against one GPU's."""
    symbol, rule = network(), "gpusgd" if options else "sgd"
    args, aux = images(symbol)
    theirs = (symbol, "sgd") if network is plain else (on_gpus(symbol, args, aux, [0], **options), rule)
    several = (on_gpus(symbol, args, aux, [0, 1], **options), rule)
    batches = (7, 7, 7, 3, 6, 6, 6)
    found = [fitted(each, args, aux, name, WORDS, batches) for each, name in (several, theirs)]
    for got, expected in zip(*found):
        assert_close(got, expected, 20_000)
    assert max(np.abs(found[0][0][name].asnumpy() - args[name]).max() for name in found[0][0]) > 1e-2


def test_two_networks_train_at_the_same_time(monkeypatch):
    """Their threads take the GPUs' locks in one order."""
    monkeypatch.setattr(_data_parallel, "BARRIER_SECONDS", 200)
    symbol = normalized()
    args, aux = odd(symbol, 6)
    pair = [bound(on_gpus(symbol, args, aux, numbers), args, aux) for numbers in ([0, 1], [1, 0])]
    theirs = bound(symbol, args, aux)
    for _ in range(5):
        for executor in (*pair, theirs):
            executor.forward(is_train=True)
        for executor in (*pair, theirs):
            executor.backward()
    for executor in pair:
        assert_close(results(executor, False), results(theirs, False), 20_000)


def test_the_gpus_draw_different_random_numbers():
    node = on_gpus(S.Dropout(data, p=0.5), {}, {}, [0, 1])
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((64, 32))})
    mx.random.seed(1)
    first, second = np.split(executor.forward(is_train=True)[0].asnumpy(), 2)
    assert {*first.ravel()} == {*second.ravel()} == {0, 2}
    assert 0.4 < (first == second).mean() < 0.6


@on_numpy
def test_sums_are_queued_with_the_locks_of_all_gpus(monkeypatch):
    """They are taken in the order of the GPUs' numbers, so that networks with other orders cannot deadlock."""
    symbol, held, sums = plain(), [], []

    class Noted(Communicator):
        def reduce(self, *given):
            sums.append([*held])
            super().reduce(*given)

    for number in range(2):
        lock = MagicMock(__enter__=lambda _, n=number: held.append(n), __exit__=lambda *_, n=number: held.remove(n))
        host_context.gpu(number).lock = lock
    monkeypatch.setattr(nccl, "communicator", lambda numbers: Noted())
    args, aux = images(symbol)
    step(bound(on_gpus(symbol, args, aux, [1, 0]), args, aux))
    mx.nd.waitall()
    assert (sums, held) == ([[0, 1]], [])


def test_what_several_gpus_cannot_share():
    x = S.FullyConnected(data, num_hidden=5, name="layer")
    params = {"layer_weight": mx.nd.ones((5, 3)), "layer_bias": mx.nd.ones(5)}
    for normalization in ("batch", "valid"):
        symbol = S.SoftmaxOutput(x, normalization=normalization, name="softmax")
        with pytest.raises(GraphError, match=f"'softmax' .*normalization={normalization} has no gradient on several"):
            ece408_op.gpu_network(symbol, params, for_training=True, device_ids=[0, 1])
    node = ece408_op.gpu_network(S.mean(x, axis=0), params, for_training=True, device_ids=[0, 1])[0]
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((4, 3)), **params})
    with pytest.raises(ProblemError, match="device_ids: expected a network that computes each image by itself"):
        executor.forward(is_train=True)[0].asnumpy()
