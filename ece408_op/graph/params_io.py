"""MXNet's parameter files (``.params``) as NumPy arrays: read, checked, written; no MXNet needed.

A file is little-endian: the number 0x112, a zero, the count of arrays, the arrays, the count of names,
the names. An array opens with a mark of its version, then has its storage type (from the second
version on), its shape, the device it came from, its type and its values. (MXNet, src/ndarray/ndarray.cc.)

MXNet's own reader believes what a file says of its sizes: two wrong bytes can make it ask for more
memory than there is. This one holds every size against the bytes that are left.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from ece408_op.errors import GraphError

Arrays = dict[str, np.ndarray]

_FILE_MARK = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_TYPES = tuple(np.dtype(code) for code in ("<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8", "?"))
_MOST_DIMENSIONS = 32
_CPU = (1, 0)


def read(content: bytes, where: str) -> Arrays:
    """The arrays of a parameter file by their full names ("arg:new0_weight"), as read-only views of the bytes.

    Raises GraphError, which begins with ``where`` and names the array.
    """
    reader = _Reader(content, where)
    mark, _, count = reader.numbers("<QQQ", "the head of the file")
    if mark != _FILE_MARK:
        raise GraphError(f"{where}: expected an MXNet parameter file, which begins with 0x112, got {mark:#x}")
    arrays = []
    for index in range(count):
        arrays.append(_read_array(reader, f"array {index} of {count}"))
    (named,) = reader.numbers("<Q", "the count of names")
    if named != count:
        raise GraphError(f"{where}: expected a name for each of the {count} arrays, got {named} names")
    result: Arrays = {}
    for index, array in enumerate(arrays):
        (length,) = reader.numbers("<Q", f"name {index}")
        raw = reader.take(length, f"name {index}")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise GraphError(f"{where}: name {index}: expected UTF-8, got {raw[:40]!r}") from None
        if name in result:
            raise GraphError(f"{where}: expected each name once, got {name!r} twice")
        result[name] = array
    if reader.left:
        raise GraphError(f"{where}: expected the file to end after the last name, got {reader.left} bytes more")
    return result


def write(arrays: Mapping[str, np.ndarray], where: str) -> bytes:
    """A parameter file's content, in the first version of the format with 64-bit shapes.

    MXNet 0.10, of 2017, knows no later one, and 1.9.1 still reads it.
    Raises GraphError for an array of a type that the format lacks, or without elements.
    """
    parts = [struct.pack("<QQQ", _FILE_MARK, 0, len(arrays))]
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
    """Takes the bytes one piece after the other."""

    def __init__(self, content: bytes, where: str) -> None:
        self._content = content
        self._at = 0
        self.where = where

    @property
    def left(self) -> int:
        return len(self._content) - self._at

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise GraphError(
                f"{self.where}: {what}: expected {size} bytes at byte {self._at}, got {self.left}; "
                "the file is truncated or damaged: copy it again"
            )
        self._at += size
        return self._content[self._at - size : self._at]

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def array(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> np.ndarray:
        size = dtype.itemsize
        for length in shape:
            size *= length
        return np.frombuffer(self.take(size, what), dtype).reshape(shape)


def _read_array(reader: _Reader, what: str) -> np.ndarray:
    (mark,) = reader.numbers("<I", what)
    if mark in (_V2, _V3):
        (storage,) = reader.numbers("<i", what)
        if storage != 0:
            raise GraphError(f"{reader.where}: {what}: expected a dense array, got a sparse one (storage {storage})")
    # The oldest arrays have no mark: they begin with the number of dimensions, each of 32 bits.
    oldest = mark not in (_V1, _V2, _V3)
    dimensions = mark if oldest else reader.numbers("<I", what)[0]
    least = 0 if mark == _V3 else 1
    if not least <= dimensions <= _MOST_DIMENSIONS:
        raise GraphError(f"{reader.where}: {what}: expected {least} to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
    shape = reader.numbers(f"<{dimensions}{'I' if oldest else 'q'}", what)
    if any(length < 1 for length in shape):
        raise GraphError(f"{reader.where}: {what}: expected lengths of at least 1, got shape {shape}")
    _, _, kind = reader.numbers("<iii", what)
    if not 0 <= kind < len(_TYPES):
        raise GraphError(f"{reader.where}: {what}: expected a type from 0 to {len(_TYPES) - 1}, got {kind}")
    return reader.array(shape, _TYPES[kind], what)
