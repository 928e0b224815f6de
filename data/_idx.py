"""IDX, the file format of MNIST: a header of big-endian integers, then the elements in C order.

    byte  0, 1       zero
    byte  2          type of the elements; 0x08 is unsigned bytes, the only one read here
    byte  3          D, the number of dimensions
    bytes 4..4+4D    the D dimensions, unsigned 32-bit integers
    then             the elements, and nothing after them

Source: http://yann.lecun.com/exdb/mnist, 'the IDX file format'.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ece408_op.errors import DataError

from .atomic import replacing

UNSIGNED_BYTE = 0x08
#: NumPy 1.x knows at most 32 dimensions.
MOST_DIMENSIONS = 32
#: Deflate codes at most 258 bytes in two bits, so a byte of it never yields more than 1032.
DEFLATE_RATIO = 1032

_GZIP_MAGIC = b"\x1f\x8b"
_AGAIN = "replace the file by a fresh copy"


def read(path: str | os.PathLike[str], shape: Sequence[int] | None = None) -> np.ndarray:
    """The uint8 array of an IDX file, plain or gzipped (told by its first bytes, not by its name).

    With ``shape`` the header must announce just that. No more is allocated or unpacked than the
    header announces, and no more than a file of this length can hold, so a small file cannot fill
    the memory. Raises DataError naming the file: it cannot be read, is no IDX file of unsigned
    bytes, is cut short, goes on after its last element, or its gzip coding is damaged.
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            length = os.fstat(raw.fileno()).st_size
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if not packed:
                return _parse(path, raw, length, shape)
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return _parse(path, unpacked, length * DEFLATE_RATIO, shape)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a sound gzip file, got a damaged one ({error}); {_AGAIN}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(path: Path, file: io.BufferedIOBase, most_bytes: int, shape: Sequence[int] | None) -> np.ndarray:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(
            f"{path}: expected an IDX file, which opens with two zero bytes, got {magic.hex(' ') or 'no byte'}"
        )
    kind, dimensions = magic[2], magic[3]
    if kind != UNSIGNED_BYTE:
        raise DataError(f"{path}: expected elements of type 0x08 (unsigned bytes), got type 0x{kind:02x}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise DataError(f"{path}: expected 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}")
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(
            f"{path}: truncated: expected {4 * dimensions} bytes of dimensions, got {len(header)}; {_AGAIN}"
        )
    announced = struct.unpack(f">{dimensions}I", header)
    if 0 in announced:
        raise DataError(f"{path}: expected dimensions of 1 or more, got {announced} in the header")
    if shape is not None and announced != tuple(shape):
        raise DataError(f"{path}: expected the shape {tuple(shape)}, got {announced} in the header")
    total = math.prod(announced)
    if total > most_bytes:
        raise DataError(
            f"{path}: truncated: expected {total} elements of shape {announced}, "
            f"got a file that can hold no more than {most_bytes}; {_AGAIN}"
        )
    elements = np.empty(total, np.uint8)
    filled = 0
    while filled < total:
        got = file.readinto(elements.data[filled:])
        if not got:
            raise DataError(
                f"{path}: truncated: expected {total} elements of shape {announced}, got {filled}; {_AGAIN}"
            )
        filled += got
    # In a gzip file this read also reaches the end, and with it the check of its CRC.
    if file.read(1):
        raise DataError(
            f"{path}: trailing bytes: expected the end after {total} elements of shape {announced}; {_AGAIN}"
        )
    return elements.reshape(announced)


def write(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write a uint8 array of 1 element or more, gzipped where the name ends in .gz.

    The file takes its name when it is whole; equal arrays give equal bytes (no time in the gzip
    header). Raises DataError where the array is none that IDX holds here or the file cannot be written.
    """
    path = Path(path)
    if array.dtype != np.uint8 or array.ndim < 1 or array.size < 1:
        raise DataError(f"{path}: expected a uint8 array that is not empty, got {array.dtype} of shape {array.shape}")
    header = struct.pack(f">4B{array.ndim}I", 0, 0, UNSIGNED_BYTE, array.ndim, *array.shape)
    content = header + array.tobytes()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
