"""The short way of small calls, which is the caller's own thread, beside the long way through MXNet's engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ece408_op
from ece408_op.core.check import compare
from ece408_op.kernels.cpu import direct
from ece408_op.plugin import bridge
from ece408_op.runtime import thread_pool

mx = pytest.importorskip("mxnet")
at_once = pytest.importorskip("ece408_op.plugin._synchronous")  # behind MXNet, which it is joined to
operator = pytest.importorskip("ece408_op.plugin._operator")


@pytest.fixture(params=["cpu", "gpu"])
def forwards(monkeypatch, request):
    """The threads that computed, in order; mx.cpu() stands for mx.gpu() too."""
    gpu = request.param == "gpu"
    monkeypatch.setattr(bridge, "on_gpu", lambda array: gpu)
    monkeypatch.setattr(thread_pool, "alone", lambda: True)
    seen, made = [], operator.NewProp.create_operator

    def create(prop, *given):
        operator = made(prop, *given)
        compute = operator.forward
        operator.forward = lambda *arrays, **more: seen.append(threading.get_ident()) or compute(*arrays, **more)
        return operator

    monkeypatch.setattr(operator.NewProp, "create_operator", create)
    return seen


def arrays(batch=2, channels=3, size=9, filters=4, kernel=3):
    rng = np.random.default_rng(408)
    x = rng.uniform(-1, 1, (batch, channels, size, size)).astype(np.float32)
    w = rng.standard_normal((filters, channels, kernel, kernel)).astype(np.float32)
    return mx.nd.array(x), mx.nd.array(w)


HERE = threading.get_ident()


def call(x, w, **more):
    y = mx.nd.Custom(x, w, op_type="New", kernel=w.shape[2:], num_filter=w.shape[0], **more)
    y.wait_to_read()
    return y


def test_a_small_call_is_computed_here_and_right(forwards):
    x, w = arrays()
    y = call(x * 1, w)  # of an input that the engine may still be computing
    assert forwards == [HERE]
    assert compare(y.asnumpy(), x.asnumpy(), w.asnumpy(), direct.KERNEL).passed
    assert ece408_op.op_times()[-1].problem.x_shape == x.shape


def test_it_is_what_the_engine_computes(forwards):
    x, w = arrays(5)
    out = mx.nd.full((5, 4, 7, 7), np.nan)
    assert call(x, w, out=out) is out
    assert forwards != [HERE]
    assert (call(x, w).asnumpy() == out.asnumpy()).all()
    assert forwards[1:] == [HERE]


def test_fused_calls_and_named_ones(forwards):
    x, w = arrays()
    assert call(x, w, fuse="tanh_pool").shape == (2, 4, 3, 3)
    assert ece408_op.New(x, w, kernel=(3, 3), num_filter=4, name="first").shape == (2, 4, 7, 7)
    assert forwards == [HERE] * 2
    assert ece408_op.op_times()[-1].layer == "first"


#: Too many operations for both homes; few, but 84,000 bytes, of a shape that no other test has.
LARGE = {"large": (600, 16, 30, 16, 5), "wide": (2, 1, 73, 1, 1)}


@pytest.mark.parametrize("what", ["recorded", "large", "wide", "with other threads"])
def test_what_needs_the_engine_goes_its_way(forwards, monkeypatch, what):
    x, w = arrays(*LARGE.get(what, ()))
    if what == "wide":
        monkeypatch.setattr(at_once, "MOST_BYTES", {"cpu": 80_000, "gpu": 80_000})
    if what == "with other threads":
        monkeypatch.setattr(thread_pool, "alone", lambda: False)
    if what == "recorded":
        with mx.autograd.record():
            call(x, w)
    else:
        call(x, w)
    assert len(forwards) == 1
    assert forwards != [HERE]


def test_an_empty_batch(forwards):
    with mx.util.np_shape(True):
        assert call(mx.nd.zeros((0, 3, 9, 9)), arrays()[1]).shape == (0, 4, 7, 7)
    assert forwards != [HERE]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel": (5, 5)}, "weight: expected shape"),
        ({"num_filter": 5}, "weight: expected shape"),
        ({"impl": "none"}, "impl: expected one of"),
        ({"stride": 2}, "unknown attribute stride"),
        ({"data": (2, 4, 9, 9)}, "weight: expected shape"),
        ({"data": (2, 3, 9)}, "data: expected 4 dimensions"),
        ({"dtype": "float16"}, "data: expected float32"),
    ],
)
def test_errors_are_those_of_the_long_way(monkeypatch, change, reason):
    monkeypatch.setattr(thread_pool, "alone", lambda: False)
    x, w = arrays()
    given = {"kernel": (3, 3), "num_filter": 4, **change}
    if "data" in given:
        x = mx.nd.zeros(given.pop("data"))
    if "dtype" in given:
        x = x.astype(given.pop("dtype"))

    def error():
        with pytest.raises(mx.MXNetError, match=reason) as caught:
            mx.nd.Custom(x, w, op_type="New", **given).wait_to_read()
        return type(caught.value).__name__, str(caught.value)

    usual = error()
    monkeypatch.setattr(thread_pool, "alone", lambda: True)
    assert error() == usual


def test_a_kernel_that_fails_is_reported_as_ever(forwards, monkeypatch):
    def fail(*given):
        raise ece408_op.errors.DeviceError("no room")

    monkeypatch.setattr("ece408_op.plugin._cpu_context.convolve", fail)
    x, w = arrays()
    with pytest.raises(mx.MXNetError, match="no room"):
        call(x, w)
    assert forwards[0] == HERE
    assert len(forwards) > 1


def test_an_input_that_failed_is_reported_as_what_it_was(forwards, monkeypatch):
    calls = []

    def fail(*given):
        calls.append(given)
        raise ece408_op.errors.DeviceError(f"failure {len(calls)}")

    monkeypatch.setattr("ece408_op.plugin._cpu_context.convolve", fail)
    x, w = arrays()
    out = mx.nd.zeros((2, 4, 7, 7))
    mx.nd.Custom(x, w, op_type="New", kernel=(3, 3), num_filter=4, out=out)  # by the engine: nobody has waited yet
    with pytest.raises(mx.MXNetError, match="failure 1"):
        call(out, mx.nd.ones((5, 4, 3, 3)))
    assert len(calls) == 1


@pytest.mark.parametrize("turn", range(20))
def test_a_weight_that_a_convolution_is_about_to_block_is_read_in_plain_order(forwards, turn):
    """The built-in one is queued and not waited for: it asks for its weight in another order, in place."""
    rng = np.random.default_rng(turn)
    x = mx.nd.array(rng.uniform(-1, 1, (1, 16, 12, 12)).astype(np.float32))
    w = mx.nd.array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32))
    large, plain = mx.nd.ones((100, 16, 40, 40)), w.asnumpy()
    mx.nd.waitall()
    built_in = [mx.nd.Convolution(a, w, kernel=(3, 3), num_filter=16, no_bias=True) for a in (large, x, x)]
    middle = mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)
    y, z = call(x, w), call(middle, w)  # and data that is the result of one
    assert compare(y.asnumpy(), x.asnumpy(), plain, direct.KERNEL).passed
    assert compare(z.asnumpy(), middle.asnumpy(), plain, direct.KERNEL).passed
    assert np.isfinite(built_in[0].asnumpy()).all()


@pytest.mark.parametrize("home", ["cpu", "gpu"])
def test_both_inputs_are_settled_before_they_are_read_where_mxnet_blocks_arrays(monkeypatch, home):
    settled, settle = [], bridge.settle
    monkeypatch.setattr(bridge, "on_gpu", lambda array: home == "gpu")
    monkeypatch.setattr(thread_pool, "alone", lambda: True)
    monkeypatch.setattr(bridge, "settle", lambda array: settled.append(array.handle.value) or settle(array))
    monkeypatch.setattr("ece408_op.plugin._cpu_context.convolve", lambda *given: settled.append("read") or (0.0, 0.0))
    x, w = arrays()
    call(x, w)
    both = [x.handle.value, w.handle.value] if home == "cpu" else []
    assert settled == [*both, "read"]
