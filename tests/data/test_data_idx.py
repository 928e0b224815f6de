"""IDX files: what is written comes back, and a file with any fault is refused by name."""

from __future__ import annotations

import gzip
import io
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ece408_op.data import _idx
from ece408_op.errors import DataError

ARRAY = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
HEADER = struct.pack(">4B3I", 0, 0, 8, 3, 3, 4, 5)
PLAIN = HEADER + ARRAY.tobytes()
PACKED = gzip.compress(PLAIN, mtime=0)


def refused(path: Path, content: bytes, shape: tuple[int, ...] | None = None) -> str:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        _idx.read(path, shape)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", [PLAIN, PACKED], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_reads_the_format_by_content(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    array = _idx.read(tmp_path / name, (3, 4, 5))
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, ARRAY)


@settings(max_examples=40, deadline=None)
@given(
    array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=5, min_side=1, max_side=6)),
    name=st.sampled_from(["array", "array.gz"]),
)
def test_write_then_read(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, name: str) -> None:
    path = tmp_path_factory.mktemp("idx") / name
    _idx.write(path, array)
    np.testing.assert_array_equal(_idx.read(path, array.shape), array)
    first = path.read_bytes()
    assert (first[:2] == b"\x1f\x8b") == name.endswith(".gz")
    _idx.write(path, array)
    assert path.read_bytes() == first
    assert [child.name for child in path.parent.iterdir()] == [name]


def test_writes_the_published_layout(tmp_path: Path) -> None:
    _idx.write(tmp_path / "array", np.asfortranarray(ARRAY))
    assert (tmp_path / "array").read_bytes() == PLAIN


@pytest.mark.parametrize(
    "array", [ARRAY.astype(np.float32), np.uint8(3), np.zeros((0, 2), np.uint8)], ids=["float", "scalar", "empty"]
)
def test_refuses_to_write(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(DataError, match="expected a uint8 array that is not empty"):
        _idx.write(tmp_path / "array", array)
    assert not list(tmp_path.iterdir())


def test_failed_write_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.array: cannot be written \(No such file"):
        _idx.write(tmp_path / "absent" / "array", ARRAY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an IDX file, which opens with two zero bytes, got no byte"),
        (b"\0\0\x08", "expected an IDX file"),
        (b"\x89PNG" + PLAIN, "got 89 50 4e 47"),
        (b"\0\0\x0d\x03" + PLAIN[4:], "expected elements of type 0x08 .unsigned bytes., got type 0x0d"),
        (b"\0\0\x08\0" + PLAIN[4:], "expected 1 to 32 dimensions, got 0"),
        (b"\0\0\x08\xff" + bytes(2000), "expected 1 to 32 dimensions, got 255"),
        (PLAIN[:13], "truncated: expected 12 bytes of dimensions, got 9"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 4, 5), "expected dimensions of 1 or more"),
        (PLAIN + b"\0", "trailing bytes: expected the end after 60 elements"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_names_the_fault(tmp_path: Path, content: bytes, message: str, pack) -> None:
    text = refused(tmp_path / "file", pack(content))
    assert re.search(message, text), text


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(PLAIN)):
        refused(tmp_path / "file", PLAIN[:length])
        refused(tmp_path / "file", gzip.compress(PLAIN[:length]))
    for length in range(len(PACKED)):
        refused(tmp_path / "file", PACKED[:length])


def test_every_wrong_header_byte_is_refused(tmp_path: Path) -> None:
    for place in range(len(HEADER)):
        for change in (1, 0x80, 0xFF):
            content = bytearray(PLAIN)
            content[place] ^= change
            refused(tmp_path / "file", bytes(content), ARRAY.shape)


def test_damaged_gzip_never_gives_other_elements(tmp_path: Path) -> None:
    """A flipped bit is refused, or (in a field such as the time of packing) changes nothing."""
    path = tmp_path / "file"
    refusals = 0
    for place in range(len(PACKED)):
        for bit in range(8):
            content = bytearray(PACKED)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            try:
                array = _idx.read(path)
            except DataError as error:
                assert str(path) in str(error)
                refusals += 1
            else:
                np.testing.assert_array_equal(array, ARRAY)
    assert refusals > 8 * (len(PACKED) - 10)  # all bits behind the ten bytes of gzip's header, at least


def test_gzip_with_a_second_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(PLAIN[:30]) + gzip.compress(PLAIN[30:]))
    np.testing.assert_array_equal(_idx.read(path), ARRAY)
    assert "trailing bytes" in refused(path, PACKED + gzip.compress(b"more"))
    assert "damaged" in refused(path, PACKED + b"more")


def test_wrong_shape_is_refused_before_the_elements_are_read(tmp_path: Path) -> None:
    text = refused(tmp_path / "file", HEADER, (3, 5, 4))
    assert "expected the shape (3, 5, 4), got (3, 4, 5)" in text


def peak_of(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            _idx.read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_header_and_file(tmp_path: Path) -> None:
    """Neither a header that announces 2**36 elements nor 64 MB packed behind a small one fills the memory."""
    liar = struct.pack(">4B3I", 0, 0, 8, 3, 2**12, 2**12, 2**12)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(PLAIN)
        for _ in range(64):
            file.write(bytes(2**20))
    for content in (liar + bytes(1000), gzip.compress(liar + bytes(1000)), packed.getvalue()):
        (tmp_path / "file").write_bytes(content)
        assert peak_of(tmp_path / "file") < 2**20


def test_unreadable_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: cannot be read \(No such file"):
        _idx.read(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be read"):
        _idx.read(tmp_path)
