"""Training of whole networks: MXNet's Module and executors with gpu_network's node, against MXNet's own operators."""

from __future__ import annotations

import numpy as np
import pytest
from network_case import S, data, mx, ndarrays, on_numpy, text_of, values
from network_fake import Stream
from training_case import assert_close, bound, compare, compare_layers, images, node_of, results, small, step

import ece408_op
from ece408_op import data as fashion
from ece408_op import models
from ece408_op.errors import DataError, DeviceError
from ece408_op.models import inference
from ece408_op.network._network import parse
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda

pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("request_", ["write", "add", {"data": "null", "first_weight": "null", "last_bias": "add"}])
def test_gradients_as_requested(request_):
    symbol = small()
    compare(symbol, *images(symbol), request=request_, steps=2)


def test_parameters_used_twice_and_several_outputs():
    w, b = S.Variable("w"), S.Variable("b")
    words = {"kernel": (3, 3), "num_filter": 3, "pad": (1, 1)}
    x = S.tanh(S.Convolution(S.tanh(S.Convolution(data, w, b, **words)), w, b, **words))
    compare_layers(S.Group([x * S.broadcast_add(x, S.mean(x, axis=0, keepdims=True)), x, S.BlockGrad(x)]), (2, 3, 7, 5))


def test_a_relu_behind_batch_norm():
    """It is computed with the normalization, unless something else reads what is between."""
    x = S.relu(S.BatchNorm(S.Activation(S.BatchNorm(data, fix_gamma=False), act_type="relu"), axis=2))
    x = S.BatchNorm(x, use_global_stats=True)
    x = S.BatchNorm(S.relu(x), fix_gamma=False)
    compare_layers(S.Group([S.relu(x), S.tanh(x)]), (4, 3, 6, 5))


def test_batch_norm_behind_a_convolution_with_a_bias():
    """It takes the bias, unless its statistics are the stored ones or something else reads the convolution."""
    words = {"kernel": (3, 3), "num_filter": 4, "pad": (1, 1)}
    x = S.relu(S.BatchNorm(S.Convolution(data, name="first", **words), fix_gamma=False, name="a"))
    x = S.BatchNorm(S.Convolution(x, name="second", **words), use_global_stats=True, name="b")
    x = S.Convolution(x, name="third", **words)
    compare_layers(S.BatchNorm(x, name="c") + S.tanh(x), (3, 2, 6, 5))


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh", "softrelu", "softsign"])
def test_an_activation_in_front_of_a_max_pooling(kind):
    """The pooling computes it, unless something else reads what is between or it takes no maxima."""
    words = {"kernel": (3, 2), "stride": (2, 2), "pad": (1, 0), "pooling_convention": "full"}
    x = S.Activation(data, act_type=kind, name="first")
    y = S.Activation(data, act_type=kind, name="read_twice")
    pooled = S.Pooling(x, pool_type="max", name="joined", **words)
    symbol = S.Group([pooled, S.Pooling(y, pool_type="max", **words) + S.Pooling(y, pool_type="avg", **words)])
    fused = parse(text_of(node_of(symbol, {}, inputs=("data",)))).fused_for_training()
    applied = {node.name: node.epilogue for _, node in fused.operators}
    assert {name: one.activation for name, one in applied.items() if one} == {"joined": kind}
    compare_layers(symbol, (3, 2, 7, 8), steps=1)


def test_a_relu_behind_a_sum():
    """It is computed with the sum, unless something else reads what is between."""
    x = S.relu(S.tanh(data) + data)
    x = S.elemwise_add(x, S.sqrt(x + 1))
    compare_layers(S.Group([S.relu(x), S.BlockGrad(x)]), (4, 3, 6, 5))


def test_passes_that_a_cuda_graph_repeats(monkeypatch):
    """They are captured once, and leave what another executor of the network needs for its backward pass."""
    symbol, captured, original = small(), [], cuda.captured
    monkeypatch.setattr(cuda, "captured", lambda *given: captured.append(given) or original(*given))
    (args, aux), count = images(symbol), 2
    ours, theirs = ([bound(one, args, aux) for _ in range(count)] for one in (node_of(symbol, args, aux), symbol))
    for seed in range(0, 2 * 4, 2):
        for executors in (ours, theirs):
            for number, one in enumerate(executors, seed):
                args, aux = images(symbol, seed=number)
                one.copy_params_from(ndarrays(args), ndarrays(aux))
                one.forward(is_train=True)
            for one in executors:
                one.backward()
        for pair in zip(ours, theirs):
            assert_close(*map(results, pair))
    assert len(captured) == count


@on_numpy
@pytest.mark.parametrize("gradients", ["cpu", "gpu"])
def test_each_pass_ends_when_its_gpu_has_computed(gradients, monkeypatch):
    """Its memory may be the next step's, whose copies run on other streams; and its errors are its own."""
    symbol = small()
    args, aux = images(symbol)
    executor = bound(node_of(symbol, args, aux, gradients=gradients), args, aux)
    done, execute, synchronize = [], cuda.execute, Stream.synchronize
    stream = host_context.gpu(0).stream
    monkeypatch.setattr(cuda, "execute", lambda *given: done.append("launch") or execute(*given))
    waits = lambda self: (done.append("wait") if self is stream else None, synchronize(self))  # noqa: E731
    monkeypatch.setattr(Stream, "synchronize", waits)
    for run in (lambda: executor.forward(is_train=True), executor.backward):
        run()
        mx.nd.waitall()
        assert "launch" in done and done[-1] == "wait"
        done.clear()


def test_a_loss_beside_an_output_that_is_no_loss():
    x = S.FullyConnected(data, num_hidden=5, name="layer")
    symbol = S.Group([S.SoftmaxOutput(x, name="softmax"), S.BlockGrad(S.softmax(x))])
    args, aux = values(symbol, {"data": (4, 3)})
    compare(symbol, {**args, "softmax_label": np.arange(4).astype("f")}, aux)


def test_networks_that_are_bound_one_after_another():
    """MXNet asks the arrays of the first one's backward pass for what the second one's reads."""
    layer = S.FullyConnected(data, num_hidden=5, name="layer")
    symbols = [S.SoftmaxOutput(layer, name="softmax"), S.Group([S.tanh(layer), layer * 2])]
    cases = []
    for symbol in symbols:
        args, aux = values(symbol, {"data": (4, 3)})
        cases.append([bound(one, args, aux) for one in (symbol, node_of(symbol, args, aux))])
    for theirs, ours in cases:
        for one in (theirs, ours):
            one.forward(is_train=True)
            one.backward([mx.nd.ones(output.shape) for output in one.outputs])
        assert_close(*({"data": one.grad_dict["data"]} for one in (ours, theirs)))


def test_batch_sizes_that_change_and_inference_between():
    symbol = small()
    args, aux = images(symbol, 6)
    executors = [bound(one, args, aux) for one in (symbol, node_of(symbol, args, aux))]
    for batch in (6, 3, 6):
        given, _ = images(symbol, batch, seed=batch)
        sizes = {"data": (batch, 3, 8, 8), "softmax_label": (batch,)}
        executors = [one.reshape(allow_up_sizing=True, partial_shaping=True, **sizes) for one in executors]
        for executor in executors:
            executor.copy_params_from(ndarrays({name: given[name] for name in sizes}))
            step(executor)
            # MXNet sets is_train for passes that have not begun, too.
            executor.outputs[0].wait_to_read()
            executor.forward(is_train=False)
        assert_close(*map(results, reversed(executors)))


def test_imperative_calls_with_autograd():
    symbol = S.tanh(S.FullyConnected(data, num_hidden=5, name="layer"))
    args, aux = values(symbol, {"data": (4, 3)})
    blocks = []
    for one in (symbol, node_of(symbol, args, inputs=("data",))):
        block = mx.gluon.SymbolBlock(one, data)
        block.initialize()
        for name, parameter in block.collect_params().items():
            parameter.set_data(mx.nd.array(args[name]))
        x = mx.nd.array(args["data"])
        x.attach_grad()
        for _ in range(2):
            with mx.autograd.record():
                loss = (block(x) ** 2).sum() + block(2 * x).sum()
            loss.backward()
        blocks.append({"data": x.grad, **{name: p.grad() for name, p in block.collect_params().items()}})
    assert_close(*blocks)


def test_variables_keep_their_attributes_but_context_groups():
    with mx.AttrScope(ctx_group="first"):
        symbol = S.FullyConnected(data, S.Variable("w", lr_mult=0.25, wd_mult=0.0), no_bias=True, num_hidden=2)
    node = node_of(symbol, {"w": np.ones((2, 3), "f")})
    expected = {name: value for name, value in symbol.attr_dict()["w"].items() if "ctx_group" not in name}
    assert node.attr_dict()["w"] == expected
    executor = node.simple_bind(mx.cpu(), group2ctx={"first": mx.cpu(1)}, data=(1, 3))
    assert executor.arg_dict["w"].context == mx.cpu()


@pytest.mark.parametrize("gradients", ["cpu", "gpu"])
def test_an_empty_batch_has_gradients_of_zero(gradients):
    symbol = S.FullyConnected(data, num_hidden=2, name="layer")
    args, _ = values(symbol, {"data": (3, 4)})
    del args["data"]
    node = ece408_op.gpu_network(symbol, ndarrays(args), for_training=True, gradients=gradients)[0]
    with mx.util.np_shape():
        found = {name: mx.nd.full(array.shape, np.nan) for name, array in args.items()}
        given = {**ndarrays(args), "data": mx.nd.zeros((0, 4))}
        executor = node.bind(mx.cpu(), given, found)
        assert executor.forward(is_train=True)[0].shape == (0, 2)
        executor.backward([mx.nd.zeros((0, 2))])
        assert all((array.asnumpy() == 0).all() for array in found.values())


def test_a_backward_pass_without_a_forward_pass():
    symbol = S.FullyConnected(data, num_hidden=2, name="layer")
    args, aux = values(symbol, {"data": (3, 4)})
    executor = bound(node_of(symbol, args), args, aux)
    with pytest.raises(DeviceError, match="backward: expected a forward pass with is_train=True before .*, got none"):
        executor.backward([mx.nd.ones((3, 2))])
        executor.grad_dict["data"].asnumpy()


#: Networks, the sides of their images, and learning rates; with larger ones rounding errors grow from step to step.
NETWORKS = {
    "resnet18_v1": (32, 1e-4),
    "mobilenetv2_1.0": (32, 1e-5),
    "ece408-high": (None, 1e-3),
    "ece408-2018sp": (None, 1e-4),
    "ece408-2018fa": (None, 1e-3),
}


def of_the_zoo(name, way):
    """Return a network of the model zoo; for NumPy, with a quarter of its channels."""
    zoo, words = mx.gluon.model_zoo.vision, {"classes": 10, "prefix": "net_"}
    if way != "numpy":
        return zoo.get_model(name, **words)
    if name == "mobilenetv2_1.0":
        return zoo.mobilenet_v2_0_25(**words)
    assert name == "resnet18_v1"
    return zoo.ResNetV1(zoo.BasicBlockV1, [2, 2, 2, 2], [16, 16, 32, 64, 128], **words)


def started(name, way, steps):
    """Return a network with random weights and a loss, and images and labels for that number of steps."""
    side, rate = NETWORKS[name]
    stream, batch = np.random.RandomState(408), 4
    if side is None:
        try:
            images_, labels, *_ = fashion.load_test(models.info(name).image[1], steps * batch)
        except DataError as error:
            pytest.skip(str(error))
        symbol = inference.built_in(models.find(name)).symbol
    else:
        images_, labels = stream.standard_normal((steps * batch, 3, side, side)), stream.randint(0, 10, steps * batch)
        symbol = S.SoftmaxOutput(of_the_zoo(name, way)(data), name="softmax")
    shapes, _, states = symbol.infer_shape(data=(batch, *images_.shape[1:]))
    args = {
        key: stream.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else np.ones(shape)
        for key, shape in zip(symbol.list_arguments(), shapes)
    }
    aux = {key: np.ones(shape, "f") for key, shape in zip(symbol.list_auxiliary_states(), states)}
    return symbol, args, aux, (images_.astype("f"), labels.astype("f"))


#: Those that differ from the others in sizes alone.
ALIKE = ("ece408-high", "ece408-2018fa")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in NETWORKS]
)
def test_steps_of_module_fit(name, way):
    """Losses differ from MXNet's as MXNet's own do between weights that differ by float32's precision."""
    steps = 5 if way == "numpy" else 20
    symbol, args, aux, (images_, labels) = started(name, way, steps)
    label = next(key for key in args if "label" in key)
    inputs, words = ("data", label), {"learning_rate": NETWORKS[name][1], "momentum": 0.9}

    def losses(one, rule, noise=0):
        stream, metric, found = np.random.RandomState(noise), mx.metric.CrossEntropy(), []
        changed = {n: a * (1 + bool(noise) * 2.0**-23 * stream.uniform(-1, 1, a.shape)) for n, a in args.items()}

        def finished(step):
            found.append(metric.get()[1])
            metric.reset()

        mx.mod.Module(one, label_names=[label]).fit(
            mx.io.NDArrayIter(images_, labels, 4, label_name=label),
            eval_metric=metric,
            optimizer=rule,
            optimizer_params=words,
            arg_params=ndarrays({n: a for n, a in changed.items() if n not in inputs}),
            aux_params=ndarrays(aux),
            num_epoch=1,
            batch_end_callback=finished,
        )
        return np.array(found)

    theirs, ours = losses(symbol, "sgd"), losses(node_of(symbol, args, aux, inputs, gradients="gpu"), "gpusgd")
    spread = np.max([np.abs(losses(symbol, "sgd", noise) - theirs) for noise in range(1, 7)], axis=0)
    assert len(theirs) == steps
    tolerance = np.maximum(4 * np.maximum.accumulate(spread), 2.0**-20 * theirs)
    assert (np.abs(ours - theirs) <= tolerance).all(), (ours, theirs, tolerance)
