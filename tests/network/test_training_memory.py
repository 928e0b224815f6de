"""The memory of training steps on a GPU: which device's is freed, and that arrays do not outlive their step."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from network_case import mx, on_numpy, updater
from network_fake import captured_once, no_room
from process import wait_until
from training_case import bound, images, node_of, one_layer, small, step

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.network import _cuda_graphs, _gpu_update
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda

pytestmark = [pytest.mark.usefixtures("way", "no_collection"), on_numpy]
#: Where an array has no room that no kernel asks for.
NO_KERNEL = nullcontext()


def run(call):
    call()
    mx.nd.waitall()


def test_the_first_steps_memory_is_freed_on_its_gpu(monkeypatch):
    current, freed = [], []

    gpu = host_context.gpu(0)
    gpu.device = MagicMock(id=0, __enter__=current.append, __exit__=lambda device, *_: current.remove(device))
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append(current == [gpu.device]))
    monkeypatch.setattr(cuda.cupy(), "get_default_memory_pool", lambda: pool)
    executor = trained_once()
    run(lambda: executor.forward(is_train=True))
    assert freed == [True]


def test_memory_of_captured_launches_stays_where_there_is_no_room(monkeypatch):
    """CuPy frees the blocks of a pool that no array uses then, but a graph may."""

    class Memory:
        def __init__(self, size):
            made.append(weakref.ref(self))

    class Pool:
        def __init__(self, allocate):
            self.malloc = lambda size: free.append(allocate(size))
            self.free_all_blocks = free.clear

    made, free = [], []
    space = {"Memory": Memory, "MemoryPool": Pool, "MemoryPointer": lambda block, offset: block}
    for name, one in space.items():
        monkeypatch.setattr(cuda.cupy().cuda, name, one, raising=False)
    pool = _cuda_graphs.Pool([host_context.gpu(0)])
    pool._pool.malloc(100)
    pool._pool.free_all_blocks()
    (block,) = made
    assert block() is not None
    del pool
    assert block() is None


def trained_once():
    """Return an executor after a forward pass."""
    symbol = small()
    args, aux = images(symbol)
    executor = bound(node_of(symbol, args, aux), args, aux)
    run(lambda: executor.forward(is_train=True))
    return executor


def note_arrays(monkeypatch, no_room_for=(), inside=NO_KERNEL):
    """Return a list of references to the arrays that are made from now on; those of some numbers have no room."""
    arrays, empty = [], cuda.cupy().empty

    def noted(shape, dtype):
        array = empty(shape, dtype)
        arrays.append(weakref.ref(array))
        if len(arrays) in no_room_for:
            with inside:
                no_room()
        return array

    monkeypatch.setattr(cuda.cupy(), "empty", noted)
    return arrays


def alive(references):
    return [one for one in references if one() is not None]


def test_memory_is_free_without_a_garbage_collection(monkeypatch):
    executor = trained_once()
    arrays = note_arrays(monkeypatch)
    run(executor.backward)
    assert arrays
    assert not alive(arrays)
    graphs = weakref.ref(_cuda_graphs.Graphs(((6, 3),), [host_context.gpu(0)]))
    assert graphs() is None


@pytest.mark.parametrize("mode", [None, {}], ids=["imperative", "hybrid"])
def test_a_step_of_gluon_is_free_without_a_garbage_collection(mode, monkeypatch):
    """MXNet makes an operator for each call of a block, which may stay longer than its arrays."""
    x, layer = mx.nd.ones((4, 3)), mx.gluon.nn.Dense(5, in_units=3)
    layer.initialize()
    block = ece408_op.gluon.on_gpu(layer, x)
    if mode is not None:
        block.hybridize(**mode)
    arrays = note_arrays(monkeypatch)
    with mx.autograd.record():
        loss = block(x).sum()
    run(loss.backward)
    assert arrays
    wait_until(lambda: not alive(arrays))


@pytest.mark.parametrize("fails", ["backward", "scratch", "capture"])
def test_a_step_without_room_is_gone_before_the_memory_is_freed(fails, monkeypatch):
    """Whether an array had no room, a kernel's scratch memory, or the graph that has captured all."""
    executor, left = trained_once(), []
    if fails == "capture":
        run(executor.backward)
        run(lambda: executor.forward(is_train=True))  # the graphs' inputs stay
    inside = cuda.reported("a kernel") if fails == "scratch" else NO_KERNEL
    arrays = note_arrays(monkeypatch, [] if fails == "capture" else [3], inside)

    def captured(call, stream):
        call()
        no_room()

    pool = SimpleNamespace(free_all_blocks=lambda: left.append((len(arrays), alive(arrays))))
    monkeypatch.setattr(cuda.cupy(), "get_default_memory_pool", lambda: pool)
    monkeypatch.setattr(cuda, "captured", captured)
    run(executor.backward)
    ((made, still),) = left
    assert 0 < made < len(arrays)
    assert not still


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_that_fails_keeps_nothing(fails, monkeypatch):
    """MXNet's message has a number of the error, which therefore stays."""
    executor = trained_once()
    executor.backward()
    run(lambda: executor.forward(is_train=True))
    arrays = note_arrays(monkeypatch, no_room_for=range(5, 1000))
    monkeypatch.setattr(cuda, "captured", lambda call, stream: call())
    executor.forward(is_train=True) if fails == "forward" else executor.backward()
    with pytest.raises(DeviceError, match="expected room for a training step"):
        mx.nd.waitall()
    assert len(arrays) > 5
    assert not alive(arrays)


def test_gradients_that_no_update_has_used_leave_their_memory_to_the_next_step(monkeypatch):
    monkeypatch.setattr(cuda, "captured", captured_once)
    weight, gradient = mx.nd.ones((2, 3)), mx.nd.zeros((2, 3))
    executor = one_layer(weight, gradient)
    for _ in range(2):
        run(lambda: step(executor, [mx.nd.ones((4, 2))]))
    (deferred,) = _gpu_update.pending.values()
    owner, array = weakref.ref(deferred.owner), deferred.gradient
    del deferred
    run(lambda: executor.forward(is_train=True))
    assert owner() is None
    array.fill(np.nan)  # as the next step's passes may
    updater()(0, gradient, weight)
    assert (weight.asnumpy() == 0).all()


def test_gradients_stay_on_a_gpu_that_the_next_step_has_not_locked(monkeypatch):
    monkeypatch.setattr(_gpu_update, "pending", type(_gpu_update.pending)())
    gpu, owner = host_context.gpu(0), object()
    gradient = cuda.cupy().zeros((2, 3), np.float32)
    _gpu_update.defer({1: _gpu_update.Deferred(gpu, gradient, owner)})
    _gpu_update.move_from(owner, [])
    assert _gpu_update.pending[1].gradient is gradient
    _gpu_update.move_from(owner, [gpu])
    assert _gpu_update.pending[1].owner is None


def test_passes_are_captured_again_after_one_that_had_no_room(monkeypatch):
    failures, launched, inputs = [], [], _cuda_graphs.GraphPass.inputs

    def once_without_room(self):
        if not failures:
            failures.append(self)
            no_room()
        return inputs.fget(self)

    def captured(call, stream):
        call()
        return SimpleNamespace(launch=launched.append)

    monkeypatch.setattr(_cuda_graphs.GraphPass, "inputs", property(once_without_room))
    monkeypatch.setattr(cuda, "captured", captured)
    executor = trained_once()
    for _ in range(4):
        launched.clear()
        run(lambda: step(executor))
    assert failures and launched


def test_inference_gets_the_memory_of_training(monkeypatch):
    made, graphs = [], _cuda_graphs.Graphs
    monkeypatch.setattr(_cuda_graphs, "Graphs", lambda *given: made.append(graphs(*given)) or made[0])
    monkeypatch.setattr(cuda, "captured", captured_once)
    executor = trained_once()
    for _ in range(2):
        run(lambda: step(executor))
    found, alloc = weakref.ref(made.pop()), cuda.cupy().cuda.alloc
    assert found() is not None
    del executor

    def without_room(count):
        if found() is not None:
            no_room()
        return alloc(count)

    monkeypatch.setattr(cuda.cupy().cuda, "alloc", without_room)
    node, *_ = ece408_op.gpu_network(mx.sym.Variable("data") * 2, {})
    executor = node.bind(mx.cpu(), {"data": mx.nd.ones((3, 4))})
    assert (executor.forward(is_train=False)[0].asnumpy() == 2).all()
