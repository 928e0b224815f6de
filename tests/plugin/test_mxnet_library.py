"""What the package does where MXNet's library is another one: counts of writes, the reorder to the default layout."""

import pytest

import ece408_op  # noqa: F401 (before MXNet)
from ece408_op.errors import DeviceError

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import array_version, default_layout  # noqa: E402 (they need MXNet)


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
