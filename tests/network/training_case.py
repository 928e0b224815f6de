"""What the tests of training share: networks, their arrays, and steps of MXNet's executors and Modules."""

import numpy as np
from network_case import S, data, mx, ndarrays, values

import ece408_op
from ece408_op.core.kernel import EPS32


def node_of(symbol, args, aux=(), inputs=("data", "softmax_label"), **options):
    params = ndarrays({name: array for name, array in args.items() if name not in inputs})
    return ece408_op.gpu_network(symbol, params, ndarrays(dict(aux)), for_training=True, **options)[0]


def bound(symbol, args, aux, request="write"):
    names = [name for name in symbol.list_arguments() if "label" not in name]
    requests = {name: (request if isinstance(request, str) else request.get(name, "write")) for name in names}
    gradients = {name: mx.nd.ones(args[name].shape) for name in names}
    requests.update({name: "null" for name in symbol.list_arguments() if name not in names})
    return symbol.bind(mx.cpu(), ndarrays(args), gradients, requests, ndarrays(aux))


def assert_close(got, expected, terms=2000):
    assert got.keys() == expected.keys()
    for name in got:
        own, theirs = got[name].asnumpy(), expected[name].asnumpy()
        assert own.shape == theirs.shape
        worst = np.abs(own - theirs).max(initial=0)
        assert worst <= terms * EPS32 * np.abs(theirs).max(initial=1), (name, worst)


def step(executor, heads=None):
    executor.forward(is_train=True)
    executor.backward(heads)
    return executor


def results(executor, shared=True):
    """Return what a step has computed, by name: MXNet's uses of one layer change its states in another order."""
    found = {f"gradient to {n}": g for n, g in executor.grad_dict.items() if g is not None}
    found |= {name: state for name, state in executor.aux_dict.items() if shared or not name.startswith("shared")}
    return {**found, **{f"output {number}": output for number, output in enumerate(executor.outputs)}}


def compare(symbol, args, aux=(), heads=None, request="write", steps=1, terms=2000, **options):
    """Run both for some steps; compare outputs, gradients and states."""
    aux, found = dict(aux), []
    for one in (node_of(symbol, args, aux, **options), symbol):
        executor = bound(one, args, aux, request)
        for _ in range(steps):
            step(executor, heads and [mx.nd.array(head) for head in heads])
        found.append(results(executor))
    assert_close(*found, terms)


def one_layer(weight, gradient, x=data, on_gpu=True):
    """Return an executor of ``x``, for ones (4, 3), times a weight, whose gradient stays on the GPU."""
    symbol = S.FullyConnected(x, S.Variable("w"), num_hidden=len(weight), no_bias=True)
    symbol = node_of(symbol, {"w": weight.asnumpy()}, gradients="gpu") if on_gpu else symbol
    return symbol.bind(mx.cpu(), {"data": mx.nd.ones((4, 3)), "w": weight}, {"w": gradient})


def compare_layers(symbol, shape, steps=2):
    """Compare for random data of that shape, and random gradients of the outputs."""
    stream = np.random.RandomState(1)
    heads = [stream.uniform(-1, 1, each) for each in symbol.infer_shape(data=shape)[1]]
    compare(symbol, *values(symbol, {"data": shape}), heads, steps=steps)


def small():
    """A network with a loss, whose layers have gradients of all kinds."""
    x = S.Convolution(data, kernel=(3, 3), num_filter=8, pad=(1, 1), no_bias=True, name="first")
    x = S.Activation(S.BatchNorm(x, fix_gamma=False, name="norm"), act_type="relu")
    shortcut = S.Convolution(x, kernel=(1, 1), num_filter=8, no_bias=True, name="shortcut")
    x = S.Pooling(x + shortcut, kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = S.FullyConnected(S.Flatten(x), num_hidden=10, name="last")
    return S.SoftmaxOutput(x, name="softmax")


def images(symbol, batch=6, seed=0):
    args, aux = values(symbol, {"data": (batch, 3, 8, 8)}, seed)
    return {**args, "softmax_label": (np.arange(batch) % 10).astype("f")}, aux


def module(symbol, args, aux, rule, words):
    """Return a Module with these arrays, for batches of six images, and a learning rate that falls."""
    found = mx.mod.Module(symbol, context=mx.cpu())
    found.bind([("data", (6, 3, 8, 8))], [("softmax_label", (6,))])
    params = {name: array for name, array in args.items() if name not in ("data", "softmax_label")}
    found.init_params(arg_params=ndarrays(params), aux_params=ndarrays(aux))
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.7)
    found.init_optimizer(optimizer=rule, optimizer_params={**words, "lr_scheduler": schedule, "rescale_grad": 1 / 6})
    return found


def steps(found, batches, first=0):
    """Return a Module's parameters and states after steps on batches of these sizes."""
    for seed, batch in enumerate(batches, first):
        given, _ = images(small(), batch, seed)
        labels = mx.nd.array(given["softmax_label"])
        found.forward_backward(mx.io.DataBatch([mx.nd.array(given["data"])], [labels]))
        found.update()
    # MXNet's executors do not wait for BatchNorm's states.
    mx.nd.waitall()
    return found.get_params()


def fitted(symbol, args, aux, rule, words, batches):
    """Return the parameters and states of a new Module after steps on batches of these sizes."""
    return steps(module(symbol, args, aux, rule, words), batches)


def plain():
    """A network with a loss, and parameters that are used twice, but without BatchNorm."""
    w = S.Variable("w")
    x = S.Activation(S.Convolution(data, kernel=(3, 3), num_filter=8, pad=(1, 1), name="first"), act_type="relu")
    x = S.Convolution(x, w, kernel=(1, 1), num_filter=8, no_bias=True, name="second")
    x = S.Pooling(S.Convolution(x, w, kernel=(1, 1), num_filter=8, no_bias=True, name="third"), kernel=(2, 2))
    return S.SoftmaxOutput(S.FullyConnected(S.Flatten(x), num_hidden=10, name="last"), name="softmax")


def on_gpus(symbol, args, aux, numbers, **options):
    return node_of(symbol, args, aux, device_ids=numbers, **options)


def normalized():
    """A network whose BatchNorms have all that they may have; one is used twice, and one reads the data."""
    x = S.BatchNorm(data, fix_gamma=True, eps=0.01, name="of_data")
    x = S.Convolution(x, kernel=(3, 3), num_filter=5, pad=(1, 0), name="with_bias")
    x = S.relu(S.BatchNorm(x, fix_gamma=False, momentum=0.7, name="taking_bias"))
    shared = {name: S.Variable(f"shared_{name}") for name in ("gamma", "beta", "moving_mean", "moving_var")}
    for number in range(2):
        x = S.BatchNorm(S.tanh(x), **shared, fix_gamma=False, momentum=0.6, name=f"use{number}")
    x = x + S.BatchNorm(x, axis=2, fix_gamma=False, name="of_rows")
    x = S.BatchNorm(x, use_global_stats=True, fix_gamma=False, name="stored")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=10, name="last"), name="softmax")


def odd(symbol, batch, seed=0):
    args, aux = values(symbol, {"data": (batch, 3, 7, 5)}, seed)
    return {**args, "softmax_label": (np.arange(batch) % 10).astype("f")}, aux
