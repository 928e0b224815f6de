"""Download a file whose length and SHA-256 are known."""

from __future__ import annotations

import hashlib
import http.client
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ece408_op.errors import DataError

from .atomic import replacing

#: Seconds to wait for each piece; the first wait includes the name lookup and the connection.
TIMEOUT = 5.0
#: Bytes per piece: with TIMEOUT, a connection slower than 3 kB/s fails.
PIECE = 16 * 1024


def fetch(url: str, target: Path, size: int, sha256: str, timeout: float = TIMEOUT) -> None:
    """Download ``url`` to ``target``, with a progress bar on stderr.

    ``target`` is replaced only by a file of ``size`` bytes with that SHA-256. Raises DataError, which names the
    address, if no data arrive for ``timeout`` seconds, the server refuses, or the file is another one; OSError if
    ``target`` is not writable.
    """
    from tqdm import tqdm

    digest = hashlib.sha256()
    got = 0
    with replacing(target) as file:
        pieces = _pieces(url, size, timeout)
        first = next(pieces, b"")  # before the bar, which does not appear without a network
        with tqdm(total=size, unit="B", unit_scale=True, desc=f"Downloading {target.name}") as bar:
            for piece in chain([first], pieces):
                file.write(piece)
                digest.update(piece)
                got += len(piece)
                bar.update(len(piece))
        if got != size:
            raise DataError(f"{url}: expected {size} bytes, got {'more' if got > size else got}")
        if digest.hexdigest() != sha256:
            raise DataError(f"{url}: expected the SHA-256 {sha256}, got {digest.hexdigest()}")


def _pieces(url: str, size: int, timeout: float) -> Iterator[bytes]:
    """Yield the content of ``url``, at most ``size + 1`` bytes.

    A thread reads from the network, because a socket's own timeout starts again for each address of a host and for
    each packet, and does not cover the name lookup.
    """
    arrived: queue.Queue[bytes | Exception] = queue.Queue()
    threading.Thread(target=_pump, args=(url, size + 1, timeout, arrived), daemon=True).start()
    while True:
        try:
            piece = arrived.get(timeout=timeout)
        except queue.Empty:
            raise DataError(f"{url}: no answer within {timeout:g} seconds") from None
        if isinstance(piece, Exception):
            reason = getattr(piece, "reason", "") if type(piece) is urllib.error.URLError else str(piece)
            raise DataError(f"{url}: {reason or type(piece).__name__}") from piece
        if not piece:
            return
        yield piece


def _pump(url: str, limit: int, timeout: float, arrived: queue.Queue[bytes | Exception]) -> None:
    """Put the pieces of ``url`` into the queue, then an empty one, or else the exception that ended the download."""
    request = urllib.request.Request(url, headers={"User-Agent": "ece408-op"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while piece := response.read(min(PIECE, limit)):
                arrived.put(piece)
                limit -= len(piece)
        arrived.put(b"")
    except (OSError, ValueError, http.client.HTTPException) as error:
        arrived.put(error)
