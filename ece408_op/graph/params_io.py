"""Read, check and write MXNet's parameter files (``.params``) as NumPy arrays, without MXNet.

A file is little-endian: the number 0x112, a zero, the count of arrays, the arrays, the count of names, the names. An
array starts with a magic number for its version, then has its storage type (since the second version), its shape, its
device, its type and its values. (MXNet, src/ndarray/ndarray.cc.)

MXNet's own reader trusts the sizes in a file: two wrong bytes can make it allocate more memory than there is. This
module checks every size against the remaining bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod

import numpy as np

from ece408_op.errors import GraphError

Arrays = dict[str, np.ndarray]

_FILE_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_TYPES = tuple(np.dtype(code) for code in ("<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8", "?"))
_MOST_DIMENSIONS = 32
_CPU = (1, 0)


def read(content: bytes, where: str) -> Arrays:
    """Return the arrays of a parameter file by their full names ("arg:new0_weight"), as read-only views of the bytes.

    Raises GraphError, which starts with ``where`` and names the array.
    """
    reader = _Reader(content, where)
    magic, _, count = reader.numbers("<QQQ", "the head of the file")
    reader.check(magic == _FILE_MAGIC, "", f"an MXNet parameter file, which starts with 0x112, got {magic:#x}")
    arrays = [_read_array(reader, f"array {index} of {count}") for index in range(count)]
    (named,) = reader.numbers("<Q", "the count of names")
    reader.check(named == count, "", f"a name for each of the {count} arrays, got {named} names")
    result: Arrays = {}
    for index, array in enumerate(arrays):
        what = f"name {index}"
        (length,) = reader.numbers("<Q", what)
        raw = reader.take(length, what)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise GraphError(f"{where}: {what}: expected UTF-8, got {raw[:40]!r}") from None
        reader.check(name not in result, "", f"each name once, got {name!r} twice")
        result[name] = array
    reader.check(not reader.left, "", f"the file to end after the last name, got {reader.left} bytes more")
    return result


def write(arrays: Mapping[str, np.ndarray], where: str) -> bytes:
    """Return a parameter file's content, in the first version of the format with 64-bit shapes.

    MXNet 0.10, of 2017, reads no later version, and 1.9.1 still reads this one. Raises GraphError for an array that is
    empty or has a type that the format lacks.
    """
    parts = [struct.pack("<QQQ", _FILE_MAGIC, 0, len(arrays))]
    for name, array in arrays.items():
        little = array.dtype.newbyteorder("<")
        if little not in _TYPES[:-1]:
            known = ", ".join(dtype.name for dtype in _TYPES[:-1])
            raise GraphError(f"{where}: {name}: expected one of {known}; got {array.dtype}")
        if not array.ndim or not array.size:
            raise GraphError(f"{where}: {name}: expected at least one dimension and element, got shape {array.shape}")
        parts.append(struct.pack(f"<II{array.ndim}q", _V1, array.ndim, *array.shape))
        parts.append(struct.pack("<iii", *_CPU, _TYPES.index(little)))
        parts.append(np.ascontiguousarray(array, little).tobytes())
    parts.append(struct.pack("<Q", len(arrays)))
    for name in arrays:
        encoded = name.encode("utf-8")
        parts += [struct.pack("<Q", len(encoded)), encoded]
    return b"".join(parts)


class _Reader:
    """Reads the bytes of a file in order, and checks that enough are left."""

    def __init__(self, content: bytes, where: str) -> None:
        self._content, self._position, self.where = content, 0, where

    @property
    def left(self) -> int:
        return len(self._content) - self._position

    def check(self, valid: bool, what: str, expected: str) -> None:
        if not valid:
            raise GraphError(f"{self.where}: {what}{': ' if what else ''}expected {expected}")

    def take(self, size: int, what: str) -> bytes:
        expected = f"{size} bytes at byte {self._position}, got {self.left}"
        self.check(size <= self.left, what, f"{expected}; the file is truncated or damaged: copy it again")
        self._position += size
        return self._content[self._position - size : self._position]

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))


def _read_array(reader: _Reader, what: str) -> np.ndarray:
    (magic,) = reader.numbers("<I", what)
    if magic in (_V2, _V3):
        (storage,) = reader.numbers("<i", what)
        reader.check(storage == 0, what, f"a dense array, got a sparse one (storage {storage})")
    # The oldest format has no magic number: an array starts with its number of dimensions, and lengths have 32 bits.
    oldest = magic not in (_V1, _V2, _V3)
    dimensions = magic if oldest else reader.numbers("<I", what)[0]
    least = 0 if magic == _V3 else 1
    bounds = f"{least} to {_MOST_DIMENSIONS} dimensions, got {dimensions}"
    reader.check(least <= dimensions <= _MOST_DIMENSIONS, what, bounds)
    shape = reader.numbers(f"<{dimensions}{'I' if oldest else 'q'}", what)
    reader.check(all(length >= 1 for length in shape), what, f"lengths of at least 1, got shape {shape}")
    _, _, code = reader.numbers("<iii", what)
    reader.check(0 <= code < len(_TYPES), what, f"a type from 0 to {len(_TYPES) - 1}, got {code}")
    return np.frombuffer(reader.take(_TYPES[code].itemsize * prod(shape), what), _TYPES[code]).reshape(shape)
