"""Right numbers through every API: arrays in oneDNN's blocked layout, and many threads.

Each case here gives wrong numbers, hangs or aborts where a Custom operator is used plainly.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ece408_op

mx = pytest.importorskip("mxnet")

#: Without the reorder, at least three of four are wrong.
REPEATS = 8
STREAM = np.random.RandomState(0)
X = STREAM.uniform(-1, 1, (200, 16, 22, 22)).astype(np.float32)
W_BEFORE = STREAM.normal(size=(16, 16, 3, 3)).astype(np.float32)
W = STREAM.normal(size=(32, 16, 3, 3)).astype(np.float32)
W_AFTER = STREAM.normal(size=(8, 32, 3, 3)).astype(np.float32)
NEW = {"op_type": "New", "kernel": (3, 3), "num_filter": 32}


def convolution(F, x, w):
    """MXNet's own layer with 16 filters."""
    return F.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)


@pytest.fixture(scope="module")
def expected():
    """The right answer, by built-in convolutions on plain arrays alone."""
    between = mx.nd.array(convolution(mx.nd, mx.nd.array(X), mx.nd.array(W_BEFORE)).asnumpy())
    return mx.nd.Convolution(between, mx.nd.array(W), kernel=(3, 3), num_filter=32, no_bias=True).asnumpy()


def wrong(outputs, expected):
    """How many outputs are wrong."""
    tolerance = 1e-4 * np.abs(expected).max()
    return sum(not np.abs(y.asnumpy().reshape(expected.shape) - expected).max() < tolerance for y in outputs)


def blocked_weight():
    """A weight that a built-in convolution has just used, and so left in its own layout."""
    weight = mx.nd.array(W)
    mx.nd.Convolution(mx.nd.zeros((200, 16, 20, 20)), weight, kernel=(3, 3), num_filter=32, no_bias=True)
    return weight


def blocked_data():
    """The result of a built-in convolution, in its own layout."""
    return convolution(mx.nd, mx.nd.array(X), mx.nd.array(W_BEFORE))


def into_a_blocked_output():
    """An output that a built-in convolution has left in its own layout."""
    out = mx.nd.Convolution(
        mx.nd.array(X[:, :, :20, :20]), mx.nd.zeros((32, 16, 1, 1)), kernel=(1, 1), num_filter=32, no_bias=True
    )
    out = mx.nd.Convolution(out, mx.nd.zeros((32, 32, 3, 3)), kernel=(3, 3), num_filter=32, no_bias=True)
    return mx.nd.Custom(blocked_data(), blocked_weight(), out=out, **NEW)


CALLS = {
    "New": lambda: ece408_op.New(blocked_data(), blocked_weight(), kernel=(3, 3), num_filter=32),
    "out": into_a_blocked_output,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_imperative_calls(call, expected):
    assert wrong((call() for _ in range(REPEATS)), expected) == 0


def test_a_built_in_convolution_behind_it(expected):
    def behind(y):
        return mx.nd.Convolution(y, mx.nd.array(W_AFTER), kernel=(3, 3), num_filter=8, no_bias=True)

    results = (behind(mx.nd.Custom(blocked_data(), blocked_weight(), **NEW)) for _ in range(REPEATS))
    assert wrong(results, behind(mx.nd.array(expected)).asnumpy()) == 0


@pytest.mark.parametrize("mode", ["plain", "hybridised", "static"])
def test_a_block_of_gluon(mode, expected):
    """Executors and Modules have no such layout here: MXNet keeps the reordered array for them."""
    before = convolution(mx.sym, mx.sym.var("data"), mx.sym.var("before"))
    symbol = mx.sym.Custom(before, mx.sym.var("after"), **NEW)
    block = mx.gluon.SymbolBlock(symbol, [mx.sym.var("data", dtype="float32")])
    block.initialize()
    for name, value in {"before": W_BEFORE, "after": W}.items():
        block.collect_params()[name].set_data(mx.nd.array(value))
    if mode != "plain":
        block.hybridize(static_alloc=mode == "static")
    assert wrong((block(mx.nd.array(X)) for _ in range(REPEATS)), expected) == 0


class Loop(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x, weight):
        def step(item, state):
            return F.Custom(item, weight, **NEW), state

        return F.contrib.foreach(step, x, F.zeros((1,)))[0]


def test_a_loop_of_python_is_right_and_one_of_mxnets_is_refused(expected):
    between = convolution(mx.nd, mx.nd.array(X), mx.nd.array(W_BEFORE))
    steps, net = mx.nd.stack(between, between), Loop()
    assert wrong(net(steps, blocked_weight()), expected) == 0
    net.hybridize()
    with pytest.raises(mx.MXNetError, match="expected a graph without control flow around New, got one inside"):
        net(steps, blocked_weight()).wait_to_read()
    names = [mx.sym.var("data"), mx.sym.var("w")]
    with pytest.raises(mx.MXNetError, match="without control flow"):
        Loop().hybrid_forward(mx.sym, *names).infer_shape(data=steps.shape, w=W.shape)


@mx.operator.register("test_runs")
class RunsProp(mx.operator.CustomOpProp):
    """A copy, made after ``work``, on one of MXNet's own threads."""

    work = print

    def create_operator(self, *_):
        class Runs(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                RunsProp.work()
                self.assign(out_data[0], req[0], in_data[0])

        return Runs()


@pytest.mark.parametrize("where", ["a thread", "another operator"])
def test_a_built_in_convolution_with_the_same_weight_in_another_thread(where):
    """It may be called, and block the weight, at any moment."""
    x = mx.nd.array(X[:8, :, :20, :20])
    weight, layer = mx.nd.array(W), {"kernel": (3, 3), "num_filter": 32}
    expected = mx.nd.Convolution(x, mx.nd.array(W), no_bias=True, **layer).asnumpy()
    done, found = threading.Event(), []

    def work():
        try:
            found.append(wrong((ece408_op.New(x, weight, **layer) for _ in range(160)), expected))
        finally:
            done.set()

    if where == "a thread":
        threading.Thread(target=work).start()
    else:
        RunsProp.work = work
        mx.nd.Custom(mx.nd.ones(1), op_type="test_runs")
    while not done.is_set():
        mx.nd.Convolution(x, weight, no_bias=True, **layer).wait_to_read()
    assert found == [0]


def test_shapes_of_one_symbol_inferred_in_many_threads():
    """As by threads that bind it for batches of their own."""
    interval = sys.getswitchinterval()
    symbol = ece408_op.New(mx.sym.Variable("data"), mx.sym.Variable("w"), kernel=(3, 3), num_filter=2)

    def inferred(batch):
        return [symbol.infer_shape(data=(batch, 1, 8, 8))[1] for _ in range(200)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for batch, shapes in enumerate(pool.map(inferred, range(1, 9)), 1):
                assert shapes == [[(batch, 2, 6, 6)]] * 200
    finally:
        sys.setswitchinterval(interval)


@pytest.fixture
def given():
    """An event for which the operator "test_runs" waits."""
    event = threading.Event()
    RunsProp.work = lambda: event.wait(300)
    return event


@pytest.mark.parametrize("late", ["data", "weight"])
def test_a_call_does_not_wait_for_what_it_is_given(late, given):
    expected = mx.nd.Convolution(mx.nd.array(X), mx.nd.array(W), kernel=(3, 3), num_filter=32, no_bias=True).asnumpy()
    arrays = {"data": mx.nd.array(X), "weight": mx.nd.array(W)}
    arrays[late] = mx.nd.Custom(arrays[late], op_type="test_runs")
    timer = threading.Timer(200, given.set)
    timer.start()
    y = ece408_op.New(**arrays, kernel=(3, 3), num_filter=32)
    timer.cancel()
    assert not given.is_set()
    given.set()
    assert wrong([y], expected) == 0


def test_a_pass_without_training_leaves_a_queued_pass_alone(given):
    """Max-pooling stores what its gradient needs only if is_train is set when it runs, after the call."""
    x, w = (mx.sym.Variable(name) for name in "xw")
    y = ece408_op.New(mx.sym.Custom(x, op_type="test_runs"), w, kernel=(3, 3), num_filter=32)
    symbol = mx.sym.Pooling(y, kernel=(2, 2), stride=(2, 2), pool_type="max")
    found = []
    for modes in ([True], [True, False]):
        gradient = mx.nd.zeros(W.shape)
        executor = symbol.bind(mx.cpu(), {"x": mx.nd.array(X[:2]), "w": mx.nd.array(W)}, {"w": gradient})
        given.clear()
        threading.Timer(0.1, given.set).start()
        for is_train in modes:
            executor.forward(is_train=is_train)
            if is_train:
                executor.backward(mx.nd.ones((2, 32, 10, 10)))
        found.append(gradient)
    assert wrong(found[1:], found[0].asnumpy()) == 0
