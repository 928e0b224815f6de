"""The memory of training steps on a GPU: which device's is freed, and that arrays do not outlive their step."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from network_case import mx
from network_fake import OutOfMemoryError
from test_training import bound, images, node_of, small

from ece408_op.network import _repeated, trainer
from ece408_op.plugin import host_context
from ece408_op.runtime import cuda

pytestmark = [pytest.mark.usefixtures("way"), pytest.mark.parametrize("way", ["numpy"], indirect=True)]


def test_the_first_steps_memory_is_freed_on_its_gpu(monkeypatch):
    current, freed = [], []

    class Device:
        def __enter__(self):
            current.append(self)

        def __exit__(self, *error):
            current.remove(self)

    gpu = host_context.gpu(0)
    gpu.device = Device()
    symbol = small()
    args, aux = images(symbol)
    executor = bound(node_of(symbol, args, aux), args, aux)
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append(current == [gpu.device]))
    monkeypatch.setattr(cuda.cupy(), "get_default_memory_pool", lambda: pool)
    for _ in range(2):
        executor.forward(is_train=True)
        mx.nd.waitall()
    assert freed == [True]


def test_memory_is_free_without_a_garbage_collection(monkeypatch):
    symbol, devices, original = small(), weakref.WeakSet(), trainer.StepDevice

    def noted(*given):
        device = original(*given)
        devices.add(device)
        return device

    monkeypatch.setattr(trainer, "StepDevice", noted)
    args, aux = images(symbol)
    executor = bound(node_of(symbol, args, aux), args, aux)
    gc.collect()
    gc.disable()
    try:
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
        assert not devices
        passes = _repeated.Passes(((6, 3),))
        passes.of("forward", [(6, 3)])
        passes = weakref.ref(passes)
        assert passes() is None
    finally:
        gc.enable()


def test_what_had_no_room_is_gone_before_the_memory_is_freed(monkeypatch):
    """Where a capture fails, then the computation without it, and the next attempt finds room."""
    passes, arrays, freed, out = _repeated.Passes(((2,),)), [], [], np.empty(2, np.float32)

    def pool(name):
        return SimpleNamespace(free_all_blocks=lambda: freed.append((name, [one() for one in arrays])))

    def compute(inputs):
        array = cuda.cupy().zeros(2, np.float32)
        arrays.append(weakref.ref(array))
        if len(arrays) < 3:
            raise OutOfMemoryError("no room")
        return [array], "found"

    passes.pool = SimpleNamespace(malloc=None, **vars(pool("own")))
    monkeypatch.setattr(cuda, "captured", lambda call, stream: call())
    monkeypatch.setattr(cuda.cupy(), "get_default_memory_pool", lambda: pool("CuPy's"))
    assert trainer.step(host_context.gpu(0), [np.ones(2, np.float32)], [out], compute, passes) == "found"
    assert freed == [("own", [None]), ("own", [None, None]), ("CuPy's", [None, None])]
    assert (out == 0).all()
