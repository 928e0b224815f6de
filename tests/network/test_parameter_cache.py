"""Parameters that stay on GPUs between an update and the next step: never other values than MXNet's arrays have."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from network_case import S, mx, ndarrays, require_gpus, updater
from training_case import assert_close, images, on_gpus, plain

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.network import _gpu_update, _step
from ece408_op.network._gpu_update import cached_at
from ece408_op.plugin import array_version
from ece408_op.plugin.bridge import addresses
from ece408_op.runtime import pinned

pytestmark = pytest.mark.usefixtures("way")

WORDS = {"learning_rate": 0.004, "momentum": 0.9, "wd": 1e-3, "rescale_grad": 1 / 7}
#: Parameters of ``plain``, which uses "w" twice.
NAMES = ("first_weight", "first_bias", "w", "last_weight", "last_bias")


@pytest.fixture(autouse=True)
def all_large(monkeypatch):
    """Small parameters, as those of tests are, cross the bus in any case, and are not pinned."""
    monkeypatch.setattr(_step, "SMALL_BYTES", 4)
    monkeypatch.setattr(pinned, "LEAST_BYTES", 8)
    _step.packing_of_shapes.cache_clear()
    yield
    _step.packing_of_shapes.cache_clear()


@pytest.fixture(params=[[0], [0, 1], pytest.param([1, 0], marks=pytest.mark.exhaustive)], ids=str)
def numbers(request, way):
    require_gpus(way, max(request.param) + 1)
    return request.param


@pytest.fixture
def copied(monkeypatch):
    """A list of the shapes that each pass and update copies to a GPU."""
    found, original = [], _step.Pipeline

    def noted(device, chunks, inputs, *rest, **options):
        found.append([array.size for array in inputs if array.size])
        return original(device, chunks, inputs, *rest, **options)

    monkeypatch.setattr(_step, "Pipeline", noted)
    return found


class Trained:
    """An executor with data of its own, and its optimiser."""

    def __init__(self, symbol, arrays, rule, gradients=None):
        gradients = gradients or {name: mx.nd.zeros(arrays[name].shape) for name in NAMES}
        self.executor = symbol.bind(mx.cpu(), {**arrays, "data": arrays["data"].copy()}, gradients)
        self.update = updater(rule, **WORDS)

    @property
    def weights(self):
        return {name: self.executor.arg_dict[name] for name in NAMES}

    def forward(self, seed):
        data = self.executor.arg_dict["data"]
        data[:] = images(plain(), len(data), seed)[0]["data"]
        self.executor.forward(is_train=True)

    def apply(self, names=NAMES):
        arrays = ([found[name] for name in names] for found in (self.executor.grad_dict, self.weights))
        self.update([NAMES.index(name) for name in names], *arrays)

    def step(self, seed):
        self.forward(seed)
        self.executor.backward()
        self.apply()


def both(numbers, gradients="gpu"):
    """Return MXNet's, and that on GPUs of these numbers."""
    symbol = plain()
    args, aux = images(symbol, 7)
    ours = on_gpus(symbol, args, aux, numbers, gradients=gradients)
    return Trained(symbol, ndarrays(args), "sgd"), Trained(ours, ndarrays(args), "gpusgd")


def assert_equal_steps(theirs, ours):
    """Both have the same parameters, and the next outputs are the same."""
    assert_close(ours.weights, theirs.weights, 20_000)
    for one in (theirs, ours):
        one.forward(9)
    assert_close({"y": ours.executor.outputs[0]}, {"y": theirs.executor.outputs[0]}, 20_000)


def by_another_optimiser(weight):
    updater("sgd", learning_rate=0.05)(0, mx.nd.ones(weight.shape), weight)


WRITES = {
    "nothing": lambda weight: None,
    "all": lambda weight: weight.__setitem__(slice(None), 0.05),
    "NumPy's": lambda weight: weight.__setitem__(slice(None), np.full(weight.shape, 0.05)),
    "an element": lambda weight: weight.__setitem__((2,) + (0,) * (weight.ndim - 1), 0.5),
    "in place": lambda weight: weight.__imul__(0.5),
    "a view": lambda weight: weight[1:3].__iadd__(0.1),
    "a view of another shape": lambda weight: weight.reshape(-1)[:5].__iadd__(0.1),
    "out": lambda weight: mx.nd.clip(weight, -0.1, 0.1, out=weight),
    "copyto": lambda weight: (mx.nd.ones(weight.shape) / 16).copyto(weight),
    "another optimiser": by_another_optimiser,
}


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_what_mxnet_writes_is_used(write, readable, numbers, monkeypatch):
    """Between steps, and between a backward pass and its update; whether or not its counts of writes can be read."""
    monkeypatch.setattr(array_version, "is_readable", lambda: readable)
    theirs, ours = both(numbers)
    for one in (theirs, ours):
        for seed in range(7):
            one.forward(seed)
            one.executor.backward()
            if seed in (3, 5):
                mx.nd.waitall()
                WRITES[write](one.weights["last_weight"])
            one.apply()
            if seed in (1, 2, 6):
                WRITES[write](one.weights["w"])
                WRITES[write](one.weights["last_weight"])
    assert_equal_steps(theirs, ours)


@pytest.mark.parametrize("readable", [True, False])
def test_parameters_are_copied_to_a_gpu_only_after_another_write(numbers, readable, copied, monkeypatch):
    monkeypatch.setattr(array_version, "is_readable", lambda: readable)
    _, ours = both(numbers)
    sizes = {name: array.size for name, array in ours.weights.items()}

    def copied_parameters():
        ours.step(0)
        mx.nd.waitall()
        found = sorted(name for name, size in sizes.items() for one in copied if size in one)
        copied.clear()
        return found

    assert len({*sizes.values()} - {8, 10, 7 * 3 * 8 * 8}) == 3
    large = ["first_weight", "last_weight", "w"]

    def of_large():
        return [name for name in copied_parameters() if name in large]

    # The forward pass on each GPU, and the update on one.
    everything = sorted(large * (len(numbers) + 1))
    assert of_large() == everything
    for _ in range(3):
        assert of_large() == ([] if readable else everything)
    ours.weights["w"][0, 0] = 1
    assert of_large() == (["w"] * (len(numbers) + 1) if readable else everything)
    assert of_large() == ([] if readable else everything)


#: The parameters that calls of the optimiser update, one call after another.
CALLS = [[NAMES], [[name] for name in NAMES], [NAMES[:2], NAMES[2:]], [NAMES[::-1]]]


@pytest.mark.parametrize("seed", range(4))
def test_networks_that_share_parameters_in_any_order_of_steps_and_updates(numbers, seed):
    """Executors of a graph, of batches that other GPUs compute, of another graph, and with a parameter of its own."""
    symbol = plain()
    args, aux = images(symbol, 7)
    scores, label = symbol.get_children()

    def trained(rule, **options):
        graphs = symbol, S.SoftmaxOutput(scores * 2, label, name="softmax")
        graph, other = (on_gpus(one, args, aux, numbers, **options) if options else one for one in graphs)
        shared, single = ndarrays(args), {"data": mx.nd.ones((1, 3, 8, 8)), "softmax_label": mx.nd.ones(1)}
        own = {**shared, "last_weight": shared["last_weight"] * 2}
        found = [Trained(graph, arrays, rule) for arrays in (shared, {**shared, **single}, own)]
        found[1].update = found[0].update
        found.append(Trained(other, shared, rule))
        stream = np.random.RandomState(seed)
        for step in range(15):
            one = found[stream.choice(4, p=[0.4, 0.2, 0.2, 0.2])]
            one.forward(step)
            one.executor.backward()
            for names in CALLS[stream.choice(4, p=[0.7, 0.1, 0.1, 0.1])]:
                one.apply(names)
            # MXNet's executors do not wait for one another.
            mx.nd.waitall()
            WRITES[stream.choice(["nothing", "an element", "a view"])](one.weights["w"])
        return {**found[0].weights, "own": found[2].weights["last_weight"]}

    assert_close(trained("gpusgd", gradients="gpu"), trained("sgd"), 20_000)


def test_a_block_whose_parameters_are_set_and_loaded_and_frozen(numbers, tmp_path):
    def trained(rule, **options):
        mx.random.seed(3)
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mx.gluon.nn.Conv2D(8, 3, activation="relu"), mx.gluon.nn.Dense(12), mx.gluon.nn.Dense(10))
        net.initialize(mx.init.Xavier())
        x = mx.nd.array(np.random.RandomState(2).uniform(-1, 1, (9, 3, 12, 12)))
        block = ece408_op.gluon.on_gpu(net, x, device_ids=numbers, **options) if options else net
        net(x)
        net.save_parameters(str(tmp_path / "parameters"))
        learner = mx.gluon.Trainer(net.collect_params(), rule, {"learning_rate": 0.01, "momentum": 0.5})
        for number in range(8):
            with mx.autograd.record():
                loss = mx.gluon.loss.SoftmaxCELoss()(block(x), mx.nd.arange(9))
            loss.backward()
            learner.step(9)
            if number == 2:
                net[1].weight.set_data(net[1].weight.data() * 0.5)
            if number == 4:
                net.load_parameters(str(tmp_path / "parameters"))
            if number == 5:
                net.initialize(mx.init.Constant(0.01), force_reinit=True)
                net[2].weight.set_data(mx.nd.ones((10, 12)) / 50)
        return {name: parameter.data() for name, parameter in net.collect_params().items()}

    assert_close(trained("gpusgd", gradients="gpu"), trained("sgd"), 20_000)


def test_gradients_of_mxnets_arrays_keep_parameters_too(copied, numbers):
    """They are copied to the first GPU, whose parameters the next forward passes use."""
    theirs, ours = both(numbers, "cpu")
    for one in (theirs, ours):
        for seed in range(3):
            copied.clear()
            one.step(seed)
            mx.nd.waitall()
    size = ours.weights["last_weight"].size
    assert [size in one for one in copied] == [False] * (len(copied) - 1) + [True]
    assert copied[-1].count(size) == 1, "the gradient alone"
    assert_equal_steps(theirs, ours)


def test_an_update_that_fails_keeps_nothing(numbers, monkeypatch):
    """MXNet's arrays may have changed or not: what they have counts."""
    _, ours = both(numbers)
    for seed in range(3):
        ours.step(seed)
    ours.forward(3)
    ours.executor.backward()
    mx.nd.waitall()
    original = _gpu_update.apply

    def fails(rule, updates):
        original(rule, updates)
        for one in updates:
            one.parameter[...] = np.nan
        raise DeviceError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(_gpu_update, "apply", fails)
        ours.apply()
        with pytest.raises(DeviceError, match=r"GPU \d: out of order"):
            mx.nd.waitall()
    before = ours.weights["w"].asnumpy()
    ours.step(4)
    assert all(np.isfinite(array.asnumpy()).all() for array in (ours.executor.outputs[0], *ours.weights.values()))
    assert not np.array_equal(ours.weights["w"].asnumpy(), before)


def test_what_is_kept_goes_with_the_optimiser():
    _, ours = both([0])
    ours.step(0)
    mx.nd.waitall()
    weights = ours.weights
    places = addresses(weights.values())
    assert all(cached_at(place) is not None for place in places)
    del ours
    gc.collect()
    assert all(cached_at(place) is None for place in places)
