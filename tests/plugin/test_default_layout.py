"""Where MXNet's library cannot reorder arrays to the default layout, no wrong numbers are returned."""

from __future__ import annotations

import pytest

from ece408_op.errors import DeviceError

mx = pytest.importorskip("mxnet")
from ece408_op.plugin import default_layout  # noqa: E402 (it needs MXNet)


def features(monkeypatch, enabled):
    """Make this build of MXNet have oneDNN, or not."""

    class Features(dict):
        def is_enabled(self, name):
            return self[name]

    monkeypatch.setattr(mx.runtime, "Features", lambda: Features(MKLDNN=enabled))


def test_a_build_with_onednn_and_without_the_reorder_is_refused(monkeypatch):
    monkeypatch.delenv("MXNET_MKLDNN_ENABLED", raising=False)
    features(monkeypatch, enabled=True)
    with pytest.raises(DeviceError, match=r"Reorder2DefaultAsync.*wrong numbers; install MXNet 1\.9\.1"):
        default_layout.reorder_function(object())
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert default_layout.reorder_function(object())(None) is None


def test_a_build_without_onednn_needs_no_reorder(monkeypatch):
    monkeypatch.delenv("MXNET_MKLDNN_ENABLED", raising=False)
    features(monkeypatch, enabled=False)
    assert default_layout.reorder_function(object())(None) is None


def test_calls_raise_it(monkeypatch):
    monkeypatch.delenv("MXNET_MKLDNN_ENABLED", raising=False)
    features(monkeypatch, enabled=True)
    monkeypatch.setattr(default_layout, "REORDER", "missing")
    default_layout.reorder_function.cache_clear()
    try:
        for size in (8, 800):  # by the synchronous fast path, and through the engine
            x, w = mx.nd.ones((size, 16, 20, 20)), mx.nd.ones((32, 16, 3, 3))
            with pytest.raises(DeviceError, match=r"MXNet 1\.9\.1: expected NDArray::Reorder2DefaultAsync"):
                mx.nd.Custom(x, w, op_type="New", kernel=(3, 3), num_filter=32)
    finally:
        default_layout.reorder_function.cache_clear()
