"""What the package uses of MXNet's library: counts of an array's writes, and the reorder to the default layout."""

import pytest

import ece408_op  # noqa: F401 (before MXNet)
from ece408_op.errors import DeviceError

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import array_version, default_layout  # noqa: E402 (they need MXNet)

WRITES = {
    "all": lambda a: a.__setitem__(slice(None), 3),
    "in place": lambda a: a.__iadd__(1),
    "out": lambda a: mx.nd.sin(a, out=a),
    "copy": lambda a: mx.nd.ones(a.shape).copyto(a),
    "slice": lambda a: a[1:2].__setitem__(slice(None), 5),
    "reshaped": lambda a: a.reshape((-1,)).__setitem__(slice(None), 5),
    "optimiser": lambda a: mx.nd.sgd_update(a, mx.nd.ones(a.shape), lr=0.1, out=a),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_counted_and_reads_are_not(write):
    array = mx.nd.zeros((3, 4))
    array.wait_to_read()
    version = array_version.version_of(array)
    before = version()
    (array + 1).wait_to_read()
    array.asnumpy()
    assert version() == before
    WRITES[write](array)
    array.wait_to_read()
    assert version() == array_version.version_of(array.reshape((-1,)))() == before + 1


@pytest.fixture
def nothing_known():
    """Have the package ask for MXNet's version and functions again in this test, and after it."""
    cached = array_version.is_readable, default_layout.reorder_function
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize(("version", "readable"), [("1.9.1", True), ("2.0.0", False)])
def test_the_memory_of_another_mxnet_is_not_read(version, readable, nothing_known, monkeypatch):
    monkeypatch.setattr(mx, "__version__", version)
    assert array_version.is_readable() == readable


# --- where the library cannot reorder arrays, no wrong numbers are returned ---


@pytest.fixture
def build(nothing_known, monkeypatch):
    """A function that makes this build of MXNet have oneDNN, or not, and perhaps not use it."""

    class Features(dict):
        def is_enabled(self, name):
            return self[name]

    def make(has_onednn, enabled=None):
        monkeypatch.setattr(mx.runtime, "Features", lambda: Features(MKLDNN=has_onednn))
        monkeypatch.delenv("MXNET_MKLDNN_ENABLED", raising=False)
        if enabled:
            monkeypatch.setenv("MXNET_MKLDNN_ENABLED", enabled)

    return make


@pytest.mark.parametrize("given", [(True, "0"), (False,)])
def test_a_build_that_does_not_use_onednn_needs_no_reorder(build, given):
    build(*given)
    assert default_layout.reorder_function(object())(None) is None


def test_calls_of_a_build_with_onednn_and_without_the_reorder_are_refused(build, monkeypatch):
    build(True)
    monkeypatch.setattr(default_layout, "REORDER", "missing")
    for size in (8, 800):  # by the synchronous fast path, and through the engine
        x, w = mx.nd.ones((size, 16, 20, 20)), mx.nd.ones((32, 16, 3, 3))
        with pytest.raises(DeviceError, match=r"Reorder2DefaultAsync.*wrong numbers; install MXNet 1\.9\.1"):
            mx.nd.Custom(x, w, op_type="New", kernel=(3, 3), num_filter=32)
