"""Optimisers on the GPU, against MXNet's own: parameters after some steps, checkpoints, and wrong uses."""

import numpy as np
import pytest
from network_case import S, data, mx, ndarrays, on_numpy, updater
from network_fake import Array, no_room
from training_case import assert_close, fitted, images, module, node_of, one_layer, step, steps

import ece408_op
from ece408_op.errors import DeviceError, ProblemError
from ece408_op.network import _gpu_update
from ece408_op.network._gpu_update import Update, rows_of
from ece408_op.plugin import array_version
from ece408_op.runtime import cuda

pytestmark = pytest.mark.usefixtures("way")

RULES = {
    "plain": ("sgd", {"learning_rate": 0.05}),
    "momentum": ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.02}),
    "adam": ("adam", {"learning_rate": 0.003, "wd": 0.01, "clip_gradient": 0.02, "beta1": 0.8, "epsilon": 1e-4}),
}


def network(gradients="cpu"):
    """Return the symbol for MXNet, or the node, with factors for single parameters; and the arrays."""
    weight = S.Variable("last_weight", lr_mult=0.5, wd_mult=2.0)
    layers = S.Activation(S.Convolution(data, kernel=(3, 3), num_filter=4, name="first"), act_type="tanh")
    layers = S.BatchNorm(layers, fix_gamma=False, name="norm")
    symbol = S.SoftmaxOutput(S.FullyConnected(S.Flatten(layers), weight, num_hidden=10, name="last"), name="softmax")
    args, aux = images(symbol)
    if gradients is None:
        return symbol, args, aux
    return node_of(symbol, args, aux, gradients=gradients), args, aux


def test_a_kvstore_that_updates(tmp_path):
    """As in MXNet's examples, which make one for Module.fit; its parameters are copies of the network's."""

    def trained(symbol, rule):
        found = module(symbol, args, aux, rule, {})
        store, words = mx.kv.create("local"), {**RULES["momentum"][1], "rescale_grad": 1 / 6}
        found.init_optimizer(kvstore=store, optimizer=rule, optimizer_params=words, force_init=True)
        steps(found, [6] * 2)
        found.save_optimizer_states(str(tmp_path / rule))
        found.load_optimizer_states(str(tmp_path / rule))
        return steps(found, [6] * 2)

    symbol, args, aux = network(None)
    for got, expected in zip(trained(network("gpu")[0], "gpusgd"), trained(symbol, "sgd")):
        assert_close(got, expected)


@pytest.mark.parametrize("gradients", ["gpu", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_parameters_are_mxnets(rule, gradients):
    name, words = RULES[rule]
    symbol, args, aux = network(None)
    theirs = fitted(symbol, args, aux, name, words, [6] * 5)
    ours = fitted(network(gradients)[0], args, aux, f"gpu{name}", words, [6] * 5)
    for got, expected in zip(ours, theirs):
        assert_close(got, expected)
    change = max(np.abs(theirs[0][key].asnumpy() - args[key]).max() for key in theirs[0])
    assert change > 1e-3


def test_one_update_of_many_networks():
    """As of the parts around layers that no gpu_network supports."""

    def trained(rule, **options):
        mx.random.seed(5)
        layers, net = [mx.gluon.nn.Dense(3, in_units=3) for _ in range(20)], mx.gluon.nn.Sequential()
        x, parameters = mx.nd.array(np.random.RandomState(2).uniform(-1, 1, (4, 3))), []
        for one in layers:
            one.initialize(mx.init.Xavier())
            parameters += one.collect_params().values()
            net.add(ece408_op.gluon.on_gpu(one, x, **options) if options else one, mx.gluon.nn.Lambda("sin"))
        learner = mx.gluon.Trainer(parameters, rule, {"learning_rate": 0.1})
        for _ in range(2):
            with mx.autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            learner.step(1)
        return {str(number): one.data() for number, one in enumerate(parameters)}

    assert_close(trained("gpusgd", gradients="gpu"), trained("sgd"))


@pytest.mark.parametrize("rule", ["sgd", "adam", "rmsprop"])
def test_gradients_on_the_gpu_and_another_optimiser(rule):
    node, args, aux = network("gpu")
    found = module(node, args, aux, rule, {})
    with pytest.raises(ProblemError, match="expected parameters that the optimiser gpusgd or gpuadam updates"):
        steps(found, [6] * 2)


def test_gradients_on_the_gpu_are_nan_and_used_once():
    weight, gradient, update = mx.nd.ones((2, 3)), mx.nd.zeros((2, 3)), updater()
    step(one_layer(weight, gradient), [mx.nd.ones((4, 2))])
    assert np.isnan(gradient.asnumpy()).all()
    update(0, gradient, weight)
    assert (weight.asnumpy() == 0).all()
    update(0, gradient, weight)
    with pytest.raises(ProblemError, match="expected gradients as the network's last backward pass left them"):
        mx.nd.waitall()
    assert (weight.asnumpy() == 0).all()
    assert not _gpu_update.pending


@on_numpy
@pytest.mark.parametrize("fails", ["forward", "backward", "update"])
def test_a_step_without_memory_changes_nothing(way, fails, monkeypatch):
    node, args, aux = network("gpu")
    found = module(node, args, aux, "gpusgd", RULES["momentum"][1])
    batch = mx.io.DataBatch([mx.nd.ones((6, 3, 8, 8))], [mx.nd.array(args["softmax_label"])])

    def values():
        states = [array for _, state in sorted(found._updater.states.items()) for array in state.__reduce__()[1][0]]
        executor = found._exec_group.execs[0]
        arrays = [array.asnumpy() for array in (*executor.arg_dict.values(), *executor.aux_dict.values())]
        return [array.tobytes() for array in (*states, *arrays)]

    steps(found, [6])
    # BatchNorm's states change in the forward pass.
    found.forward(batch, is_train=True)
    mx.nd.waitall()
    before = values()
    if fails == "update":
        found.backward()
        mx.nd.waitall()
    with monkeypatch.context() as patch:
        patch.setattr(cuda.cupy(), "empty", no_room)
        getattr(found, fails)(*([batch, True] if fails == "forward" else []))
        with pytest.raises(DeviceError, match="GPU 0: the GPU's memory: expected room for a training step"):
            mx.nd.waitall()
    assert values() == before
    steps(found, [6], 1)
    assert values() != before


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("place", [(0, 0), (1, 1), slice(1, 2), "all"])
def test_a_gradient_on_the_gpu_that_is_changed_is_refused(place, steps, readable, monkeypatch):
    monkeypatch.setattr(array_version, "is_readable", lambda: readable)
    weight, gradient, update = mx.nd.ones((3, 3)), mx.nd.ones((3, 3)), updater()
    executor = one_layer(weight, gradient)
    for number in range(steps):
        assert (weight.asnumpy() == 1 - number).all()
        step(executor, [mx.nd.ones((4, 3))])
        mx.nd.waitall()
        if number == steps - 1 and place == "all":
            gradient *= 0.5
        elif number == steps - 1:
            gradient[place] = 0
        update(0, gradient, weight)
    with pytest.raises(ProblemError, match="something changed the arrays; pass gradients='cpu'"):
        mx.nd.waitall()
    assert (weight.asnumpy() == 2 - steps).all()


def test_an_older_gradient_for_the_same_arrays_is_never_used():
    """It is of another network, and the newer backward pass has overwritten it."""
    weight, gradient, update = mx.nd.ones((3, 3)), mx.nd.zeros((3, 3)), updater()
    executors = []
    for x in (data, data * 2):
        executors.append(step(one_layer(weight, gradient, x), [mx.nd.ones((4, 3))]))
    update(0, gradient, weight)
    assert (weight.asnumpy() == -1).all()
    assert not _gpu_update.pending


def test_sgd_without_momentum_keeps_nothing_of_a_step():
    """Not even NaN or infinity: 0 times these is NaN."""
    weight, gradient, update = mx.nd.ones((3,)), mx.nd.array([np.nan, np.inf, 1]), updater()
    update(0, gradient, weight)
    for array in (weight, gradient):
        array[:] = 1
    update(0, gradient, weight)
    assert (weight.asnumpy() == 0.75).all()


def test_wrong_options():
    node, args, aux = network("gpu")
    gradients = {name: mx.nd.ones(array.shape) for name, array in args.items()}
    executor = node.bind(mx.cpu(), ndarrays(args), gradients, "add", ndarrays(aux))
    executor.forward(is_train=True)
    executor.backward()
    with pytest.raises(ProblemError, match="first_weight: expected grad_req write with gradients='gpu', got add"):
        executor.grad_dict["first_weight"].asnumpy()
    with pytest.raises(ProblemError, match="gradients: expected cpu without for_training, got gpu"):
        ece408_op.gpu_network(S.tanh(data), {}, gradients="gpu")


def test_arrays_that_do_not_fit_are_refused():
    update, doubles = updater(), mx.nd.zeros((3, 2), dtype="float64")
    with pytest.raises(ProblemError, match="GpuSGD: expected float32 parameters, dense, in mx.cpu.*got float64"):
        update(0, doubles, doubles)
    rows = mx.nd.sparse.row_sparse_array(([[1.0, 2.0]], [1]), shape=(3, 2))
    for wrong in (rows, mx.nd.ones((3, 2), dtype="float16"), mx.nd.ones((2, 2))):
        with pytest.raises(ProblemError, match="GpuSGD: expected float32 gradients, dense, in mx.cpu.*, of shape"):
            update(0, wrong, mx.nd.ones((3, 2)))
    for rule, shape in (("gpuadam", (3, 2)), ("gpusgd", (2, 2))):
        other = updater(rule)
        other.set_states(update.get_states())
        with pytest.raises(ProblemError, match=r"state: expected a state of .*got arrays of the shapes \[\(3, 2\)\]"):
            other(0, mx.nd.ones(shape), mx.nd.ones(shape))
    update.states[0], update.states_synced[0] = mx.nd.zeros(3), True
    with pytest.raises(ProblemError, match="state: expected a state of GpuSGD with arrays .*got NDArray"):
        update(0, mx.nd.zeros(3), mx.nd.zeros(3))


@pytest.mark.parametrize("shared", ["parameters", "one twice", "gradient"])
def test_parameters_that_share_memory_are_refused(shared):
    """MXNet's engine would wait for ever."""
    update, arrays, gradients = updater(), mx.nd.ones((2, 3)), mx.nd.ones(3)
    weights = {"parameters": [arrays[0], arrays[1]], "one twice": [gradients.copy()] * 2, "gradient": [gradients]}
    several = weights[shared]
    for alone in (False, True, True):  # also where each has been updated by itself
        with pytest.raises(ProblemError, match="GpuSGD: expected parameters that share no memory with each other or"):
            update([*range(len(several))], [gradients] * len(several), several)
        for number, one in enumerate(several if alone else []):
            update(number, gradients if len(several) > 1 else mx.nd.ones(3), one)
    with pytest.raises(ProblemError, match="one array twice"):
        update([0, 0], [gradients] * 2, [several[0]] * 2)
    mx.nd.waitall()


@pytest.mark.parametrize("clip", [0, -1.0])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_limit_that_is_not_positive_is_none(rule, clip):
    weights = {}
    for name in (rule, f"gpu{rule}"):
        weights[name] = mx.nd.ones(3)
        updater(name, learning_rate=0.1, clip_gradient=clip)(0, mx.nd.array([0.5, -3, 2]), weights[name])
    assert_close({"": weights[f"gpu{rule}"]}, {"": weights[rule]})


@pytest.mark.parametrize("order", ["F0 B0 U0 F1 B1 U1", "F0 F1 B0 U0 B1 U1", "F0 F1 B0 B1 U0 U1"])
def test_forward_passes_before_the_last_update(order):
    """Forward (F), backward (B) and update (U) of two executors with one weight."""

    def weight(rule):
        shared, update, executors = mx.nd.ones((2, 3)), updater(rule, learning_rate=0.25), []
        for number in (1, 2):
            executors.append(one_layer(shared, mx.nd.zeros((2, 3)), on_gpu=rule == "gpusgd"))
            executors[-1].arg_dict["data"][:] = number
        for action, number in order.split():
            one = executors[int(number)]
            if action == "F":
                one.forward(is_train=True)
            elif action == "B":
                one.backward([mx.nd.ones((4, 2))])
            else:
                update(0, one.grad_dict["w"], shared)
            # MXNet's executors do not wait for one another.
            mx.nd.waitall()
        return {"": shared}

    assert_close(weight("gpusgd"), weight("sgd"))


@on_numpy
def test_gradients_of_networks_that_are_never_updated_do_not_stay(way, monkeypatch):
    monkeypatch.setattr(_gpu_update, "MOST_PASSES", 16)
    weights, gradients = ([mx.nd.ones((2, 3)) for _ in range(20)] for _ in range(2))
    executors = [step(one_layer(*arrays), [mx.nd.ones((4, 2))]) for arrays in zip(weights, gradients)]
    mx.nd.waitall()
    assert len(_gpu_update.pending) == 16 < len(executors)
    updater()(0, gradients[-1], weights[-1])
    assert (weights[-1].asnumpy() == 0).all()


@on_numpy
@pytest.mark.parametrize("states", [1, 2])
def test_the_rows_of_an_update(way, states):
    arrays = [[np.zeros(size, np.float32).view(Array) for _ in range(2 + states)] for size in (3, 5)]
    rates = [(0.5, 0.25), (1e-3, 0.0)]
    updates = [Update(one[0], one[1], one[2:], *pair) for one, pair in zip(arrays, rates)]
    rows = rows_of(updates)
    assert rows[:, 4].tolist() == [3, 5]
    assert rows[:, : 2 + states].tolist() == [[array.data.ptr for array in one] for one in arrays]
    assert not rows[:, 2 + states : 4].any()
    np.testing.assert_array_equal(np.ascontiguousarray(rows[:, 5:]).view(np.float32), np.float32(rates))
