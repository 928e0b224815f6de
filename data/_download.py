"""Fetch a file of known length and SHA-256; it takes its place only when both agree."""

from __future__ import annotations

import hashlib
import http.client
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ece408_op.errors import DataError

from .atomic import replacing

#: Seconds that each piece may take, finding and reaching the server included.
TIMEOUT = 5.0
#: Bytes of a piece: with TIMEOUT the slowest line that is still waited for has 3 kB/s.
PIECE = 16 * 1024


def fetch(url: str, target: Path, size: int, sha256: str, timeout: float = TIMEOUT) -> None:
    """Download ``url`` to ``target`` with a progress bar on stderr.

    Raises DataError naming the address where nothing comes for ``timeout`` seconds, where the server
    refuses, or where length or SHA-256 are not the ones given; OSError where ``target`` cannot be
    written. In every such case ``target`` stays as it was.
    """
    from tqdm import tqdm

    digest = hashlib.sha256()
    with replacing(target) as file:
        got = 0
        bar = None
        try:
            for piece in _pieces(url, size, timeout):
                # A bar from the first piece on: a machine without network is not shown one.
                bar = bar or tqdm(total=size, unit="B", unit_scale=True, desc=f"Downloading {target.name}")
                file.write(piece)
                digest.update(piece)
                got += len(piece)
                bar.update(len(piece))
        finally:
            if bar is not None:
                bar.close()
        if got != size:
            raise DataError(f"{url}: expected {size} bytes, got {'more' if got > size else got}")
        if digest.hexdigest() != sha256:
            raise DataError(f"{url}: expected the SHA-256 {sha256}, got {digest.hexdigest()}")


def _pieces(url: str, size: int, timeout: float) -> Iterator[bytes]:
    """What the address holds, up to one byte more than ``size``.

    A thread does the waiting: a socket's own time-out counts for each address of a host and for each
    packet anew, and not at all for the search of the host's name.
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


def _pump(url: str, most: int, timeout: float, arrived: queue.Queue[bytes | Exception]) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "ece408-op"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while most > 0:
                piece = response.read(min(PIECE, most))
                if not piece:
                    break
                arrived.put(piece)
                most -= len(piece)
        arrived.put(b"")
    except (OSError, ValueError, http.client.HTTPException) as error:
        arrived.put(error)
