"""IDX, the file format of MNIST: a header of big-endian integers, then the elements in C order.

    byte  0, 1       zero
    byte  2          element type; 0x08 is unsigned byte, the only one supported here
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

UNSIGNED_BYTE = 0x08
#: Deflate encodes at most 258 bytes in two bits, so one compressed byte yields at most 1032.
DEFLATE_RATIO = 1032

_GZIP_MAGIC = b"\x1f\x8b"
_CURE = "; replace the file by a fresh copy"


def read(path: str | os.PathLike[str], shape: Sequence[int]) -> np.ndarray:
    """Return the uint8 array of that shape in an IDX file, plain or gzipped (detected by its first bytes).

    The header must state ``shape``. Neither header nor gzip data can make this function allocate more than ``shape``
    needs or the file can hold. Raises DataError, which names the file, if the file cannot be read, is no IDX file of
    unsigned bytes, has another shape, is truncated, continues after its last element, or has damaged gzip data.
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            length = os.fstat(raw.fileno()).st_size
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if not packed:
                return _parse(raw, length, tuple(shape))
            with gzip.GzipFile(fileobj=raw) as unpacked:
                return _parse(unpacked, length * DEFLATE_RATIO, tuple(shape))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a sound gzip file, got a damaged one ({error}){_CURE}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(file: io.BufferedIOBase, most_bytes: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of an IDX stream that holds at most ``most_bytes`` bytes; raises ValueError with the fault."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise ValueError(f"expected an IDX file, which starts with two zero bytes, got {magic.hex(' ') or 'no byte'}")
    kind, dimensions = magic[2], magic[3]
    if kind != UNSIGNED_BYTE:
        raise ValueError(f"expected elements of type 0x08 (unsigned bytes), got type 0x{kind:02x}")
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise ValueError(f"truncated: expected {4 * dimensions} bytes of dimensions, got {len(header)}{_CURE}")
    stated = struct.unpack(f">{dimensions}I", header)
    if stated != shape:
        raise ValueError(f"expected the shape {shape}, got {stated} in the header")
    total = math.prod(shape)
    expected = f"truncated: expected {total} elements of shape {shape}, got"
    if total > most_bytes:
        raise ValueError(f"{expected} a file that can hold no more than {most_bytes}{_CURE}")
    elements = np.empty(total, np.uint8)
    filled = 0
    while filled < total:
        got = file.readinto(elements.data[filled:])
        if not got:
            raise ValueError(f"{expected} {filled}{_CURE}")
        filled += got
    # In a gzip file this read also reaches the end, and with it the check of the CRC.
    if file.read(1):
        raise ValueError(f"trailing bytes: expected the end after {total} elements of shape {shape}{_CURE}")
    return elements.reshape(shape)
