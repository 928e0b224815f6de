"""Asking for a GPU that cannot be used gives one sentence that says what to do; no GPU is needed here."""

import re

import numpy as np
import pytest

import ece408_op
from ece408_op.errors import DeviceError
from ece408_op.plugin import bridge
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip

mx = pytest.importorskip("mxnet")

NO_CUPY = "the GPU: expected CuPy"
NO_DRIVER = "the GPU: expected a working NVIDIA driver"


@pytest.fixture(params=[NO_CUPY, NO_DRIVER])
def no_gpu(request, monkeypatch):
    """A machine where asking for the GPU's figures fails with a reason; the words of it."""

    def chip(device=0):
        raise DeviceError(f"{request.param}, got something else")

    monkeypatch.setattr(cuda, "driver_version", lambda: 12040)
    monkeypatch.setattr(cuda, "chip", chip)
    return request.param


def machine(monkeypatch, capability, gpus=1, cuda_build=True):
    """A machine with a GPU of that compute capability and a build of MXNet, as they answer when asked."""
    monkeypatch.setattr(cuda, "driver_version", lambda: 12040)
    monkeypatch.setattr(cuda, "chip", lambda device=0: Chip("Some GPU", capability, 100))
    monkeypatch.setattr(mx.runtime.Features, "is_enabled", lambda self, name: cuda_build)

    def count():
        if isinstance(gpus, Exception):
            raise gpus
        return gpus

    monkeypatch.setattr(mx.context, "num_gpus", count)


def arrays():
    """Input and filters on the CPU."""
    return mx.nd.ones((1, 1, 5, 5)), mx.nd.ones((2, 1, 3, 3))


def test_the_host_context_without_a_gpu(no_gpu, capfd):
    with pytest.raises(mx.MXNetError, match=no_gpu) as caught:
        ece408_op.New(*arrays(), kernel=(3, 3), num_filter=2, device="gpu")
    assert isinstance(caught.value, DeviceError)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""
    assert bridge.gpu_problem("host").startswith(no_gpu)
    # The process lives on.
    assert (ece408_op.New(*arrays(), kernel=(3, 3), num_filter=2).asnumpy() == 9).all()


def test_the_host_context_without_a_gpu_in_a_module(no_gpu):
    layer = ece408_op.New(mx.sym.var("data"), kernel=(3, 3), num_filter=2, device="gpu", name="new0")
    with pytest.raises(RuntimeError, match=no_gpu):
        layer.simple_bind(mx.cpu(), data=(1, 1, 5, 5), grad_req="null").forward()[0].wait_to_read()


@pytest.mark.parametrize(
    ("impl", "given", "words"),
    [
        ("naive", {}, "the cpu, where the arrays are, got 'naive'; pass device='gpu' or another impl"),
        ("direct", {"device": "gpu"}, "the gpu, where it is to run, got 'direct'; pass device='cpu' or another impl"),
    ],
)
def test_a_kernel_of_the_other_device_says_how(impl, given, words, monkeypatch):
    machine(monkeypatch, (9, 0))
    with pytest.raises(mx.MXNetError, match=f"impl: expected an implementation for {words}$"):
        ece408_op.New(*arrays(), kernel=(3, 3), num_filter=2, impl=impl, **given)


def test_gpu_arrays_are_not_computed_on_the_cpu(monkeypatch):
    from ece408_op.plugin.operator import NewProp

    machine(monkeypatch, (9, 0))
    prop = NewProp(kernel="(3, 3)", num_filter="2", device="cpu")
    with pytest.raises(DeviceError, match="copy them to mx.cpu"):
        prop.create_operator(mx.gpu(), [(1, 1, 5, 5), (2, 1, 3, 3)], [np.float32] * 2)


@pytest.mark.parametrize("capability", [(5, 0), (5, 2), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)])
def test_gpus_that_mxnets_kernels_run_on(monkeypatch, capability):
    machine(monkeypatch, capability)
    assert bridge.gpu_problem("device") is bridge.gpu_problem("host") is None


@pytest.mark.parametrize(
    ("has", "words"),
    [
        *(({"capability": one}, r"\(Some GPU\).*host context") for one in ((3, 7), (9, 0), (10, 0), (12, 0))),
        ({"cuda_build": False}, "CPU build"),
        ({"gpus": 0}, "at least one NVIDIA GPU"),
        ({"gpus": mx.MXNetError("no driver\nStack trace:\n  0")}, "no driver"),
    ],
    ids=str,
)
def test_machines_without_a_device_context_have_the_other_one(monkeypatch, has, words):
    machine(monkeypatch, **{"capability": (8, 0), **has})
    assert re.fullmatch(rf"mx\.gpu\(\): expected .*{words}.*", bridge.gpu_problem("device"))  # in one line
    assert bridge.gpu_problem("host") is None


def test_there_are_two_contexts():
    with pytest.raises(ValueError, match="expected 'host' or 'device', got 'gpu'"):
        bridge.gpu_problem("gpu")
