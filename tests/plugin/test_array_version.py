"""How often MXNet has written an array."""

from __future__ import annotations

import pytest

from ece408_op.plugin import array_version, mxnet_import

try:
    mx = mxnet_import.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

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


def test_the_memory_of_another_mxnet_is_not_read(monkeypatch):
    array_version.is_readable.cache_clear()
    assert array_version.is_readable()
    array_version.is_readable.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "__version__", "2.0.0")
        assert not array_version.is_readable()
    array_version.is_readable.cache_clear()
