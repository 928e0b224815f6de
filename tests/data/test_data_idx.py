"""IDX files: sound ones are read, and a file with any fault is refused by name."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ece408_op.data import _idx
from ece408_op.errors import DataError

ARRAY = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
HEADER = struct.pack(">4B3I", 0, 0, 8, 3, 3, 4, 5)
PLAIN = HEADER + ARRAY.tobytes()
PACKED = gzip.compress(PLAIN, mtime=0)


def read(path: Path, content: bytes, shape: tuple[int, ...] = ARRAY.shape) -> str:
    """Read a file of that content; return the message of the DataError, or "" if it gave ARRAY."""
    path.write_bytes(content)
    try:
        array = _idx.read(path, shape)
    except DataError as error:
        assert str(error).startswith(f"{path}: ")
        return str(error)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, ARRAY)
    return ""


@pytest.mark.parametrize("content", [PLAIN, PACKED], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_reads_the_format_by_content(tmp_path: Path, name: str, content: bytes) -> None:
    assert read(tmp_path / name, content) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"expected the IDX header of unsigned bytes of shape (3, 4, 5), {HEADER.hex(' ')}, got no byte"),
        (b"\x89PNG" + PLAIN, "got 89 50 4e 47 00 00"),
        (b"\0\0\x0d\x03" + PLAIN[4:], "got 00 00 0d 03"),
        (b"\0\0\x08\0" + PLAIN[4:], "got 00 00 08 00"),
        (b"\0\0\x08\xff" + bytes(2000), "got 00 00 08 ff"),
        (PLAIN[:13], f"got {HEADER[:13].hex(' ')};"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 3, 5, 4), "00 05 00 00 00 04;"),
        (PLAIN[:-1], "expected 60 elements of shape (3, 4, 5), got "),
        (PLAIN + b"\0", "expected 60 elements of shape (3, 4, 5), got more;"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_names_the_fault(tmp_path: Path, content: bytes, message: str, pack) -> None:
    assert message in read(tmp_path / "file", pack(content))


def test_every_truncation_and_every_wrong_header_byte_is_refused(tmp_path: Path) -> None:
    for length in range(len(PLAIN)):
        assert read(tmp_path / "file", PLAIN[:length])
        assert read(tmp_path / "file", gzip.compress(PLAIN[:length]))
    for length in range(len(PACKED)):
        assert read(tmp_path / "file", PACKED[:length])
    for place in range(len(HEADER)):
        for change in (1, 0x80, 0xFF):
            content = bytearray(PLAIN)
            content[place] ^= change
            assert read(tmp_path / "file", bytes(content))


def test_damaged_gzip_never_gives_other_elements(tmp_path: Path) -> None:
    """A flipped bit is refused, or (in a field such as the time of packing) changes nothing."""
    refusals = 0
    for place in range(len(PACKED)):
        for bit in range(8):
            content = bytearray(PACKED)
            content[place] ^= 1 << bit
            refusals += bool(read(tmp_path / "file", bytes(content)))
    assert refusals > 8 * (len(PACKED) - 10)  # at least all bits after the ten bytes of gzip's header


def test_gzip_with_a_second_member(tmp_path: Path) -> None:
    assert read(tmp_path / "file", gzip.compress(PLAIN[:30]) + gzip.compress(PLAIN[30:])) == ""
    assert "got more" in read(tmp_path / "file", PACKED + gzip.compress(b"more"))
    assert "damaged" in read(tmp_path / "file", PACKED + b"more")


def test_memory_is_bounded_by_the_shape_and_by_the_file(tmp_path: Path) -> None:
    """Neither 2**36 elements in a header and a shape nor 64 MB packed behind a small header fill the memory."""
    huge = (2**12, 2**12, 2**12)
    liar = struct.pack(">4B3I", 0, 0, 8, 3, *huge)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(PLAIN)
        for _ in range(64):
            file.write(bytes(2**20))
    liars = (liar + bytes(1000), gzip.compress(liar + bytes(1000)))
    cases = [(content, shape) for content in liars for shape in (huge, ARRAY.shape)]
    for content, shape in [*cases, (packed.getvalue(), ARRAY.shape)]:
        tracemalloc.start()
        try:
            assert read(tmp_path / "file", content, shape)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


def test_unreadable_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: cannot be read \(No such file"):
        _idx.read(tmp_path / "absent", ARRAY.shape)
    with pytest.raises(DataError, match="cannot be read"):
        _idx.read(tmp_path, ARRAY.shape)
