"""Backward passes that are queued behind their forward passes, before MXNet asks for them, against MXNet's own."""

from __future__ import annotations

import numpy as np
import pytest
from network_case import require_gpus
from training_case import assert_close, bound, images, on_gpus, plain

from ece408_op.network import _cuda_graphs, _training, trainer


@pytest.fixture(params=[[0], [0, 1]], ids=str)
def both(way, request, monkeypatch):
    """MXNet's executor and, last, one on these GPUs."""
    require_gpus(way, len(request.param))
    if way == "numpy":
        repeat_on_numpy(monkeypatch)
    symbol = plain()
    args, aux = images(symbol)
    return [bound(one, args, aux) for one in (symbol, on_gpus(symbol, args, aux, request.param))]


def repeat_on_numpy(monkeypatch):
    """Repeat passes on NumPy's arrays too, whose graphs are calls: a backward pass reads the last forward pass."""
    last, forward, backward = {}, _training.forward, _training.backward

    def noted(network, operators, *args):
        last[id(operators.chooser)] = forward(network, operators, *args)
        return last[id(operators.chooser)]

    def backward_of_last(network, operators, _, *args):
        return backward(network, operators, last[id(operators.chooser)], *args)

    never_used = property(lambda self: lambda: None, lambda self, user: None)
    monkeypatch.setattr(_cuda_graphs.Graphs, "user", never_used, raising=False)
    monkeypatch.setattr(_training, "forward", noted)
    monkeypatch.setattr(_training, "backward", backward_of_last)


def computed(both, data, labels, changed=None):
    """Compute both passes, with other labels in the backward pass if they are given, and compare all gradients."""
    found = []
    for executor in both:
        executor.arg_dict["softmax_label"][:] = labels
        executor.forward(is_train=True, data=data)
        executor.outputs[0].wait_to_read()
        if changed is not None:
            executor.arg_dict["softmax_label"][:] = changed
        executor.backward()
        found.append({name: array for name, array in executor.grad_dict.items() if name != "softmax_label"})
    assert_close(*reversed(found))


@pytest.fixture
def queued(monkeypatch):
    """Whether each repeated forward pass has had its backward pass behind it."""
    found, real = [], trainer.queue_backward

    def noted(rank, graphs, *args):
        one = real(rank, graphs, *args)
        found.extend([one] if graphs else [])
        return one

    monkeypatch.setattr(trainer, "queue_backward", noted)
    return found


def test_gradients_are_for_the_labels_at_the_backward_pass(both, queued):
    stream = np.random.RandomState(5)
    shape = both[0].arg_dict["data"].shape
    for step in range(6):
        data, labels = stream.uniform(-1, 1, shape).astype("f"), stream.randint(0, 10, shape[0])
        computed(both, data, labels, (labels + 1) % 10 if step in (3, 4) else None)
    gpus = len(queued) // 5
    assert gpus in (1, 2)
    assert [one is not None for one in queued] == [False] * gpus + [True] * 4 * gpus


def test_a_forward_pass_without_a_backward_pass_has_the_next_one_queue_none(both, queued):
    (*_, ours), data = both, both[0].arg_dict["data"].asnumpy()
    labels = np.arange(len(data)) % 10
    for _ in range(3):
        computed(both, data, labels)
    queued.clear()
    ours.forward(is_train=True)
    ours.forward(is_train=True)
    computed(both, data, labels)
    gpus = len(queued) // 3
    assert gpus in (1, 2)
    assert [one is not None for one in queued] == [True] * gpus + [False] * 2 * gpus
