"""Parameters of inference on GPUs: the arrays' present values count, whoever writes them, in executors and blocks."""

import gc
import threading
from functools import partial

import network_fake
import numpy as np
import pytest
from network_case import S, data, inference_of, mx, on_numpy

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.network import engine
from ece408_op.plugin import array_version, bridge
from ece408_op.runtime import cuda

pytestmark = pytest.mark.usefixtures("way")

WRITES = {
    "all": lambda weight: weight.__setitem__(slice(None), 0.05),
    "NumPy's": lambda weight: weight.__setitem__(slice(None), np.full(weight.shape, 0.05)),
    "an element": lambda weight: weight.__setitem__((1, 2), 0.5),
    "in place": lambda weight: weight.__imul__(0.5),
    "a view": lambda weight: weight.reshape(-1)[1:3].__iadd__(0.1),
    "out": lambda weight: mx.nd.clip(weight, -0.1, 0.1, out=weight),
    "DLPack": lambda weight: mx.nd.from_dlpack(weight.to_dlpack_for_write()).__iadd__(1),
}


def block_of(symbol, parameters):
    """Return a SymbolBlock of the network, whose only parameter is ``weight``."""
    node, _, _ = ece408_op.gpu_network(symbol, {"weight": parameters["weight"].data()})
    return mx.gluon.SymbolBlock(node, [S.Variable("data", dtype="float32")], parameters)


def parameters_of(weight):
    """Return Gluon's parameters: this array, as ``weight``."""
    parameters = mx.gluon.ParameterDict()
    parameters.get("weight", shape=weight.shape).initialize()
    parameters["weight"].set_data(weight)
    return parameters


def bound(symbol, x, weight, entry):
    """Return the array of the network's parameter ``weight``, and its call for x."""
    if entry == "executor":
        executor = inference_of(symbol, {"data": x.asnumpy(), "weight": weight.asnumpy()})
        return executor.arg_dict["weight"], lambda: executor.forward(is_train=False)[0]
    parameters = parameters_of(weight)
    block = block_of(symbol, parameters)
    block.hybridize(**dict.fromkeys(("static_alloc", "static_shape"), entry == "static block"))
    return parameters["weight"].data(), partial(block, x)


def scaled():
    """Return the parameter of an executor that multiplies ones by it, at first one, and the call."""
    return bound(S.broadcast_mul(data, S.Variable("weight")), mx.nd.ones((4, 5)), mx.nd.ones((1, 5)), "executor")


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("entry", ["executor", "block", "static block"])
def test_what_mxnet_writes_is_used(entry, write, readable, monkeypatch):
    """Whether or not MXNet's counts of writes can be read."""
    monkeypatch.setattr(array_version, "is_readable", lambda: readable)
    symbol = S.FullyConnected(data, S.Variable("weight"), num_hidden=4, no_bias=True)
    x, weight = mx.nd.random.normal(shape=(3, 5)), mx.nd.random.normal(shape=(4, 5))
    weight, call = bound(symbol, x, weight, entry)
    for _ in range(6):
        call()
    for _ in range(2):
        WRITES[write](weight)
        for _ in range(3):
            assert np.abs(call().asnumpy() - x.asnumpy() @ weight.asnumpy().T).max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_blocks_and_executors_that_share_a_parameter_see_all_writes(seed):
    """In any order, with calls that wait for none before them: a block's calls write the parameter's layout too."""
    symbol, draw = S.broadcast_mul(data, S.Variable("weight")), np.random.RandomState(seed)
    parameters, x = parameters_of(mx.nd.ones((2, 5))), mx.nd.ones((2, 5))
    blocks, weight = [block_of(symbol, parameters) for _ in range(2)], parameters["weight"].data()
    node, _, _ = ece408_op.gpu_network(symbol, {"weight": weight})
    executor = node.bind(mx.cpu(), {"data": x, "weight": weight})
    ways = [partial(blocks[0], x), partial(blocks[1], x), lambda: executor.forward(is_train=False)[0] * 1]
    found, value = [], 1
    for step in range(60):
        if draw.rand() < 0.2:
            value = step
            weight[:] = value
        found += [(ways[draw.randint(3)](), value) for _ in range(draw.randint(1, 4))]
    assert [y.asnumpy().tolist() for y, _ in found] == [np.full((2, 5), value).tolist() for _, value in found]


def test_new_parameters_at_the_addresses_of_freed_ones_are_used():
    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(data, S.Variable("factor")), {"factor": mx.nd.ones((1, 5000))})
    addresses = []
    for number in range(9):
        arguments = {"data": mx.nd.ones((2, 5000)), "factor": mx.nd.full((1, 5000), number)}
        addresses += bridge.addresses([arguments["factor"]])
        executor = node.bind(mx.cpu(), arguments)
        for _ in range(3):
            assert (executor.forward(is_train=False)[0].asnumpy() == number).all()
        del executor, arguments
    assert len({*addresses}) < len(addresses)


def test_executors_that_share_a_parameter_see_each_others_writes():
    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(data, S.Variable("factor")), {"factor": mx.nd.ones((1, 5))})
    factor = mx.nd.ones((1, 5))
    executors = [node.bind(mx.cpu(), {"data": mx.nd.ones((n, 5)), "factor": factor}) for n in (2, 3)]
    for step in range(3):
        executors[step % 2].arg_dict["factor"][:] = step
        for executor in 6 * executors:
            assert (executor.forward(is_train=False)[0].asnumpy() == step).all()


@on_numpy
def test_parameters_of_a_call_that_failed_are_compared_by_the_next(monkeypatch):
    weight, call = scaled()
    for _ in range(5):
        call().wait_to_read()
    weight[:] = 3
    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "comparisons", network_fake.no_room)
        with pytest.raises(mx.MXNetError, match="no room"):
            call().wait_to_read()
    assert (call().asnumpy() == 3).all()


@on_numpy
def test_writes_that_mxnet_does_not_count_are_used_after_one_that_it_counts():
    weight, call = scaled()
    for _ in range(5):
        assert (call().asnumpy() == 1).all()
    bridge.view_at(*bridge.addresses([weight]), weight.shape).fill(3)
    assert (call().asnumpy() == 1).all()
    weight *= 1
    assert (call().asnumpy() == 3).all()


@on_numpy
def test_a_copy_from_numpy_beside_calls_is_used_when_it_has_ended():
    """MXNet counts it before it copies. The parameter is the end of an array, which is copied last."""
    base, data = mx.nd.zeros((2_000_000, 5)), mx.nd.ones((1, 5))
    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(S.Variable("data"), S.Variable("factor")), {"factor": base[-1:]})
    executor = node.bind(mx.cpu(), {"data": data, "factor": base[-1:]})

    def call():
        return executor.forward(is_train=False)[0].asnumpy()

    for value in (1, 2, 3):
        values = np.full(base.shape, value, "f")
        writer = threading.Thread(target=base.__setitem__, args=(slice(None), values))
        writer.start()
        while writer.is_alive():
            call()
        writer.join()
        assert (call() == value).all()


def test_executors_of_one_symbol_have_parameters_of_their_own():
    """In turns, and after a call that could not send its parameters."""
    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(data, S.Variable("factor")), {"factor": mx.nd.ones((1, 5))})
    executors = [node.bind(mx.cpu(), {"data": mx.nd.ones((2, 5)), "factor": mx.nd.full((1, 5), n)}) for n in (1, 2)]
    for turns in (1, 4, 1, 1, 5):
        for number, executor in enumerate(executors, 1):
            for _ in range(turns):
                assert (executor.forward(is_train=False)[0].asnumpy() == number).all()


@on_numpy
def test_parameters_that_could_not_be_sent_are_not_taken_for_anothers(monkeypatch):
    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(data, S.Variable("factor")), {"factor": mx.nd.ones((1, 5))})
    executors = [node.bind(mx.cpu(), {"data": mx.nd.ones((2, 5)), "factor": mx.nd.full((1, 5), n)}) for n in (1, 2)]
    for executor in 6 * executors[:1] + executors[1:]:
        executor.forward(is_train=False)[0].wait_to_read()
    executors[0].arg_dict["factor"][:] = 7
    with monkeypatch.context() as patch:
        patch.setattr(cuda.cupy(), "asarray", network_fake.no_room)
        with pytest.raises(DeviceError, match="no room"):
            executors[0].forward(is_train=False)[0].wait_to_read()
    for executor, expected in ((executors[1], 2), (executors[0], 7)):
        assert (executor.forward(is_train=False)[0].asnumpy() == expected).all()


@on_numpy
def test_parameters_are_freed_with_their_executor_while_the_symbol_lives_on():
    def living():
        gc.collect()
        return sum(isinstance(one, array_version.Counted) for one in gc.get_objects())

    node, _, _ = ece408_op.gpu_network(S.broadcast_mul(data, S.Variable("factor")), {"factor": mx.nd.ones((1, 5))})
    before = living()
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((2, 5)), "factor": mx.nd.ones((1, 5))})
    for _ in range(3):
        executor.forward(is_train=False)[0].wait_to_read()
    assert living() > before
    del executor
    assert living() == before
