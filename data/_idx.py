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
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from ece408_op.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
#: Deflate encodes at most 258 bytes in two bits, so one compressed byte yields at most 1032.
_DEFLATE_RATIO = 1032


def read(path: str | os.PathLike[str], shape: Sequence[int]) -> np.ndarray:
    """Return the uint8 array of that shape in an IDX file, plain or gzipped (detected by its first bytes).

    The array is read-only. No header and no gzip data make this function allocate more than ``shape`` needs or the file
    can hold. Raises DataError, which names the file, if the file cannot be read, has another header than that of
    unsigned bytes of this shape, is truncated, continues after its last element, or has damaged gzip data.
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            length = os.fstat(raw.fileno()).st_size
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if not packed:
                return _parse(raw, length, tuple(shape))
            with gzip.open(raw) as unpacked:
                return _parse(unpacked, length * _DEFLATE_RATIO, tuple(shape))
    except ValueError as error:
        raise DataError(f"{path}: {error}; replace the file by a fresh copy") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a gzip file, got a damaged one ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(file: IO[bytes] | gzip.GzipFile, most_bytes: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of an IDX stream that holds at most ``most_bytes`` bytes; raise ValueError with the fault."""
    header, total = struct.pack(f">4B{len(shape)}I", 0, 0, 0x08, len(shape), *shape), math.prod(shape)
    got = file.read(len(header))
    if got != header:
        expected = f"expected the IDX header of unsigned bytes of shape {shape}, {header.hex(' ')}"
        raise ValueError(f"{expected}, got {got.hex(' ') or 'no byte'}")
    expected = f"expected {total} elements of shape {shape}, got"
    if total > most_bytes:
        raise ValueError(f"{expected} a file that can hold at most {most_bytes}")
    # In a gzip file, reading beyond the last element also reaches the end, and with it the check of the CRC.
    elements = file.read(total + 1)
    if len(elements) != total:
        raise ValueError(f"{expected} {'more' if len(elements) > total else len(elements)}")
    return np.frombuffer(elements, np.uint8).reshape(shape)
