"""Bad input gives one clear error, in the exception that the caller catches, by every API of MXNet."""

import gc
import signal
import weakref
from unittest import mock

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import ProblemError
from ece408_op.plugin import mxnet_errors
from ece408_op.runtime import thread_pool

mx = pytest.importorskip("mxnet")

GOOD = {"kernel": (3, 3), "num_filter": 4}

#: Changes of GOOD, words that the message must have, and the shapes of data and weight if they are not SHAPES.
SHAPES = (2, 1, 9, 9), (4, 1, 3, 3)
BAD = {
    "kernel one row too large": ({"kernel": (6, 6)}, "5 rows.*(6, 6)", (2, 1, 5, 9), (4, 1, 6, 6)),
    "kernel one column too large": ({"kernel": (6, 6)}, "5 columns.*(6, 6)", (2, 1, 9, 5), (4, 1, 6, 6)),
    "data of rank 3": ({}, "data: expected 4 dimensions.*(2, 9, 9)", (2, 9, 9), (4, 1, 3, 3)),
    "weight of rank 2": ({}, "weight: expected 4 dimensions.*(4, 9)", (2, 1, 9, 9), (4, 9)),
    "wrong channels": ({}, "expected shape (4, 3, 3, 3).*got (4, 1, 3, 3)", (2, 3, 9, 9), (4, 1, 3, 3)),
    "wrong filters": ({}, "expected shape (4, 1, 3, 3).*got (5, 1, 3, 3)", (2, 1, 9, 9), (5, 1, 3, 3)),
    "1-D kernel": ({"kernel": (3,)}, "kernel: expected two positive.*2-D", (2, 1, 9), (4, 1, 3)),
    "3-D kernel": ({"kernel": (3, 3, 3)}, "kernel: expected two positive", (2, 1, 9, 9, 9), (4, 1, 3, 3, 3)),
    "an output of 2**31 rows": ({"pad": (2**30, 0)}, "expected fewer than 2147483648 rows.*got 2147483655"),
    "stride 0": ({"stride": (0, 1)}, "stride: expected two positive.*(0, 1)"),
    "stride of one number": ({"stride": "2"}, "stride: expected two"),
    "pad -1": ({"pad": (0, -1)}, "pad: expected two non-negative.*(0, -1)"),
    "dilate 0": ({"dilate": (0, 0)}, "dilate: expected two positive"),
    "dilated too far": ({"dilate": (1, 5)}, "9 columns.*dilated by (1, 5)"),
    "3 groups of 4 filters": ({"num_group": 3}, "num_group: .*divisor of 4 filters", (2, 3, 9, 9), (4, 1, 3, 3)),
    "2 groups of 3 channels": ({"num_group": 2}, "divisor of 3 channels, got 2", (2, 3, 9, 9), (4, 1, 3, 3)),
    "channels of a group": ({"num_group": 2}, "(4, 2, 3, 3).*got (4, 4, 3, 3)", (2, 4, 9, 9), (4, 4, 3, 3)),
    "no_bias of text": ({"no_bias": "no"}, "no_bias: expected True or False.*no"),
    "layout NHWC": ({"layout": "NHWC"}, "layout: expected NCHW.*NHWC"),
    "pooling behind padding": ({"fuse": "tanh_pool", "pad": (1, 1)}, "fuse: expected a square kernel without"),
    "kernel of text": ({"kernel": "five"}, "kernel: expected.*five"),
    "kernel of an array": ({"kernel": np.array([3, 3])}, "kernel: expected two positive"),
    "kernel absent": ({"kernel": None}, "kernel: expected a value"),
    "num_filter 0": ({"num_filter": 0}, "num_filter: expected.*0"),
    "num_filter absent": ({"num_filter": None}, "num_filter: expected a value"),
    "num_filter text": ({"num_filter": "x"}, "num_filter: expected.*x"),
    "2**31 filters": ({"num_filter": 2**31}, "num_filter: expected .*positive integer.*2147483648"),
    "kernel of 2**31": ({"kernel": (2**31, 2**31)}, "kernel: expected .*positive integer.*2147483648"),
    "unknown attribute": ({"adj": (1, 1)}, "unknown attribute adj"),
    "unknown implementation": ({"impl": "fastest"}, "impl: expected.*fastest"),
    "unknown device": ({"device": "tpu"}, "device: expected.*tpu"),
    "unknown precision": ({"precision": "int4"}, "precision: expected.*int4"),
}


def bad(case):
    """The attributes of a case without those that are None, the shapes of data and weight, and the words."""
    changes, words, *shapes = BAD[case]
    given = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    return given, *(shapes or SHAPES), words


def pattern(words):
    """A regular expression for words in which only .* has a meaning."""
    return ".*".join(part.replace("(", r"\(").replace(")", r"\)") for part in words.split(".*"))


def by_nd(attributes, x, w):
    """Imperatively: through MXNet's engine and by the synchronous fast path, with one error."""
    found = []
    for alone in (False, True):
        with mock.patch.object(thread_pool, "is_only_thread", lambda: alone), pytest.raises(RuntimeError) as caught:  # noqa: B023
            mx.nd.Custom(mx.nd.ones(x), mx.nd.ones(w), op_type="New", **attributes).wait_to_read()
        found.append((type(caught.value).__name__, str(caught.value)))
    assert found[0] == found[1]
    raise caught.value


def by_builder(attributes, x, w):
    """By the function for arrays and symbols, which raises at once or with the shapes."""
    ece408_op.New(mx.nd.ones(x), mx.nd.ones(w), **{**dict.fromkeys(GOOD), **attributes})


def symbol(attributes):
    """The layer as a symbol, built without the builder, which would refuse it at once."""
    return mx.sym.Custom(mx.sym.var("data"), mx.sym.var("w"), op_type="New", name="new0", **attributes)


def by_infer_shape(attributes, x, w):
    """By asking for shapes."""
    symbol(attributes).infer_shape(data=x, w=w)


def by_simple_bind(attributes, x, w):
    """By an executor."""
    symbol(attributes).simple_bind(mx.cpu(), data=x, w=w, grad_req="null").forward()[0].wait_to_read()


def by_module(attributes, x, w):
    """By Module, with the weight's shape written on its variable."""
    weight = mx.sym.var("w", shape=w)
    layer = mx.sym.Custom(mx.sym.var("data"), weight, op_type="New", name="new0", **attributes)
    mx.mod.Module(layer, label_names=None).bind([("data", x)], for_training=False)


def by_gluon(hybridize):
    """By a HybridBlock, plain or hybridised."""

    def call(attributes, x, w):
        class Net(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, data, weight):
                return F.Custom(data, weight, op_type="New", **attributes)

        net = Net()
        if hybridize:
            net.hybridize()
        net(mx.nd.ones(x), mx.nd.ones(w)).wait_to_read()

    return call


APIS = {
    "nd": by_nd,
    "New": by_builder,
    "infer_shape": by_infer_shape,
    "simple_bind": by_simple_bind,
    "Module.bind": by_module,
    "Gluon": by_gluon(False),
    "Gluon hybridised": by_gluon(True),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("case", BAD)
def test_the_reason_reaches_the_caller(api, case, capfd):
    attributes, x, w, words = bad(case)
    with pytest.raises(ProblemError if api == "New" else RuntimeError, match=pattern(words)):
        APIS[api](attributes, x, w)
    assert capfd.readouterr().out == ""
    good = mx.nd.Custom(mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3)), op_type="New", **GOOD)
    assert (good.asnumpy() == 9).all()


DATA, WEIGHT = mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": np.ones((1, 1, 3, 3), np.float32)}, "data: expected an NDArray or a Symbol, got ndarray"),
        ({"data": DATA}, "weight: expected an NDArray"),
        ({"data": mx.sym.var("data"), "weight": WEIGHT}, "weight: expected a Symbol"),
        ({"data": mx.sym.var("data"), "out": DATA}, "out: expected none"),
        *(
            ({"data": DATA, "weight": WEIGHT, "out": out}, "out: expected an NDArray to fill")
            for out in (3, "y", np.ones((1, 4, 1, 1), np.float32), [])
        ),
    ],
)
def test_the_builder_takes_ndarrays_or_symbols_alone(given, words):
    with pytest.raises(ProblemError, match=words):
        ece408_op.New(**given, **GOOD)


def test_sparse_arrays_are_refused(capfd):
    data, weight = mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3)).tostype("row_sparse")
    for call in (mx.nd.Custom, ece408_op.New):
        kind = {"op_type": "New"} if call is mx.nd.Custom else {}
        with pytest.raises(ProblemError, match="expected a dense array, got a row_sparse one"):
            call(data, weight, **kind, **GOOD)
    symbol = mx.sym.Custom(mx.sym.var("data", stype="row_sparse"), op_type="New", **GOOD)
    with pytest.raises(RuntimeError, match="data: expected a dense array, got a row_sparse one"):
        symbol.simple_bind(mx.cpu(), data=(1, 1, 3, 3))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_other_types_are_refused(dtype, capfd):
    with pytest.raises(mx.MXNetError, match=f"data: expected float32, got {dtype}"):
        mx.nd.Custom(mx.nd.ones((1, 1, 3, 3), dtype=dtype), mx.nd.ones((4, 1, 3, 3)), op_type="New", **GOOD)
    with pytest.raises(mx.MXNetError, match=f"weight: expected float32, got {dtype}"):
        mx.nd.Custom(mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3), dtype=dtype), op_type="New", **GOOD)
    with pytest.raises(mx.MXNetError, match=f"data: expected float32, got {dtype}"):
        symbol(GOOD).infer_type(data=dtype)
    assert capfd.readouterr().out == ""


def test_the_refusal_names_bfloat16():
    cast = mx.sym.Custom(mx.sym.amp_cast(mx.sym.var("x"), dtype="float16"), mx.sym.var("w"), op_type="New", **GOOD)
    mixed = mx.sym.load_json(cast.tojson(remove_amp_cast=False).replace("float16", "bfloat16"))
    with pytest.raises(mx.MXNetError, match="data: expected float32, got bfloat16"):
        mixed.infer_type(x="float32")


def test_a_weight_of_another_type_leaves_no_failure_behind():
    with mx.autograd.record(), pytest.raises(mx.MXNetError, match="weight: expected float32, got bool"):
        mx.nd.Custom(mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3)).astype("bool"), op_type="New", **GOOD)
    mx.nd.waitall()


@pytest.mark.parametrize("later", [False, True])
def test_another_operators_errors_stay_as_they_are(later, capfd):
    """Before and after one of ours, for shapes and in a computation."""

    class Fails(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            raise ValueError("somebody else's")

    class Prop(mx.operator.CustomOpProp):
        def infer_shape(self, in_shape):
            return super().infer_shape(in_shape) if later else Fails().forward(None, None, None, None, None)

        def create_operator(self, ctx, shapes, dtypes):
            return Fails()

    mx.operator.register(f"SomebodyElses{later}")(Prop)
    for _ in range(2):
        with pytest.raises(mx.MXNetError) as caught:
            mx.nd.Custom(mx.nd.ones((1,)), op_type=f"SomebodyElses{later}").wait_to_read()
        assert not any(words in str(caught.value) for words in ("New", "kernel", "gradient"))
        assert "somebody else's" in capfd.readouterr().out
        with pytest.raises(mx.MXNetError, match="kernel: expected"):
            mx.nd.Custom(mx.nd.ones((1, 1, 3, 3)), mx.nd.ones((4, 1, 3, 3)), op_type="New", num_filter=4)
        data = mx.nd.ones((1, 1, 3, 3))
        data.attach_grad()
        with mx.autograd.record():
            y = mx.nd.Custom(data, mx.nd.ones((4, 1, 3, 3)), op_type="New", fuse="tanh_pool_full", **GOOD)
        with pytest.raises(mx.MXNetError, match="has no gradient"):
            y.backward()
            data.grad.wait_to_read()


def failing(kernel):
    """A call that fails when it computes, for a reason that names its own kernel's size."""
    x, w = mx.nd.ones((8, 1, 40, 40)), mx.nd.ones((2, 1, kernel, kernel))
    return mx.nd.Custom(x, w, op_type="New", kernel=(kernel, kernel), num_filter=2, impl="winograd")


@pytest.mark.parametrize("behind", [lambda y: y, lambda y: y + 1], ids=["itself", "an operator behind it"])
def test_operators_that_fail_at_once_each_report_their_own_reason(behind, monkeypatch, capfd):
    monkeypatch.setattr(thread_pool, "is_only_thread", lambda: False)  # through MXNet's engine
    for _ in range(20):
        pending = {kernel: behind(failing(kernel)) for kernel in range(20, 30)}
        for kernel in reversed(pending):
            with pytest.raises(mx.MXNetError, match=f"filters of {kernel} x {kernel} on the cpu: winograd"):
                pending[kernel].wait_to_read()
    assert capfd.readouterr().out == ""


def test_a_gradient_and_a_result_that_fail_at_once_each_report_their_own_reason():
    for _ in range(20):
        data = mx.nd.ones((1, 1, 3, 3))
        data.attach_grad()
        with mx.autograd.record():
            y = mx.nd.Custom(data, mx.nd.ones((4, 1, 3, 3)), op_type="New", fuse="tanh_pool_full", **GOOD)
        y.backward()
        other = failing(20)
        with pytest.raises(mx.MXNetError, match="has no gradient"):
            data.grad.wait_to_read()
        with pytest.raises(mx.MXNetError, match="filters of 20 x 20"):
            other.wait_to_read()


@pytest.mark.parametrize("context", [mx.cpu(), mx.gpu()], ids=str)
def test_a_failure_keeps_its_reason_and_nothing_of_its_call(context):
    """MXNet calls an operator inside the context of its arrays, which may be a GPU that MXNet has no kernels for.

    A build without GPUs fails there alike.
    """

    class Data:
        pass

    @mxnet_errors.reported_with_outputs
    def forward(req, in_data, out_data):
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise ProblemError("the reason") from error

    data, y = Data(), mx.nd.empty((2, 3))
    kept = weakref.ref(data)
    with context:
        forward(req=["write"], in_data=[data], out_data=[y])
    del data
    gc.collect()
    assert kept() is None
    with pytest.raises(mx.MXNetError, match="the reason"):
        y.wait_to_read()


#: The methods that MXNet calls, by what the user calls.
CALLED_BACK = {
    "recorded": "infer_storage_type", "backward": "infer_storage_type_backward", "hybridised": "infer_storage_type",
    "bound": "infer_storage_type", "shapes": "infer_shape", "types": "infer_type", "loaded": "list_arguments",
}  # fmt: skip


@pytest.fixture
def ctrl_c():
    """Python's handler, which a process that a script starts in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("way", CALLED_BACK)
def test_ctrl_c_in_a_callback_of_mxnet_is_raised_after_the_call(way, monkeypatch):
    """MXNet's library gets no answer from a callback that raises KeyboardInterrupt, and may end the process."""
    from ece408_op.plugin.operator import NewProp  # after MXNet

    x, w = mx.nd.ones((2, 3, 8, 8)), mx.nd.ones((4, 3, 3, 3))
    x.attach_grad()
    layer = ece408_op.gluon.Conv2D(4, 3, in_channels=3)
    layer.initialize()
    layer.hybridize()

    def compute():
        with mx.autograd.record():
            return ece408_op.New(x, w, kernel=(3, 3), num_filter=4)

    calls = {"recorded": compute, "backward": compute().backward, "hybridised": lambda: layer(x)}
    symbol = ece408_op.New(mx.sym.var("data"), kernel=(3, 3), num_filter=4)
    calls["bound"] = lambda: symbol.simple_bind(mx.cpu(), data=x.shape)
    calls["shapes"], calls["types"] = lambda: symbol.infer_shape(data=x.shape), lambda: symbol.infer_type(data="f")
    calls["loaded"] = lambda: mx.sym.load_json(symbol.tojson())
    with monkeypatch.context() as patch:
        name = CALLED_BACK[way]
        method, raised = getattr(NewProp, name), []

        def interrupted(*args):
            if not raised:
                raised.append(signal.raise_signal(signal.SIGINT))
            return method(*args)

        patch.setattr(NewProp, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[way]()
    assert raised
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert compute().sum().asscalar() == 2 * 4 * 6 * 6 * 27
