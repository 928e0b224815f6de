"""Training through the operator, compared with MXNet's own Convolution: by every API, among oneDNN's operators."""

import numpy as np
import pytest

import ece408_op

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

#: 16 to 32 channels: oneDNN's blocked layouts, with which a gradient in the wrong layout has wrong numbers.
WORDS = {"kernel": (3, 3), "num_filter": 32, "no_bias": True}
MODES = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}


def values(*shapes, seed=0):
    random = np.random.RandomState(seed)
    return [mx.nd.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


def assert_close(got, want, tolerance=2e-5):
    """Rounding errors of both sides, as a share of the largest value: the sums have at most 100,000 products."""
    for one, other in zip(got, want):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


def own(data, *parameters, **words):
    """MXNet's Convolution for arrays and symbols."""
    return (mx.sym if isinstance(data, mx.sym.Symbol) else mx.nd).Convolution(data, *parameters, **words)


class Network(mx.gluon.HybridBlock):
    """A layer of oneDNN's, the convolution, and another layer of oneDNN's."""

    def __init__(self, convolution, before, after):
        super().__init__(prefix="net_")
        self.convolution = convolution
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(32, 16, 3, 3))
            self.before, self.after = (self.layer(kind, channels) for kind, channels in ((before, 16), (after, 32)))

    @staticmethod
    def layer(kind, channels):
        return {
            "Convolution": lambda: nn.Conv2D(channels, 3, use_bias=False, in_channels=channels),
            "BatchNorm": lambda: nn.BatchNorm(in_channels=channels),
            "Pooling": lambda: nn.AvgPool2D(2, 2),
            "nothing": lambda: nn.HybridLambda(lambda F, x: x),
        }[kind]()

    def hybrid_forward(self, F, data, weight):
        return self.after(self.convolution(self.before(data), weight, **WORDS))


def trained(convolution, before, after, mode):
    """Return the output and all gradients of one step."""
    net = Network(convolution, before, after)
    net.initialize()
    parameters = sorted(net.collect_params(".*weight|.*gamma|.*beta").items())
    for number, (name, parameter) in enumerate(parameters):
        (value,) = values(parameter.shape, seed=number)
        parameter.set_data(value / 10 + ("gamma" in name))
    if mode is not None:
        net.hybridize(**mode)
    (data,) = values((40, 16, 20, 20))
    data.attach_grad()
    with mx.autograd.record():
        y = net(data)
    y.backward(values(y.shape, seed=1)[0])
    return [y.asnumpy(), data.grad.asnumpy(), *(parameter.grad().asnumpy() for _, parameter in parameters)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nothing", "Convolution"),
        ("Convolution", "nothing"),
        ("Convolution", "Convolution"),
        ("nothing", "BatchNorm"),
        ("BatchNorm", "Pooling"),
        ("Pooling", "Pooling"),
        ("BatchNorm", "Convolution"),
    ],
)
def test_gradients_in_the_default_layout_between_onednns_operators(before, after, mode):
    want = trained(own, before, after, None)
    for _ in range(2):
        assert_close(trained(ece408_op.Convolution, before, after, MODES[mode]), want)


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("mine", [0, 1, 2])
def test_gradients_that_mxnets_own_operator_writes_too(request_, mine):
    """Its gradient arrays may be left in a blocked layout."""

    def gradients(convolutions):
        data, weight = values((50, 16, 20, 20), (32, 16, 3, 3))
        for array in (data, weight):
            array.attach_grad(request_)
        for _ in range(2):
            with mx.autograd.record():
                loss = sum((convolution(data, weight, **WORDS) ** 2).sum() for convolution in convolutions)
            loss.backward()
        for convolution in convolutions:  # each writes by itself
            with mx.autograd.record():
                y = convolution(data, weight, **WORDS)
            y.backward()
        return data.grad.asnumpy(), weight.grad.asnumpy()

    mixed = [own, own, own]
    mixed[mine] = ece408_op.Convolution
    assert_close(gradients(mixed), gradients([own, own, own]))


def a_weight_that_a_convolution_reorders_before_the_backward_pass(convolution):
    data, weight = values((50, 16, 20, 20), (32, 16, 3, 3))
    data.attach_grad()
    with mx.autograd.record():
        y = convolution(data, weight, **WORDS)
    own(data, weight, **WORDS).wait_to_read()
    y.backward()
    return [data.grad.asnumpy()]


@pytest.mark.parametrize("request_", ["write", "add"])
def test_an_executor(request_):
    def gradients(convolution):
        layer = convolution(mx.sym.var("data"), mx.sym.var("w"), **WORDS)
        middle = own(layer, mx.sym.var("w2"), kernel=(1, 1), num_filter=16, no_bias=True)
        last = convolution(middle, mx.sym.var("w"), **WORDS)
        names = ["data", "w", "w2"]
        arrays = dict(zip(names, values((20, 16, 20, 20), (32, 16, 3, 3), (16, 32, 1, 1))))
        written = {name: array.zeros_like() for name, array in arrays.items()}
        executor = last.bind(mx.cpu(), arrays, args_grad=written, grad_req=request_)
        for _ in range(2):
            (y,) = executor.forward(is_train=True)
            executor.backward(values(y.shape, seed=1))
        return [written[name].asnumpy() for name in names]

    assert_close(gradients(ece408_op.Convolution), gradients(own), 1e-4)


def one_array_as_both_inputs_and_several_calls_on_one(convolution):
    (array,) = values((3, 3, 3, 3))
    array.attach_grad()
    with mx.autograd.record():
        y = convolution(array, array, kernel=(3, 3), num_filter=3, no_bias=True, pad=(1, 1))
        z = convolution(y, array, kernel=(3, 3), num_filter=3, no_bias=True, pad=(2, 2))
    z.backward()
    return [array.grad.asnumpy()]


def backward_passes_out_of_order(convolution):
    data, weight = values((4, 16, 9, 9), (32, 16, 3, 3))
    data.attach_grad()
    weight.attach_grad("add")
    with mx.autograd.record():
        first, second = convolution(data, weight, **WORDS), convolution(data * 2, weight, **WORDS)
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    return data.grad.asnumpy(), weight.grad.asnumpy()


def test_autograd_grad_and_the_second_derivative():
    data, weight = values((4, 16, 9, 9), (32, 16, 3, 3))
    for array in (data, weight):
        array.attach_grad()

    def gradients(convolution, **more):
        with mx.autograd.record():
            y = (convolution(data, weight, **WORDS) ** 2).sum()
            return mx.autograd.grad(y, [data, weight], **more)

    want = [gradient.asnumpy() for gradient in gradients(own)]
    assert_close([gradient.asnumpy() for gradient in gradients(ece408_op.Convolution)], want)
    with pytest.raises(mx.MXNetError, match="there is no second derivative; pass"), mx.autograd.record():
        gradients(ece408_op.Convolution, create_graph=True)[0].sum().backward()


def test_out_and_mx_np_while_recording():
    data, weight = values((4, 16, 9, 9), (32, 16, 3, 3))
    want = []
    for convolution in (own, ece408_op.Convolution):
        data.attach_grad()
        out = mx.nd.zeros((4, 32, 7, 7))
        with mx.autograd.record():
            assert convolution(data, weight, out=out, **WORDS) is out
            y = out * 2
        y.backward()
        want.append(data.grad.asnumpy())
    assert_close(want[1:], want[:1])
    with mx.util.np_shape(True), mx.util.np_array(True):
        numpys = data.as_np_ndarray(), weight.as_np_ndarray()
        numpys[0].attach_grad()
        with mx.autograd.record():
            z = ece408_op.Convolution(*numpys, **WORDS) * 2
        z.backward()
        assert_close([numpys[0].grad.asnumpy()], want[:1])


@pytest.mark.filterwarnings("error")
def test_a_sum_that_overflows_is_no_warning():
    data, weight, bias = values((2, 16, 9, 9), (32, 16, 3, 3), (32,))
    bias.attach_grad()
    with mx.autograd.record():
        y = ece408_op.Convolution(data, weight, bias, kernel=(3, 3), num_filter=32)
    y.backward(mx.nd.full(y.shape, 1e38))
    assert np.isinf(bias.grad.asnumpy()).all()


@pytest.mark.parametrize(
    "gradients",
    [
        a_weight_that_a_convolution_reorders_before_the_backward_pass,
        one_array_as_both_inputs_and_several_calls_on_one,
        backward_passes_out_of_order,
    ],
    ids=lambda gradients: gradients.__name__,
)
def test_gradients_are_those_of_mxnets_own(gradients):
    want = gradients(own)
    for _ in range(4):
        assert_close(gradients(ece408_op.Convolution), want)
