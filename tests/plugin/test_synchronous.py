"""The synchronous fast path of small calls, compared with the way through MXNet's engine."""

import threading

import numpy as np
import pytest

import ece408_op
from ece408_op.core import dispatch
from ece408_op.core.check import compare
from ece408_op.errors import DeviceError
from ece408_op.kernels.cpu import direct
from ece408_op.plugin import bridge, op_times
from ece408_op.runtime import thread_pool

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import imperative  # noqa: E402 (it needs MXNet)


@pytest.fixture(params=["cpu", "gpu"])
def threads(monkeypatch, request):
    """The threads that computed, in order; mx.cpu() stands for mx.gpu() too."""
    gpu = request.param == "gpu"
    mx.nd.waitall()  # an earlier test's call may still be running
    monkeypatch.setattr(bridge, "on_gpu", lambda array: gpu)
    monkeypatch.setattr(thread_pool, "is_only_thread", lambda: True)
    seen, record = [], op_times.record
    monkeypatch.setattr(op_times, "record", lambda call: seen.append(threading.get_ident()) or record(call))
    return seen


@pytest.fixture
def failures(monkeypatch):
    """The threads in which a kernel was chosen, which fails every time."""
    seen = []

    def fail(*given):
        seen.append(threading.get_ident())
        raise DeviceError(f"failure {len(seen)}")

    monkeypatch.setattr(dispatch, "select", fail)
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


def test_a_small_call_is_computed_here_and_right(threads):
    x, w = arrays()
    y = call(x * 1, w)  # of an input that the engine may still be computing
    assert threads == [HERE]
    assert compare(y.asnumpy(), x.asnumpy(), w.asnumpy(), direct.KERNEL).passed
    assert ece408_op.op_times()[-1].problem.x_shape == x.shape


def test_it_is_what_the_engine_computes(threads):
    x, w = arrays(5)
    out = mx.nd.full((5, 4, 7, 7), np.nan)
    assert call(x, w, out=out) is out
    assert threads != [HERE]
    assert (call(x, w).asnumpy() == out.asnumpy()).all()
    assert threads[1:] == [HERE]


def test_fused_calls_and_named_ones(threads):
    x, w = arrays()
    assert call(x, w, fuse="tanh_pool").shape == (2, 4, 3, 3)
    assert ece408_op.New(x, w, kernel=(3, 3), num_filter=4, name="first").shape == (2, 4, 7, 7)
    assert threads == [HERE] * 2
    assert ece408_op.op_times()[-1].layer == "first"


#: Too many operations for both homes; few, but 84,000 bytes, of a shape that no other test has.
LARGE = {"large": (600, 16, 30, 16, 5), "wide": (2, 1, 73, 1, 1)}


@pytest.mark.parametrize("what", ["recorded", "large", "wide", "with other threads"])
def test_what_needs_the_engine_goes_its_way(threads, monkeypatch, what):
    x, w = arrays(*LARGE.get(what, ()))
    if what == "wide":
        monkeypatch.setattr(imperative, "MOST_BYTES", {"cpu": 80_000, "gpu": 80_000})
    if what == "with other threads":
        monkeypatch.setattr(thread_pool, "is_only_thread", lambda: False)
    if what == "recorded":
        with mx.autograd.record():
            call(x, w)
    else:
        call(x, w)
    assert len(threads) == 1
    assert threads != [HERE]


def test_arrays_in_a_data_loaders_memory(threads):
    shared = mx.Context("cpu_shared", 0)
    x, w = (array.as_in_context(shared) for array in arrays())
    assert call(x, w).context == mx.cpu()
    assert call(x, w.as_in_context(mx.cpu())).context == mx.cpu()


def test_a_call_that_fails_here_fails_in_the_engine_which_reports_it(threads, failures):
    x, w = arrays()
    with pytest.raises(mx.MXNetError, match="failure 2"):
        call(x, w)
    assert failures[0] == HERE != failures[1]


def test_an_input_that_failed_is_reported_by_its_own_reason(threads, failures):
    x, w = arrays()
    out = mx.nd.zeros((2, 4, 7, 7))
    mx.nd.Custom(x, w, op_type="New", kernel=(3, 3), num_filter=4, out=out)  # by the engine: nobody has waited yet
    with pytest.raises(mx.MXNetError, match="failure 1"):
        call(out, mx.nd.ones((5, 4, 3, 3)))
    assert len(failures) == 1


@pytest.mark.parametrize("threads", ["cpu"], indirect=True)  # on a GPU, no array has another order
def test_a_weight_that_a_convolution_is_about_to_block_is_read_in_plain_order(threads):
    """The built-in one is queued and not waited for: it asks for its weight in another order, in place."""
    for turn in range(20):
        x, w = (mx.nd.array(each.asnumpy() + turn) for each in arrays(1, 16, 12, 16))
        large, plain = mx.nd.ones((100, 16, 40, 40)), w.asnumpy()
        mx.nd.waitall()
        built_in = [mx.nd.Convolution(a, w, kernel=(3, 3), num_filter=16, no_bias=True) for a in (large, x, x)]
        middle = mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True)
        y, z = call(x, w), call(middle, w)  # and data that is the result of one
        assert compare(y.asnumpy(), x.asnumpy(), plain, direct.KERNEL).passed
        assert compare(z.asnumpy(), middle.asnumpy(), plain, direct.KERNEL).passed
        assert np.isfinite(built_in[0].asnumpy()).all()
